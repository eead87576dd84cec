//! E16: orders to the daemon through what a tenant sees of it.

use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Result, bail};
use serde_json::json;

use super::bypass::without_variables;
use super::{mib, part};
use crate::limits::within;
use crate::mps::wait_until;
use crate::protocol::{Reply, Request};
use crate::stage::Stage;
use crate::table::{Finding, Verdict};
use crate::tenant::{NOBODY, PATIENCE, Start, Tenant, Who, for_all};

/// Who gives the orders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Giver {
    Root,
    Nobody,
    /// Root inside, 65534 outside.
    NamespaceRoot,
}

impl Giver {
    fn name(self) -> &'static str {
        match self {
            Self::Root => "root",
            Self::Nobody => "user 65534",
            Self::NamespaceRoot => "root of a user namespace",
        }
    }

    /// The driver's control program, as this giver would run it.
    fn program(self, stage: &Stage) -> Result<Command> {
        if self == Self::Root {
            return Ok(Command::new(stage.daemon.program()));
        }
        let copy = for_all(stage.daemon.program(), stage.folder())?;
        let mut command = match self {
            Self::NamespaceRoot => {
                let mut unshare = Command::new("unshare");
                unshare.args(["--user", "--map-root-user", "--"]).arg(copy);
                unshare
            }
            _ => Command::new(copy),
        };
        command.uid(NOBODY).gid(NOBODY);
        Ok(command)
    }

    /// Order and answer in one line. An error: it could not even be given.
    fn order(self, stage: &Stage, order: &str) -> Result<String> {
        let text = stage.daemon.ask_through(&stage.daemon.client(), order, self.program(stage)?)?;
        if text.starts_with("unshare:") {
            bail!(text);
        }
        let text = if text.is_empty() {
            "no answer".to_owned()
        } else {
            text.lines().collect::<Vec<_>>().join("; ")
        };
        Ok(format!("`{order}`: {text}"))
    }

    fn orders(self, stage: &Stage, orders: &[String]) -> Result<Vec<String>> {
        orders.iter().map(|order| self.order(stage, order)).collect()
    }
}

/// E16
pub fn given(stage: &mut Stage) -> Result<Vec<Finding>> {
    let name = "a client of user 65534 beside one of root";
    let mut findings = vec![part(name, client_as_nobody(stage, name))?];
    for giver in [Giver::Root, Giver::Nobody, Giver::NamespaceRoot] {
        for (what, order) in [
            ("limits", limits as fn(&Stage, &str, Giver) -> Result<Finding>),
            ("neighbour", neighbour),
            ("daemon", daemon),
        ] {
            let name = format!("{what}, {}", giver.name());
            let found = stage.serve(stage.limits).and_then(|()| order(stage, &name, giver));
            findings.push(part(&name, found)?);
        }
    }
    Ok(findings)
}

/// Does MPS serve more than one user at once?
fn client_as_nobody(stage: &Stage, part: &str) -> Result<Finding> {
    stage.serve(stage.limits)?;
    let _neighbour = beside(stage)?;
    let client = stage.client("e16-nobody", stage.env(stage.limits));
    let start = Start { who: Who::Nobody, ..client };
    let mut tenant = stage.start(start)?;
    let (seen, works) = match tenant.try_ask(Request::Open)? {
        Ok(Reply::Opened(opened)) => (format!("opened in {:.0} ms", opened.open_ms), true),
        Ok(Reply::Failed(failure)) => (failure.to_string(), false),
        Ok(other) => return tenant.unexpected(&other),
        Err(silence) => (silence.to_string(), false),
    };
    Ok(Finding::new(part, "it opens", seen, Verdict::as_expected_if(works)))
}

/// A tenant that has done nothing wrong. With it there is a server.
fn beside(stage: &Stage) -> Result<Tenant> {
    let mut neighbour = stage.tenant("e16-neighbour", stage.limits)?;
    neighbour.open().map(|_| neighbour)
}

fn server(stage: &Stage) -> Result<u32> {
    Ok(stage.daemon.servers()?.first().copied().unwrap_or(0))
}

fn limits(stage: &Stage, part: &str, giver: Giver) -> Result<Finding> {
    let _neighbour = beside(stage)?;
    let (server, big) = (server(stage)?, stage.memory() + 4096);
    let (_, granted) = without_variables(stage)?;
    let orders = [
        "get_server_list".to_owned(),
        format!("set_default_device_pinned_mem_limit 0 {big}M"),
        "set_default_active_thread_percentage 100".to_owned(),
        format!("set_device_pinned_mem_limit {server} 0 {big}M"),
        format!("set_active_thread_percentage {server} 100"),
        format!("start_server -uid {NOBODY}"),
    ];
    let answers = giver.orders(stage, &orders)?;
    let (bytes, multiprocessors) = without_variables(stage)?;
    let default = stage.daemon.ask("get_default_active_thread_percentage")?;
    let seen = format!(
        "a new client gets {} and {multiprocessors} multiprocessors, the default is {default} %; {}",
        mib(bytes),
        answers.join("; ")
    );
    let same = default.parse::<f32>().ok() == Some(stage.limits.compute.unwrap_or(100).into());
    let verdict = Verdict::holds_if(within(bytes, stage.memory()) && multiprocessors <= granted && same);
    let expected = format!("a new client still gets ≤ {} MiB and {granted} multiprocessors", stage.memory());
    Ok(Finding::new(part, expected, seen, verdict).with(json!({"answers": answers})))
}

fn neighbour(stage: &Stage, part: &str, giver: Giver) -> Result<Finding> {
    let mut neighbour = beside(stage)?;
    let server = server(stage)?;
    let orders =
        [format!("terminate_client {server} {}", neighbour.pid()), format!("shutdown_server {server} -f")];
    let answers = giver.orders(stage, &orders)?;
    neighbour.tell(&Request::Work { ms: 200 })?;
    let (seen, lives) = match neighbour.hear(PATIENCE)? {
        Ok(Reply::Worked { .. }) => ("the neighbour goes on".to_owned(), true),
        Ok(Reply::Failed(failure)) => (format!("the neighbour has {failure}"), false),
        Ok(other) => return neighbour.unexpected(&other),
        Err(silence) => (format!("the neighbour: {silence}"), false),
    };
    let seen = format!("{seen}; {}", answers.join("; "));
    let verdict = Verdict::holds_if(lives);
    Ok(Finding::new(part, "the neighbour goes on", seen, verdict).with(json!({"answers": answers})))
}

fn daemon(stage: &Stage, part: &str, giver: Giver) -> Result<Finding> {
    let before = stage.daemon.pid();
    let answers = giver.orders(stage, &["quit -t 1".to_owned(), "quit".to_owned()])?;
    let gone = wait_until(std::time::Duration::from_secs(3), || (stage.daemon.pid() != before).then_some(()));
    let seen = if gone.is_ok() { "the daemon is gone" } else { "the daemon lives" };
    let verdict = Verdict::holds_if(gone.is_err());
    let seen = format!("{seen}; {}", answers.join("; "));
    Ok(Finding::new(part, "the daemon lives", seen, verdict).with(json!({"answers": answers})))
}

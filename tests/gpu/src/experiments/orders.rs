//! E16: orders to the daemon through what a tenant sees of it.

use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::Result;
use serde_json::json;

use super::bypass::without_variables;
use super::mib;
use crate::limits::within;
use crate::mps::wait_until;
use crate::stage::Stage;
use crate::table::{Finding, Verdict};
use crate::tenant::{PATIENCE, Start, Tenant, Who};
use crate::words::{Do, Said};

const NOBODY: u32 = 65534;

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
    fn program(self, stage: &Stage) -> Command {
        let control = stage.daemon.program();
        let mut command = match self {
            Self::NamespaceRoot => {
                let mut unshare = Command::new("unshare");
                unshare.args(["--user", "--map-root-user", "--"]).arg(control);
                unshare
            }
            _ => Command::new(control),
        };
        if self != Self::Root {
            command.uid(NOBODY).gid(NOBODY);
        }
        command
    }

    /// The answer, or what went wrong, in one line.
    fn order(self, stage: &Stage, order: &str) -> String {
        match stage.daemon.ask_through(&stage.daemon.client(), order, self.program(stage)) {
            Ok(text) if text.is_empty() => format!("`{order}`: no answer"),
            Ok(text) => format!("`{order}`: {}", text.lines().collect::<Vec<_>>().join("; ")),
            Err(error) => format!("`{order}`: {error:#}"),
        }
    }
}

/// E16
pub fn given(stage: &mut Stage) -> Result<Vec<Finding>> {
    let mut findings = vec![client_as_nobody(stage)?];
    for giver in [Giver::Root, Giver::Nobody, Giver::NamespaceRoot] {
        stage.serve(stage.limits)?;
        let mut neighbour = stage.tenant("e16-neighbour", stage.limits)?;
        neighbour.open()?;
        findings.push(limits(stage, giver)?);
        findings.push(neighbour_is_ended(stage, giver, &mut neighbour)?);
        findings.push(daemon_is_ended(stage, giver)?);
    }
    Ok(findings)
}

/// Does MPS serve more than one user at once?
fn client_as_nobody(stage: &Stage) -> Result<Finding> {
    let part = "a client of user 65534 beside one of root";
    stage.serve(stage.limits)?;
    let mut neighbour = stage.tenant("e16-neighbour", stage.limits)?;
    neighbour.open()?;
    let start = Start {
        name: "e16-nobody".to_owned(),
        env: stage.env(stage.limits),
        who: Who::Nobody,
        ..Start::default()
    };
    let mut tenant = match stage.start(start) {
        Ok(tenant) => tenant,
        Err(error) => {
            return Ok(Finding::not_run(part, format!("{error:#}; put gpu-check where all may run it")));
        }
    };
    let (seen, works) = match tenant.try_ask(Do::Open)? {
        Ok(Said::Opened(opened)) => (format!("opened in {:.0} ms", opened.open_ms), true),
        Ok(Said::Failed(failure)) => (failure.to_string(), false),
        Ok(other) => return tenant.unexpected(&other),
        Err(silence) => (silence.to_string(), false),
    };
    Ok(Finding::new(part, "it opens", seen, Verdict::as_expected_if(works)))
}

fn server(stage: &Stage) -> Result<u32> {
    Ok(stage.daemon.servers()?.first().copied().unwrap_or(0))
}

fn limits(stage: &Stage, giver: Giver) -> Result<Finding> {
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
    let answers: Vec<String> = orders.iter().map(|order| giver.order(stage, order)).collect();
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
    let part = format!("limits, {}", giver.name());
    Ok(Finding::new(&part, expected, seen, verdict).with(json!({"answers": answers})))
}

fn neighbour_is_ended(stage: &Stage, giver: Giver, neighbour: &mut Tenant) -> Result<Finding> {
    let server = server(stage)?;
    let orders =
        [format!("terminate_client {server} {}", neighbour.pid()), format!("shutdown_server {server} -f")];
    let answers: Vec<String> = orders.iter().map(|order| giver.order(stage, order)).collect();
    neighbour.tell(&Do::Work { ms: 200 })?;
    let (seen, lives) = match neighbour.hear(PATIENCE)? {
        Ok(Said::Worked { .. }) => ("the neighbour goes on".to_owned(), true),
        Ok(Said::Failed(failure)) => (format!("the neighbour has {failure}"), false),
        Ok(other) => return neighbour.unexpected(&other),
        Err(silence) => (format!("the neighbour: {silence}"), false),
    };
    let seen = format!("{seen}; {}", answers.join("; "));
    let part = format!("neighbour, {}", giver.name());
    let verdict = Verdict::holds_if(lives);
    Ok(Finding::new(&part, "the neighbour goes on", seen, verdict).with(json!({"answers": answers})))
}

fn daemon_is_ended(stage: &Stage, giver: Giver) -> Result<Finding> {
    let before = stage.daemon.pid();
    let answers: Vec<String> = ["quit -t 1", "quit"].iter().map(|order| giver.order(stage, order)).collect();
    let gone = wait_until(std::time::Duration::from_secs(3), || (stage.daemon.pid() != before).then_some(()));
    let seen = if gone.is_ok() { "the daemon is gone" } else { "the daemon lives" };
    let verdict = Verdict::holds_if(gone.is_err());
    let seen = format!("{seen}; {}", answers.join("; "));
    let part = format!("daemon, {}", giver.name());
    Ok(Finding::new(&part, "the daemon lives", seen, verdict).with(json!({"answers": answers})))
}

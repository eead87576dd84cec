//! Commands and answers as text, as seen with the daemon of driver 550 (MPS guide, "nvidia-cuda-mps-control").
//!
//! Answers are not delimited, and "no limit" is no answer at all. So every reading of a memory limit is
//! followed by one of the thread percentage, which always answers: it ends the group.

use crate::model::quantity::Bytes;
use crate::model::share::{MpsLimits, Percent};

const GIB_MIB: u64 = 1024;

/// Why a text is no answer.
#[derive(Debug, PartialEq, Eq)]
pub enum Complaint {
    /// There is no daemon.
    Gone(String),
    /// The daemon serves another client and read nothing of this.
    Busy(String),
    Refused(String),
}

/// The last command of every session: its answer proves that the daemon read all commands before it.
pub const END_MARKER: &str = "get_default_active_thread_percentage";

/// The answers to all commands before [`END_MARKER`].
pub fn complete_answer(text: &str) -> Result<&str, Complaint> {
    if let Some(complaint) = complaint(text) {
        return Err(complaint);
    }
    let text = text.trim_end();
    let (before, last) = text.rsplit_once('\n').map_or(("", text), |(before, last)| (before, last));
    match is_percentage(last.trim()) {
        true => Ok(before),
        false => Err(Complaint::Busy(format!("its answer was {text:?}"))),
    }
}

fn is_percentage(line: &str) -> bool {
    line.contains('.') && line.parse::<f32>().is_ok()
}

/// The first line that tells that something was not done.
pub fn complaint(text: &str) -> Option<Complaint> {
    const GONE: [&str; 2] = ["Cannot find MPS control", "Cannot authenticate or connect"];
    const BUSY: [&str; 1] = ["Cannot send command"];
    const REFUSED: [&str; 7] = [
        "Unknown command",
        "Insufficient privileges",
        "Not enough privilege",
        "Invalid ",
        "Internal error",
        "Failed to ",
        "The MPS control daemon is shutting down",
    ];
    let begins = |line: &str, with: &[&str]| with.iter().any(|start| line.starts_with(start));
    text.lines().map(str::trim).find_map(|line| match () {
        () if begins(line, &GONE) => Some(Complaint::Gone(line.to_owned())),
        () if begins(line, &BUSY) => Some(Complaint::Busy(line.to_owned())),
        () if begins(line, &REFUSED) => Some(Complaint::Refused(line.to_owned())),
        () => None,
    })
}

/// What future servers are to start with. No limit is written as 0: seen to bring back "no default".
pub fn set_defaults(limits: &MpsLimits) -> Vec<String> {
    let memory = limits.memory.iter().enumerate();
    memory
        .map(|(ordinal, limit)| format!("set_default_device_pinned_mem_limit {ordinal} {}", amount(*limit)))
        .chain([format!("set_default_active_thread_percentage {}", percent(limits.compute))])
        .collect()
}

/// What new clients of a running server get.
pub fn set_server(server: u32, limits: &MpsLimits) -> Vec<String> {
    let memory = limits.memory.iter().enumerate();
    memory
        .map(|(ordinal, limit)| format!("set_device_pinned_mem_limit {server} {ordinal} {}", amount(*limit)))
        .chain([format!("set_active_thread_percentage {server} {}", percent(limits.compute))])
        .collect()
}

fn amount(limit: Option<Bytes>) -> String {
    limit.map_or_else(|| "0".to_owned(), |limit| format!("{}M", limit.mib_floor()))
}

fn percent(limit: Option<Percent>) -> u8 {
    limit.map_or(100, Percent::get)
}

/// Asks for all defaults and the servers.
pub fn read_defaults(devices: usize) -> Vec<String> {
    let of = |ordinal| {
        [
            format!("get_default_device_pinned_mem_limit {ordinal}"),
            "get_default_active_thread_percentage".to_owned(),
        ]
    };
    (0..devices).flat_map(of).chain(["get_server_list".to_owned()]).collect()
}

/// Asks for the state and the limits of one server.
pub fn read_server(server: u32, devices: usize) -> Vec<String> {
    let of = |ordinal| {
        [
            format!("get_device_pinned_mem_limit {server} {ordinal}"),
            format!("get_active_thread_percentage {server}"),
        ]
    };
    [format!("get_server_status {server}")].into_iter().chain((0..devices).flat_map(of)).collect()
}

/// Limits in the daemon's own words.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Limits {
    /// Per device; empty: no limit.
    pub memory: Vec<String>,
    pub compute: String,
}

/// The answer to [`read_defaults`]: limits, and the servers' process ids.
pub fn defaults(text: &str, devices: usize) -> Option<(Limits, Vec<u32>)> {
    let lines: Vec<&str> = lines(text).collect();
    let (limits, rest) = limits(&lines, devices)?;
    Some((limits, rest.iter().map(|line| line.parse().ok()).collect::<Option<_>>()?))
}

/// The answer to [`read_server`]: its state and its limits. None if it is no more, too.
pub fn server(text: &str, devices: usize) -> Option<(String, Limits)> {
    let lines: Vec<&str> = lines(text).collect();
    let (state, rest) = lines.split_first()?;
    let (limits, rest) = limits(rest, devices)?;
    (is_state(state) && rest.is_empty()).then(|| ((*state).to_owned(), limits))
}

/// Numbers of processes, one a line: servers or clients. None if it is anything else.
pub fn pids(text: &str) -> Option<Vec<u32>> {
    lines(text).map(|line| line.parse().ok()).collect()
}

/// True if a server or client that was asked about is not there.
pub fn is_not_found(text: &str) -> bool {
    lines(text).any(|line| line.ends_with("not found") || line.ends_with("not found!"))
}

fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(str::trim).filter(|line| !line.is_empty())
}

/// `ACTIVE`, `INITIALIZING`, `FAULT`.
fn is_state(word: &str) -> bool {
    !word.is_empty() && word.bytes().all(|b| b.is_ascii_uppercase() || b == b'_' || b == b' ')
}

/// As many groups of an optional amount and a percentage as there are devices; what is behind them.
fn limits<'a, 'b>(lines: &'b [&'a str], devices: usize) -> Option<(Limits, &'b [&'a str])> {
    let mut found = Limits::default();
    let mut rest = lines;
    for _ in 0..devices {
        let (mut line, mut after) = rest.split_first()?;
        let mut memory = String::new();
        if mib(line).is_some() {
            memory = (*line).to_owned();
            (line, after) = after.split_first()?;
        }
        if !is_percentage(line) {
            return None;
        }
        found.memory.push(memory);
        found.compute = (*line).to_owned();
        rest = after;
    }
    Some((found, rest))
}

/// Is what the daemon says what it was asked for?
///
/// From 1 GiB up it rounds its answer down to whole GiB (seen with 550: 2000M is answered `1G`); below,
/// it is exact. An exact answer fits, too.
pub fn memory_fits(limit: Option<Bytes>, answer: &str) -> bool {
    match (limit.map(Bytes::mib_floor), mib(answer)) {
        (None, None) => answer.is_empty(),
        (Some(limit), Some(answer)) => {
            answer == limit || (limit >= GIB_MIB && answer == limit - limit % GIB_MIB)
        }
        _ => false,
    }
}

/// `25.0` for 25 %.
pub fn compute_fits(limit: Option<Percent>, answer: &str) -> bool {
    answer.parse::<f32>().is_ok_and(|answer| (answer - f32::from(percent(limit))).abs() < 0.05)
}

/// True if all of it is as asked.
pub fn fit(limits: &MpsLimits, answers: &Limits) -> bool {
    limits.memory.len() == answers.memory.len()
        && limits.memory.iter().zip(&answers.memory).all(|(limit, answer)| memory_fits(*limit, answer))
        && compute_fits(limits.compute, &answers.compute)
}

/// As [`fit`], for a running server: one that tells no memory limit of its own has the default that it was
/// started with.
pub fn fit_server(limits: &MpsLimits, answers: &Limits) -> bool {
    limits.memory.len() == answers.memory.len()
        && limits
            .memory
            .iter()
            .zip(&answers.memory)
            .all(|(limit, answer)| answer.is_empty() || memory_fits(*limit, answer))
        && compute_fits(limits.compute, &answers.compute)
}

/// An amount such as `500M` or `20G`, in MiB.
fn mib(answer: &str) -> Option<u64> {
    let number = |suffix| answer.strip_suffix(suffix).and_then(|number: &str| number.parse::<u64>().ok());
    match number('M') {
        Some(mib) => Some(mib),
        None => number('G')?.checked_mul(GIB_MIB),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(mib: &[u64], compute: u8) -> MpsLimits {
        let memory = mib.iter().map(|mib| (*mib != 0).then(|| Bytes::from_mib(*mib))).collect();
        MpsLimits { memory, compute: Percent::try_from(compute).ok() }
    }

    #[test]
    fn limits_are_set_by_number_in_whole_mib_and_none_is_zero() {
        assert_eq!(
            set_defaults(&limits(&[2000, 0], 25)),
            [
                "set_default_device_pinned_mem_limit 0 2000M",
                "set_default_device_pinned_mem_limit 1 0",
                "set_default_active_thread_percentage 25",
            ]
        );
        assert_eq!(
            set_server(7, &limits(&[500], 0)),
            ["set_device_pinned_mem_limit 7 0 500M", "set_active_thread_percentage 7 100"]
        );
    }

    #[test]
    fn an_answer_is_rounded_down_to_whole_gib_from_one_gib_up() {
        // As the daemon of driver 550 answers.
        for (mib, answer) in [
            (1, "1M"),
            (500, "500M"),
            (1023, "1023M"),
            (1024, "1G"),
            (1025, "1G"),
            (2000, "1G"),
            (10240, "10G"),
        ] {
            assert!(memory_fits(Some(Bytes::from_mib(mib)), answer), "{mib} {answer}");
        }
        assert!(memory_fits(Some(Bytes::from_mib(2000)), "2000M"), "an exact answer fits, too");
        for (mib, answer) in [(2000, "2G"), (500, "0G"), (1023, "1G"), (2048, "1G"), (500, ""), (500, "?")] {
            assert!(!memory_fits(Some(Bytes::from_mib(mib)), answer), "{mib} {answer}");
        }
        assert!(memory_fits(None, ""));
        assert!(!memory_fits(None, "1G") && !memory_fits(None, "none"));
    }

    #[test]
    fn percentages_are_told_with_a_decimal() {
        let of = |percent: u8| Percent::try_from(percent).ok();
        assert!(compute_fits(of(25), "25.0") && compute_fits(None, "100.0"));
        assert!(!compute_fits(of(25), "100.0") && !compute_fits(of(25), "") && !compute_fits(None, "25.0"));
    }

    #[test]
    fn defaults_are_read_with_and_without_limits_and_servers() {
        let read = |text: &str, devices| defaults(text, devices);
        let (found, servers) = read("1G\n25.0\n", 1).unwrap();
        assert_eq!((found.memory, found.compute.as_str(), servers), (vec!["1G".to_owned()], "25.0", vec![]));
        let (found, servers) = read("100.0\n4242\n4243\n", 1).unwrap();
        assert_eq!((found.memory, servers), (vec![String::new()], vec![4242, 4243]));
        let (found, _) = read("50.0\n600M\n50.0\n", 2).unwrap();
        assert_eq!(found.memory, ["", "600M"]);
        for bad in ["", "1G\n", "1G\n25.0\nhello\n", "1G\n2G\n25.0\n", "25\n"] {
            assert_eq!(read(bad, 1), None, "{bad:?}");
        }
    }

    #[test]
    fn a_server_tells_its_state_first_and_one_that_is_gone_tells_nothing() {
        let (state, found) = server("ACTIVE\n1G\n25.0\n", 1).unwrap();
        assert_eq!((state.as_str(), found.memory), ("ACTIVE", vec!["1G".to_owned()]));
        assert_eq!(server("Server 7 not found\nServer 7 not found\n", 1), None);
        assert!(is_not_found("Server 7 not found\n") && is_not_found("Server 1 not found!\n1\n"));
        assert!(!is_not_found("ACTIVE\n"));
    }

    #[test]
    fn a_server_without_words_of_its_own_has_the_default() {
        let answers = |memory: &str| Limits { memory: vec![memory.to_owned()], compute: "25.0".to_owned() };
        assert!(fit_server(&limits(&[2000], 25), &answers("")));
        assert!(!fit_server(&limits(&[2000], 25), &answers("5G")));
        assert!(!fit(&limits(&[2000], 25), &answers("")));
    }

    #[test]
    fn what_was_heard_ends_with_a_percentage_of_its_own() {
        // Seen while others talked to the daemon.
        assert!(matches!(complete_answer(""), Err(Complaint::Busy(_))));
        assert!(matches!(
            complete_answer("Cannot send command to MPS control daemon process\n"),
            Err(Complaint::Busy(_))
        ));
        assert!(matches!(
            complete_answer("Cannot find MPS control daemon process\n"),
            Err(Complaint::Gone(_))
        ));
        assert!(matches!(complete_answer("1G\n"), Err(Complaint::Busy(_))), "cut off");
        assert!(matches!(complete_answer("Unknown command\n25.0\n"), Err(Complaint::Refused(_))));
        assert_eq!(complete_answer("25.0\n"), Ok(""), "a list of nobody");
        assert_eq!(complete_answer("1G\n25.0\n4242\n25.0\n"), Ok("1G\n25.0\n4242"));
    }

    #[test]
    fn only_text_tells_that_something_was_not_done() {
        for (text, complains) in [
            ("Cannot find MPS control daemon process\n", true),
            ("Unknown command \"x\"\n", true),
            ("Insufficient privileges for UID 1000. Control deamon settings can only ...\n", true),
            ("25.0\n", false),
            ("", false),
        ] {
            assert_eq!(complaint(text).is_some(), complains, "{text}");
        }
        assert_eq!(pids("1\n22\n"), Some(vec![1, 22]));
        assert_eq!(pids("Server 1 not found\n"), None);
    }
}

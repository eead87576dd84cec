//! The report as text: a few lines for each claim, then a row for each node, or for nodes that look alike.

use std::collections::BTreeMap;

use super::super::inspect::span;
use super::super::table::{plain, render};
use super::report::{ExplainReport, ExplainedClaim};
use crate::controller::explain::{
    Answer, ClaimPlace, ClaimedDevice, Explained, How, NodeObstacle, ObstacleKind, Origin, User,
};
use crate::model::names::NodeName;
use crate::model::share::Extent;

/// More rows than this, and verdicts of one kind are told in one row, the nearest for all.
const ROWS_MAX: usize = 24;
/// Different verdicts of one kind that are still told one by one then.
const OF_A_KIND_MAX: usize = 3;
/// Nodes that are named in a row.
const NAMES_MAX: usize = 3;
/// Columns before what is said of a claim.
const KEY_WIDTH: usize = 12;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    Grouped,
    Each,
}

pub fn draw(report: &ExplainReport, rows: Rows) -> String {
    let mut text = String::new();
    let named = &report.named;
    match named.kind.as_str() {
        "claim" => {}
        "file" => text.push_str(&line(
            "File",
            &format!("{}, as if it were created now in {}", named.name, named.namespace),
        )),
        kind => {
            let kind = format!("{}{}", kind[..1].to_uppercase(), &kind[1..]);
            text.push_str(&line(&kind, &named.to_string()));
        }
    }
    let mut shown: Option<&[(NodeName, NodeObstacle)]> = None;
    for told in &report.told {
        if !text.is_empty() {
            text.push('\n');
        }
        claim(&mut text, report, told);
        // Claims of one pod wait for the same nodes.
        if let Answer::Waits { nodes, .. } = &told.explained.answer
            && !nodes.is_empty()
            && shown != Some(nodes)
        {
            text.push('\n');
            text.push_str(&table(nodes, rows));
            shown = Some(nodes);
        }
    }
    lines(&mut text, "Lacks", report.lacks.iter().cloned());
    let told = report.events.iter().map(|one| {
        let age = one.at.map_or(String::new(), |at| format!(", {} ago", age(report, &at)));
        format!("{}{age}: {}", one.reason, one.message)
    });
    lines(&mut text, "Event", told);
    lines(&mut text, "Note", report.remarks.iter().cloned());
    text
}

fn age(report: &ExplainReport, since: &jiff::Timestamp) -> String {
    span(report.at.duration_since(*since).as_secs_f64().max(0.0))
}

/// One line of the answer. Words of events, conditions and annotations may be a tenant's.
fn line(key: &str, words: &str) -> String {
    let words = plain(words);
    let key = if key.is_empty() { String::new() } else { format!("{key}:") };
    format!("{key:<KEY_WIDTH$}{words}\n")
}

fn lines(text: &mut String, key: &str, all: impl IntoIterator<Item = String>) {
    for (at, words) in all.into_iter().enumerate() {
        text.push_str(&line(if at == 0 { key } else { "" }, &words));
    }
}

fn claim(text: &mut String, report: &ExplainReport, told: &ExplainedClaim) {
    let Explained { namespace, name, origin, created, pods, answer } = &told.explained;
    let age = |since: &jiff::Timestamp| age(report, since);
    let about = match (origin, created) {
        (Origin::Promised, _) => " (planned for its pod; created once it has a place)".to_owned(),
        (Origin::Exists, Some(created)) => format!(" ({} old)", age(created)),
        (Origin::Exists, None) => String::new(),
        (Origin::Limits, _) => " (kube-scheduler makes a claim of it as it binds the pod)".to_owned(),
    };
    match origin {
        Origin::Limits => text.push_str(&line("Limits", &format!("{name}{about}"))),
        Origin::Exists | Origin::Promised => {
            text.push_str(&line("Claim", &format!("{namespace}/{name}{about}")));
        }
    }
    if !pods.is_empty() {
        text.push_str(&line("Pods", &users(pods)));
    }
    match answer {
        Answer::Placed { place, remarks } => {
            text.push_str(&line("Answer", &format!("placed{}", on(place))));
            lines(text, "Devices", place.devices.iter().map(|one| part(one, place)));
            lines(text, "But", remarks.iter().cloned());
        }
        Answer::Would { place, holdups } => {
            text.push_str(&line("Answer", &format!("there is room now{}", on(place))));
            lines(text, "Devices", place.devices.iter().map(|one| part(one, place)));
            lines(text, "First", holdups.iter().cloned());
        }
        Answer::Waits { because, words, first, kept, moves, preemption, .. } => {
            text.push_str(&line("Answer", &format!("waits ({})", because.as_str())));
            text.push_str(&line("Why", words));
            lines(text, "First", first.clone());
            lines(text, "Room", moves.clone());
            lines(text, "Preempts", preemption.as_ref().map(ToString::to_string));
            lines(text, "Kept for", kept.iter().cloned());
        }
        Answer::Open { words, .. } => {
            text.push_str(&line("Answer", "there is room now"));
            text.push_str(&line("How", words));
        }
        Answer::Refused { words } => {
            text.push_str(&line("Answer", "refused: it can never be placed as it is"));
            text.push_str(&line("Why", words));
        }
        Answer::Hold { words, .. } => {
            text.push_str(&line("Answer", "one of the controller's own claims, which are never placed"));
            text.push_str(&line("Why", words));
        }
        Answer::NotOurs { place, words } => {
            let at = place.as_ref().map_or(String::new(), |place| format!("; it is placed{}", on(place)));
            text.push_str(&line("Answer", &format!("not the controller's to place{at}")));
            text.push_str(&line("Why", words));
            if let Some(place) = place {
                lines(text, "Devices", place.devices.iter().map(|one| part(one, place)));
            }
        }
    }
    if let (Answer::Waits { .. } | Answer::Would { .. }, Some(leader)) = (answer, &report.leader) {
        let words = leader.words(report.at).unwrap_or_else(|words| words);
        text.push_str(&line("Controller", &words));
    }
    let carried = told.carried.iter().map(|one| {
        let age = one.since.as_ref().map_or(String::new(), |since| format!(", {} ago", age(since)));
        // Cut where it stands in the claim.
        let same = matches!(answer, Answer::Waits { words, .. } if words.starts_with(&one.words));
        format!("{}{age}: {}", one.field, if same { "as above" } else { &one.words })
    });
    lines(text, "On it", carried);
}

fn users(pods: &[User]) -> String {
    let one = |pod: &User| match (&pod.node, pod.reserved) {
        (Some(node), true) => format!("{} (on {node}, has reserved it)", pod.name),
        (Some(node), false) => format!("{} (on {node})", pod.name),
        (None, true) => format!("{} (has reserved it)", pod.name),
        (None, false) => pod.name.clone(),
    };
    let names: Vec<String> = pods.iter().take(NAMES_MAX).map(one).collect();
    let more = pods.len().saturating_sub(NAMES_MAX);
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    format!("{}{more}", names.join(", "))
}

fn on(place: &ClaimPlace) -> String {
    place.node.as_ref().map_or(String::new(), |node| format!(" on node {node}"))
}

fn part(part: &ClaimedDevice, place: &ClaimPlace) -> String {
    let name = match place.node.as_ref() == Some(&part.gpu.node) {
        true => part.gpu.device.to_string(),
        false => part.gpu.to_string(),
    };
    let compute = |percent: Option<u64>| percent.map_or(String::new(), |one| format!(", {one} % of compute"));
    match &part.how {
        How::Granted(share) if share.extent == Extent::Whole => {
            format!("{name}: the whole GPU, for this claim alone and without MPS")
        }
        How::Granted(share) if matches!(share.extent, Extent::Mig(_)) => {
            format!("{name}: a MIG device of {} MiB, for this claim alone", share.memory.mib_floor())
        }
        How::Granted(share) => format!(
            "{name}: {} MiB{}, isolation {}",
            share.memory.mib_floor(),
            compute(share.compute.map(|percent| u64::from(percent.get()))),
            share.isolation.as_str()
        ),
        How::Scheduled { memory_mib: Some(mib), compute: percent } => {
            format!("{name}: {mib} MiB{}, a share that kube-scheduler allocated", compute(*percent))
        }
        How::Scheduled { .. } => format!("{name}: a share that kube-scheduler allocated"),
        How::Whole => format!("{name}: the whole device"),
    }
}

/// Nodes by what keeps the pod off them, the nearest first.
fn table(nodes: &[(NodeName, NodeObstacle)], rows: Rows) -> String {
    if rows == Rows::Each {
        let rows = nodes.iter().map(|(node, verdict)| [node.to_string(), verdict.to_string()]);
        return render(&["NODE", "VERDICT"], rows);
    }
    let mut groups: BTreeMap<(ObstacleKind, String), Group<'_>> = BTreeMap::new();
    for (node, verdict) in nodes {
        let group = groups.entry((verdict.kind(), verdict.to_string()));
        group.or_insert_with(|| Group { verdict, nodes: Vec::new(), differ: false }).nodes.push(node);
    }
    let mut groups: Vec<Group<'_>> = groups.into_values().collect();
    let merged = groups.len() > ROWS_MAX;
    if merged {
        groups = of_kinds(groups);
    }
    groups.sort_by_cached_key(|group| {
        (group.verdict.kind(), std::cmp::Reverse(group.verdict.measure()), group.nodes[0].clone())
    });
    let mut text = render(&["NODE", "VERDICT"], groups.iter().map(Group::row));
    if merged {
        text.push_str("\n-o wide shows each node.\n");
    }
    text
}

/// Nodes in one row.
struct Group<'a> {
    /// Of the first node; the others have the same, or one that is no nearer.
    verdict: &'a NodeObstacle,
    nodes: Vec<&'a NodeName>,
    /// They have not all the same.
    differ: bool,
}

impl Group<'_> {
    fn row(&self) -> [String; 2] {
        let names = match self.nodes.len() <= NAMES_MAX && !self.differ {
            true => self.nodes.iter().map(|node| node.to_string()).collect::<Vec<_>>().join(", "),
            false => format!("{} nodes", self.nodes.len()),
        };
        let verdict = match (self.differ, self.verdict.measure()) {
            (false, _) => self.verdict.to_string(),
            (true, Some(_)) => format!("{} (node {}, the nearest)", self.verdict, self.nodes[0]),
            (true, None) => format!("{} (node {}; the others are similar)", self.verdict, self.nodes[0]),
        };
        [names, verdict]
    }
}

/// Many verdicts of one kind become one: that of the nearest node.
fn of_kinds(groups: Vec<Group<'_>>) -> Vec<Group<'_>> {
    let mut kinds: BTreeMap<ObstacleKind, Vec<Group<'_>>> = BTreeMap::new();
    for group in groups {
        kinds.entry(group.verdict.kind()).or_default().push(group);
    }
    kinds
        .into_values()
        .flat_map(|of_kind| if of_kind.len() > OF_A_KIND_MAX { vec![one(of_kind)] } else { of_kind })
        .collect()
}

fn one(mut groups: Vec<Group<'_>>) -> Group<'_> {
    groups.sort_by_key(|group| (std::cmp::Reverse(group.verdict.measure()), group.nodes[0].clone()));
    let mut nodes = Vec::new();
    let verdict = groups[0].verdict;
    groups.iter().for_each(|group| nodes.extend(group.nodes.iter().copied()));
    Group { verdict, nodes, differ: true }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_words_of_a_tenant_begin_a_line_or_move_the_cursor() {
        let told = line("Event", "gone\nAnswer: placed\r\u{1b}[2J\u{9b}1A");
        assert_eq!(told.lines().count(), 1, "{told:?}");
        assert!(told.starts_with("Event:") && told.ends_with("1A\n"), "{told:?}");
        assert!(!told.trim_end().contains(char::is_control), "{told:?}");
    }
}

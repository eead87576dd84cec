//! What waits and what would help it, as text.

use super::super::table::plain;
use super::super::top::{self, PictureStyle};
use super::RebalanceReport;
use crate::controller::explain::rebalance::{Help, HelpedUnit, amount_of, spot};

/// Units that no moves help are named; of more the number.
const NAMED_MAX: usize = 10;

/// Sentences, then the maps. `acts`: what is proposed is about to be done.
pub fn draw(report: &RebalanceReport, acts: bool, look: PictureStyle) -> String {
    let mut text = heading(report);
    for (waits, found) in report.proposed() {
        text.push_str(&format!("\n{}\n", plain(&name(waits))));
        for one in &found.moves {
            let pod = format!("{}/{}", one.pod.namespace, one.pod.name);
            let owner = format!("{} {}", one.owner.kind.as_str(), one.owner.name);
            let words =
                format!("  evict {pod} ({}, of {owner}); it fits {}", amount_of(&one.from), spot(&one.to));
            text.push_str(&format!("{}\n", plain(&words)));
        }
        let then: Vec<String> = found.then.iter().map(|(_, place)| spot(place)).collect();
        text.push_str(&format!("  then this fits {}\n", plain(&then.join(" and "))));
    }
    text.push_str(&helpless(report));
    if report.exit_code() == 0 {
        return text;
    }
    text.push_str(&format!("\nBEFORE\n{}", top::drawn(&report.before, look)));
    text.push_str(&format!("\nAFTER\n{}", top::drawn(&report.after, look)));
    if !acts {
        text.push_str(
            "\n--apply evicts these pods; the pods that are made in their place get other names.\n",
        );
    }
    text
}

fn heading(report: &RebalanceReport) -> String {
    let of = |test: fn(&Help) -> bool| report.waits.iter().filter(|one| test(&one.help)).count();
    let moved: usize = report.proposed().map(|(_, found)| found.moves.len()).sum();
    let served = report.proposed().count();
    let lacks = of(|help| !matches!(help, Help::Fits));
    match (lacks, served) {
        (0, _) => "Nothing waits for room.\n".to_owned(),
        (lacks, 0) => format!("{} for room; no moves would help.\n", wait(lacks)),
        (lacks, served) => {
            let pods = if moved == 1 { "1 pod" } else { &format!("{moved} pods") };
            format!("{} for room; moving {pods} would make room for {served}.\n", wait(lacks))
        }
    }
}

fn wait(count: usize) -> String {
    if count == 1 { "1 pod or gang waits".to_owned() } else { format!("{count} pods and gangs wait") }
}

/// Those that no moves help, and why they wait.
fn helpless(report: &RebalanceReport) -> String {
    let mut lines = Vec::new();
    for one in &report.waits {
        let words = match &one.help {
            Help::Fits | Help::Moves(_) => continue,
            Help::None(why) => why.clone(),
            Help::Spent(why) => format!("whether moves would help takes too long to find out; {why}"),
            Help::Later => "not looked at: others wait before it".to_owned(),
        };
        lines.push(format!("{}: {words}", name(one)));
    }
    let more = lines.len().saturating_sub(NAMED_MAX);
    if lines.is_empty() {
        return String::new();
    }
    let mut text = "\nNot helped by moves:\n".to_owned();
    lines.iter().take(NAMED_MAX).for_each(|line| text.push_str(&format!("  {}\n", plain(line))));
    if more > 0 {
        text.push_str(&format!("  and {more} more\n"));
    }
    text
}

/// `pod ml/train`, or `gang ml/train (4 pods)`.
pub fn name(waits: &HelpedUnit) -> String {
    let namespace = waits.pods.first().map_or("", |pod| pod.namespace.as_str());
    match (&waits.gang, waits.pods.as_slice()) {
        (None, [pod]) => format!("pod {namespace}/{}", pod.name),
        (gang, pods) => {
            format!("gang {namespace}/{} ({} pods)", gang.as_deref().unwrap_or_default(), pods.len())
        }
    }
}

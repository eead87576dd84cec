//! The map as text: a bar for each GPU, a line for each share.

use super::map::{Holder, Map, Node, Part, Row};

/// Letters for the shares of a GPU, in the bar and before the claim. A GPU has at most as many client slots.
const LETTERS: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
const FREE: char = '.';
const WHOLE: char = '#';
const BAR_MIN: usize = 16;
const BAR_MAX: usize = 64;
/// Columns of a line that are not the bar.
const BESIDE_THE_BAR: usize = 62;

/// Lines no wider than `width` as far as names allow.
pub fn draw(map: &Map, width: usize) -> String {
    let bar = width.saturating_sub(BESIDE_THE_BAR).clamp(BAR_MIN, BAR_MAX);
    let mut text = total(map);
    for node in &map.nodes {
        text.push_str(&format!("\n{}\n", head(node)));
        for row in &node.devices {
            text.push_str(&line(row, bar));
            for (letter, holder) in letters(row) {
                text.push_str(&share(letter, holder));
            }
        }
    }
    text
}

fn total(map: &Map) -> String {
    let rows = || map.nodes.iter().flat_map(|node| &node.devices);
    if rows().next().is_none() {
        return "no GPUs are published; is `tranche node` running? (kubectl get resourceslices)\n".to_owned();
    }
    let free = rows().filter_map(Row::free_mib);
    format!(
        "{}, {}: {} free, {} MiB left in shares, {} MiB at most on one GPU\n",
        counted(map.nodes.len(), "node"),
        counted(rows().count(), "device"),
        rows().filter(|row| row.is_free()).count(),
        free.clone().sum::<u64>(),
        free.max().unwrap_or(0),
    )
}

fn head(node: &Node) -> String {
    let of = |test: fn(&Row) -> bool| node.devices.iter().filter(|row| test(row)).count();
    let whole = of(|row| row.claims.iter().any(|holder| holder.part == Part::Whole));
    let shares = of(|row| row.claims.iter().any(|holder| matches!(holder.part, Part::Share { .. })));
    let free = of(Row::is_free);
    let devices = counted(node.devices.len(), "device");
    format!("{}: {devices}, {whole} whole, {shares} in shares, {free} free", node.name)
}

fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

fn line(row: &Row, bar: usize) -> String {
    let amount = match (row.grantable_mib, row.claims.iter().find(|holder| holder.part == Part::Whole)) {
        (_, Some(holder)) => name(holder),
        (Some(grantable), None) => format!("{} of {grantable} MiB", row.granted_mib()),
        (None, None) => "free".to_owned(),
    };
    let mut marks = Vec::new();
    if row.held {
        marks.push("held".to_owned());
    }
    if row.closed {
        marks.push("closed to other claims".to_owned());
    }
    marks.extend(row.taints.iter().map(|taint| format!("tainted {taint}")));
    let marks = if marks.is_empty() { String::new() } else { format!("   {}", marks.join(", ")) };
    format!("  {:<22} [{}] {amount}{marks}\n", row.device, filled(row, bar))
}

/// A cell stands for an equal part of the memory; each share has at least one while there is room.
fn filled(row: &Row, bar: usize) -> String {
    if row.claims.iter().any(|holder| holder.part == Part::Whole) {
        return WHOLE.to_string().repeat(bar);
    }
    let all = row.grantable_mib.unwrap_or(0).max(1);
    let mut text = String::with_capacity(bar);
    for (letter, holder) in letters(row) {
        let Part::Share { memory_mib, .. } = holder.part else { continue };
        let cells = usize::try_from(memory_mib.saturating_mul(bar as u64) / all).unwrap_or(bar).max(1);
        let room = bar.saturating_sub(text.len());
        text.extend(std::iter::repeat_n(letter, cells.min(room)));
    }
    text.extend(std::iter::repeat_n(FREE, bar.saturating_sub(text.len())));
    text
}

fn letters(row: &Row) -> impl Iterator<Item = (char, &Holder)> {
    let shares = row.claims.iter().filter(|holder| matches!(holder.part, Part::Share { .. }));
    LETTERS.chars().cycle().zip(shares)
}

fn share(letter: char, holder: &Holder) -> String {
    let Part::Share { memory_mib, compute } = holder.part else { return String::new() };
    let compute = compute.map_or(String::new(), |percent| format!(", {percent} %"));
    format!("    {letter} {:<40} {memory_mib} MiB{compute}\n", name(holder))
}

/// The pods that have the claim, and the claim if its name is not made from the pod's; of a claim that no pod has, the
/// claim.
fn name(holder: &Holder) -> String {
    let Holder { namespace, claim, pods, .. } = holder;
    match pods.as_slice() {
        [] => format!("claim {namespace}/{claim}"),
        [pod] if claim.starts_with(pod.as_str()) => format!("{namespace}/{pod}"),
        pods => format!("{namespace}/{} (claim {claim})", pods.join(", ")),
    }
}

/// The first lines of a picture, as many as a terminal of `height` lines has room for, and how many are left out.
pub fn cut(picture: &str, height: usize) -> String {
    let lines: Vec<&str> = picture.lines().collect();
    // The last line of the terminal is the cursor's.
    let room = height.saturating_sub(1).max(2);
    if lines.len() <= room {
        return lines.iter().map(|line| format!("{line}\n")).collect();
    }
    let (shown, left_out) = lines.split_at(room - 1);
    let shown: String = shown.iter().map(|line| format!("{line}\n")).collect();
    format!("{shown}{} more lines: --once prints all, --node NAME one node\n", left_out.len())
}

//! The map as text: a bar for each GPU, a line for each share; or a table with a row for each pod.

use super::super::table;
use super::bounds::NamespaceBounds;
use super::map::{ClaimShare, DeviceRow, HeldAmount, Map, MigCut, NodeMap};
use super::used::PodUse;

/// Letters for the shares of a GPU, in the bar and before the claim. A GPU has at most as many client slots.
const LETTERS: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
const FREE: char = '.';
const WHOLE: char = '#';
/// Of a GPU that is cut: instances that were made for no claim.
const FOREIGN: char = '-';
/// No GPU has more memory slices.
const SLICES_MAX: u32 = 128;
const BAR_MIN: usize = 16;
const BAR_MAX: usize = 64;
/// Columns of a line that are not the bar.
const BESIDE_THE_BAR: usize = 62;

/// Around the cells of a bar that are used, on a terminal that bears it: letters in reverse.
const REVERSE: &str = "\x1b[7m";
const UPRIGHT: &str = "\x1b[27m";
/// Where a figure is not known.
const UNKNOWN: &str = "-";

/// How a picture may look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PictureStyle {
    /// Columns.
    pub width: usize,
    /// Whether used parts of bars may be set off by the terminal's means.
    pub reverse: bool,
}

/// Lines no wider than the terminal as far as names allow.
pub fn draw(map: &Map, look: PictureStyle) -> String {
    let bar = look.width.saturating_sub(BESIDE_THE_BAR).clamp(BAR_MIN, BAR_MAX);
    let mut text = total(map);
    for node in &map.nodes {
        text.push_str(&format!("\n{}\n", head(node)));
        for row in &node.devices {
            text.push_str(&line(row, bar, look));
            for (letter, holder) in letters(row) {
                text.push_str(&share(letter, holder, row));
            }
        }
    }
    text + &namespaces(map) + &lacks(map)
}

/// A row for each pod of each claim; of a claim that no pod has, one.
pub fn table(map: &Map) -> String {
    let header = [
        "NODE",
        "DEVICE",
        "NAMESPACE",
        "POD",
        "CLAIM",
        "GRANTED(MiB)",
        "COMPUTE",
        "USED(MiB)",
        "PEAK(MiB)",
        "ACTIVE",
        "PROCESSES",
    ];
    let mut rows = Vec::new();
    for node in &map.nodes {
        for row in &node.devices {
            for holder in &row.claims {
                rows.extend(pods(holder).into_iter().map(|one| cells(node, row, holder, &one)));
            }
        }
    }
    table::render(&header, rows) + &namespaces(map) + &lacks(map)
}

fn cells(node: &NodeMap, row: &DeviceRow, holder: &ClaimShare, one: &PodUse) -> Vec<String> {
    let number = |figure: Option<u64>| figure.map_or(UNKNOWN.to_owned(), |figure| figure.to_string());
    let percent = |figure: Option<u64>| figure.map_or(UNKNOWN.to_owned(), |figure| format!("{figure}%"));
    let (granted, compute) = match holder.part {
        HeldAmount::Share { memory_mib, compute } => (memory_mib.to_string(), percent(compute)),
        HeldAmount::Mig { memory_mib, .. } => (memory_mib.to_string(), UNKNOWN.to_owned()),
        HeldAmount::Whole => ("whole".to_owned(), UNKNOWN.to_owned()),
        HeldAmount::Admin => ("admin".to_owned(), UNKNOWN.to_owned()),
    };
    let pod = one.pod.clone().unwrap_or_else(|| table::NONE.to_owned());
    vec![
        node.name.clone(),
        row.device.clone(),
        holder.namespace.clone(),
        pod,
        holder.claim.clone(),
        granted,
        compute,
        number(one.memory_used),
        number(one.memory_peak),
        percent(one.activity),
        number(one.processes),
    ]
}

/// What each pod uses: those that the node told of, then those of which nothing is known.
fn pods(holder: &ClaimShare) -> Vec<PodUse> {
    let mut all = holder.used.clone().unwrap_or_default();
    for pod in &holder.pods {
        if !all.iter().any(|one| one.pod.as_ref() == Some(pod)) {
            all.push(PodUse { pod: Some(pod.clone()), ..PodUse::default() });
        }
    }
    // Which pod it is becomes known a moment later.
    if all.iter().any(|one| one.pod.is_some()) {
        all.retain(|one| one.pod.is_some() || one.memory_used.is_some_and(|used| used > 0));
    }
    if all.is_empty() {
        all.push(PodUse::default());
    }
    all
}

/// A line for each namespace that has a bound.
fn namespaces(map: &Map) -> String {
    let lines: String = map.namespaces.iter().map(|one| format!("{}\n", table::plain(&bound(one)))).collect();
    if lines.is_empty() { lines } else { format!("\n{lines}") }
}

fn bound(one: &NamespaceBounds) -> String {
    let NamespaceBounds { name, used_mib, used_gpus, max_mib, max_gpus, problems } = one;
    let of = |most: &Option<u64>| most.map_or(String::new(), |most| format!(" of {most}"));
    let gpus = if max_gpus.unwrap_or(*used_gpus) == 1 { "GPU" } else { "GPUs" };
    let used = format!("{used_mib}{} MiB on {used_gpus}{} {gpus}", of(max_mib), of(max_gpus));
    let problems: String =
        problems.iter().map(|words| format!("; no more is placed: its annotation {words}")).collect();
    format!("namespace {name}: shares of {used}{problems}")
}

fn lacks(map: &Map) -> String {
    let lines: String = map.lacks.iter().map(|words| format!("{}\n", table::plain(words))).collect();
    if lines.is_empty() { lines } else { format!("\n{lines}") }
}

fn total(map: &Map) -> String {
    let rows = || map.nodes.iter().flat_map(|node| &node.devices);
    if rows().next().is_none() {
        return "no GPUs are published; is `tranche node` running? (kubectl get resourceslices)\n".to_owned();
    }
    let free = rows().filter_map(DeviceRow::free_mib);
    format!(
        "{}, {}: {} free, {} MiB left in shares, {} MiB at most on one GPU\n",
        counted(map.nodes.len(), "node"),
        counted(rows().count(), "device"),
        rows().filter(|row| row.is_free()).count(),
        free.clone().sum::<u64>(),
        free.max().unwrap_or(0),
    )
}

fn head(node: &NodeMap) -> String {
    let of = |test: fn(&DeviceRow) -> bool| node.devices.iter().filter(|row| test(row)).count();
    let whole = of(|row| row.claims.iter().any(|holder| holder.part == HeldAmount::Whole));
    let shares = of(|row| row.claims.iter().any(|holder| matches!(holder.part, HeldAmount::Share { .. })));
    let free = of(DeviceRow::is_free);
    let cut = match of(|row| row.cut.is_some() && !row.is_free()) {
        0 => String::new(),
        cut => format!(", {cut} cut"),
    };
    let devices = counted(node.devices.len(), "device");
    format!("{}: {devices}, {whole} whole, {shares} in shares{cut}, {free} free", node.name)
}

fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

fn line(row: &DeviceRow, bar: usize, look: PictureStyle) -> String {
    let whole = row.claims.iter().find(|holder| holder.part == HeldAmount::Whole);
    let amount = match (row.grantable_mib, whole) {
        (_, Some(holder)) => format!("{}{}", name(holder), usage(holder)),
        (Some(grantable), None) => format!("{} of {grantable} MiB", row.granted_mib()),
        (None, None) if row.cut.is_some() => row.cut.as_ref().map_or_else(String::new, possible),
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
    let each = whole.map_or(String::new(), each_pod);
    format!("  {:<22} [{}] {amount}{marks}\n{each}", row.device, filled(row, bar, look))
}

/// What can still be made of a GPU that is cut into MIG devices.
fn possible(cut: &MigCut) -> String {
    match &cut.largest {
        _ if cut.by_scheduler => "MIG, cut by kube-scheduler".to_owned(),
        Some(name) => format!("MIG, largest free {name} ({} MiB)", cut.largest_mib),
        None => "MIG, nothing free".to_owned(),
    }
}

/// As [`filled`], of memory slices.
fn slices(row: &DeviceRow, cut: &MigCut, bar: usize) -> String {
    let all = cut.memory_slices.clamp(1, SLICES_MAX);
    let mut of = vec![FREE; all as usize];
    let mut fill = |start: u32, size: u32, letter: char| {
        let run = of.iter_mut().skip(start as usize).take(size as usize);
        run.for_each(|cell| *cell = letter);
    };
    cut.foreign.iter().for_each(|one| fill(one.placement.start, one.placement.size, FOREIGN));
    for (letter, holder) in letters(row) {
        if let HeldAmount::Mig { start, size, .. } = holder.part {
            fill(start, size, letter);
        }
    }
    (0..bar).map(|cell| of[cell * of.len() / bar]).collect()
}

/// A cell stands for an equal part of the memory; each share has at least one while there is room, and so has what is used
/// of it.
fn filled(row: &DeviceRow, bar: usize, look: PictureStyle) -> String {
    let of = |mib: u64, all: u64| {
        usize::try_from(mib.saturating_mul(bar as u64) / all.max(1)).unwrap_or(bar).clamp(1, bar)
    };
    if let Some(holder) = row.claims.iter().find(|holder| holder.part == HeldAmount::Whole) {
        let limit = holder.used.iter().flatten().find_map(|one| one.memory_limit).or(row.grantable_mib);
        let used = holder.used_mib().filter(|mib| *mib > 0).zip(limit);
        return cells_of(WHOLE, bar, used.map_or(0, |(mib, all)| of(mib, all)), look);
    }
    if let Some(cut) = &row.cut {
        return slices(row, cut, bar);
    }
    let all = row.grantable_mib.unwrap_or(0);
    let (mut text, mut taken) = (String::with_capacity(bar), 0);
    for (letter, holder) in letters(row) {
        let HeldAmount::Share { memory_mib, .. } = holder.part else { continue };
        let cells = of(memory_mib, all).min(bar - taken);
        let used = holder.used_mib().filter(|mib| *mib > 0).map_or(0, |mib| of(mib, all));
        text.push_str(&cells_of(letter, cells, used.min(cells), look));
        taken += cells;
    }
    text.extend(std::iter::repeat_n(FREE, bar - taken));
    text
}

/// So many cells, the first `used` of them set off.
fn cells_of(letter: char, cells: usize, used: usize, look: PictureStyle) -> String {
    let row = |count: usize| letter.to_string().repeat(count);
    match used {
        0 => row(cells),
        _ if !look.reverse => row(cells),
        used => format!("{REVERSE}{}{UPRIGHT}{}", row(used), row(cells - used)),
    }
}

fn letters(row: &DeviceRow) -> impl Iterator<Item = (char, &ClaimShare)> {
    let parts =
        |holder: &&ClaimShare| matches!(holder.part, HeldAmount::Share { .. } | HeldAmount::Mig { .. });
    let shares = row.claims.iter().filter(parts);
    LETTERS.chars().cycle().zip(shares)
}

fn share(letter: char, holder: &ClaimShare, row: &DeviceRow) -> String {
    let (memory_mib, more) = match holder.part {
        HeldAmount::Share { memory_mib, compute } => {
            (memory_mib, compute.map_or(String::new(), |percent| format!(", {percent} %")))
        }
        HeldAmount::Mig { memory_mib, profile, .. } => {
            (memory_mib, row.profile(profile).map_or(String::new(), |name| format!(", MIG {name}")))
        }
        HeldAmount::Whole | HeldAmount::Admin => return String::new(),
    };
    let (usage, each) = (usage(holder), each_pod(holder));
    format!("    {letter} {:<40} {memory_mib} MiB{more}{usage}\n{each}", name(holder))
}

/// What a claim uses, behind what it was granted. Nothing where nobody asked.
fn usage(holder: &ClaimShare) -> String {
    match holder.used.as_deref() {
        None => String::new(),
        Some([one]) => format!("   {}", in_words(one)),
        Some([]) => format!("   used: {UNKNOWN}"),
        Some(_) => {
            let used = holder.used_mib().map_or(UNKNOWN.to_owned(), |mib| format!("{mib} MiB"));
            format!("   {used} used")
        }
    }
}

/// A line for each pod of a claim that several use.
fn each_pod(holder: &ClaimShare) -> String {
    let all = match holder.used.as_deref() {
        Some(all @ [_, _, ..]) => all,
        Some([_] | []) | None => return String::new(),
    };
    let line = |one: &PodUse| {
        let pod = one.pod.as_deref().unwrap_or("a pod that is not known yet");
        format!("        {:<36} {}\n", format!("{}/{pod}", holder.namespace), in_words(one))
    };
    all.iter().map(line).collect()
}

fn in_words(one: &PodUse) -> String {
    let used = one.memory_used.map_or(UNKNOWN.to_owned(), |mib| format!("{mib} MiB"));
    let active = one.activity.map_or(String::new(), |percent| format!(", {percent} % active"));
    format!("{used} used{active}")
}

/// The pods that have the claim, and the claim if its name is not made from the pod's; of a claim that no pod has, the
/// claim.
fn name(holder: &ClaimShare) -> String {
    let ClaimShare { namespace, claim, pods, .. } = holder;
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

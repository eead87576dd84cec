//! charts/tranche/podrules.yaml: what a pod that asks for devices may not do. The rules, the table that people read and
//! the tests on a cluster (`tenants::rules`) are held to it, row by row.

use std::fs;
use std::path::Path;

use serde::Deserialize;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Table {
    asks: Vec<Row>,
    env: Vec<Row>,
    visible_devices_left: Vec<Row>,
    capabilities: Vec<Row>,
    capabilities_left: Vec<Row>,
    host_path: Vec<Row>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    #[serde(alias = "path")]
    name: String,
    why: String,
    #[serde(default)]
    legal: String,
    #[serde(default)]
    value: String,
    #[serde(default)]
    counts: Counts,
}

/// What a row is for: whatever has devices, or only what may be a share of a GPU.
#[derive(Deserialize, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
enum Counts {
    #[default]
    Any,
    Share,
}

fn text(file: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).expect(file)
}

fn table() -> Table {
    serde_saphyr::from_str(&text("charts/tranche/podrules.yaml")).expect("the table is whole")
}

/// As the admission rule has it: the path is guarded, lies in what is, or has it in it.
fn reaches(path: &str, guarded: &str) -> bool {
    let stem = guarded.strip_suffix('*').map_or(format!("{guarded}/"), str::to_owned);
    let guarded = guarded.trim_end_matches('*');
    path == guarded || path.starts_with(&stem) || guarded.starts_with(&format!("{path}/"))
}

#[test]
fn every_row_is_in_the_rules_and_in_the_table_that_people_read() {
    let (rules, page, table) = (text("deploy/podpolicy.yaml"), text("docs/isolation.md"), table());
    let told = |row: &Row| {
        let name = if row.name.is_empty() { "(empty)".to_owned() } else { format!("`{}`", row.name) };
        let line = format!("| {name} | {} |", row.why);
        assert!(page.contains(&line), "docs/isolation.md lacks the row: {line}");
    };
    for row in &table.asks {
        let test = match row.name.strip_suffix('*') {
            Some(stem) => format!("name.startsWith('{stem}')"),
            None => format!("name == '{}'", row.name),
        };
        let (shares, whole) =
            (rules.matches("may-have-a-share").count(), rules.matches("asks-for-devices").count());
        // One more is for claims: of those namespaces that have no shares.
        assert_eq!(shares + whole + 1, rules.matches("kind: ValidatingAdmissionPolicy\n").count());
        // What counts as a share is named on both sides of the line, all else where there are whole devices.
        let named = if row.counts == Counts::Share { shares + whole } else { whole };
        assert_eq!(rules.matches(&test).count(), named, "{test}: each rule is for the same pods");
        told(row);
    }
    for row in &table.env {
        let test = match row.name.strip_suffix('*') {
            Some(stem) => format!("e.name.startsWith('{stem}')"),
            None => format!("e.name == '{}'", row.name),
        };
        // To tell, and to name them.
        let named = if row.counts == Counts::Share { 2 } else { 4 };
        assert_eq!(rules.matches(&test).count(), named, "{test}");
        told(row);
    }
    let left: Vec<String> = table.visible_devices_left.iter().map(|row| format!("'{}'", row.name)).collect();
    assert_eq!(rules.matches(&format!("e.?value.orValue('') in [{}]", left.join(", "))).count(), 4);
    table.visible_devices_left.iter().for_each(told);
    for row in &table.capabilities {
        assert!(
            rules.contains(&format!("{{'name': '{}', 'why': \"{}\"}}", row.name, row.why)),
            "{}",
            row.name
        );
        told(row);
    }
    for row in &table.capabilities_left {
        assert!(!rules.contains(&format!("'{}'", row.name)), "{} is refused", row.name);
        told(row);
    }
    for row in &table.host_path {
        let path = row.name.trim_end_matches('*');
        let stem = if path == row.name { format!("{path}/") } else { path.to_owned() };
        let line = format!("{{'path': '{path}', 'stem': '{stem}', 'why': \"{}\"}}", row.why);
        assert!(rules.contains(&line), "deploy/podpolicy.yaml lacks: {line}");
        told(row);
    }
    // And nothing else is refused than what stands in the table, for shares and for whole GPUs.
    assert_eq!(rules.matches("{'path': '").count(), 2 * table.host_path.len());
    assert_eq!(rules.matches("{'name': '").count(), 2 * table.capabilities.len());
}

#[test]
fn the_rows_are_sound() {
    let table = table();
    let all = [
        &table.asks,
        &table.env,
        &table.visible_devices_left,
        &table.capabilities,
        &table.capabilities_left,
        &table.host_path,
    ];
    for row in all.into_iter().flatten() {
        // Both stand in CEL and in a table.
        assert!(!row.why.is_empty() && !row.why.contains(['"', '\\', '|']), "{}: {}", row.name, row.why);
        assert!(!row.name.contains(['\'', '"', '\\', '|']), "{}", row.name);
    }
    for row in &table.env {
        let by = table.env.iter().find(|guard| row.legal.starts_with(guard.name.trim_end_matches('*')));
        assert!(
            !row.legal.is_empty() && by.is_none(),
            "{}: what is the nearest that is left alone?",
            row.name
        );
    }
    for row in &table.host_path {
        let path = row.name.trim_end_matches('*');
        assert!(path.starts_with('/') && !path.ends_with('/') && !path.contains("//"), "{path}");
        assert!(!path.starts_with("/var/run"), "{path}: the rule knows it as /run");
        assert!(["", "driverRoot", "kubeletDir", "cdiDir"].contains(&row.value.as_str()), "{}", row.value);
        assert!(row.legal.starts_with('/'), "{path}: what is the nearest thing that is left alone?");
        let by = table.host_path.iter().find(|guard| reaches(&row.legal, &guard.name));
        assert!(by.is_none(), "{} is refused", row.legal);
    }
    // What these lists were made for: each of them was a way out once.
    for path in [
        "/sys/fs/cgroup",
        "/run/containerd",
        "/driver/dev",
        "/dev",
        "/run",
        "/var/lib",
        "/etc",
        "/opt/cni/bin",
        "/etc/cron.d",
        "/etc/crontab",
        "/usr/local/bin",
        "/root/.ssh",
        "/var/log/pods",
        "/usr",
    ] {
        assert!(table.host_path.iter().any(|row| reaches(path, &row.name)), "{path}");
    }
    assert!(table.capabilities.iter().any(|row| row.name == "SYS_ADMIN"));
    assert!(table.asks.iter().any(|row| row.name == "nvidia.com/gpu"));
    let shares = table.asks.iter().filter(|row| row.counts == Counts::Share);
    assert!(shares.into_iter().any(|row| row.name.ends_with("/shared.gpu.nvidia.com")));
    // The first row that a path reaches gives the reason.
    let first =
        |path: &str| table.host_path.iter().find(|row| reaches(path, &row.name)).map(|row| &*row.name);
    assert_eq!((first("/proc/sys/net"), first("/proc/1/root")), (Some("/proc/sys"), Some("/proc")));
}

//! What pods use of what they were granted, from the text of a node plugin's metrics (docs/metrics.md, "Claims on GPUs").
//! Pure. The text comes over the network: what does not fit is passed over, and a node speaks for itself alone.

use std::collections::BTreeMap;

use serde::Serialize;

use super::map::{HeldAmount, Map};
use crate::model::names::PoolName;

/// Before the names of a claim's figures.
const PREFIX: &str = "tranche_claim_";
const MIB: f64 = 1_048_576.0;

/// What a pod uses of a claim's part of a device.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodUse {
    /// None: which of the claim's pods it is is not known yet.
    pub pod: Option<String>,
    /// MiB, a part of one counts as one.
    #[serde(rename = "memoryUsedMiB")]
    pub memory_used: Option<u64>,
    /// The most that was seen.
    #[serde(rename = "memoryPeakMiB")]
    pub memory_peak: Option<u64>,
    /// What all pods of the claim may use together.
    #[serde(rename = "memoryLimitMiB")]
    pub memory_limit: Option<u64>,
    /// Part of the time in which a kernel of the pod ran. None: NVML does not tell.
    #[serde(rename = "activityPercent")]
    pub activity: Option<u64>,
    pub processes: Option<u64>,
}

/// Whose a row is. The order is that of the answer.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct RowOwner {
    node: String,
    device: String,
    namespace: String,
    claim: String,
}

/// Rows by claim and device, then by pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Uses(BTreeMap<RowOwner, BTreeMap<String, PodUse>>);

impl Uses {
    /// Adds what a node's page says of that node's own devices. False: it says nothing of any claim.
    pub fn read(&mut self, node: &str, page: &str) -> bool {
        let mut found = false;
        for line in page.lines().filter(|line| line.starts_with(PREFIX)) {
            let Some((name, labels, value)) = series(line) else { continue };
            let label = |name: &str| labels.get(name).cloned().unwrap_or_default();
            let pool = PoolName::new(label("pool"));
            if pool.node().as_str() != node {
                continue;
            }
            found = true;
            let owner = RowOwner {
                node: node.to_owned(),
                device: label("device"),
                namespace: label("namespace"),
                claim: label("claim"),
            };
            let pod = label("pod");
            let named = Some(pod.clone()).filter(|pod| !pod.is_empty());
            let row = self.0.entry(owner).or_default().entry(pod);
            row.or_insert_with(|| PodUse { pod: named, ..PodUse::default() }).set(name, value);
        }
        found
    }

    /// Gives each part of a device on the map what its pods use. Parts of nodes that did not answer keep nothing.
    pub fn put_on(&self, map: &mut Map, answered: impl Fn(&str) -> bool) {
        for node in map.nodes.iter_mut().filter(|node| answered(&node.name)) {
            for row in &mut node.devices {
                for holder in row.claims.iter_mut().filter(|holder| holder.part != HeldAmount::Admin) {
                    let owner = RowOwner {
                        node: node.name.clone(),
                        device: row.device.clone(),
                        namespace: holder.namespace.clone(),
                        claim: holder.claim.clone(),
                    };
                    let pods = self.0.get(&owner).into_iter().flat_map(BTreeMap::values);
                    holder.used = Some(pods.cloned().collect());
                }
            }
        }
    }
}

impl PodUse {
    fn set(&mut self, name: &str, value: f64) {
        let (field, value) = match name {
            "memory_used_bytes" => (&mut self.memory_used, value / MIB),
            "memory_peak_bytes" => (&mut self.memory_peak, value / MIB),
            "memory_limit_bytes" => (&mut self.memory_limit, (value / MIB).floor()),
            "multiprocessor_activity_ratio" => (&mut self.activity, (value.min(1.0) * 100.0).round()),
            "gpu_processes" => (&mut self.processes, value),
            _ => return,
        };
        *field = whole(value);
    }
}

/// Rounded up. None: no number of this kind.
fn whole(value: f64) -> Option<u64> {
    let fits = value.is_finite() && (0.0..=1e15).contains(&value);
    // Within what was just looked at.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    fits.then_some(value.ceil() as u64)
}

type Labels = BTreeMap<String, String>;

/// A line of Prometheus' text format: the name without its prefix, the labels, the value. None: it is none.
fn series(line: &str) -> Option<(&str, Labels, f64)> {
    let (name, rest) = line.strip_prefix(PREFIX)?.split_once('{')?;
    let (labels, rest) = labels(rest)?;
    let value = rest.split_ascii_whitespace().next()?.parse().ok()?;
    Some((name, labels, value))
}

/// The labels, and what follows their bracket.
fn labels(mut text: &str) -> Option<(Labels, &str)> {
    let mut labels = Labels::new();
    loop {
        text = text.trim_start_matches([',', ' ']);
        if let Some(rest) = text.strip_prefix('}') {
            return Some((labels, rest));
        }
        let (name, rest) = text.split_once("=\"")?;
        let (value, rest) = quoted(rest)?;
        labels.insert(name.to_owned(), value);
        text = rest;
    }
}

/// A value up to its closing quote, and what follows; a backslash stands before a quote, a backslash or an `n`.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => value.push(match chars.next()?.1 {
                'n' => '\n',
                other => other,
            }),
            c => value.push(c),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(name: &str, device: &str, pod: &str, value: &str) -> String {
        format!(
            "tranche_claim_{name}{{namespace=\"ml\",pod=\"{pod}\",container=\"\",claim=\"c\",request=\"gpu\",\
             device=\"{device}\",pool=\"node-a\",UUID=\"GPU-0\"}} {value}\n"
        )
    }

    fn uses(page: &str) -> Vec<(String, PodUse)> {
        let mut uses = Uses::default();
        uses.read("node-a", page);
        let rows = uses.0.into_iter();
        rows.flat_map(|(owner, pods)| pods.into_values().map(move |one| (owner.device.clone(), one)))
            .collect()
    }

    #[test]
    fn a_row_is_made_of_the_series_of_one_pod() {
        let page = [
            "# HELP tranche_claim_memory_used_bytes x\n# TYPE tranche_claim_memory_used_bytes gauge\n"
                .to_owned(),
            line("memory_used_bytes", "gpu-0", "a", "419430401"),
            line("memory_peak_bytes", "gpu-0", "a", "5.24288e8"),
            line("memory_limit_bytes", "gpu-0", "a", "2097152000"),
            line("multiprocessor_activity_ratio", "gpu-0", "a", "0.354"),
            line("gpu_processes", "gpu-0", "a", "2"),
            line("memory_used_bytes", "gpu-0", "", "0"),
            line("violations_total", "gpu-1", "a", "7"),
            "tranche_gpu_memory_used_bytes{device=\"gpu-0\",pool=\"node-a\"} 7\n".to_owned(),
        ];
        let a = PodUse {
            pod: Some("a".to_owned()),
            memory_used: Some(401),
            memory_peak: Some(500),
            memory_limit: Some(2000),
            activity: Some(35),
            processes: Some(2),
        };
        let unknown = PodUse { memory_used: Some(0), ..PodUse::default() };
        let nothing = PodUse { pod: Some("a".to_owned()), ..PodUse::default() };
        let told = uses(&page.concat());
        assert_eq!(
            told,
            [("gpu-0".to_owned(), unknown), ("gpu-0".to_owned(), a), ("gpu-1".to_owned(), nothing)]
        );
    }

    #[test]
    fn a_node_speaks_for_itself_alone() {
        let page = line("memory_used_bytes", "gpu-0", "a", "1").replace("node-a", "node-b");
        let mut uses = Uses::default();
        assert!(!uses.read("node-a", &page));
        assert_eq!(uses, Uses::default());
        assert!(uses.read("node-b", &page));
    }

    #[test]
    fn the_pool_of_shares_is_the_nodes_too() {
        let page = line("memory_used_bytes", "gpu-0", "a", "1");
        let pool = PoolName::Shares("node-a".into()).to_string();
        assert_eq!(uses(&page.replace("node-a", &pool)), uses(&page));
    }

    #[test]
    fn what_is_no_series_is_passed_over() {
        for odd in [
            "tranche_claim_memory_used_bytes{namespace=\"ml",
            "tranche_claim_memory_used_bytes{namespace=\"ml\\",
            "tranche_claim_memory_used_bytes 5",
            "tranche_claim_memory_used_bytes{pool=\"node-a\"}",
            "tranche_claim_memory_used_bytes{pool=\"node-a\"} x",
            "tranche_claim_",
        ] {
            assert_eq!(uses(odd), [], "{odd}");
        }
        for odd in ["NaN", "-1", "+Inf", "1e300"] {
            assert_eq!(uses(&line("memory_used_bytes", "gpu-0", "a", odd))[0].1.memory_used, None, "{odd}");
        }
        let escaped = line("memory_used_bytes", "g\\\"p\\\\u\\n", "a", "1");
        assert_eq!(uses(&escaped)[0].0, "g\"p\\u\n");
    }
}

//! The node's labels that NVIDIA's GPU feature discovery sets, by the same rules, from the inventory: for schedulers,
//! autoscalers and people that choose nodes by them. Pure.
//!
//! | label | value |
//! |---|---|
//! | `nvidia.com/gpu.product` | the product's name: characters other than letters, digits, `-`, `_`, `.` go, blanks become one dash. Of several products that of most boards, boards in MIG mode last |
//! | `nvidia.com/gpu.count` | boards of that product, those in MIG mode among them |
//! | `nvidia.com/gpu.memory` | memory of such a board in MiB, where NVML tells |
//! | `nvidia.com/gpu.present` | `true` |
//!
//! Feature discovery appends `-SHARED` where the device plugin hands a GPU out several times under its usual name. Here no
//! device is multiplied, whatever is shared of it, so that no product has the suffix. Boards in MIG mode are told as
//! with its MIG strategies `none` and `mixed`, as boards; that of `single` (`-MIG-1g.10gb`) says that all MIG devices of
//! a node are alike, which is not asked for here.
//!
//! Source: NVIDIA/k8s-device-plugin, internal/lm (resource.go, mig-strategy.go).

use std::collections::BTreeMap;

use crate::model::gpu::{Gpu, Memory, MigMode};

use super::Inventory;

pub const PRODUCT: &str = "nvidia.com/gpu.product";
pub const COUNT: &str = "nvidia.com/gpu.count";
pub const MEMORY: &str = "nvidia.com/gpu.memory";
pub const PRESENT: &str = "nvidia.com/gpu.present";
/// The longest value of a label that the API server takes.
const VALUE_BYTES_MAX: usize = 63;

/// The labels of a node with this inventory; empty: it has no GPU. None: nothing is known, as while the driver is replaced.
pub fn labels(inventory: &Inventory) -> Option<BTreeMap<&'static str, String>> {
    let gpus = match inventory {
        // A driver that does not answer takes no GPU away.
        Inventory::Unknown | Inventory::Unavailable { .. } => return None,
        Inventory::Found(found) => &found.gpus,
    };
    let Some(told) = most_usual(gpus) else { return Some(BTreeMap::new()) };
    let count = gpus.iter().filter(|gpu| gpu.product_name == told.product_name).count();
    let mut labels = BTreeMap::from([(COUNT, count.to_string()), (PRESENT, "true".to_owned())]);
    let product = value(&told.product_name);
    if !product.is_empty() {
        labels.insert(PRODUCT, product);
    }
    if let Memory::Known { total, .. } = told.memory {
        labels.insert(MEMORY, total.mib_floor().to_string());
    }
    Some(labels)
}

/// A board of the product that most boards have; the first one among equals.
fn most_usual(gpus: &[Gpu]) -> Option<&Gpu> {
    let rank = |gpu: &&Gpu| {
        let alike = || gpus.iter().filter(|other| other.product_name == gpu.product_name);
        (alike().any(|other| other.mig == MigMode::Off), alike().count())
    };
    // The last of equals counts as the greatest.
    gpus.iter().rev().max_by_key(rank)
}

/// As a label can have it.
fn value(product: &str) -> String {
    let is_kept = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.') || c.is_whitespace();
    let kept: String = product.chars().filter(is_kept).collect();
    let mut value = kept.split_whitespace().collect::<Vec<&str>>().join("-");
    value.truncate(VALUE_BYTES_MAX);
    value.trim_matches(|c: char| !c.is_ascii_alphanumeric()).to_owned()
}

#[cfg(test)]
mod tests {
    use super::super::tests::gpu;
    use super::*;
    use crate::model::gpu::NodeGpus;
    use crate::model::quantity::Bytes;

    fn board(minor: u32, product: &str, mib: u64) -> Gpu {
        let memory = Memory::Known { total: Bytes::from_mib(mib), reserved: Bytes(0) };
        Gpu { product_name: product.to_owned(), memory, ..gpu(minor) }
    }

    fn told(gpus: Vec<Gpu>) -> Vec<(&'static str, String)> {
        let found = Inventory::Found(NodeGpus { gpus, ..NodeGpus::default() });
        labels(&found).unwrap().into_iter().collect()
    }

    #[test]
    fn a_node_has_what_feature_discovery_says_of_it() {
        let boards = (0..8).map(|minor| board(minor, "NVIDIA H100 80GB HBM3", 81_559)).collect();
        let expected = [
            (COUNT, "8".to_owned()),
            (MEMORY, "81559".to_owned()),
            (PRESENT, "true".to_owned()),
            (PRODUCT, "NVIDIA-H100-80GB-HBM3".to_owned()),
        ];
        assert_eq!(told(boards), expected);
    }

    #[test]
    fn names_are_written_as_feature_discovery_writes_them() {
        for (name, written) in [
            ("Tesla T4", "Tesla-T4"),
            ("NVIDIA A100-SXM4-40GB", "NVIDIA-A100-SXM4-40GB"),
            ("NVIDIA  RTX   A6000", "NVIDIA-RTX-A6000"),
            ("NVIDIA GeForce RTX 3090 (Laptop)", "NVIDIA-GeForce-RTX-3090-Laptop"),
            ("NVIDIA RTX PRO 6000 Blackwell/Server", "NVIDIA-RTX-PRO-6000-BlackwellServer"),
            ("Quadro®", "Quadro"),
        ] {
            assert_eq!(value(name), written);
        }
        assert_eq!(value("(?)"), "");
        let long = format!("{} {}", "x".repeat(62), "y".repeat(9));
        assert_eq!(value(&long), "x".repeat(62), "a value ends with a letter or a digit");
    }

    #[test]
    fn of_several_products_that_of_most_boards_is_told_and_mig_boards_come_last() {
        let product = |gpus| told(gpus).into_iter().find(|(key, _)| *key == PRODUCT).unwrap().1;
        let (l4, t4) = (|minor| board(minor, "NVIDIA L4", 1), |minor| board(minor, "Tesla T4", 1));
        assert_eq!(product(vec![t4(0), l4(1), l4(2)]), "NVIDIA-L4");
        assert_eq!(product(vec![t4(0), l4(1)]), "Tesla-T4", "the first among equals");
        let cut =
            |minor| Gpu { mig: MigMode::On(Vec::new()), ..board(minor, "NVIDIA A100-SXM4-40GB", 40_960) };
        assert_eq!(product(vec![cut(0), cut(1), t4(2)]), "Tesla-T4");
        let mixed = vec![cut(0), board(1, "NVIDIA A100-SXM4-40GB", 40_960)];
        assert!(told(mixed).contains(&(COUNT, "2".to_owned())), "boards in MIG mode count");
        assert_eq!(product(vec![cut(0)]), "NVIDIA-A100-SXM4-40GB", "no suffix of a MIG profile");
    }

    #[test]
    fn what_is_not_known_is_not_told() {
        assert_eq!(labels(&Inventory::Unknown), None);
        // The driver may be replaced just now.
        assert_eq!(labels(&Inventory::Unavailable { reason: String::new() }), None);
        assert_eq!(told(Vec::new()), []);
        let unknown = Gpu { memory: Memory::Unknown, ..board(0, "NVIDIA GB10", 0) };
        assert!(!told(vec![unknown]).iter().any(|(key, _)| *key == MEMORY));
    }
}

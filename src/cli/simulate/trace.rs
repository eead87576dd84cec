//! Node and pod lists in the format of the openb trace (alibaba/clusterdata, cluster-trace-gpu-v2023).

use std::collections::BTreeSet;
use std::sync::Arc;

use super::profiles::Profiles;
use super::rows::{BadTrace, Row, rows};
use crate::allocate::{Division, GpuSpec, MigBoard, NodeSpec, Part, Shape, ShareRoom, Want};
use crate::model::names::{DeviceName, NodeName};
use crate::model::quantity::Bytes;
use crate::model::share::{DaemonScope, Isolation};

/// A GPU, in the trace's thousandths. The trace knows no GPU memory: a thousandth counts as 1 MiB.
pub const MILLI: u64 = 1000;

#[derive(Debug)]
pub struct Trace {
    pub nodes: Vec<NodeSpec>,
    pub pods: Vec<TracePod>,
}

#[derive(Debug, Clone)]
pub struct TracePod {
    pub shape: Shape,
    /// Thousandths of each GPU.
    pub gpu_milli: u64,
}

impl TracePod {
    /// What it asks for, over all its GPUs.
    pub fn milli(&self) -> u64 {
        u64::from(self.shape.gpus()) * self.gpu_milli
    }
}

impl Trace {
    pub fn capacity_milli(&self) -> u64 {
        self.nodes.iter().map(|node| node.gpus.len() as u64 * MILLI).sum()
    }
}

/// More are on no board.
const GPUS_MAX: u32 = 64;

/// GPUs of the node that are cut into MIG devices on demand; the others are given whole and in shares.
const MIG_GPUS: &str = "mig_gpus";

/// Reads a list of nodes. `profiles`: what GPUs can be cut into, by model.
///
/// # Errors
/// The first mistake, with file, line and field.
pub fn nodes(file: &str, text: &str, profiles: &Profiles) -> Result<Vec<NodeSpec>, BadTrace> {
    let columns = ["sn", "cpu_milli", "memory_mib", "gpu", "model"];
    let mut names = BTreeSet::new();
    rows(file, text, columns)?.iter().map(|row| node(row, profiles, &mut names)).collect()
}

fn node(row: &Row<'_, 5>, profiles: &Profiles, names: &mut BTreeSet<String>) -> Result<NodeSpec, BadTrace> {
    let name = row.text(0)?;
    if !names.insert(name.to_owned()) {
        return Err(row.bad(0, format!("node {name} is in an earlier line, too")));
    }
    let gpus: u32 = row.number(3)?;
    if gpus > GPUS_MAX {
        return Err(row.bad(3, format!("{gpus} GPUs are more than a node has ({GPUS_MAX} at most)")));
    }
    let model = row.fields[4];
    let cut = row.optional_as(MIG_GPUS, "a valid whole number")?.unwrap_or(0);
    if cut > gpus {
        return Err(row.bad_at(MIG_GPUS, format!("{cut} is more than the {gpus} GPUs of the node")));
    }
    let board = match (cut, profiles.of(model)) {
        (0, _) => None,
        (_, Some(profiles)) => Some(profiles),
        (_, None) => {
            return Err(row.bad_at(
                MIG_GPUS,
                format!("--mig-profiles does not say what a GPU of model {model:?} can be cut into"),
            ));
        }
    };
    let gpu = |minor| GpuSpec {
        device: DeviceName::whole(minor),
        product: model.to_owned(),
        division: match &board {
            Some(profiles) if minor < cut => Division::Mig(MigBoard {
                profiles: Arc::clone(profiles),
                foreign: Vec::new(),
                parts: None,
                given_whole: false,
            }),
            _ => Division::Shares(in_shares()),
        },
        facts: Arc::default(),
    };
    Ok(NodeSpec {
        name: NodeName::new(name),
        cpu_milli: row.number(1)?,
        memory: Bytes::from_mib(row.number(2)?),
        gpus: (0..gpus).map(gpu).collect(),
    })
}

fn in_shares() -> ShareRoom {
    ShareRoom {
        memory: Bytes::from_mib(MILLI),
        // Not to count where the paper does not: as many as there are thousandths.
        slots: MILLI as u32,
        processes_per_slot: 1,
        // Sizes may mix: the trace's shares are counted, not enforced.
        isolation: Isolation::Kernel,
        daemon: DaemonScope::Share,
    }
}

/// `mig`: what is asked of each GPU is a MIG device of so many thousandths of its memory slices.
const ISOLATION: &str = "isolation";

/// Reads a list of pods. Other columns than the named ones are passed over.
///
/// # Errors
/// The first mistake, with file, line and field.
pub fn pods(file: &str, text: &str) -> Result<Vec<TracePod>, BadTrace> {
    let columns = ["name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli"];
    rows(file, text, columns)?.iter().map(pod).collect()
}

fn pod(row: &Row<'_, 5>) -> Result<TracePod, BadTrace> {
    row.text(0)?;
    let gpus: u32 = row.number(3)?;
    let gpu_milli: u64 = row.number(4)?;
    if gpus > GPUS_MAX {
        return Err(row.bad(3, format!("{gpus} GPUs are more than a node has ({GPUS_MAX} at most)")));
    }
    let part = match (gpus, gpu_milli) {
        (0, 0) | (1.., MILLI) => Part::Whole,
        (0, _) => return Err(row.bad(4, format!("{gpu_milli} thousandths of no GPU (num_gpu is 0)"))),
        (_, 0) => return Err(row.bad(4, format!("0 thousandths of {gpus} GPUs"))),
        (1.., 1..MILLI) => {
            let fraction = format!("0.{gpu_milli:03}").parse();
            Part::Fraction(fraction.map_err(|words: String| row.bad(4, words))?)
        }
        _ => return Err(row.bad(4, format!("{gpu_milli} is more than the {MILLI} thousandths of a GPU"))),
    };
    let minimum_isolation = match row.optional(ISOLATION) {
        None => Isolation::None,
        Some("mig") => Isolation::Mig,
        Some(other) => {
            let words = format!("{other:?} is not valid: write mig for MIG devices, or nothing");
            return Err(row.bad_at(ISOLATION, words));
        }
    };
    let models = row.optional("gpu_spec").unwrap_or_default();
    let products = models.split('|').map(str::trim).filter(|model| !model.is_empty());
    let products = products.map(str::to_owned).collect();
    let want = Want { part, products, minimum_isolation, ..Want::whole(gpus) };
    let shape =
        Shape { cpu_milli: row.number(1)?, memory: Bytes::from_mib(row.number(2)?), ..Shape::one(want) };
    Ok(TracePod { shape, gpu_milli })
}

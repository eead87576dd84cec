//! Node and pod lists in the format of the openb trace (alibaba/clusterdata, cluster-trace-gpu-v2023).

use std::collections::BTreeSet;
use std::str::FromStr;
use std::sync::Arc;

use thiserror::Error;

use crate::allocate::{Division, GpuSpec, NodeSpec, Part, Shape, ShareRoom, Want};
use crate::model::names::{DeviceName, NodeName};
use crate::model::quantity::Bytes;
use crate::model::share::{DaemonScope, Isolation};

/// A GPU, in the trace's thousandths. The trace knows no GPU memory: a thousandth counts as 1 MiB.
pub const MILLI: u64 = 1000;

#[derive(Debug)]
pub struct Trace {
    pub nodes: Vec<NodeSpec>,
    pub pods: Vec<Pod>,
}

#[derive(Debug, Clone)]
pub struct Pod {
    pub shape: Shape,
    /// Thousandths of each GPU.
    pub gpu_milli: u64,
}

impl Pod {
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

/// What is wrong with a file, and where.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BadTrace {
    #[error("{file} is empty; its first line names the columns")]
    Empty { file: String },
    #[error("{file}, line 1: column {column} is missing; there are: {found}")]
    Column { file: String, column: &'static str, found: String },
    #[error("{file}, line {line}: {found} fields where the first line names {expected}")]
    Fields { file: String, line: usize, found: usize, expected: usize },
    #[error("{file}, line {line}, field {column}: {words}")]
    Field { file: String, line: usize, column: &'static str, words: String },
}

/// More are on no board.
const GPUS_MAX: u32 = 64;

/// Reads a list of nodes.
///
/// # Errors
/// The first mistake, with file, line and field.
pub fn nodes(file: &str, text: &str) -> Result<Vec<NodeSpec>, BadTrace> {
    let columns = ["sn", "cpu_milli", "memory_mib", "gpu", "model"];
    let mut names = BTreeSet::new();
    rows(file, text, columns)?.iter().map(|row| node(row, &mut names)).collect()
}

fn node(row: &Row<'_, 5>, names: &mut BTreeSet<String>) -> Result<NodeSpec, BadTrace> {
    let name = row.text(0)?;
    if !names.insert(name.to_owned()) {
        return Err(row.bad(0, format!("node {name} is in an earlier line, too")));
    }
    let gpus: u32 = row.number(3)?;
    if gpus > GPUS_MAX {
        return Err(row.bad(3, format!("{gpus} GPUs are more than a node has ({GPUS_MAX} at most)")));
    }
    let gpu = |minor| GpuSpec {
        device: DeviceName::whole(minor),
        product: row.fields[4].to_owned(),
        division: Division::Shares(ShareRoom {
            memory: Bytes::from_mib(MILLI),
            // Not to count where the paper does not: as many as there are thousandths.
            slots: MILLI as u32,
            processes_per_slot: 1,
            // Sizes may mix: the trace's shares are counted, not enforced.
            isolation: Isolation::Kernel,
            daemon: DaemonScope::Share,
        }),
        facts: Arc::default(),
    };
    Ok(NodeSpec {
        name: NodeName::new(name),
        cpu_milli: row.number(1)?,
        memory: Bytes::from_mib(row.number(2)?),
        gpus: (0..gpus).map(gpu).collect(),
    })
}

/// Reads a list of pods. Other columns than the named ones are passed over.
///
/// # Errors
/// The first mistake, with file, line and field.
pub fn pods(file: &str, text: &str) -> Result<Vec<Pod>, BadTrace> {
    let columns = ["name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli"];
    let specs = header(file, text)?.iter().position(|column| *column == "gpu_spec");
    let rows = rows(file, text, columns)?;
    rows.iter().map(|row| pod(row, specs.map_or("", |at| row.all[at]))).collect()
}

fn pod(row: &Row<'_, 5>, models: &str) -> Result<Pod, BadTrace> {
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
    let products = models.split('|').map(str::trim).filter(|model| !model.is_empty());
    let want = Want { part, products: products.map(str::to_owned).collect(), ..Want::whole(gpus) };
    let shape =
        Shape { cpu_milli: row.number(1)?, memory: Bytes::from_mib(row.number(2)?), ..Shape::one(want) };
    Ok(Pod { shape, gpu_milli })
}

/// One line, with the columns that were asked for.
struct Row<'a, const N: usize> {
    file: &'a str,
    line: usize,
    columns: [&'static str; N],
    fields: [&'a str; N],
    all: Vec<&'a str>,
}

impl<const N: usize> Row<'_, N> {
    fn bad(&self, column: usize, words: String) -> BadTrace {
        BadTrace::Field { file: self.file.to_owned(), line: self.line, column: self.columns[column], words }
    }

    fn text(&self, column: usize) -> Result<&str, BadTrace> {
        let text = self.fields[column];
        if text.is_empty() { Err(self.bad(column, "is empty".to_owned())) } else { Ok(text) }
    }

    fn number<T: FromStr>(&self, column: usize) -> Result<T, BadTrace> {
        let text = self.fields[column];
        text.parse().map_err(|_| self.bad(column, format!("{text:?} is not a valid whole number")))
    }
}

fn header<'a>(file: &str, text: &'a str) -> Result<Vec<&'a str>, BadTrace> {
    let line = text.trim_start_matches('\u{feff}').lines().next().filter(|line| !line.trim().is_empty());
    let line = line.ok_or_else(|| BadTrace::Empty { file: file.to_owned() })?;
    Ok(line.split(',').map(str::trim).collect())
}

fn rows<'a, const N: usize>(
    file: &'a str,
    text: &'a str,
    columns: [&'static str; N],
) -> Result<Vec<Row<'a, N>>, BadTrace> {
    let header = header(file, text)?;
    let mut places = [0; N];
    for (place, column) in places.iter_mut().zip(columns) {
        let found = header.iter().position(|name| *name == column);
        *place = found.ok_or_else(|| BadTrace::Column {
            file: file.to_owned(),
            column,
            found: header.join(", "),
        })?;
    }
    let mut rows = Vec::new();
    for (nth, line) in text.lines().enumerate().skip(1).filter(|(_, line)| !line.trim().is_empty()) {
        let all: Vec<&str> = line.split(',').map(str::trim).collect();
        let (found, expected, line) = (all.len(), header.len(), nth + 1);
        if found != expected {
            return Err(BadTrace::Fields { file: file.to_owned(), line, found, expected });
        }
        rows.push(Row { file, line, columns, fields: places.map(|at| all[at]), all });
    }
    Ok(rows)
}

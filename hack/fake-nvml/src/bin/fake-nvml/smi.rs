//! What the driver can do by its program `nvidia-smi` only: the time slice of a board.

use std::path::Path;

use fake_nvml::code::Code;
use fake_nvml::node::{self, Gpu, Node};
use fake_nvml::state;

use crate::args::Args;

/// 0 default, 1 short, 2 medium, 3 long.
const LONGEST: u32 = 3;

pub fn run(dir: &Path, mut args: Args) -> Result<(), String> {
    let node = node::load().map_err(|_| "NVIDIA-SMI has failed: the driver is not loaded".to_owned());
    if args.flag("-L") {
        args.end()?;
        let node = match (node, in_container()) {
            (Ok(node), _) => node,
            (Err(words), nodes) if nodes.is_empty() => return Err(words),
            (Err(_), nodes) => {
                for (index, path) in nodes.iter().enumerate() {
                    println!("GPU {index}: simulated ({path})");
                }
                return Ok(());
            }
        };
        for gpu in &node.gpus {
            println!("GPU {}: {} (UUID: {})", gpu.index, gpu.name(), gpu.identity.uuid);
        }
        return Ok(());
    }
    let node = node?;
    match args.word("a command")?.as_str() {
        "compute-policy" => compute_policy(dir, &node, args),
        other => Err(format!("what is {other}? (this nvidia-smi knows compute-policy and -L)")),
    }
}

/// A container has the GPUs' device nodes and nothing of the simulation's state.
fn in_container() -> Vec<String> {
    let found = (0..64).map(|minor| format!("/dev/nvidia{minor}"));
    found.filter(|path| Path::new(path).exists()).collect()
}

fn compute_policy(dir: &Path, node: &Node, mut args: Args) -> Result<(), String> {
    let wanted = args.option("-i")?.ok_or("compute-policy wants -i UUID")?;
    let level: u32 = args.number("--set-timeslice")?.ok_or("compute-policy wants --set-timeslice")?;
    args.end()?;
    if level > LONGEST {
        return Err(format!("a time slice of {level}? It is 0 to {LONGEST}"));
    }
    let named = |gpu: &&Gpu| gpu.identity.uuid == wanted || gpu.index.to_string() == wanted;
    let gpu = node.gpus.iter().find(named).ok_or_else(|| format!("no device {wanted} was found"))?;
    if gpu.over.lost {
        return Err(format!("{wanted}: GPU is lost"));
    }
    state::update(dir, node.board.key, |state| {
        state.gpus.entry(gpu.index).or_default().time_slice = Some(level);
        Ok::<_, Code>(())
    })
    .map_err(|_| format!("{}: state.json cannot be written", dir.display()))
}

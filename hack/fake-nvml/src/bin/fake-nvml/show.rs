//! The node as a table.

use std::path::Path;

use fake_nvml::node::{Device, Node};
use fake_nvml::{session, state};

use crate::args::Args;
use crate::edit::read;

pub fn show(dir: &Path, args: Args) -> Result<(), String> {
    args.end()?;
    let node = Node::new(dir, read(dir)?, state::read(dir));
    // The tool looks at the node as a client would that has just begun.
    session::open(&node);
    let loaded = if node.control.driver_loaded { "" } else { " (not loaded)" };
    println!("{} x {}, driver {}{loaded}", node.gpus.len(), node.board.name, node.control.driver_version);
    for gpu in &node.gpus {
        let memory = gpu.memory();
        println!(
            "{:>2}  {}  {}  {:>6} of {:>6} MiB  mode {}{}{}",
            gpu.index,
            gpu.identity.uuid,
            gpu.identity.bus_id(),
            memory.used >> 20,
            memory.total >> 20,
            gpu.compute_mode,
            if gpu.mig.enabled { "  MIG" } else { "" },
            if gpu.over.lost { "  LOST" } else { "" },
        );
        for (gi, ci) in gpu.mig.devices() {
            let handle = fake_nvml::abi::Handle::Mig { gpu: gpu.index, gi, ci };
            if let Ok(Device::Mig(mig)) = node.device(handle.pointer::<()>()) {
                println!(
                    "      {}  gi {gi} ci {ci}  at {}:{}  {}",
                    mig.uuid(),
                    mig.instance.start,
                    mig.profile.size,
                    mig.profile.name
                );
            }
        }
        for process in gpu.processes() {
            let memory = process.used_mib.map_or("?".to_owned(), |m| m.to_string());
            println!("      pid {}  {memory} MiB  {:?}", process.pid, process.kind);
        }
        for (path, limit) in &gpu.changed.limits {
            println!("      limit {path}  soft {}  hard {}", limit.soft, limit.hard);
        }
    }
    for (call, faults) in &node.control.faults {
        for fault in faults.as_slice() {
            println!("fault {call}: {}", serde_json::to_string(fault).unwrap_or_default());
        }
    }
    if !node.control.missing.is_empty() {
        println!("missing: {}", node.control.missing.join(" "));
    }
    Ok(())
}

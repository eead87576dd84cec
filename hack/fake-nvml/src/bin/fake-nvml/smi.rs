//! The tool called as `nvidia-smi`: `-L` and `--version`, on the node and in containers, and what the driver can do by
//! this program only, the time slice of a board.

use std::path::Path;

use fake_nvml::abi::Handle;
use fake_nvml::code::Code;
use fake_nvml::control::Control;
use fake_nvml::node::{self, Device, Gpu, Node};
use fake_nvml::state::{self, State};
use fake_nvml::{carried, driver, session};

use crate::args::Args;

/// 0 default, 1 short, 2 medium, 3 long.
const LONGEST: u32 = 3;

pub fn run(dir: &Path, mut args: Args) -> Result<(), String> {
    if args.flag("-L") {
        args.end()?;
        print!("{}", list(dir)?);
        return Ok(());
    }
    if args.flag("--version") {
        args.end()?;
        print!("{}", versions(&here(dir)?.0));
        return Ok(());
    }
    let node = loaded()?;
    match args.word("a command")?.as_str() {
        "compute-policy" => compute_policy(dir, &node, args),
        other => Err(format!("what is {other}? (this nvidia-smi knows compute-policy, -L and --version)")),
    }
}

fn loaded() -> Result<std::sync::Arc<Node>, String> {
    node::load().map_err(|_| "NVIDIA-SMI has failed: the driver is not loaded".to_owned())
}

/// Which of a node's devices can be seen.
enum View<'p> {
    Node,
    /// A container: those whose device nodes lie in this folder.
    Container(&'p Path),
}

/// The node's description: its own, or in a container the one that this program carries.
fn here(dir: &Path) -> Result<(Control, View<'static>), String> {
    let failed = match loaded() {
        Ok(node) => return Ok((node.control.clone(), View::Node)),
        Err(words) => words,
    };
    if dir.join("control.json").exists() {
        return Err(failed);
    }
    let text = carried::read(Path::new("/proc/self/exe")).ok_or(failed)?;
    Ok((Control::parse(&text)?, View::Container(Path::new("/dev"))))
}

fn list(dir: &Path) -> Result<String, String> {
    let (control, view) = here(dir)?;
    let state = match view {
        View::Node => state::read(dir),
        View::Container(_) => State::default(),
    };
    let node = Node::new(dir, control, state);
    session::open(&node);
    let text = lines(&node, &view);
    if text.is_empty() { Err("No devices were found".to_owned()) } else { Ok(text) }
}

/// One line for each board that can be seen, counted from 0, and for each of its MIG devices.
fn lines(node: &Node, view: &View<'_>) -> String {
    let mut text = String::new();
    let boards = node.gpus.iter().filter(|gpu| view.has(&format!("nvidia{}", gpu.identity.minor)));
    for (index, gpu) in boards.enumerate() {
        text += &format!("GPU {index}: {} (UUID: {})\n", gpu.name(), gpu.identity.uuid);
        let migs = gpu.mig.devices().into_iter().filter(|(gi, ci)| {
            let cap = capability(gpu.identity.minor, *gi, *ci);
            view.has(&format!("nvidia-caps/nvidia-cap{cap}"))
        });
        for (number, (gi, ci)) in migs.enumerate() {
            let handle = Handle::Mig { gpu: gpu.index, gi, ci };
            if let Ok(Device::Mig(mig)) = node.device(handle.pointer::<()>()) {
                let (name, uuid) = (mig.name(), mig.uuid());
                let profile = name.rsplit(" MIG ").next().unwrap_or_default();
                text += &format!("  MIG {profile:<11} Device {number:>2}: (UUID: {uuid})\n");
            }
        }
    }
    text
}

impl View<'_> {
    fn has(&self, name: &str) -> bool {
        match self {
            View::Node => true,
            View::Container(dev) => dev.join(name).exists(),
        }
    }
}

/// The number of a compute instance's capability device, as `driver_proc` of hack/rig/lib/driver.sh gives them: each
/// board has 15 GPU instances of one access file and 8 compute instances, and the first number is 3.
fn capability(minor: u32, gi: u32, ci: u32) -> u64 {
    let (minor, gi, ci) = (u64::from(minor), u64::from(gi), u64::from(ci));
    3 + (minor * 15 + gi) * 9 + 1 + ci
}

fn versions(control: &Control) -> String {
    let version = control.driver_version.as_str();
    let branch =
        version.rsplit_once('.').filter(|(rest, _)| rest.contains('.')).map_or(version, |(rest, _)| rest);
    let cuda = driver::cuda(driver::series(version));
    format!(
        "NVIDIA-SMI version  : {version}\nNVML version        : {branch}\nDRIVER version      : {version}\n\
         CUDA Version        : {}.{}\n",
        cuda / 1000,
        cuda % 1000 / 10
    )
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_sees_the_devices_whose_nodes_it_has() {
        let dev = std::env::temp_dir().join(format!("fake-nvml-dev-{}", std::process::id()));
        std::fs::create_dir_all(dev.join("nvidia-caps")).unwrap();
        let control = r#"{"profile": "h100", "count": 3, "host_seed": "node-a", "gpus":
            {"1": {"mig": {"instances": [{"profile": "1g.10gb"}, {"profile": "1g.10gb"}]}}}}"#;
        let node = Node::new(&dev, Control::parse(control).unwrap(), State::default());
        session::open(&node);
        let all = lines(&node, &View::Node);
        assert_eq!(all.lines().count(), 5, "{all}");
        let second = all.lines().nth(3).unwrap();
        assert!(second.starts_with("  MIG 1g.10gb     Device  1: (UUID: MIG-"), "{second}");

        let (gi, ci) = node.gpus[1].mig.devices()[1];
        for name in ["nvidia1".to_owned(), format!("nvidia-caps/nvidia-cap{}", capability(1, gi, ci))] {
            std::fs::write(dev.join(name), "").unwrap();
        }
        let seen = lines(&node, &View::Container(&dev));
        std::fs::remove_dir_all(&dev).unwrap();
        let uuid = second.split("UUID: ").nth(1).unwrap();
        let board = &node.gpus[1].identity.uuid;
        assert_eq!(
            seen,
            format!(
                "GPU 0: NVIDIA H100 80GB HBM3 (UUID: {board})\n  MIG 1g.10gb     Device  0: (UUID: {uuid}\n"
            )
        );
    }
}

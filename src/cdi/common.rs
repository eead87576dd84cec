//! The edits that every container with a GPU gets.

use std::collections::BTreeSet;

use super::driver::{
    DeviceNode, DeviceNodeState, DriverFiles, DriverNode, FileKind, Hook, HookTool, Library, RootFiles,
};
use super::spec;

/// Keeps NVIDIA's older runtime hook, where one is installed too, from adding GPUs of its own
/// accord: `void` is its word for "leave this container alone".
pub const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";

/// Libraries that programs also load by the name without a number.
const PLAIN_NAMES: [&str; 4] = ["libcuda", "libnvcuvid", "libnvidia-encode", "libnvidia-ml"];

/// Numbered names of libraries that must be found even where the driver root lacks the link.
const SONAMES: [(&str, &str); 4] = [
    ("libcuda", "libcuda.so.1"),
    ("libnvidia-ml", "libnvidia-ml.so.1"),
    ("libnvidia-nvvm", "libnvidia-nvvm.so.4"),
    ("libnvidia-ptxjitcompiler", "libnvidia-ptxjitcompiler.so.1"),
];

const READ_ONLY: [&str; 5] = ["ro", "nosuid", "nodev", "rbind", "rprivate"];
const SOCKET: [&str; 6] = ["ro", "nosuid", "nodev", "noexec", "rbind", "rprivate"];

pub fn edits(driver: &DriverFiles) -> spec::Edits {
    let root = &*driver.root;
    let mut mounts = match root.hook {
        Some(_) => mirrored(root),
        None => by_loader_name(root),
    };
    mounts.extend(root.binaries.iter().chain(&root.files).map(mount));
    let nodes = DriverNode::CONTROL.iter().filter_map(|node| driver.nodes.0.get(node));
    spec::Edits {
        env: vec![format!("{VISIBLE_DEVICES}=void")],
        device_nodes: nodes.map(device_node).collect(),
        mounts,
        hooks: root.hook.as_ref().map(|hook| hooks(hook, root)).unwrap_or_default(),
    }
}

/// How a device node is written. `rw` and no `m`: a container never needs to make nodes.
pub fn device_node(node: &DeviceNode) -> spec::DeviceNode {
    let kernel_only = node.state == DeviceNodeState::KernelOnly;
    spec::DeviceNode {
        path: node.container.clone(),
        host_path: (!kernel_only && node.host.host != node.container).then(|| node.host.host.clone()),
        kind: kernel_only.then_some("c"),
        major: kernel_only.then_some(node.major),
        minor: kernel_only.then_some(node.minor),
        permissions: "rw",
    }
}

fn mount(file: &super::RootFile) -> spec::Mount {
    let options = match file.kind {
        FileKind::Plain => READ_ONLY.to_vec(),
        FileKind::Socket => SOCKET.to_vec(),
    };
    spec::Mount { host_path: file.host.host.clone(), container_path: file.container.clone(), options }
}

/// Every library where the driver root has it.
fn mirrored(root: &RootFiles) -> Vec<spec::Mount> {
    root.libraries.iter().map(|library| mount(&library.file)).collect()
}

/// Every library under the names the loader is asked for, in the directories it searches by itself.
fn by_loader_name(root: &RootFiles) -> Vec<spec::Mount> {
    let directories = [format!("/usr/lib/{}", root.arch.triplet()), "/usr/lib64".to_owned()];
    let named = |directory: &String, library: &Library| -> Vec<spec::Mount> {
        let file = &library.file;
        let place = |name: String| spec::Mount {
            host_path: file.host.host.clone(),
            container_path: format!("{directory}{}/{name}", subdirectory(&file.container)),
            options: READ_ONLY.to_vec(),
        };
        loader_names(library).into_iter().map(place).collect()
    };
    directories.iter().flat_map(|dir| root.libraries.iter().flat_map(move |lib| named(dir, lib))).collect()
}

/// VDPAU looks for its drivers in a directory of their own.
fn subdirectory(container: &str) -> &'static str {
    if container.contains("/vdpau/") { "/vdpau" } else { "" }
}

/// The numbered names (`libcuda.so.1`) where there are any, else the file's own; and the plain name
/// where programs use it.
fn loader_names(library: &Library) -> BTreeSet<String> {
    let (_, file) = split(&library.file.container);
    let stem = file.split_once(".so").map_or(file, |(stem, _)| stem);
    let numbered = |name: &&String| {
        name.rsplit_once(".so.").is_some_and(|(_, n)| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    };
    let mut names: BTreeSet<String> = library.aliases.iter().filter(numbered).cloned().collect();
    if names.is_empty() {
        let known = SONAMES.iter().find(|(known, _)| *known == stem);
        names.insert(known.map_or(file, |(_, soname)| soname).to_owned());
    }
    if PLAIN_NAMES.contains(&stem) {
        names.insert(format!("{stem}.so"));
    }
    names
}

/// The toolkit's two hooks, in order: links that programs expect, then the linker cache, which also
/// makes the numbered links (documented under `nvidia-ctk hook` in NVIDIA's toolkit guide).
fn hooks(hook: &Hook, root: &RootFiles) -> Vec<spec::Hook> {
    let links: BTreeSet<String> = root.libraries.iter().filter_map(plain_link).collect();
    let folders: BTreeSet<&str> = root.libraries.iter().map(|lib| split(&lib.file.container).0).collect();
    let link_args = links.into_iter().flat_map(|link| ["--link".to_owned(), link]).collect::<Vec<_>>();
    let folder_args = folders.into_iter().flat_map(|dir| ["--folder".to_owned(), dir.to_owned()]).collect();
    let mut hooks = Vec::new();
    if !link_args.is_empty() {
        hooks.push(call(hook, "create-symlinks", link_args));
    }
    hooks.push(call(hook, "update-ldcache", folder_args));
    hooks
}

/// `libcuda.so.1::/usr/lib/…/libcuda.so`, for libraries that have such a link in the driver root.
fn plain_link(library: &Library) -> Option<String> {
    let (directory, file) = split(&library.file.container);
    let plain = format!("{}.so", file.split_once(".so")?.0);
    library.aliases.contains(&plain).then_some(())?;
    let target = loader_names(library).into_iter().find(|name| *name != plain)?;
    Some(format!("{target}::{directory}/{plain}"))
}

fn call(hook: &Hook, verb: &str, mut args: Vec<String>) -> spec::Hook {
    let program: &[&str] = match hook.tool {
        HookTool::NvidiaCdiHook => &["nvidia-cdi-hook"],
        HookTool::NvidiaCtk => &["nvidia-ctk", "hook"],
    };
    let mut all: Vec<String> = program.iter().map(|word| (*word).to_owned()).collect();
    all.push(verb.to_owned());
    all.append(&mut args);
    spec::Hook { hook_name: "createContainer", path: hook.path.host.clone(), args: all }
}

/// Directory and file name of an absolute path.
fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}

//! Moves a daemon out of the pod's control group. The container runtime ends all processes in that group when the
//! container ends (where the host's PID namespace is shared), and a daemon must outlive its supervisor.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Below the root of every hierarchy.
const GROUP: &str = "tranche-mps";

/// Moves this process, and so what it will start. Best effort: what went wrong, in words, per hierarchy.
pub fn leave(root: &Path) -> Vec<String> {
    let found = hierarchies(root);
    if found.is_empty() {
        return vec![format!(
            "no control groups below {}: the daemon stays in this container's and ends with it",
            root.display()
        )];
    }
    let told = |(path, error): (PathBuf, io::Error)| {
        format!("the daemon stays in this container's control group of {}: {error}", path.display())
    };
    found.into_iter().filter_map(|path| enter(&path).err().map(|error| told((path, error)))).collect()
}

/// The root itself with version 2; with version 1 the folders in it, each once (some are links).
fn hierarchies(root: &Path) -> Vec<PathBuf> {
    if root.join("cgroup.procs").exists() {
        return vec![root.to_owned()];
    }
    let Ok(entries) = fs::read_dir(root) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .filter_map(|entry| entry.path().canonicalize().ok())
        .filter(|path| path.join("cgroup.procs").exists())
        .collect();
    found.sort();
    found.dedup();
    found
}

fn enter(hierarchy: &Path) -> io::Result<()> {
    let group = hierarchy.join(GROUP);
    match fs::create_dir(&group) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    // Version 1: a new group has no processors and takes nobody until it has.
    for name in ["cpuset.cpus", "cpuset.mems"] {
        let own = group.join(name);
        if fs::read_to_string(&own).is_ok_and(|text| text.trim().is_empty()) {
            // Version 2 has these files, too, and they may stay empty.
            let _ = fs::read(hierarchy.join(name)).and_then(|all| fs::write(&own, all));
        }
    }
    // 0 is the process that writes.
    fs::write(group.join("cgroup.procs"), "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hierarchy(root: &Path, name: &str) -> PathBuf {
        let path = root.join(name);
        fs::create_dir_all(path.join(GROUP)).unwrap();
        fs::write(path.join("cgroup.procs"), "1\n").unwrap();
        path
    }

    #[test]
    fn every_hierarchy_of_version_1_is_left_once() {
        let dir = tempfile::tempdir().unwrap();
        let (cpu, cpuset) = (hierarchy(dir.path(), "cpu,cpuacct"), hierarchy(dir.path(), "cpuset"));
        std::os::unix::fs::symlink(&cpu, dir.path().join("cpu")).unwrap();
        fs::write(cpuset.join("cpuset.cpus"), "0-1\n").unwrap();
        fs::write(cpuset.join(GROUP).join("cpuset.cpus"), "\n").unwrap();
        assert_eq!(hierarchies(dir.path()).len(), 2);
        assert_eq!(leave(dir.path()), Vec::<String>::new());
        assert_eq!(fs::read_to_string(cpu.join(GROUP).join("cgroup.procs")).unwrap(), "0");
        assert_eq!(fs::read_to_string(cpuset.join(GROUP).join("cpuset.cpus")).unwrap(), "0-1\n");
    }

    #[test]
    fn version_2_is_one_hierarchy_and_a_failure_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let root = hierarchy(dir.path(), "cgroup");
        assert_eq!(hierarchies(&root), std::slice::from_ref(&root));
        fs::create_dir(root.join(GROUP).join("cgroup.procs")).unwrap();
        let words = leave(&root);
        assert!(words.len() == 1 && words[0].contains("stays in this container's"), "{words:?}");
        assert_eq!(leave(&dir.path().join("none")).len(), 1);
    }
}

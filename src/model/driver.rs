//! Where NVIDIA's driver is installed on a node: its root, and the directories that packagings put its libraries in.

use std::path::{Path, PathBuf};

/// Directories of libraries below a driver root: Debian and Ubuntu; RHEL and SUSE; Debian's alternatives; Arch; driver
/// containers; Container-Optimized OS; Bottlerocket; Talos; NixOS; WSL. The last is the root itself.
const LIBRARY_DIRECTORIES: [&str; 23] = [
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "usr/lib64/nvidia/current",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "lib64",
    "lib",
    "usr/local/nvidia/lib64",
    "usr/lib64/nvidia",
    "usr/lib/nvidia",
    "usr/lib/nvidia/tesla",
    "usr/local/lib",
    "opt/nvidia/lib64",
    "home/kubernetes/bin/nvidia/lib64",
    "usr/local/glibc/usr/lib",
    "usr/local/glibc/lib",
    "run/opengl-driver/lib",
    "usr/lib/wsl/lib",
    ".",
];

/// A driver root as this process sees it, and the library directories that an administrator named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverPlace {
    root: PathBuf,
    own: Vec<String>,
}

impl DriverPlace {
    /// `own`: library directories relative to the root, which come before the usual ones.
    pub fn new(root: impl Into<PathBuf>, own: Vec<String>) -> Self {
        Self { root: root.into(), own }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Directories relative to the root in which libraries may be, whether or not they exist; the likeliest first.
    pub fn library_directories(&self) -> impl Iterator<Item = &str> {
        self.own.iter().map(String::as_str).chain(LIBRARY_DIRECTORIES)
    }
}

impl From<PathBuf> for DriverPlace {
    fn from(root: PathBuf) -> Self {
        Self::new(root, Vec::new())
    }
}

impl From<&Path> for DriverPlace {
    fn from(root: &Path) -> Self {
        root.to_owned().into()
    }
}

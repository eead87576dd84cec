//! What this machine has: the driver's libraries and programs, root, a kernel.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use nix::unistd::Uid;

use crate::mps::{CONTROL, Program};
use crate::nvml::{Gpu, Nvml};

pub const CUDA: &str = "libcuda.so.1";
pub const NVML: &str = "libnvidia-ml.so.1";

/// Below a driver root, most usual first.
const LIBRARIES: [&str; 8] = [
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "lib64",
    "usr/local/nvidia/lib64",
    "usr/local/nvidia/lib",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
];
const PROGRAMS: [&str; 5] =
    ["usr/bin", "usr/sbin", "usr/local/nvidia/bin", "usr/local/bin", "usr/lib/nvidia/current"];

/// The driver, as far as it is there.
#[derive(Debug, Clone)]
pub struct Driver {
    pub cuda: PathBuf,
    pub nvml: PathBuf,
    pub control: Option<Program>,
}

/// Looks below a root; with `/`, what the dynamic loader knows will do, too.
pub fn driver(root: &Path, control: Option<&Path>, nvml: Option<&Path>) -> Result<Driver> {
    let cuda = library(root, CUDA)?;
    let nvml = nvml.map_or_else(|| library(root, NVML), |path| Ok(path.to_owned()))?;
    let own_root = root != Path::new("/");
    let libraries = cuda.parent().filter(|_| own_root).map(Path::to_owned).into_iter().collect();
    let found = control.map(Path::to_owned).or_else(|| find(root, &PROGRAMS, CONTROL));
    let control = found.map(|path| Program { path, libraries });
    Ok(Driver { cuda, nvml, control })
}

fn library(root: &Path, name: &str) -> Result<PathBuf> {
    match find(root, &LIBRARIES, name) {
        Some(path) => Ok(path),
        None if root == Path::new("/") && loader_knows(name) => Ok(name.into()),
        None => bail!(
            "no {name} below {}: no NVIDIA driver there (or name its root: --driver-root)",
            root.display()
        ),
    }
}

fn find(root: &Path, folders: &[&str], name: &str) -> Option<PathBuf> {
    folders.iter().map(|folder| root.join(folder).join(name)).find(|path| path.exists())
}

fn loader_knows(name: &str) -> bool {
    let cache = fs::read("/etc/ld.so.cache").unwrap_or_default();
    cache.windows(name.len()).any(|window| window == name.as_bytes())
}

/// The GPU to use: by index or UUID, else the first that is in no MIG mode, else the first.
pub fn choose(nvml: &Nvml, wanted: Option<&str>) -> Result<Gpu> {
    let gpus = nvml.gpus()?;
    pick(&gpus, wanted).cloned()
}

fn pick<'a>(gpus: &'a [Gpu], wanted: Option<&str>) -> Result<&'a Gpu> {
    let Some(wanted) = wanted else {
        let whole = gpus.iter().find(|gpu| !gpu.mig);
        return whole.or(gpus.first()).context("the driver knows no GPU");
    };
    let found = gpus.iter().find(|gpu| gpu.uuid == wanted || gpu.index.to_string() == wanted);
    found.with_context(|| {
        let known: Vec<_> = gpus.iter().map(|gpu| format!("{} ({})", gpu.index, gpu.uuid)).collect();
        format!("no GPU {wanted}; there are {}", known.join(", "))
    })
}

pub fn is_root() -> bool {
    Uid::effective().is_root()
}

pub fn kernel() -> String {
    let text = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    text.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(index: u32, mig: bool) -> Gpu {
        Gpu { index, uuid: format!("GPU-{index}"), name: "NVIDIA H200".to_owned(), total: 1 << 37, mig }
    }

    #[test]
    fn the_first_gpu_without_mig_is_taken_unless_one_is_named() {
        let gpus = [gpu(0, true), gpu(1, false), gpu(2, false)];
        assert_eq!(pick(&gpus, None).unwrap().index, 1);
        assert_eq!(pick(&gpus, Some("2")).unwrap().index, 2);
        assert_eq!(pick(&gpus, Some("GPU-1")).unwrap().index, 1);
        assert!(pick(&gpus, Some("0")).unwrap().mig);
        assert!(pick(&gpus, Some("7")).unwrap_err().to_string().contains("GPU-2"));
        assert!(pick(&gpus[..1], None).unwrap().mig, "the report says that it is in MIG mode");
        assert!(pick(&[], None).is_err());
    }

    #[test]
    fn a_driver_is_found_below_its_root_or_it_is_said_where_none_is() {
        let root = tempfile::tempdir().unwrap();
        let words = driver(root.path(), None, None).unwrap_err().to_string();
        assert!(words.contains(CUDA) && words.contains("--driver-root"), "{words}");
        let folder = root.path().join("usr/lib64");
        fs::create_dir_all(&folder).unwrap();
        fs::create_dir_all(root.path().join("usr/bin")).unwrap();
        for path in [folder.join(CUDA), folder.join(NVML)] {
            fs::write(path, "").unwrap();
        }
        assert!(driver(root.path(), None, None).unwrap().control.is_none());
        fs::write(root.path().join("usr/bin").join(CONTROL), "").unwrap();
        let found = driver(root.path(), None, None).unwrap();
        assert_eq!(found.cuda, folder.join(CUDA));
        assert_eq!(found.control.unwrap().libraries, [folder]);
    }
}

//! Finds the driver's NVML library.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::path::{Component, Path, PathBuf};

use super::NvmlError;
use crate::model::driver::DriverPlace;

/// The library's name since the first NVML.
pub const LIBRARY: &str = "libnvidia-ml.so.1";

/// More symbolic links than this are taken for a loop, as the kernel does.
const MAX_LINKS: usize = 40;

/// Real paths of the libraries found under the root, most usual place first; at least one.
///
/// Symbolic links mean what they mean on the node: an absolute one starts at the root, and none leads
/// out of it to the container's own files. The path is free of links and so names the driver version,
/// as a rule: another version is another file for the dynamic loader.
pub fn find(driver: &DriverPlace) -> Result<Vec<PathBuf>, NvmlError> {
    let root = driver.root();
    let mut found: Vec<PathBuf> = Vec::new();
    for directory in driver.library_directories() {
        let path = Path::new(directory).join(LIBRARY);
        if let Some(real) = resolve(root, &path).filter(|real| real.is_file() && !found.contains(real)) {
            found.push(real);
        }
    }
    if found.is_empty() {
        let searched = driver.library_directories().map(str::to_owned).collect();
        return Err(NvmlError::LibraryMissing { root: root.to_owned(), searched });
    }
    Ok(found)
}

/// Directories in which a library would be found, as far as they exist: what to watch for a driver
/// that is installed or replaced.
pub fn directories(driver: &DriverPlace) -> Vec<PathBuf> {
    let root = driver.root();
    let mut found: Vec<PathBuf> = Vec::new();
    for directory in driver.library_directories() {
        if let Some(real) =
            resolve(root, Path::new(directory)).filter(|real| real.is_dir() && !found.contains(real))
        {
            found.push(real);
        }
    }
    found
}

/// `path` as seen by a process whose root directory is `root`, with every symbolic link followed.
/// `None` if a part of it does not exist.
fn resolve(root: &Path, path: &Path) -> Option<PathBuf> {
    let mut to_do: VecDeque<OsString> = parts(path);
    let mut done: Vec<OsString> = Vec::new();
    let mut links = 0;
    while let Some(part) = to_do.pop_front() {
        if part == OsStr::new("..") {
            done.pop();
            continue;
        }
        let mut here = root.to_owned();
        here.extend(&done);
        here.push(&part);
        if !here.symlink_metadata().ok()?.is_symlink() {
            done.push(part);
            continue;
        }
        links += 1;
        if links > MAX_LINKS {
            return None;
        }
        let target = here.read_link().ok()?;
        if target.is_absolute() {
            done.clear();
        }
        for part in parts(&target).into_iter().rev() {
            to_do.push_front(part);
        }
    }
    let mut real = root.to_owned();
    real.extend(&done);
    Some(real)
}

fn parts(path: &Path) -> VecDeque<OsString> {
    path.components()
        .filter_map(|component| match component {
            Component::Normal(part) => Some(part.to_owned()),
            Component::ParentDir => Some("..".into()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    fn root() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    fn file(root: &Path, path: &str) -> PathBuf {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "").unwrap();
        path
    }

    fn link(root: &Path, path: &str, target: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(target, path).unwrap();
    }

    #[test]
    fn links_are_followed_inside_the_root() {
        let root = root();
        let real = file(root.path(), "opt/driver/libnvidia-ml.so.580.1");
        link(root.path(), "usr/lib64/libnvidia-ml.so.1", "/opt/driver/libnvidia-ml.so.580.1");
        link(root.path(), "lib64", "usr/lib64");
        link(
            root.path(),
            "lib/x86_64-linux-gnu/libnvidia-ml.so.1",
            "../../../../../opt/driver/libnvidia-ml.so.580.1",
        );
        assert_eq!(find(&root.path().into()).unwrap(), [real]);
    }

    #[test]
    fn debian_keeps_it_one_floor_down() {
        let root = root();
        let real = file(root.path(), "usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.1");
        assert_eq!(find(&root.path().into()).unwrap(), [real]);
    }

    #[test]
    fn an_administrators_directory_comes_first_and_layouts_of_node_images_are_known() {
        let root = root();
        let folders = ["opt/nvidia/lib64", "usr/lib/nvidia/tesla", "usr/local/lib", "."];
        for folder in folders {
            file(root.path(), &format!("{folder}/libnvidia-ml.so.1"));
        }
        let own = DriverPlace::new(root.path(), vec!["srv/lib".to_owned()]);
        let first = file(root.path(), "srv/lib/libnvidia-ml.so.1");
        let found = find(&own).unwrap();
        assert_eq!((&found[0], found.len()), (&first, folders.len() + 1), "{found:?}");
    }

    #[test]
    fn a_link_never_leads_to_the_containers_own_files() {
        let (root, outside) = (root(), root());
        let target = file(outside.path(), "libnvidia-ml.so.1");
        link(root.path(), "usr/lib64/libnvidia-ml.so.1", target.to_str().unwrap());
        link(root.path(), "lib64/libnvidia-ml.so.1", "libnvidia-ml.so.1");
        let words = find(&root.path().into()).unwrap_err().to_string();
        for directory in ["usr/lib64, ", "usr/lib/nvidia/tesla, ", "--driver-library-dirs"] {
            assert!(words.contains(directory), "{words}");
        }
        assert!(words.contains("install the NVIDIA driver on the node"), "{words}");
    }

    #[test]
    fn only_directories_that_exist_are_watched() {
        let root = root();
        file(root.path(), "usr/lib64/other.so");
        link(root.path(), "lib64", "/usr/lib64");
        assert_eq!(directories(&root.path().into()), [root.path().join("usr/lib64"), root.path().to_owned()]);
    }
}

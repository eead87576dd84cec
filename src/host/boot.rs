//! Which boot this is, and which load of the driver.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::model::names::BootId;

/// Reads the kernel's boot id, normally from /proc/sys/kernel/random/boot_id.
pub fn boot_id(path: &Path) -> io::Result<BootId> {
    let text = std::fs::read_to_string(path)?;
    let id = text.trim();
    if id.is_empty() || id.len() > 64 {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("{} contains no boot id", path.display()),
        ));
    }
    Ok(BootId::new(id))
}

/// A number of the kernel module's load, from `/sys` as this process sees it; none while it is not loaded.
///
/// The inode of its folder: the kernel numbers the entries of sysfs upwards as they are made (kernfs), so
/// that a module that is loaded again has another one.
pub fn module_load(sys_root: &Path, module: &str) -> Option<u64> {
    std::fs::metadata(sys_root.join("module").join(module)).ok().map(|folder| folder.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_that_is_loaded_again_has_another_number() {
        let sys = tempfile::tempdir().unwrap();
        assert_eq!(module_load(sys.path(), "nvidia"), None);
        let folder = sys.path().join("module/nvidia");
        std::fs::create_dir_all(&folder).unwrap();
        let first = module_load(sys.path(), "nvidia");
        assert!(first.is_some());
        assert_eq!(module_load(sys.path(), "nvidia"), first);
        std::fs::rename(&folder, sys.path().join("module/old")).unwrap();
        std::fs::create_dir(&folder).unwrap();
        assert_ne!(module_load(sys.path(), "nvidia"), first);
    }
}

//! Which boot this is.

use std::io;
use std::path::Path;

use crate::model::names::BootId;

/// Reads the kernel's boot id, normally from /proc/sys/kernel/random/boot_id.
pub fn boot_id(path: &Path) -> io::Result<BootId> {
    let text = std::fs::read_to_string(path)?;
    let id = text.trim();
    if id.is_empty() || id.len() > 64 {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("{} holds no boot id", path.display()),
        ));
    }
    Ok(BootId::new(id))
}

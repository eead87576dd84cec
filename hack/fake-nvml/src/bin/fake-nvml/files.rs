//! Copies: of the library under its real name with the names of one driver version, of the library without some names,
//! and of this program as `nvidia-smi`. Each takes its place as a whole, so that whoever has the old one open keeps it.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use fake_nvml::{carried, driver, strip};

use crate::args::Args;
use crate::edit;

pub fn strip(mut args: Args) -> Result<(), String> {
    let from = args.word("the library")?;
    let to = args.word("the copy")?;
    let names = args.all("a name")?;
    let mut file = fs::read(&from).map_err(|e| format!("{from}: {e}"))?;
    strip::strip(&mut file, &names).map_err(|e| format!("{from}: {e}"))?;
    put(Path::new(&to), &file)
}

/// As a driver package does it: the file with the version in its name, then the link.
pub fn install(mut args: Args) -> Result<(), String> {
    let beside = || {
        let own = std::env::current_exe().ok()?;
        Some(own.parent()?.join("libfake_nvml.so"))
    };
    let library =
        args.option("--lib")?.map(PathBuf::from).or_else(beside).ok_or("which library? (--lib FILE)")?;
    let version = args.option("--driver")?.unwrap_or_else(|| driver::DEFAULT.to_owned());
    let dir = PathBuf::from(args.word("a directory")?);
    args.end()?;
    let mut file = fs::read(&library).map_err(|e| format!("{}: {e}", library.display()))?;
    driver::keep_names_of(&version, &mut file).map_err(|e| format!("{}: {e}", library.display()))?;
    fs::create_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let name = format!("libnvidia-ml.so.{version}");
    put(&dir.join(&name), &file)?;
    let (link, temporary) = (dir.join("libnvidia-ml.so.1"), dir.join(".libnvidia-ml.so.1.new"));
    let linked = symlink(&name, &temporary).and_then(|()| fs::rename(&temporary, &link));
    linked.map_err(|e| format!("{}: {e}", link.display()))?;
    println!("{}", link.display());
    Ok(())
}

/// This program as `nvidia-smi` with the node's description, which containers do not see.
pub fn smi(dir: &Path, mut args: Args) -> Result<(), String> {
    let to = args.word("where nvidia-smi is to be")?;
    args.end()?;
    let own = fs::read("/proc/self/exe").map_err(|e| format!("/proc/self/exe: {e}"))?;
    let text = serde_json::to_string(&edit::read(dir)?).map_err(|e| e.to_string())?;
    put(Path::new(&to), &carried::with(own, &text))
}

fn put(to: &Path, content: &[u8]) -> Result<(), String> {
    let temporary = PathBuf::from(format!("{}.new", to.display()));
    let written = fs::write(&temporary, content)
        .and_then(|()| fs::set_permissions(&temporary, fs::Permissions::from_mode(0o755)))
        .and_then(|()| fs::rename(&temporary, to));
    written.map_err(|e| format!("{}: {e}", to.display()))
}

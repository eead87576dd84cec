//! Copies of the library: under its real name, and without some of its names.

use std::fs;
use std::path::PathBuf;

use crate::args::Args;

pub fn strip(mut args: Args) -> Result<(), String> {
    let from = args.word("the library")?;
    let to = args.word("the copy")?;
    let names = args.all("a name")?;
    let mut file = fs::read(&from).map_err(|e| format!("{from}: {e}"))?;
    fake_nvml::strip::strip(&mut file, &names).map_err(|e| format!("{from}: {e}"))?;
    // Not over a copy that is loaded somewhere: a new file takes its place.
    let temporary = format!("{to}.new");
    fs::write(&temporary, &file).map_err(|e| format!("{temporary}: {e}"))?;
    fs::rename(&temporary, &to).map_err(|e| format!("{to}: {e}"))
}

pub fn install(mut args: Args) -> Result<(), String> {
    let beside = || {
        let own = std::env::current_exe().ok()?;
        Some(own.parent()?.join("libfake_nvml.so"))
    };
    let library =
        args.option("--lib")?.map(PathBuf::from).or_else(beside).ok_or("which library? (--lib FILE)")?;
    let dir = PathBuf::from(args.word("a directory")?);
    args.end()?;
    fs::create_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let target = dir.join("libnvidia-ml.so.1");
    let temporary = dir.join(".libnvidia-ml.so.1.new");
    fs::copy(&library, &temporary).map_err(|e| format!("{}: {e}", library.display()))?;
    fs::rename(&temporary, &target).map_err(|e| format!("{}: {e}", target.display()))?;
    println!("{}", target.display());
    Ok(())
}

//! The driver as WSL has it: libraries without the driver's version in `usr/lib/wsl/lib`, which look for the driver
//! itself in its store below `usr/lib/wsl/drivers` (NVIDIA's "CUDA on WSL" user guide; Microsoft's GPU paravirtualization).

use std::collections::BTreeMap;
use std::path::Path;

use super::libraries::elf_arch;
use super::view::Looker;
use crate::cdi::{Arch, FileKind, Library, RootFile};

const LIBRARIES: &str = "usr/lib/wsl/lib";
const STORES: &str = "usr/lib/wsl/drivers";
/// What tells WSL from other roots: the way to the GPU.
const DXCORE: &str = "usr/lib/wsl/lib/libdxcore.so";
/// A store of NVIDIA's driver has this; stores of other makers' drivers do not.
const IN_STORE: &str = "libcuda.so.1.1";

/// The libraries of WSL with their instruction set. None: the root is not WSL's, or has none of NVIDIA's.
pub fn libraries(look: &Looker<'_>) -> Option<(Arch, Vec<Library>)> {
    let arch = elf_arch(&look.view.inside.join(look.resolve(DXCORE)?))?;
    let directory = look.resolve(LIBRARIES)?;
    let mut by_stem: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for name in look.names(&directory) {
        if let Some((stem, _)) = name.split_once(".so").filter(|(stem, _)| stem.starts_with("lib")) {
            by_stem.entry(stem.to_owned()).or_default().push(name);
        }
    }
    by_stem.contains_key("libcuda").then_some(())?;
    let found = by_stem.iter().filter_map(|(stem, names)| library(look, arch, stem, names));
    Some((arch, found.collect()))
}

/// Of all names of a library the one that programs ask for; whether the others are links or copies does not matter.
fn library(look: &Looker<'_>, arch: Arch, stem: &str, names: &[String]) -> Option<Library> {
    let asked = format!("{stem}.so.1");
    let name = names.iter().find(|name| **name == asked).or_else(|| names.first())?;
    let path = look.resolve(Path::new(LIBRARIES).join(name))?;
    (elf_arch(&look.view.inside.join(&path)) == Some(arch)).then_some(())?;
    let container = format!("/{LIBRARIES}/{name}");
    let file = RootFile { host: look.view.host_path(&path)?, container, kind: FileKind::Plain };
    let aliases = names.iter().filter(|other| *other != name).cloned().collect();
    Some(Library { file, aliases })
}

/// The folders with NVIDIA's driver, each mounted as a whole where it lies: its name is known to Windows alone.
pub fn stores(look: &Looker<'_>) -> Vec<RootFile> {
    let Some(all) = look.resolve(STORES) else { return Vec::new() };
    let store = |name: String| {
        let path = look.resolve(Path::new(STORES).join(&name))?;
        look.resolve(path.join(IN_STORE))?;
        let container = format!("/{STORES}/{name}");
        Some(RootFile { host: look.view.host_path(&path)?, container, kind: FileKind::Plain })
    };
    look.names(&all).into_iter().filter_map(store).collect()
}

//! The driver's shared libraries: found by the version in their names.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::places;
use super::view::Looker;
use crate::cdi::{Arch, FileKind, Library, RootFile};
use crate::model::driver::DriverPlace;

/// A library directory (links resolved) with the names in it.
pub struct Directory {
    pub path: PathBuf,
    pub names: Vec<String>,
}

/// Every library directory of the root, each once, in the order of [`DriverPlace::library_directories`].
pub fn directories(look: &Looker<'_>, driver: &DriverPlace) -> Vec<Directory> {
    let variants = places::VARIANTS.iter().flat_map(|parent| {
        let names = look.resolve(parent).map(|path| look.names(&path)).unwrap_or_default();
        names.into_iter().map(move |name| format!("{parent}/{name}"))
    });
    let all = driver
        .library_directories()
        .map(str::to_owned)
        .chain(variants)
        .flat_map(|place| [place.clone(), format!("{place}/vdpau")]);
    let mut seen = BTreeSet::new();
    let found = all.filter_map(|place| look.resolve(place)).filter(|path| seen.insert(path.clone()));
    found.map(|path| Directory { names: look.names(&path), path }).collect()
}

/// Versions of the `libcuda.so.<version>` files that are there. Sorted, each once.
pub fn versions(directories: &[Directory]) -> BTreeSet<String> {
    let names = directories.iter().flat_map(|directory| &directory.names);
    let suffixes = names.filter_map(|name| name.strip_prefix("libcuda.so."));
    suffixes.filter(|version| version.contains('.') && is_version(version)).map(str::to_owned).collect()
}

fn is_version(text: &str) -> bool {
    text.split('.').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
}

/// The driver's libraries of one instruction set, sorted by file name.
pub fn libraries(look: &Looker<'_>, directories: &[Directory], version: &str, arch: Arch) -> Vec<Library> {
    let suffix = format!(".so.{version}");
    let wanted = |name: &str| {
        (name.starts_with("lib") && name.ends_with(&suffix)) || places::OWN_VERSION.contains(&name)
    };
    let mut seen = BTreeSet::new();
    let mut found: Vec<Library> = Vec::new();
    for directory in directories {
        for name in directory.names.iter().filter(|name| wanted(name)) {
            let Some(path) = look.resolve(directory.path.join(name)) else { continue };
            let Some(file) = path.file_name().and_then(|n| n.to_str()) else { continue };
            if seen.contains(file) || elf_arch(&look.view.inside.join(&path)) != Some(arch) {
                continue;
            }
            let Some(library) = library(look, directories, &path, arch) else { continue };
            seen.insert(file.to_owned());
            found.push(library);
        }
    }
    found.sort_by(|a, b| a.file.container.rsplit('/').next().cmp(&b.file.container.rsplit('/').next()));
    found
}

/// The library at a resolved path, with every name in a library directory that leads to it.
fn library(look: &Looker<'_>, directories: &[Directory], path: &Path, arch: Arch) -> Option<Library> {
    let file = path.file_name()?.to_str()?;
    let prefix = format!("{}.so", file.split_once(".so")?.0);
    let mut aliases = BTreeSet::new();
    for directory in directories {
        for name in directory.names.iter().filter(|name| *name != file && is_alias(name, &prefix)) {
            if look.resolve(directory.path.join(name)).as_deref() == Some(path) {
                aliases.insert(name.clone());
            }
        }
    }
    let host = look.view.host_path(path)?;
    // A root that is the folder of the libraries itself: they cannot be where a container has its root.
    let container = match path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        Some(_) => format!("/{}", path.to_str()?),
        None => format!("/usr/lib/{}/{file}", arch.triplet()),
    };
    let file = RootFile { host, container, kind: FileKind::Plain };
    Some(Library { file, aliases: aliases.into_iter().collect() })
}

fn is_alias(name: &str, prefix: &str) -> bool {
    name.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// The instruction set of a 64-bit ELF file, from its header (elf(5)); None for any other file, such
/// as the 32-bit libraries that some distributions have in `usr/lib`.
pub fn elf_arch(path: &Path) -> Option<Arch> {
    const CLASS_64: u8 = 2;
    let mut header = [0_u8; 20];
    File::open(path).ok()?.read_exact(&mut header).ok()?;
    let machine = u16::from_le_bytes([header[18], header[19]]);
    match (header.starts_with(b"\x7fELF") && header[4] == CLASS_64, machine) {
        (true, 62) => Some(Arch::X86_64),
        (true, 183) => Some(Arch::Aarch64),
        _ => None,
    }
}

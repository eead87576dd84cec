//! The driver root: finds the driver's libraries, programs and files for `cdi` to inject.
//!
//! A driver root is the file system that NVIDIA's driver is installed in: the host's own, or that of
//! a driver container (`/run/nvidia/driver`). This process sees it at one place and the container
//! runtime at another ([`RootView`]). Links are followed below the root only.
//! May import `model`, and `cdi` for its data types; no external crate but thiserror.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::device_nodes::DevRoot;
use crate::cdi::{FileKind, Hook, HookTool, HostPath, RootFile, RootFiles};
use crate::model::driver::DriverPlace;

mod cache;
mod libraries;
mod places;
#[cfg(test)]
pub(super) mod tests;
mod view;
mod wsl;

pub use cache::{DriverError, DriverRootCache};
pub use view::{Looker, RootView};

/// In place of a version that is not known, where no name has it.
const WSL: &str = "WSL";

/// Where the driver is, as an administrator configures it.
#[derive(Debug, Clone)]
pub struct DriverRoot {
    pub view: RootView,
    /// As this process sees it: library directories, and the root once more.
    pub place: DriverPlace,
    /// The host's root, to look for NVIDIA's container toolkit in, where the driver root is another.
    pub toolkit: Option<RootView>,
    /// The toolkit's folder on the host, as an administrator named it: below `toolkit`, or else below the driver root.
    pub toolkit_dir: Option<PathBuf>,
    pub hook: HookChoice,
    pub dev: DevRoot,
}

/// Whether to call the toolkit's hook program from CDI files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HookChoice {
    /// If one is found.
    Search,
    /// This one, on the host; told by its file name.
    At(HostPath),
    /// Never: mount libraries under their loader names even where a toolkit is installed.
    Off,
}

impl DriverRoot {
    /// A root that holds everything: libraries, `dev` and, if it has one, the toolkit.
    pub fn new(inside: impl Into<PathBuf>, outside: impl Into<String>) -> Self {
        Self::of(inside.into().into(), outside)
    }

    /// The same, with the library directories that an administrator named.
    pub fn of(place: DriverPlace, outside: impl Into<String>) -> Self {
        let view = RootView::new(place.root(), outside);
        let dev = DevRoot { view: view.clone(), proc: PathBuf::from("/proc") };
        Self { view, place, toolkit: None, toolkit_dir: None, hook: HookChoice::Search, dev }
    }
}

/// Why a driver root cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ScanError {
    #[error(
        "no NVIDIA driver below {root} ({host} on the host): no 64-bit libcuda.so.<version> in {searched} below it; install the driver, point the driver root at it, or name the directory of its libraries with --driver-library-dirs"
    )]
    NoDriver { root: PathBuf, host: String, searched: String },
    #[error(
        "the driver root {host} holds driver {found}, but NVML speaks of {wanted}: the driver was changed without a reboot or reload, or the root is not this driver's"
    )]
    OtherVersion { host: String, found: String, wanted: String },
    #[error(
        "the driver root {host} holds several drivers ({found}) and the running one is not known: load the driver's kernel module, or remove the others"
    )]
    Ambiguous { host: String, found: String },
    #[error("the hook program {path} is neither an nvidia-cdi-hook nor an nvidia-ctk")]
    Hook { path: String },
}

/// Looks through the root once. The version is NVML's; None takes the only one that is there.
/// Blocks on file calls.
pub fn scan(root: &DriverRoot, version: Option<&str>) -> Result<RootFiles, ScanError> {
    traced_scan(root, version).map(|(files, _)| files)
}

/// [`scan`], with the directories whose content decided the result.
fn traced_scan(
    root: &DriverRoot,
    version: Option<&str>,
) -> Result<(RootFiles, BTreeSet<PathBuf>), ScanError> {
    let look = Looker::new(&root.view);
    if let Some((arch, libraries)) = wsl::libraries(&look) {
        let (hook, mut looked) = find_hook(root)?;
        let binaries = binaries(&look);
        // NVML tells the version of the driver in Windows; no name below the root has it.
        let version = version.unwrap_or(WSL).to_owned();
        let files = RootFiles { version, arch, libraries, binaries, files: wsl::stores(&look), hook };
        looked.append(&mut look.directories());
        return Ok((files, looked));
    }
    let directories = libraries::directories(&look, &root.place);
    let version = pick_version(root, &directories, version)?;
    let arch = libcuda_arch(&look, &directories, &version).ok_or_else(|| no_driver(root))?;
    let (hook, mut looked) = find_hook(root)?;
    let files = RootFiles {
        libraries: libraries::libraries(&look, &directories, &version, arch),
        binaries: binaries(&look),
        files: files(&look, &directories, &version),
        version,
        arch,
        hook,
    };
    looked.append(&mut look.directories());
    Ok((files, looked))
}

fn no_driver(DriverRoot { view, place, .. }: &DriverRoot) -> ScanError {
    let searched = place.library_directories().collect::<Vec<_>>().join(", ");
    ScanError::NoDriver { root: view.inside.clone(), host: view.outside.clone(), searched }
}

fn pick_version(
    root: &DriverRoot,
    directories: &[libraries::Directory],
    wanted: Option<&str>,
) -> Result<String, ScanError> {
    let found = libraries::versions(directories);
    let list = || found.iter().cloned().collect::<Vec<_>>().join(", ");
    let host = root.view.outside.clone();
    match (wanted, found.len()) {
        (_, 0) => Err(no_driver(root)),
        (Some(wanted), _) if found.contains(wanted) => Ok(wanted.to_owned()),
        (Some(wanted), _) => Err(ScanError::OtherVersion { host, found: list(), wanted: wanted.to_owned() }),
        (None, 1) => Ok(list()),
        (None, _) => Err(ScanError::Ambiguous { host, found: list() }),
    }
}

fn libcuda_arch(
    look: &Looker<'_>,
    directories: &[libraries::Directory],
    version: &str,
) -> Option<crate::cdi::Arch> {
    let name = format!("libcuda.so.{version}");
    let places = directories.iter().filter(|directory| directory.names.contains(&name));
    let files = places.filter_map(|directory| look.resolve(directory.path.join(&name)));
    files.filter_map(|path| libraries::elf_arch(&look.view.inside.join(path))).next()
}

/// A program of the driver below a root, free of links, relative to the root.
pub fn program(root: &RootView, name: &str) -> Option<PathBuf> {
    let look = Looker::new(root);
    let places = places::BINARY_DIRECTORIES.iter().map(|directory| format!("{directory}/{name}"));
    places.filter_map(|place| look.resolve(place)).find(|path| root.inside.join(path).is_file())
}

/// True if the root has a dynamic loader of its own: its programs want its own C library.
pub fn has_loader(root: &RootView) -> bool {
    let look = Looker::new(root);
    places::LOADERS.iter().any(|place| look.resolve(place).is_some())
}

/// Directories below the root where the driver's libraries and programs may be, as this process sees them.
pub fn search_paths(driver: &DriverPlace) -> (Vec<PathBuf>, Vec<PathBuf>) {
    let there = |place: &str| Some(driver.root().join(place)).filter(|path| path.is_dir());
    let programs = places::BINARY_DIRECTORIES.iter().filter_map(|place| there(place));
    (driver.library_directories().filter_map(there).collect(), programs.collect())
}

fn binaries(look: &Looker<'_>) -> Vec<RootFile> {
    let find = |name: &&str| {
        let places = places::BINARY_DIRECTORIES.iter().map(|directory| format!("{directory}/{name}"));
        places.filter_map(|place| file(look, &place, format!("/usr/bin/{name}"))).next()
    };
    places::BINARIES.iter().filter_map(find).collect()
}

fn files(look: &Looker<'_>, directories: &[libraries::Directory], version: &str) -> Vec<RootFile> {
    let plain =
        places::FILES.iter().filter_map(|place| same_place(look, &place.replace("{version}", version)));
    let mut files: Vec<RootFile> = plain.collect();
    for (name, container) in places::BESIDE_LIBRARIES {
        let beside = directories.iter().filter(|directory| directory.names.iter().any(|n| n == name));
        let known = files.iter().any(|file| file.container == container);
        let path =
            beside.filter_map(|directory| directory.path.join(name).to_str().map(str::to_owned)).next();
        files.extend(path.filter(|_| !known).and_then(|path| file(look, &path, container.to_owned())));
    }
    files.extend(firmware(look, version));
    let sockets = places::SOCKETS.iter().filter_map(|place| same_place(look, place));
    files.extend(sockets.map(|socket| RootFile { kind: FileKind::Socket, ..socket }));
    files
}

fn firmware(look: &Looker<'_>, version: &str) -> Vec<RootFile> {
    let directories = places::FIRMWARE.iter().map(|parent| format!("{parent}/{version}"));
    let existing = directories.filter_map(|place| look.resolve(&place).map(|path| (place, path)));
    let Some((place, path)) = existing.take(1).next() else { return Vec::new() };
    let names =
        look.names(&path).into_iter().filter(|name| name.starts_with("gsp") && name.ends_with(".bin"));
    names.filter_map(|name| same_place(look, &format!("{place}/{name}"))).collect()
}

fn same_place(look: &Looker<'_>, place: &str) -> Option<RootFile> {
    file(look, place, format!("/{place}"))
}

fn file(look: &Looker<'_>, place: &str, container: String) -> Option<RootFile> {
    let path = look.resolve(place).filter(|path| !look.view.inside.join(path).is_dir())?;
    Some(RootFile { host: look.view.host_path(&path)?, container, kind: FileKind::Plain })
}

type FoundHook = (Option<Hook>, BTreeSet<PathBuf>);

fn find_hook(root: &DriverRoot) -> Result<FoundHook, ScanError> {
    match &root.hook {
        HookChoice::Off => Ok((None, BTreeSet::new())),
        HookChoice::At(path) => {
            let tool = hook_tool(&path.host).ok_or_else(|| ScanError::Hook { path: path.host.clone() })?;
            Ok((Some(Hook { path: path.clone(), tool }), BTreeSet::new()))
        }
        HookChoice::Search => {
            let (named, mut looked) = named_hook(root);
            if named.is_some() {
                return Ok((named, looked));
            }
            for view in root.toolkit.iter().chain([&root.view]) {
                let look = Looker::new(view);
                let found = places::HOOKS.iter().filter_map(|place| hook(&look, place)).next();
                looked.append(&mut look.directories());
                if found.is_some() {
                    return Ok((found, looked));
                }
            }
            Ok((None, looked))
        }
    }
}

/// The hook in the toolkit's folder that an administrator named.
fn named_hook(root: &DriverRoot) -> FoundHook {
    let Some(folder) = root.toolkit_dir.as_deref().and_then(Path::to_str) else {
        return (None, BTreeSet::new());
    };
    let look = Looker::new(root.toolkit.as_ref().unwrap_or(&root.view));
    let folder = folder.trim_matches('/');
    let found = places::HOOK_NAMES.iter().find_map(|name| hook(&look, &format!("{folder}/{name}")));
    (found, look.directories())
}

/// An administrator named the toolkit's folder, and no hook is in it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} on the host, which is named as the folder of NVIDIA's container toolkit, has neither nvidia-cdi-hook nor \
     nvidia-ctk; without one of them containers get no linker cache. It is looked for again with each claim; install the \
     toolkit there, or correct --toolkit-dir (node.toolkitDir of the chart)",
    folder.display()
)]
pub struct MissingToolkit {
    pub folder: PathBuf,
}

fn missing_toolkit(root: &DriverRoot) -> Option<MissingToolkit> {
    let folder = root.toolkit_dir.clone().filter(|_| root.hook == HookChoice::Search)?;
    named_hook(root).0.is_none().then_some(MissingToolkit { folder })
}

/// The tool is told by the name looked for, the path is what it resolves to.
fn hook(look: &Looker<'_>, place: &str) -> Option<Hook> {
    let found = same_place(look, place)?;
    Some(Hook { path: found.host, tool: hook_tool(place)? })
}

fn hook_tool(path: &str) -> Option<HookTool> {
    match Path::new(path).file_name()?.to_str()? {
        "nvidia-cdi-hook" => Some(HookTool::NvidiaCdiHook),
        "nvidia-ctk" => Some(HookTool::NvidiaCtk),
        _ => None,
    }
}

/// A path of a CDI file that is not there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{host} is missing (looked for at {}): the driver, the toolkit or a daemon was changed or removed; reinstall it, or wait for the next attempt, which looks again",
    inside.display()
)]
pub struct MissingPath {
    pub host: String,
    pub inside: PathBuf,
}

/// Checks every path of a rendered CDI file ([`crate::cdi::CdiFile::paths`]), right before the file
/// is written. The first missing one is the error; then also call [`DriverRootCache::forget`].
pub fn check(paths: &[HostPath]) -> Result<(), MissingPath> {
    let missing = paths.iter().find(|path| path.inside.symlink_metadata().is_err());
    missing.map_or(Ok(()), |path| Err(MissingPath { host: path.host.clone(), inside: path.inside.clone() }))
}

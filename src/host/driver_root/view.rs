//! A directory tree that is another root file system to the container runtime.

use std::cell::RefCell;
use std::collections::{BTreeSet, VecDeque};
use std::ffi::OsString;
use std::fs;
use std::path::{Component, Path, PathBuf};

use crate::cdi::HostPath;

/// One root under two names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RootView {
    /// Where this process sees it, e.g. `/driver-root`.
    pub inside: PathBuf,
    /// Where the container runtime sees it on the host, e.g. `/` or `/run/nvidia/driver`.
    pub outside: String,
}

/// Links that one path may lead through, as in Linux (path_resolution(7)).
const LINKS: u32 = 40;

impl RootView {
    pub fn new(inside: impl Into<PathBuf>, outside: impl Into<String>) -> Self {
        Self { inside: inside.into(), outside: outside.into() }
    }

    /// Both names of a path below the root. None if the path is not UTF-8, which CDI cannot carry.
    pub fn host_path(&self, relative: &Path) -> Option<HostPath> {
        let host = format!("{}/{}", self.outside.trim_end_matches('/'), relative.to_str()?);
        Some(HostPath { inside: self.inside.join(relative), host })
    }
}

/// Looks paths up below one root, and remembers the directories whose content decided the answers.
pub struct Looker<'a> {
    pub view: &'a RootView,
    directories: RefCell<BTreeSet<PathBuf>>,
}

impl<'a> Looker<'a> {
    pub fn new(view: &'a RootView) -> Self {
        Self { view, directories: RefCell::default() }
    }

    /// Follows links as a process would that has the root as its `/`: an absolute link starts again at
    /// the root, and `..` never climbs above it. So no link can lead out, whatever it says.
    /// The answer is relative to the root and free of links; None if nothing is there.
    pub fn resolve(&self, path: impl AsRef<Path>) -> Option<PathBuf> {
        let mut ahead: VecDeque<OsString> = parts(path.as_ref());
        let mut done = PathBuf::new();
        let mut links = 0;
        while let Some(part) = ahead.pop_front() {
            if part == ".." {
                done.pop();
                continue;
            }
            self.directories.borrow_mut().insert(self.view.inside.join(&done));
            let next = done.join(&part);
            let full = self.view.inside.join(&next);
            if !fs::symlink_metadata(&full).ok()?.is_symlink() {
                done = next;
                continue;
            }
            links += 1;
            let target = fs::read_link(&full).ok().filter(|_| links <= LINKS)?;
            if target.is_absolute() {
                done = PathBuf::new();
            }
            for part in parts(&target).into_iter().rev() {
                ahead.push_front(part);
            }
        }
        Some(done)
    }

    /// Names in a directory, sorted; none if it is not there. Names that are not UTF-8 are left out.
    pub fn names(&self, directory: &Path) -> Vec<String> {
        let full = self.view.inside.join(directory);
        let Ok(entries) = fs::read_dir(&full) else { return Vec::new() };
        self.directories.borrow_mut().insert(full);
        let mut names: Vec<String> =
            entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// The directories that were looked into.
    pub fn directories(self) -> BTreeSet<PathBuf> {
        self.directories.into_inner()
    }
}

fn parts(path: &Path) -> VecDeque<OsString> {
    let part = |component: Component<'_>| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    };
    path.components().filter_map(part).collect()
}

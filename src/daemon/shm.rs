//! The memory that the programs of a GPU's shares find as /dev/shm: a tmpfs of its own, bounded in bytes and
//! files, since tenants write there. Nothing of ours is in it, save [`RESERVED`].

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};
use nix::sys::stat::{major, minor};
use nix::sys::statvfs::statvfs;

use crate::model::quantity::Bytes;
use crate::model::share::{SharedMemory, SharedMemoryUser};

/// libcuda opens this file of /dev/shm in every process, the MPS server among them, and maps it whoever owns it
/// (seen with 550.163.01): by its name, it says which library to load. As a folder of root's it cannot be opened so.
pub const RESERVED: &str = "cuda_injection_path_shm";
/// Enough that one user alone makes it full as [`SharedMemory::is_full`] has it, so that it is told.
const QUOTA_PERCENT: u64 = 96;
/// What is moved up from a folder that goes.
const MOVED: &str = ".tranche-gone-";
/// Entries of a folder that are looked at at a time: tenants decide how many there are.
const LOOKED_AT: usize = 16_384;

/// How much the tenants of one GPU may put there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// None: half of the machine's memory, as tmpfs has it. Pages are charged to who writes them.
    pub size: Option<Bytes>,
    /// Files and folders. The kernel keeps some 800 bytes of each.
    pub files: u64,
}

impl Bounds {
    pub const DEFAULT: Self = Self { size: None, files: 8192 };
}

/// Who may still want what is there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Living {
    users: BTreeSet<u32>,
    /// Open or mapped.
    inodes: BTreeSet<u64>,
}

/// Mounts it. On kernels with quotas of tmpfs (6.6, `CONFIG_TMPFS_QUOTA`) no user gets more than [`QUOTA_PERCENT`],
/// so that one who fills it leaves some room for the others and for the MPS server.
pub fn mount_at(path: &Path, bounds: Bounds) -> io::Result<()> {
    let size = bounds.size.map_or_else(half_of_memory, Ok)?.0;
    // The folder itself, and the reserved one.
    let plain = format!("size={size},nr_inodes={},mode=1777", bounds.files + 2);
    let quotas = format!(
        "{plain},usrquota,usrquota_block_hardlimit={},usrquota_inode_hardlimit={}",
        size / 100 * QUOTA_PERCENT,
        bounds.files * QUOTA_PERCENT / 100
    );
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let with = |options: &str| mount(Some("tmpfs"), path, Some("tmpfs"), flags, Some(options));
    Ok(with(&quotas).or_else(|_| with(&plain))?)
}

fn half_of_memory() -> io::Result<Bytes> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = line.and_then(|rest| rest.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    let kib = kib.ok_or_else(|| io::Error::new(ErrorKind::InvalidData, "/proc/meminfo has no MemTotal"))?;
    Ok(Bytes(kib * 1024 / 2))
}

/// Sees to it that the reserved name is a folder of root's. The sticky bit keeps it from others' hands.
pub fn reserve(shm: &Path) -> io::Result<()> {
    let path = shm.join(RESERVED);
    match fs::symlink_metadata(&path) {
        Ok(meta) if meta.is_dir() && meta.uid() == nix::unistd::geteuid().as_raw() => return Ok(()),
        Ok(meta) if meta.is_dir() => take_away(&path, &shm.join(format!("{MOVED}{RESERVED}")))?,
        Ok(_) => fs::remove_file(&path)?,
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    DirBuilder::new().mode(0o700).create(&path)
}

fn take_away(path: &Path, to: &Path) -> io::Result<()> {
    fs::remove_dir(path).or_else(|_| fs::rename(path, to))
}

/// How full it is; whose it is, if it is nearly full.
pub fn usage(shm: &Path) -> io::Result<SharedMemory> {
    let system = statvfs(shm)?;
    // c_ulong, which is not u64 everywhere.
    #[allow(clippy::useless_conversion)]
    let (unit, blocks, free, files, files_free) = (
        u64::from(system.fragment_size()),
        u64::from(system.blocks()),
        u64::from(system.blocks_free()),
        u64::from(system.files()),
        u64::from(system.files_free()),
    );
    let mut usage = SharedMemory {
        used: Bytes(blocks.saturating_sub(free).saturating_mul(unit)),
        size: Bytes(blocks.saturating_mul(unit)),
        files: files.saturating_sub(files_free),
        files_max: files,
        most: None,
    };
    if usage.is_full() {
        usage.most = most(shm, &usage);
    }
    Ok(usage)
}

/// The user who has the largest part of it, of the bytes or of the files.
fn most(shm: &Path, of: &SharedMemory) -> Option<SharedMemoryUser> {
    let mut users = BTreeMap::<u32, SharedMemoryUser>::new();
    let (mut folders, mut seen) = (vec![shm.to_owned()], 0);
    while let Some(folder) = folders.pop() {
        for (path, meta) in entries(&folder) {
            seen += 1;
            if seen > LOOKED_AT {
                break;
            }
            if path == shm.join(RESERVED) {
                continue;
            }
            let uid = meta.uid();
            let user = users.entry(uid).or_insert(SharedMemoryUser { uid, used: Bytes(0), files: 0 });
            user.used.0 += meta.blocks() * 512;
            user.files += 1;
            if meta.is_dir() {
                folders.push(path);
            }
        }
    }
    let bytes = |user: &SharedMemoryUser| u128::from(user.used.0) * u128::from(of.files_max);
    let files = |user: &SharedMemoryUser| u128::from(user.files) * u128::from(of.size.0);
    users.into_values().max_by_key(|user| bytes(user).max(files(user)))
}

/// What is in a folder, links not followed: the first of it. What cannot be read is left out.
fn entries(folder: &Path) -> Vec<(PathBuf, Metadata)> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let paths = entries.flatten().map(|entry| entry.path()).take(LOOKED_AT);
    paths.filter_map(|path| fs::symlink_metadata(&path).ok().map(|meta| (path, meta))).collect()
}

/// Removes everything. True if nothing is left.
pub fn empty(shm: &Path) -> bool {
    clear(shm, &|_| true);
    entries(shm).iter().all(|(path, _)| path == &shm.join(RESERVED))
}

/// Removes what nobody can want any more: the files of users who have no process that has this as its /dev/shm,
/// unless one of those has the file open or mapped. The processes `own` are no tenants. How many were removed.
pub fn clear_departed(shm: &Path, own: &[u32]) -> io::Result<usize> {
    let living = living(shm, own)?;
    let departed =
        |meta: &Metadata| !living.users.contains(&meta.uid()) && !living.inodes.contains(&meta.ino());
    Ok(clear(shm, &departed))
}

/// Names are removed at the top only, and what is in a folder is moved up there first: a name below a folder could
/// lead elsewhere by then, but not to where a file of this file system can be moved from. It works at any depth.
fn clear(shm: &Path, goes: &dyn Fn(&Metadata) -> bool) -> usize {
    let (mut removed, mut moved, mut rounds) = (0, 0_u64, 0);
    loop {
        let mut progress = false;
        for (path, meta) in entries(shm) {
            if path.file_name() == Some(OsStr::new(RESERVED)) || !goes(&meta) {
                continue;
            }
            let gone = if meta.is_dir() { fs::remove_dir(&path) } else { fs::remove_file(&path) };
            if gone.is_ok() {
                (removed, progress) = (removed + 1, true);
                continue;
            }
            for (child, _) in entries(&path).into_iter().filter(|(_, meta)| goes(meta)) {
                moved += 1;
                let to = shm.join(format!("{MOVED}{moved}"));
                // Never over a file that is there.
                progress |= fs::symlink_metadata(&to).is_err() && fs::rename(&child, &to).is_ok();
            }
        }
        rounds += 1;
        if !progress || rounds > LOOKED_AT {
            return removed;
        }
    }
}

fn living(shm: &Path, own: &[u32]) -> io::Result<Living> {
    let device = fs::metadata(shm)?.dev();
    let mut living = Living::default();
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let proc = entry.path();
        // A process that ends meanwhile wants nothing.
        if !fs::metadata(proc.join("root/dev/shm")).is_ok_and(|meta| meta.dev() == device) {
            continue;
        }
        if !own.contains(&pid) {
            living.users.extend(users(&fs::read_to_string(proc.join("status")).unwrap_or_default()));
        }
        for fd in fs::read_dir(proc.join("fd")).into_iter().flatten().flatten() {
            let open = fs::metadata(fd.path()).ok().filter(|meta| meta.dev() == device);
            living.inodes.extend(open.map(|meta| meta.ino()));
        }
        let maps = fs::read_to_string(proc.join("maps")).unwrap_or_default();
        living.inodes.extend(mapped(&maps, device));
    }
    Ok(living)
}

/// The real, effective, saved and file system user of a process (proc(5), status).
fn users(status: &str) -> Vec<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
    line.split_whitespace().filter_map(|id| id.parse().ok()).collect()
}

/// Inodes of that device among a process's mappings (proc(5), maps).
fn mapped(maps: &str, device: u64) -> Vec<u64> {
    let device = format!("{:02x}:{:02x}", major(device), minor(device));
    let inode = |line: &str| {
        let mut fields = line.split_whitespace().skip(3);
        (fields.next() == Some(&device)).then(|| fields.next()?.parse().ok())?
    };
    maps.lines().filter_map(inode).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn names(shm: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(shm)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn all_goes_at_any_depth_and_links_lead_nowhere() {
        let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let shm = dir.path();
        fs::write(outside.path().join("theirs"), "kept").unwrap();
        std::os::unix::fs::symlink(outside.path(), shm.join("link")).unwrap();
        reserve(shm).unwrap();
        let mut deep = shm.join("deep");
        for level in 0..300 {
            fs::create_dir(&deep).unwrap();
            fs::write(deep.join("file"), "x").unwrap();
            std::os::unix::fs::symlink(outside.path(), deep.join("link")).unwrap();
            deep = deep.join(format!("{level}"));
        }
        assert!(empty(shm));
        assert_eq!(names(shm), [RESERVED]);
        assert_eq!(fs::read(outside.path().join("theirs")).unwrap(), b"kept");
    }

    #[test]
    fn the_reserved_name_is_a_folder_whatever_was_put_there() {
        let dir = tempfile::tempdir().unwrap();
        let (shm, path) = (dir.path(), dir.path().join(RESERVED));
        reserve(shm).unwrap();
        reserve(shm).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        fs::remove_dir(&path).unwrap();
        fs::write(&path, "/dev/shm/library.so").unwrap();
        reserve(shm).unwrap();
        assert!(path.is_dir());
        assert!(fs::OpenOptions::new().read(true).write(true).open(&path).is_err(), "as libcuda opens it");
    }

    #[test]
    fn what_goes_is_what_nobody_alive_can_want() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("folder")).unwrap();
        for name in ["folder/kept", "folder/gone", "gone"] {
            fs::write(dir.path().join(name), "x").unwrap();
        }
        let kept = fs::metadata(dir.path().join("folder/kept")).unwrap().ino();
        assert_eq!(clear(dir.path(), &|meta| meta.ino() != kept), 2);
        assert_eq!(names(dir.path()), ["folder"]);
        assert_eq!(names(&dir.path().join("folder")), ["kept"]);
    }

    #[test]
    fn a_process_tells_its_users_and_what_it_has_mapped() {
        let status = "Name:\tpython\nUid:\t0\t1000\t1000\t7\nGid:\t0\t0\t0\t0\n";
        assert_eq!(users(status), [0, 1000, 1000, 7]);
        assert_eq!(users("Name:\tx\n"), [0_u32; 0]);
        let maps = "7f00-7f01 rw-s 00000000 00:15 12                  /dev/shm/a b (deleted)\n\
                    7f01-7f02 rw-s 00000000 08:01 13                  /usr/lib/x\n7f02-7f03 rw-p 0 00:00 0\n";
        assert_eq!(mapped(maps, nix::sys::stat::makedev(0, 0x15)), [12]);
    }
}

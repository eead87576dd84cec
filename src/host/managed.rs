//! CUDA managed memory of a process, which NVML counts for nobody: what the process has mapped of the device file
//! nvidia-uvm. Seen on an H100 with driver 580: each managed allocation is a shared mapping of that file, of its size;
//! a process that makes none has one of 2 MiB. Linear memory, pools, and memory of the node have no such mapping.

use std::collections::HashMap;
use std::ffi::CString;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::libc;

use crate::model::quantity::{Bytes, MIB};

/// As many bytes are read of a process's list of mappings. A list may be longer: a line holds a path of up to 4 KiB.
const LIST_BYTES: u64 = 64 << 20;
/// What a process has mapped of the file before it allocates anything.
const UNUSED: u64 = 2 * MIB;
/// As many files of other names are looked at: Linux lets a process have 65,530 mappings unless it is told otherwise.
const OTHERS: usize = 65_536;
/// Files that are smaller are not looked at: managed memory comes in blocks of 2 MiB.
const SMALLEST: u64 = MIB;

/// How much managed memory a process has; what may be more is greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ManagedMemory {
    /// At most so much of it is in the GPUs' memory; the rest is in the node's.
    Mapped(Bytes),
    /// The process has more mappings than are read.
    Untold,
}

/// Reads `maps` (proc_pid_maps(5)) in a process's folder. A mapping of another name counts too if it is one of the device
/// with that number: a container may give its device files other names.
///
/// Blocks for as long as the process waits within a page fault while another of its threads maps memory: a file system of
/// the process's own can make that for ever.
///
/// # Errors
/// The list cannot be read. A process that has ended has nothing mapped.
pub(super) fn managed_memory(folder: &Path, uvm: Option<u32>) -> io::Result<ManagedMemory> {
    let file = match File::open(folder.join("maps")) {
        Ok(file) => file,
        Err(error) if super::process::is_gone(&error) => return Ok(ManagedMemory::Mapped(Bytes(0))),
        Err(error) => return Err(error),
    };
    let mut list = BufReader::with_capacity(64 << 10, file.take(LIST_BYTES));
    let (mut sum, mut read, mut line) = (0_u64, 0_u64, Vec::new());
    let mut others: HashMap<Vec<u8>, bool> = HashMap::new();
    loop {
        line.clear();
        let length = match list.read_until(b'\n', &mut line) {
            Ok(length) => length,
            // It ended meanwhile.
            Err(error) if super::process::is_gone(&error) => break,
            Err(error) => return Err(error),
        };
        read += length as u64;
        if length == 0 {
            break;
        }
        let Some(mapping) = Mapping::of(&line) else { continue };
        let counts = match uvm {
            _ if mapping.is_named_uvm => true,
            Some(number) if mapping.size >= SMALLEST => match others.get(mapping.file) {
                Some(is_uvm) => *is_uvm,
                None if others.len() >= OTHERS => return Ok(ManagedMemory::Untold),
                None => {
                    let is_uvm = is_device(&folder.join("map_files").join(mapping.range), number);
                    others.insert(mapping.file.to_vec(), is_uvm);
                    is_uvm
                }
            },
            _ => false,
        };
        if counts {
            sum = sum.saturating_add(mapping.size);
        }
    }
    Ok(match read < LIST_BYTES {
        true => ManagedMemory::Mapped(Bytes(sum.saturating_sub(UNUSED))),
        false => ManagedMemory::Untold,
    })
}

/// A mapping that other processes may share: `204a00000-204c00000 rw-s 204a00000 00:06 144 /dev/nvidia-uvm`.
struct Mapping<'a> {
    range: &'a str,
    /// Number of the file system, and of the file there.
    file: &'a [u8],
    size: u64,
    is_named_uvm: bool,
}

impl<'a> Mapping<'a> {
    fn of(line: &'a [u8]) -> Option<Self> {
        let mut words = line.splitn(4, |byte| *byte == b' ');
        let range = std::str::from_utf8(words.next()?).ok()?;
        let shared = words.next()?.get(3) == Some(&b's');
        let rest = words.nth(1)?;
        let mut spaces = rest.iter().enumerate().filter(|(_, byte)| **byte == b' ').map(|(at, _)| at);
        let system = spaces.next()?;
        let file = &rest[..spaces.next().unwrap_or(rest.len())];
        let path = rest[file.len()..].trim_ascii();
        let inode = file[system + 1..].trim_ascii();
        let (start, end) = range.split_once('-')?;
        let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        let is_named_uvm = path == b"/dev/nvidia-uvm";
        (shared && inode != b"0").then_some(Self {
            range,
            file,
            size: end.saturating_sub(start),
            is_named_uvm,
        })
    }
}

/// A character device of that number. The file may lie on a file system of somebody else's that does not answer, so what the
/// kernel knows has to do (`AT_STATX_DONT_SYNC`, statx(2)).
#[allow(unsafe_code)]
fn is_device(link: &Path, number: u32) -> bool {
    let Ok(path) = CString::new(link.as_os_str().as_bytes()) else { return false };
    let flags = libc::AT_STATX_DONT_SYNC | libc::AT_NO_AUTOMOUNT;
    let mut found = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the path ends with a zero byte, and the kernel writes one statx into memory that has room for one.
    let answer =
        unsafe { libc::statx(libc::AT_FDCWD, path.as_ptr(), flags, libc::STATX_TYPE, found.as_mut_ptr()) };
    if answer != 0 {
        return false;
    }
    // SAFETY: all of it was zeroed, which is a value of each of its numbers.
    let found = unsafe { found.assume_init() };
    u32::from(found.stx_mode) & libc::S_IFMT == libc::S_IFCHR && found.stx_rdev_major == number
}

/// The number of the device nvidia-uvm in a `devices` file (proc_devices(5)); none if its module is not loaded.
pub(super) fn uvm_number(devices: &str) -> Option<u32> {
    let words = |line: &str| {
        let (number, name) = line.trim().split_once(' ')?;
        (name.trim() == "nvidia-uvm").then(|| number.parse().ok())?
    };
    devices.lines().find_map(words)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn folder(maps: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("map_files")).unwrap();
        fs::write(folder.path().join("maps"), maps).unwrap();
        folder
    }

    fn mapped(maps: &str) -> ManagedMemory {
        managed_memory(folder(maps).path(), None).unwrap()
    }

    const MIBS: fn(u64) -> ManagedMemory = |mib| ManagedMemory::Mapped(Bytes::from_mib(mib));

    /// As a process has them on an H100: two managed allocations of 256 MiB.
    const LIST: &str = "\
200600000-200800000 rw-s 00000000 00:06 143                              /dev/nvidia0
200800000-204000000 rw-s 00000000 00:06 142                              /dev/nvidiactl
204a00000-204c00000 rw-s 204a00000 00:06 144                             /dev/nvidia-uvm
7f0000000000-7f0010000000 rw-s 7f0000000000 00:06 144                    /dev/nvidia-uvm
7f0010000000-7f0020000000 rw-s 7f0010000000 00:06 144                    /dev/nvidia-uvm
7f0020000000-7f0030000000 rw-p 00000000 00:00 0
7f0040000000-7f0050000000 rw-s 00000000 00:01 1025                       /dev/zero (deleted)
7ffd0000a000-7ffd0002b000 rw-p 00000000 00:00 0                          [stack]
";

    #[test]
    fn managed_allocations_are_counted_and_nothing_else() {
        assert_eq!(mapped(LIST), MIBS(512));
        assert_eq!(mapped(LIST.lines().take(3).collect::<Vec<_>>().join("\n").as_str()), MIBS(0));
        for odd in
            ["", "\n", "x", "7f-80 rw-s", "80-7f rw-s 0 00:06 144 /dev/nvidia-uvm", "zz-80 rw-s 0 0 1 /x"]
        {
            assert_eq!(mapped(odd), MIBS(0), "{odd:?}");
        }
        let not_utf8 = [LIST.as_bytes(), b"7f10-7f20 rw-s 0 00:01 5 /tmp/\xff\xfe\n"].concat();
        let folder = folder("");
        fs::write(folder.path().join("maps"), not_utf8).unwrap();
        assert_eq!(managed_memory(folder.path(), None).unwrap(), MIBS(512));
    }

    #[test]
    fn another_name_hides_nothing() {
        let list = "7f0000000000-7f0010000000 rw-s 7f0000000000 00:2f 144 /dev/x\n\
                    7f0010000000-7f0010001000 rw-s 7f0010000000 00:2f 144 /dev/x\n";
        let folder = folder(list);
        for range in ["7f0000000000-7f0010000000", "7f0010000000-7f0010001000"] {
            let link = folder.path().join("map_files").join(range);
            std::os::unix::fs::symlink("/dev/null", link).unwrap();
        }
        assert_eq!(managed_memory(folder.path(), Some(1)).unwrap(), MIBS(254));
        assert_eq!(managed_memory(folder.path(), Some(2)).unwrap(), MIBS(0), "another device");
        // However many ordinary files it has mapped.
        let files = |count: usize, file: fn(usize) -> usize| -> String {
            let line = |n: usize| {
                let start = (n as u64 + 1) << 30;
                format!("{start:x}-{:x} rw-s 0 00:2f {} /a\n", start + MIB, 1000 + file(n))
            };
            list.to_owned() + &(0..count).map(line).collect::<String>()
        };
        let read = |text: String| {
            fs::write(folder.path().join("maps"), text).unwrap();
            managed_memory(folder.path(), Some(1)).unwrap()
        };
        assert_eq!(read(files(OTHERS + 1, |_| 0)), MIBS(254), "one file many times");
        assert_eq!(read(files(OTHERS - 1, |n| n)), MIBS(254));
        assert_eq!(read(files(OTHERS, |n| n)), ManagedMemory::Untold);
    }

    #[test]
    fn a_process_that_has_ended_has_none() {
        let empty = tempfile::tempdir().unwrap();
        assert_eq!(managed_memory(empty.path(), None).unwrap(), MIBS(0));
    }

    #[test]
    fn the_devices_number_is_the_kernels() {
        let list = "Character devices:\n  1 mem\n195 nvidia\n510 nvidia-uvm\n511 nvidia-caps\n\nBlock devices:\n  8 sd\n";
        assert_eq!(uvm_number(list), Some(510));
        assert_eq!(uvm_number("195 nvidia\n"), None);
    }
}

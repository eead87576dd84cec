//! What descriptors of other processes mean: an open device, the place of one alone (`O_PATH`), or something else.
//!
//! A process can have a number mean other files by turns. So a reference of the file is taken (`pidfd_getfd(2)`, Linux
//! 5.6), and whatever is asked is asked of that one. `fdinfo` is not read: of some files the kernel writes as many lines
//! there as their owner likes, in its own memory on the reader's account, before the first byte can be read.
//!
//! The owner may close the file meanwhile: then the last reference is ours, and closing that one does what the file's driver
//! or server does at its end, which can take long or never end. So this is for threads that their caller can leave.

use std::ffi::{CStr, CString};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::errno::Errno;
use nix::libc;

/// Major and minor number of a character device.
pub type DeviceNumber = (u32, u32);

/// `enum kcmp_type`
const KCMP_FILES: libc::c_long = 2;

/// Whose table of open files it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DescriptorTable {
    /// That of a process's first thread.
    Process(u32),
    /// That of another thread: Linux 6.9.
    Thread(u32),
}

/// What a descriptor meant when it was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Meaning {
    Device(DeviceNumber),
    /// The place of a file, which is not open.
    Place,
    /// Another file.
    Other,
}

/// Why nothing is said of a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoMeaning {
    /// The process or the descriptor is not there any more.
    Gone,
    /// The kernel does not tell: it is too old, or a rule of the system forbids it.
    Untold,
}

impl From<Errno> for NoMeaning {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::ESRCH | Errno::EBADF => Self::Gone,
            _ => Self::Untold,
        }
    }
}

/// What the descriptor of this number means. Closes the reference that it takes: see the module's text.
pub(super) fn meaning(table: DescriptorTable, number: RawFd) -> Result<Meaning, NoMeaning> {
    let (id, flags) = match table {
        DescriptorTable::Process(pid) => (pid, 0),
        DescriptorTable::Thread(thread) => (thread, libc::PIDFD_THREAD),
    };
    // A kernel that does not know the flag says EINVAL.
    let owner = call(libc::SYS_pidfd_open, [id.into(), flags.into(), 0])?;
    let file = call(libc::SYS_pidfd_getfd, [owner.as_raw_fd().into(), number.into(), 0])?;
    if flags_of(&file)? & libc::O_PATH != 0 {
        return Ok(Meaning::Place);
    }
    let device = asked(file.as_raw_fd(), c"", libc::AT_EMPTY_PATH).map_err(|_| NoMeaning::Untold)?;
    Ok(device.map_or(Meaning::Other, Meaning::Device))
}

/// The character device that a path leads to; none if something else is there. Nothing is opened, and a server of the file
/// is not asked for what the kernel knows.
pub(super) fn device_at(path: &Path) -> io::Result<Option<DeviceNumber>> {
    asked(libc::AT_FDCWD, &CString::new(path.as_os_str().as_bytes())?, 0)
}

/// A call that makes a descriptor out of numbers.
#[allow(unsafe_code)]
fn call(name: libc::c_long, with: [libc::c_long; 3]) -> Result<OwnedFd, Errno> {
    // SAFETY: `pidfd_open` and `pidfd_getfd` take numbers and no pointers.
    let made = Errno::result(unsafe { libc::syscall(name, with[0], with[1], with[2]) })?;
    let made = i32::try_from(made).map_err(|_| Errno::EINVAL)?;
    // SAFETY: the kernel made this descriptor just now, for nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(made) })
}

/// `F_GETFL` of fcntl(2)
#[allow(unsafe_code)]
fn flags_of(file: &OwnedFd) -> Result<libc::c_int, Errno> {
    // SAFETY: the descriptor is open, and the command takes no argument.
    Errno::result(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) })
}

#[allow(unsafe_code)]
fn asked(folder: RawFd, path: &CStr, more: libc::c_int) -> io::Result<Option<DeviceNumber>> {
    let mut found = MaybeUninit::<libc::statx>::zeroed();
    let flags = libc::AT_STATX_DONT_SYNC | libc::AT_NO_AUTOMOUNT | more;
    // SAFETY: the path ends with a null byte, and the place is as large as the call expects.
    let told = unsafe { libc::statx(folder, path.as_ptr(), flags, libc::STATX_TYPE, found.as_mut_ptr()) };
    Errno::result(told)?;
    // SAFETY: all zeros is a value of the type, and the call has succeeded.
    let found = unsafe { found.assume_init() };
    let is_device = u32::from(found.stx_mode) & libc::S_IFMT == libc::S_IFCHR;
    Ok(is_device.then_some((found.stx_rdev_major, found.stx_rdev_minor)))
}

/// `kcmp(2)`: two threads have one table of open files. False where the kernel cannot tell.
#[allow(unsafe_code)]
pub(super) fn have_one_table(one: u32, other: u32) -> bool {
    // SAFETY: the call takes numbers and no pointers.
    let order =
        unsafe { libc::syscall(libc::SYS_kcmp, one.cast_signed(), other.cast_signed(), KCMP_FILES, 0, 0) };
    order == 0
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};
    use std::os::unix::fs::OpenOptionsExt;

    use super::*;

    #[test]
    fn a_descriptor_means_a_device_a_place_another_file_or_nothing() {
        let own = DescriptorTable::Process(std::process::id());
        let of = |file: &File| meaning(own, file.as_raw_fd());
        assert_eq!(of(&File::open("/dev/full").unwrap()), Ok(Meaning::Device((1, 7))));
        let place = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open("/dev/full").unwrap();
        assert_eq!(of(&place), Ok(Meaning::Place));
        assert_eq!(of(&File::open("/proc/self/status").unwrap()), Ok(Meaning::Other));
        assert_eq!(meaning(own, 1_000_000), Err(NoMeaning::Gone));
        assert_eq!(meaning(DescriptorTable::Process(u32::MAX >> 1), 0), Err(NoMeaning::Gone));
    }

    /// No kernel: what is refused says nothing about the file.
    #[test]
    fn a_refusal_is_no_answer() {
        for refusal in [Errno::ENOSYS, Errno::EPERM, Errno::EINVAL, Errno::EMFILE] {
            assert_eq!(NoMeaning::from(refusal), NoMeaning::Untold);
        }
    }
}

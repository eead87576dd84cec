//! The numbered entries of a folder of /proc: processes, or the threads of one. Each is asked of the kernel only once the
//! one before was dealt with. Read many at a time, as `std::fs::read_dir` does, an entry is milliseconds old when it is
//! looked at, and a program each of whose processes starts the next one and ends is never seen. Read one at a time, the
//! listing comes to the process that such a program has by then, because the next one is there before the last one ends,
//! and has a higher number.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::path::Path;

use rustix::fs::RawDir;
use rustix::io::Errno;

/// Room for one entry with a name of up to 12 bytes (32: `struct linux_dirent64` of getdents64(2)), wherever the room begins:
/// entries stand at multiples of 8. No number is longer, and two entries take 48 at least.
const ONE: usize = 32 + 7;
/// Room for an entry with the longest name, 255 bytes.
const LONGEST: usize = 280 + 7;

/// See the module's text.
pub struct Numbered {
    folder: File,
    /// Read, and not yet returned.
    read: VecDeque<u32>,
    is_over: bool,
}

/// The numbers that name entries of a folder, in the order in which the kernel lists them.
///
/// # Errors
/// The folder cannot be opened; or, of an item, it cannot be read any more, and the listing is over.
pub fn numbered(folder: &Path) -> io::Result<Numbered> {
    Ok(Numbered { folder: File::open(folder)?, read: VecDeque::new(), is_over: false })
}

impl Numbered {
    /// Reads on. False: there is no more.
    fn more(&mut self) -> Result<bool, Errno> {
        let mut room = [MaybeUninit::uninit(); LONGEST];
        match self.read_into(&mut room[..ONE]) {
            // A name is longer. Those of a few files of /proc are.
            Err(Errno::INVAL) => self.read_into(&mut room),
            read => read,
        }
    }

    fn read_into(&mut self, room: &mut [MaybeUninit<u8>]) -> Result<bool, Errno> {
        let mut entries = RawDir::new(&self.folder, room);
        let mut any = false;
        // The next one would be asked of the kernel by now.
        while !(any && entries.is_buffer_empty()) {
            let Some(entry) = entries.next() else { break };
            any = true;
            let name = entry?;
            self.read.extend(name.file_name().to_str().ok().and_then(|name| name.parse::<u32>().ok()));
        }
        Ok(any)
    }
}

impl Iterator for Numbered {
    type Item = io::Result<u32>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(number) = self.read.pop_front() {
                return Some(Ok(number));
            }
            if self.is_over {
                return None;
            }
            match self.more() {
                Ok(true) => {}
                Ok(false) => self.is_over = true,
                Err(errno) => {
                    self.is_over = true;
                    return Some(Err(errno.into()));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;

    use super::*;

    fn all(folder: &Path) -> BTreeSet<u32> {
        numbered(folder).unwrap().map(Result::unwrap).collect()
    }

    #[test]
    fn numbers_are_listed_beside_names_of_any_length() {
        let folder = tempfile::tempdir().unwrap();
        let numbers = (0..2000).chain([u32::MAX]).collect::<BTreeSet<u32>>();
        for number in &numbers {
            fs::create_dir(folder.path().join(number.to_string())).unwrap();
        }
        for name in ["self", "4294967296", "-1", "12x", "a-name-of-thirteen-or-more", &"1".repeat(255)] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        assert_eq!(all(folder.path()), numbers);
        assert!(all(Path::new("/proc")).contains(&std::process::id()));
        assert_eq!(numbered(Path::new("/proc/0")).err().unwrap().kind(), io::ErrorKind::NotFound);
    }

    /// What is made behind the place of the listing is listed still: the processes of /proc stand in order.
    #[test]
    fn an_entry_is_read_when_it_is_asked_for() {
        let mut listing = numbered(Path::new("/proc")).unwrap();
        let own = std::process::id();
        assert!(listing.any(|number| number.unwrap() == own));
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let is_listed = child.id() < own || listing.any(|number| number.unwrap() == child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(is_listed, "{} was made while {own} was looked at", child.id());
    }
}

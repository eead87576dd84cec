//! The numbered entries of a folder of /proc: processes. Each is asked of the kernel only once the one before was dealt
//! with. Read many at a time, as `std::fs::read_dir` does, an entry is milliseconds old when it is looked at, and a program
//! each of whose processes starts the next one and ends is never seen. Read one at a time, the listing comes to the process
//! that such a program has by then, because the next one is there before the last one ends, and has a higher number.
//!
//! Whoever starts processes faster than the listing goes on would keep it from its end. So what is new since the listing
//! began is looked at for a limited time; then only what was there is. And where the numbers begin anew meanwhile (the kernel
//! gives them in turn, up to its `pid_max`), the next process of such a program may stand where the listing has been. Either
//! is told ([`Numbered::is_cut`]).

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{RawDir, SeekFrom};
use rustix::io::Errno;

/// Room for one entry with a name of up to 12 bytes (32: `struct linux_dirent64` of getdents64(2)), wherever the room begins:
/// entries stand at multiples of 8. No number is longer, and two entries take 48 at least.
const ONE: usize = 32 + 7;
/// Room for an entry with the longest name, 255 bytes.
const LONGEST: usize = 280 + 7;

/// See the module's text.
pub struct Numbered {
    folder: File,
    /// What was there when the listing began, in order.
    before: Vec<u32>,
    /// Read, and not yet returned: each with its place in the folder.
    read: VecDeque<(u32, u64)>,
    /// Where the folder is read on.
    place: u64,
    /// The last one that was returned, and its place.
    last: Option<(u32, u64)>,
    /// It is read again.
    again: Option<u32>,
    /// For what is new.
    left: Duration,
    /// When something new was returned that is being looked at.
    at_new: Option<Instant>,
    /// The folder's `loadavg`, and the newest number by it when the listing began.
    newest: (PathBuf, Option<u32>),
    is_cut: bool,
    is_over: bool,
}

/// The number that the kernel gave last: the fifth field of `loadavg` (proc_loadavg(5)).
fn newest(loadavg: &Path) -> Option<u32> {
    std::fs::read_to_string(loadavg).ok()?.split_whitespace().nth(4)?.parse().ok()
}

/// The numbers that name entries of a folder, in the order in which the kernel lists them: those that are there now, and
/// those that come while these are looked at, for `new_for` in all.
///
/// # Errors
/// The folder cannot be read; or, of an item, it cannot be read any more, and the listing is over.
pub fn numbered(folder: &Path, new_for: Duration) -> io::Result<Numbered> {
    let loadavg = folder.join("loadavg");
    let newest = (loadavg.clone(), newest(&loadavg));
    let mut before = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        before.extend(entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()));
    }
    before.sort_unstable();
    Ok(Numbered {
        folder: File::open(folder)?,
        before,
        read: VecDeque::new(),
        place: 0,
        last: None,
        again: None,
        left: new_for,
        at_new: None,
        newest,
        is_cut: false,
        is_over: false,
    })
}

impl Numbered {
    /// There was more that is new than there was time for, or numbers began anew.
    pub fn is_cut(&self) -> bool {
        let (loadavg, before) = &self.newest;
        self.is_cut || before.is_some_and(|before| newest(loadavg).is_some_and(|now| now < before))
    }

    /// It was there, or there is time left for what is new.
    fn is_wanted(&mut self, number: u32) -> bool {
        if self.before.binary_search(&number).is_ok() {
            return true;
        }
        if self.left.is_zero() {
            self.is_cut = true;
            self.is_over |= self.before.last().is_none_or(|last| *last < number);
            return false;
        }
        self.at_new = Some(Instant::now());
        true
    }

    /// Back to the last one that was returned: with it the kernel had looked for the next, which may be another by now.
    fn back(&mut self) -> Result<(), Errno> {
        let Some((number, at)) = self.last.take() else { return Ok(()) };
        rustix::fs::seek(&self.folder, SeekFrom::Start(at))?;
        (self.place, self.again) = (at, Some(number));
        Ok(())
    }

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
            let entry = entry?;
            let at = std::mem::replace(&mut self.place, entry.next_entry_cookie());
            let number = entry.file_name().to_str().ok().and_then(|name| name.parse::<u32>().ok());
            self.read.extend(number.map(|number| (number, at)));
        }
        Ok(any)
    }
}

impl Iterator for Numbered {
    type Item = io::Result<u32>;

    fn next(&mut self) -> Option<Self::Item> {
        let on_new = self.at_new.take().map(|since| since.elapsed()).unwrap_or_default();
        self.left = self.left.saturating_sub(on_new);
        loop {
            if self.is_over {
                return None;
            }
            if let Some((number, at)) = self.read.pop_front() {
                if self.again == Some(number) || !self.is_wanted(number) {
                    continue;
                }
                (self.last, self.again) = (Some((number, at)), None);
                return Some(Ok(number));
            }
            match self.back().and_then(|()| self.more()) {
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

    const LONG: Duration = Duration::from_secs(60);

    fn all(folder: &Path) -> BTreeSet<u32> {
        numbered(folder, LONG).unwrap().map(Result::unwrap).collect()
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
        assert_eq!(numbered(Path::new("/proc/0"), LONG).err().unwrap().kind(), io::ErrorKind::NotFound);
    }

    /// What is made behind the place of the listing is listed still: the processes of /proc stand in order.
    #[test]
    fn an_entry_is_read_when_it_is_asked_for() {
        let mut listing = numbered(Path::new("/proc"), LONG).unwrap();
        let own = std::process::id();
        assert!(listing.any(|number| number.unwrap() == own));
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let is_listed = child.id() < own || listing.any(|number| number.unwrap() == child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(is_listed, "{} was made while {own} was looked at", child.id());
    }

    /// Somebody starts processes as fast as they are looked at.
    #[test]
    fn what_comes_all_the_time_keeps_no_listing_from_its_end() {
        let mut listing = numbered(Path::new("/proc"), Duration::ZERO).unwrap();
        let mut children = Vec::new();
        let mut listed = BTreeSet::new();
        for number in listing.by_ref() {
            listed.insert(number.unwrap());
            if children.len() < 200 {
                children.push(std::process::Command::new("sleep").arg("600").spawn().unwrap());
            }
        }
        let started: BTreeSet<u32> = children.iter().map(std::process::Child::id).collect();
        for child in &mut children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert!(listed.contains(&std::process::id()));
        assert_eq!(listed.intersection(&started).count(), 0);
        // Unless all of their numbers are below where the listing was.
        assert!(listing.is_cut() || started.last() < listed.last(), "{started:?} {listed:?}");
    }

    /// Processes that are started then stand where the listing has been.
    #[test]
    fn where_numbers_begin_anew_the_listing_may_lack_some() {
        let folder = tempfile::tempdir().unwrap();
        (1..4).for_each(|number| fs::create_dir(folder.path().join(number.to_string())).unwrap());
        let put = |newest: u32| {
            fs::write(folder.path().join("loadavg"), format!("0.20 0.18 0.12 1/80 {newest}\n")).unwrap();
        };
        for (before, after, is_cut) in [(300, 300, false), (300, 32767, false), (32767, 310, true)] {
            put(before);
            let mut listing = numbered(folder.path(), LONG).unwrap();
            put(after);
            assert_eq!(listing.by_ref().count(), 3);
            assert_eq!(listing.is_cut(), is_cut, "{before} {after}");
        }
    }
}

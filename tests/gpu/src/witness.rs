//! Whether processes that should be clients of MPS are: in DEFAULT mode a process that MPS does not take gets
//! the GPU all the same, bound by no limit, and its numbers would tell nothing of limits.

use std::cell::RefCell;
use std::rc::Rc;

use crate::mps::Daemon;

/// Asks one daemon. Copies write into one book.
#[derive(Debug, Clone)]
pub struct Witness {
    daemon: Daemon,
    book: Rc<RefCell<Book>>,
}

/// How many processes the daemon listed as its clients, did not list, and was not heard about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Book {
    pub listed: usize,
    pub unlisted: usize,
    pub unknown: usize,
}

impl Witness {
    pub fn new(daemon: Daemon) -> Self {
        Self { daemon, book: Rc::default() }
    }

    pub fn look(&self, pid: u32) {
        let mut book = self.book.borrow_mut();
        match self.daemon.has_client(pid) {
            Ok(true) => book.listed += 1,
            Ok(false) => book.unlisted += 1,
            Err(_) => book.unknown += 1,
        }
    }

    /// What was written since the last time.
    pub fn take(&self) -> Book {
        self.book.take()
    }
}

impl Book {
    /// None if there was nobody to look at.
    pub fn words(self) -> Option<String> {
        let all = self.listed + self.unlisted + self.unknown;
        let mut words = format!("MPS lists {} of the {all} clients that were asked about", self.listed);
        if self.unlisted > 0 {
            words += &format!("; {} may have gone round it, where no limit holds", self.unlisted);
        }
        if self.unknown > 0 {
            words += &format!("; of {} the daemon did not tell", self.unknown);
        }
        (all > 0).then_some(words)
    }

    pub fn is_sure(self) -> bool {
        self.unlisted + self.unknown == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_that_cannot_be_asked_leaves_doubt() {
        let folder = tempfile::tempdir().unwrap();
        let program = crate::mps::Program { path: "/nowhere".into(), libraries: vec![] };
        let witness = Witness::new(Daemon::at(program, folder.path().to_owned()));
        assert_eq!(witness.take().words(), None);
        witness.clone().look(1);
        let book = witness.take();
        assert!(!book.is_sure());
        assert_eq!(
            book.words().unwrap(),
            "MPS lists 0 of the 1 clients that were asked about; of 1 the daemon did not tell"
        );
        assert_eq!(witness.take(), Book::default());
    }

    #[test]
    fn those_who_went_round_are_told() {
        let book = Book { listed: 2, unlisted: 1, unknown: 0 };
        assert!(
            book.words().unwrap().contains("2 of the 3 clients that were asked about; 1 may have gone round")
        );
        assert!(!book.is_sure() && Book { listed: 3, ..Book::default() }.is_sure());
    }
}

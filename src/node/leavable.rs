//! Threads that whoever waits for them can leave. Reading /proc can take for ever: the last who reads of a process that is
//! ending waits for what the process has asked of a file server, say. A thread that was left ends by itself, some time, and
//! finds that nobody waits. Only so many run at the same time: beyond that nothing is begun until one of them has ended.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

/// Of one kind. Each that stands still costs its stack.
pub(super) const THREADS_MAX: usize = 64;
/// Reading /proc and asking over a socket are shallow.
const STACK: usize = 256 * 1024;

/// The threads of one kind. Clones count into the same number.
#[derive(Debug, Clone)]
pub(super) struct LeavableThreads {
    name: &'static str,
    most: usize,
    running: Arc<AtomicUsize>,
}

/// The place of one thread among those that may run.
struct Place(Arc<AtomicUsize>);

impl LeavableThreads {
    pub fn new(name: &'static str, most: usize) -> Self {
        Self { name, most, running: Arc::default() }
    }

    /// How many have not ended.
    #[cfg(test)]
    pub fn running(&self) -> usize {
        self.running.load(Ordering::SeqCst)
    }

    /// Begins the work on a thread of its own.
    ///
    /// # Errors
    /// As many threads run as may, or the node has no memory or threads left.
    pub fn start(&self, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let place = Place(self.running.clone());
        let before = self.running.fetch_add(1, Ordering::SeqCst);
        if before >= self.most {
            let words =
                format!("{before} threads {} have not ended, at most {} may run", self.name, self.most);
            return Err(io::Error::other(words));
        }
        let work = move || {
            work();
            drop(place);
        };
        thread::Builder::new().name(self.name.to_owned()).stack_size(STACK).spawn(work).map(drop)
    }

    /// The work's result. Blocks its thread for that long at most, whatever holds the work up.
    ///
    /// # Errors
    /// In words, if there is none by then.
    pub fn run<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, String> {
        let (reply, result) = mpsc::channel();
        // Whoever no longer waits does not need the result.
        let begun = self.start(move || drop(reply.send(work())));
        begun.map_err(|error| error.to_string())?;
        result.recv_timeout(limit).map_err(|problem| match problem {
            RecvTimeoutError::Timeout => {
                format!("something held thread {} up for {} s, and it was left", self.name, limit.as_secs())
            }
            RecvTimeoutError::Disconnected => format!("thread {} broke off", self.name),
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn who_is_held_up_is_left_and_few_are_at_the_same_time() {
        let threads = LeavableThreads::new("test", 2);
        let limit = Duration::from_secs(60);
        assert_eq!(threads.run(limit, || 7), Ok(7));
        let (let_go, held_up) = mpsc::channel::<()>();
        let words = threads.run(Duration::ZERO, move || _ = held_up.recv()).unwrap_err();
        assert!(words.contains("held thread test up"), "{words}");
        let until_running = |count: usize| {
            let ended = Instant::now() + limit;
            while threads.running.load(Ordering::SeqCst) != count {
                assert!(Instant::now() < ended, "{threads:?}");
                thread::yield_now();
            }
        };
        until_running(1);
        assert_eq!(threads.run(limit, || 8), Ok(8), "one stands still, another one runs");
        until_running(1);
        let (second, also) = mpsc::channel::<()>();
        threads.run(Duration::ZERO, move || _ = also.recv()).unwrap_err();
        let words = threads.run(limit, || 9).unwrap_err();
        assert!(words.contains("2 threads test have not ended"), "{words}");
        drop((let_go, second));
        until_running(0);
        assert!(
            threads.run(limit, || panic!("as a test")).is_err_and(|words: String| words.contains("broke"))
        );
        until_running(0);
        assert_eq!(threads.run(limit, || 10), Ok(10));
    }
}

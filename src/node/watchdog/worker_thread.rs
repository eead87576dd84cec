//! Threads of the watchdog's own. The threads that the process has for blocking work are few, and claims that are
//! being prepared may use all of them for as long as a daemon takes to start. The watchdog must not wait for that.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tracing::Span;

use super::super::leavable::LeavableThreads;

/// The most pieces of work in the queue. Beyond that, callers of [`WorkerThread`] wait, and those of [`LeavableThread`] are
/// turned away.
const QUEUE: usize = 64;

type Work = Box<dyn FnOnce() + Send>;

/// Runs one piece of work after the other. The thread ends when the last clone is dropped.
#[derive(Clone)]
pub(super) struct WorkerThread(mpsc::Sender<Work>);

impl WorkerThread {
    /// # Errors
    /// The node has no memory or threads left.
    pub fn new(name: &'static str) -> io::Result<Self> {
        Self::among(&LeavableThreads::new(name, 1))
    }

    /// One of these threads.
    ///
    /// # Errors
    /// The same, or as many of them run as may.
    fn among(threads: &LeavableThreads) -> io::Result<Self> {
        let (sender, mut queue) = mpsc::channel::<Work>(QUEUE);
        threads.start(move || {
            while let Some(work) = queue.blocking_recv() {
                work();
            }
        })?;
        Ok(Self(sender))
    }

    /// Returns the work's result; none if the thread panicked. The work is done within the span of the caller.
    pub async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let (work, result) = replying(work);
        self.0.send(work).await.ok()?;
        result.await.ok()
    }
}

/// The work, and where its result comes. What nobody waits for any more when its turn comes is not done: whoever gave up
/// has been told that it failed, and what was right then may be wrong by now.
fn replying<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> (Work, oneshot::Receiver<T>) {
    let (reply, result) = oneshot::channel();
    let span = Span::current();
    let work = move || {
        if !reply.is_closed() {
            // A caller that no longer waits does not need the result.
            drop(reply.send(span.in_scope(work)));
        }
    };
    (Box::new(work), result)
}

/// Runs one piece of work after the other, and is left when one takes too long: another thread does what comes next. The
/// thread starts with the first piece of work. Clones share it.
#[derive(Clone)]
pub(super) struct LeavableThread {
    threads: LeavableThreads,
    limit: Duration,
    now: Arc<Mutex<Option<WorkerThread>>>,
}

impl LeavableThread {
    /// One at a time of these threads. `limit`: for a piece of work, with what it waits for.
    pub fn new(threads: LeavableThreads, limit: Duration) -> Self {
        Self { threads, limit, now: Arc::default() }
    }

    /// Returns the work's result.
    ///
    /// # Errors
    /// In words, if there is none in time, or too much waits already. Work that had begun goes on; what waits behind it is
    /// dropped.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, String> {
        let thread = self.thread().map_err(|error| error.to_string())?;
        let (work, result) = replying(work);
        if let Err(mpsc::error::TrySendError::Full(_)) = thread.0.try_send(work) {
            return Err(format!("{QUEUE} others wait for the same thread of the watchdog"));
        }
        match timeout(self.limit, result).await {
            Ok(Ok(found)) => Ok(found),
            Ok(Err(_)) => {
                self.leave(&thread);
                Err("a thread of the watchdog broke off".to_owned())
            }
            Err(_) => {
                self.leave(&thread);
                Err(format!(
                    "something held a thread of the watchdog up for {:?}, and it was left",
                    self.limit
                ))
            }
        }
    }

    fn thread(&self) -> io::Result<WorkerThread> {
        let mut now = self.now();
        if let Some(thread) = &*now {
            return Ok(thread.clone());
        }
        let thread = WorkerThread::among(&self.threads)?;
        *now = Some(thread.clone());
        Ok(thread)
    }

    /// Others may have left it before, and have another one by now.
    fn leave(&self, thread: &WorkerThread) {
        let mut now = self.now();
        if now.as_ref().is_some_and(|now| now.0.same_channel(&thread.0)) {
            *now = None;
        }
    }

    fn now(&self) -> MutexGuard<'_, Option<WorkerThread>> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::channel;

    use super::*;

    #[tokio::test]
    async fn a_thread_that_is_held_up_is_left_with_what_waits_behind_and_another_one_goes_on() {
        let threads = LeavableThreads::new("test", 2);
        let thread = LeavableThread::new(threads.clone(), Duration::from_secs(4));
        let (let_go, held_up) = channel::<()>();
        let stands = thread.run(move || _ = held_up.recv());
        let done = Arc::new(AtomicBool::new(false));
        let does = done.clone();
        let behind = thread.run(move || does.store(true, Ordering::SeqCst));
        let (stands, behind) = tokio::join!(stands, behind);
        assert!(stands.unwrap_err().contains("held a thread of the watchdog up"));
        assert!(behind.is_err(), "it was in the same queue");
        assert_eq!(thread.run(|| 2).await, Ok(2));
        let (also, second) = channel::<()>();
        thread.run(move || _ = second.recv()).await.unwrap_err();
        let words = thread.run(|| 3).await.unwrap_err();
        assert!(words.contains("at most 2 may run"), "{words}");
        drop((let_go, also));
        wait_until_running(&threads, 0).await;
        assert!(!done.load(Ordering::SeqCst), "it was given up, and is done all the same");
        wait_until_it_runs_again(&thread).await;
        assert!(
            thread.run(|| panic!("as a test")).await.is_err_and(|words: String| words.contains("broke off"))
        );
        wait_until_it_runs_again(&thread).await;
    }

    #[tokio::test]
    async fn what_is_too_much_for_the_queue_is_turned_away() {
        let thread = LeavableThread::new(LeavableThreads::new("test", 1), Duration::from_secs(60));
        let (let_go, held_up) = channel::<()>();
        let (began, is_held_up) = oneshot::channel();
        let first = tokio::spawn({
            let thread = thread.clone();
            let work = move || {
                let _ = began.send(());
                let _ = held_up.recv();
            };
            async move { thread.run(work).await }
        });
        is_held_up.await.unwrap();
        let behind = futures::future::join_all((0..=QUEUE).map(|_| thread.run(|| ())));
        let (behind, ()) = tokio::join!(behind, async { drop(let_go) });
        assert_eq!(behind.into_iter().filter(Result::is_err).count(), 1);
        first.await.unwrap().unwrap();
    }

    async fn wait_until_running(threads: &LeavableThreads, count: usize) {
        let until = async {
            while threads.running() != count {
                tokio::task::yield_now().await;
            }
        };
        timeout(Duration::from_secs(60), until).await.unwrap();
    }

    async fn wait_until_it_runs_again(thread: &LeavableThread) {
        let again = async {
            while thread.run(|| 4).await != Ok(4) {
                tokio::task::yield_now().await;
            }
        };
        timeout(Duration::from_secs(60), again).await.unwrap();
    }
}

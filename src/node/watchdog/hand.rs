//! A thread of the watchdog's own. The process's common threads for blocking work are few, and preparing
//! claims may hold all of them for as long as a daemon takes to start: the watchdog must not wait for that.

use std::io;
use std::thread;

use tokio::sync::{mpsc, oneshot};

/// Work that may wait for the thread; who brings more waits before the queue.
const QUEUE: usize = 64;
/// Reading /proc and asking over a socket are shallow.
const STACK: usize = 256 * 1024;

type Work = Box<dyn FnOnce() + Send>;

/// Does one piece of work after the other. The thread ends when the last clone is gone.
#[derive(Clone)]
pub(super) struct Hand(mpsc::Sender<Work>);

impl Hand {
    /// # Errors
    /// The node has no memory or threads left.
    pub fn new(name: &str) -> io::Result<Self> {
        let (sender, mut queue) = mpsc::channel::<Work>(QUEUE);
        let builder = thread::Builder::new().name(name.to_owned()).stack_size(STACK);
        builder.spawn(move || {
            while let Some(work) = queue.blocking_recv() {
                work();
            }
        })?;
        Ok(Self(sender))
    }

    /// The work's result; none if the thread broke.
    pub async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let (reply, result) = oneshot::channel();
        // Whoever does not wait any more does not want the result either.
        let work: Work = Box::new(move || drop(reply.send(work())));
        self.0.send(work).await.ok()?;
        result.await.ok()
    }
}

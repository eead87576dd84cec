//! A thread of the watchdog's own. The threads that the process has for blocking work are few, and claims that are
//! being prepared may use all of them for as long as a daemon takes to start. The watchdog must not wait for that.

use std::io;
use std::thread;

use tokio::sync::{mpsc, oneshot};
use tracing::Span;

/// The most pieces of work in the queue; beyond that, callers wait.
const QUEUE: usize = 64;
/// Reading /proc and asking over a socket are shallow.
const STACK: usize = 256 * 1024;

type Work = Box<dyn FnOnce() + Send>;

/// Runs one piece of work after the other. The thread ends when the last clone is dropped.
#[derive(Clone)]
pub(super) struct WorkerThread(mpsc::Sender<Work>);

impl WorkerThread {
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

    /// Returns the work's result; none if the thread panicked. The work is done within the span of the caller.
    pub async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let (reply, result) = oneshot::channel();
        let span = Span::current();
        // A caller that no longer waits does not need the result.
        let work: Work = Box::new(move || drop(reply.send(span.in_scope(work))));
        self.0.send(work).await.ok()?;
        result.await.ok()
    }
}

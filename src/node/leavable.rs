//! Threads that whoever waits for them can leave. Reading /proc can take for ever: the last who reads of a process that is
//! ending waits for what the process has asked of a file server, say. A thread that was left ends by itself, some time, and
//! finds that nobody waits. Only so many run at the same time: beyond that nothing is begun until one of them has ended.
//!
//! * [`LeavableThreads`]: a thread for each piece of work
//! * [`LeavableThread`]: one piece of work after the other, on one of them

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tracing::Span;

/// Of one kind. Each that stands still costs its stack.
pub(super) const THREADS_MAX: usize = 64;
/// Reading /proc and asking over a socket are shallow.
const STACK: usize = 256 * 1024;
/// The most pieces of work that wait for a [`LeavableThread`]. More are turned away.
const QUEUE: usize = 64;

/// The threads of one kind. Clones count into the same number.
#[derive(Debug, Clone)]
pub(super) struct LeavableThreads {
    name: &'static str,
    most: usize,
    running: Arc<AtomicUsize>,
    /// These are a part of them.
    all: Option<Box<LeavableThreads>>,
}

/// The place of one thread among those that may run.
struct ThreadPlace {
    running: Arc<AtomicUsize>,
    _among_all: Option<Box<ThreadPlace>>,
}

impl LeavableThreads {
    pub fn new(name: &'static str, most: usize) -> Self {
        Self { name, most, running: Arc::default(), all: None }
    }

    /// At most so many of these threads.
    pub fn part(&self, most: usize) -> Self {
        Self { name: self.name, most, running: Arc::default(), all: Some(Box::new(self.clone())) }
    }

    /// How many have not ended.
    pub fn running(&self) -> usize {
        self.running.load(Ordering::SeqCst)
    }

    /// Begins the work on a thread of its own.
    ///
    /// # Errors
    /// As many threads run as may, or the node has no memory or threads left.
    pub fn start(&self, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let place = self.place()?;
        let work = move || {
            work();
            drop(place);
        };
        thread::Builder::new().name(self.name.to_owned()).stack_size(STACK).spawn(work).map(drop)
    }

    fn place(&self) -> io::Result<ThreadPlace> {
        let among_all = self.all.as_ref().map(|all| all.place()).transpose()?;
        let place = ThreadPlace { running: self.running.clone(), _among_all: among_all.map(Box::new) };
        let before = self.running.fetch_add(1, Ordering::SeqCst);
        if before >= self.most {
            let words =
                format!("{before} threads {} have not ended, at most {} may run", self.name, self.most);
            return Err(io::Error::other(words));
        }
        Ok(place)
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
        let (reply, result) = std::sync::mpsc::channel();
        // Whoever no longer waits does not need the result.
        let begun = self.start(move || drop(reply.send(work())));
        begun.map_err(|error| error.to_string())?;
        result.recv_timeout(limit).map_err(|problem| match problem {
            RecvTimeoutError::Timeout => self.held_up(limit),
            RecvTimeoutError::Disconnected => self.broke_off(),
        })
    }

    /// Begins the work without blocking anybody. Its result, or in words why there is none by then, is to be waited for.
    ///
    /// # Errors
    /// In words, if it cannot begin.
    pub fn begin<T, W>(
        &self,
        limit: Duration,
        work: W,
    ) -> Result<impl Future<Output = Result<T, String>> + use<T, W>, String>
    where
        T: Send + 'static,
        W: FnOnce() -> T + Send + 'static,
    {
        let (work, result) = replying(work);
        self.start(work).map_err(|error| error.to_string())?;
        let threads = self.clone();
        Ok(async move {
            match timeout(limit, result).await {
                Ok(found) => found.map_err(|_| threads.broke_off()),
                Err(_) => Err(threads.held_up(limit)),
            }
        })
    }

    fn held_up(&self, limit: Duration) -> String {
        format!("something held thread {} up for {limit:?}, and it was left", self.name)
    }

    fn broke_off(&self) -> String {
        format!("thread {} broke off", self.name)
    }
}

impl Drop for ThreadPlace {
    fn drop(&mut self) {
        self.running.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Runs one piece of work after the other, and is left when one takes too long: another thread does what comes next. The
/// thread starts with the first piece of work. Clones share it; it ends when the last one is dropped.
#[derive(Debug, Clone)]
pub(super) struct LeavableThread {
    threads: LeavableThreads,
    limit: Duration,
    now: Arc<Mutex<Option<Queue>>>,
}

type Work = Box<dyn FnOnce() + Send>;

/// That of the thread that does what comes next.
type Queue = mpsc::Sender<Work>;

impl LeavableThread {
    /// One at a time of these threads. `limit`: for a piece of work, with what it waits for.
    pub fn new(threads: LeavableThreads, limit: Duration) -> Self {
        Self { threads, limit, now: Arc::default() }
    }

    /// Returns the work's result. The work is done within the span of the caller.
    ///
    /// # Errors
    /// In words, if there is none in time, or too much waits already. Work that had begun goes on; what waits behind it is
    /// dropped.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, String> {
        let queue = self.queue().map_err(|error| error.to_string())?;
        let (work, result) = replying(work);
        if let Err(mpsc::error::TrySendError::Full(_)) = queue.try_send(work) {
            return Err(format!("{QUEUE} others wait for thread {}", self.threads.name));
        }
        let problem = match timeout(self.limit, result).await {
            Ok(Ok(found)) => return Ok(found),
            Ok(Err(_)) => self.threads.broke_off(),
            Err(_) => self.threads.held_up(self.limit),
        };
        self.leave(&queue);
        Err(problem)
    }

    fn queue(&self) -> io::Result<Queue> {
        let mut now = self.now();
        if let Some(queue) = &*now {
            return Ok(queue.clone());
        }
        let (sender, mut queue) = mpsc::channel::<Work>(QUEUE);
        self.threads.start(move || {
            while let Some(work) = queue.blocking_recv() {
                work();
            }
        })?;
        *now = Some(sender.clone());
        Ok(sender)
    }

    /// Others may have left it before, and have another one by now.
    fn leave(&self, queue: &Queue) {
        let mut now = self.now();
        if now.as_ref().is_some_and(|now| now.same_channel(queue)) {
            *now = None;
        }
    }

    fn now(&self) -> MutexGuard<'_, Option<Queue>> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc::channel;
    use std::time::Instant;

    use super::*;

    #[test]
    fn who_is_held_up_is_left_and_few_are_at_the_same_time() {
        let threads = LeavableThreads::new("test", 2);
        let limit = Duration::from_secs(60);
        assert_eq!(threads.run(limit, || 7), Ok(7));
        let (let_go, held_up) = channel::<()>();
        let words = threads.run(Duration::ZERO, move || _ = held_up.recv()).unwrap_err();
        assert!(words.contains("held thread test up for 0ns"), "{words}");
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
        let (second, also) = channel::<()>();
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

    #[test]
    fn a_part_has_its_own_limit_and_counts_among_all() {
        let all = LeavableThreads::new("test", 2);
        let parts = [all.part(1), all.part(2)];
        let (let_go, held_up) = channel::<()>();
        parts[0].run(Duration::ZERO, move || _ = held_up.recv()).unwrap_err();
        let words = parts[0].run(Duration::ZERO, || ()).unwrap_err();
        assert!(words.contains("at most 1 may run"), "{words}");
        let (also, second) = channel::<()>();
        parts[1].run(Duration::ZERO, move || _ = second.recv()).unwrap_err();
        let words = parts[1].run(Duration::ZERO, || ()).unwrap_err();
        assert!(words.contains("at most 2 may run"), "{words}");
        assert_eq!([all.running(), parts[0].running(), parts[1].running()], [2, 1, 1]);
        drop((let_go, also));
        let ended = Instant::now() + Duration::from_secs(60);
        while all.running() + parts[0].running() + parts[1].running() > 0 {
            assert!(Instant::now() < ended, "{all:?}");
            thread::yield_now();
        }
    }

    #[tokio::test]
    async fn who_asks_without_blocking_leaves_what_is_held_up_too() {
        let threads = LeavableThreads::new("test", 2);
        let limit = Duration::from_secs(60);
        let (let_go, held_up) = channel::<()>();
        let held = threads.begin(Duration::from_millis(1), move || _ = held_up.recv()).unwrap();
        let words = held.await.unwrap_err();
        assert!(words.contains("held thread test up for 1ms"), "{words}");
        assert_eq!(threads.begin(limit, || 7).unwrap().await, Ok(7));
        drop(let_go);
        wait_until_running(&threads, 0).await;
        let (both, waiting): (Vec<_>, Vec<_>) = (0..2).map(|_| channel::<()>()).unzip();
        let begun: Vec<_> = waiting
            .into_iter()
            .map(|waits| threads.begin(limit, move || _ = waits.recv()).unwrap())
            .collect();
        let words = threads.begin(limit, || 8).err().unwrap();
        assert!(words.contains("2 threads test have not ended"), "{words}");
        drop(both);
        assert_eq!(futures::future::join_all(begun).await, [Ok(()), Ok(())]);
        wait_until_running(&threads, 0).await;
        let broken = threads.begin(limit, || panic!("as a test")).unwrap().await;
        assert!(broken.is_err_and(|words: String| words.contains("broke off")));
    }

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
        assert!(stands.unwrap_err().contains("held thread test up for 4s"));
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

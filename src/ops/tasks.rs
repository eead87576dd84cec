//! The process's tasks. One that ends before its time ends the process, with its name and its error:
//! a driver that lives on without its publisher is worse than one that is restarted.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::error::Error;
use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use tokio::runtime::{Builder, EnterGuard, Handle};
use tokio::sync::oneshot;
use tokio::task::{Id, JoinError, JoinSet};
use tokio_util::sync::CancellationToken;

use super::OpsError;
use super::drain::{Signals, begin, drive};

type TaskOutcome = Result<(), Box<dyn Error + Send + Sync>>;

/// What a task calls takes little stack; what is deep (selectors) is bounded to much less.
const THREAD_STACK_BYTES: usize = 2 << 20;
/// For looking up names of hosts.
const BLOCKING_THREADS_MAX: usize = 4;

/// Named tasks under one token, which asks them to end. Dropping it aborts them.
#[derive(Debug)]
pub struct Tasks {
    set: JoinSet<TaskOutcome>,
    names: HashMap<Id, &'static str>,
    /// Of the tasks that were given a thread, its name.
    places: BTreeMap<&'static str, &'static str>,
    stop: CancellationToken,
    /// Dropped, they end the threads.
    threads: Vec<oneshot::Sender<Infallible>>,
}

/// A thread for some of the tasks.
#[derive(Debug)]
pub struct Thread {
    name: &'static str,
    handle: Handle,
}

impl Thread {
    /// What is made while the guard lives is served by this thread.
    pub fn enter(&self) -> EnterGuard<'_> {
        self.handle.enter()
    }
}

impl Tasks {
    pub fn new(stop: CancellationToken) -> Self {
        let (names, places) = (HashMap::new(), BTreeMap::new());
        Self { set: JoinSet::new(), names, places, stop, threads: Vec::new() }
    }

    /// The thread of each task that was given one, both by their names.
    pub fn places(&self) -> &BTreeMap<&'static str, &'static str> {
        &self.places
    }

    /// The token that is cancelled when the process is to end.
    pub fn stop(&self) -> CancellationToken {
        self.stop.clone()
    }

    /// Starts a task. It is to run until the process's token is cancelled, and to end soon after.
    pub fn spawn<E>(&mut self, name: &'static str, task: impl Future<Output = Result<(), E>> + Send + 'static)
    where
        E: Into<Box<dyn Error + Send + Sync>> + Send + 'static,
    {
        let handle = self.set.spawn(async move { task.await.map_err(Into::into) });
        self.names.insert(handle.id(), name);
    }

    /// Starts a thread for [`Self::spawn_on`]: its tasks go on whatever those of other threads are busy with. It ends
    /// with the last of them, or when they are aborted.
    ///
    /// # Errors
    /// The system has no thread left.
    pub fn thread(&mut self, name: &'static str) -> Result<Thread, OpsError> {
        let failed = |source| OpsError::Thread { name, source };
        let runtime = Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(BLOCKING_THREADS_MAX)
            .build()
            .map_err(failed)?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<Infallible>();
        let work = move || {
            // An error: nobody is there any more who could start or await a task.
            let _ = runtime.block_on(stopped);
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name(name.to_owned()).stack_size(THREAD_STACK_BYTES);
        thread.spawn(work).map_err(failed)?;
        self.threads.push(stop);
        Ok(Thread { name, handle })
    }

    /// [`Self::spawn`], on a thread of [`Self::thread`].
    pub fn spawn_on<E>(
        &mut self,
        thread: &Thread,
        name: &'static str,
        task: impl Future<Output = Result<(), E>> + Send + 'static,
    ) where
        E: Into<Box<dyn Error + Send + Sync>> + Send + 'static,
    {
        let handle = self.set.spawn_on(async move { task.await.map_err(Into::into) }, &thread.handle);
        self.places.insert(name, thread.name);
        self.names.insert(handle.id(), name);
    }

    /// Runs until all tasks have ended: asked by a signal, or because one of them ended by itself.
    /// After the deadline the rest is aborted.
    ///
    /// # Errors
    /// The first thing that went wrong; later ones are logged.
    pub async fn run(mut self, signals: Signals, drain_deadline: Duration) -> Result<(), OpsError> {
        let stop = self.stop.clone();
        let mut driver = pin!(drive(signals, &stop, drain_deadline));
        let mut first = Ok(());
        loop {
            tokio::select! {
                biased;
                joined = self.set.join_next_with_id() => match joined {
                    None => return first,
                    Some(joined) => keep_first(&mut first, self.verdict(joined)),
                },
                () = &mut driver => {
                    keep_first(&mut first, Err(OpsError::DrainCutShort(self.running())));
                    return first;
                }
            }
        }
    }

    /// What a task's end means. Starts the drain if none was under way.
    fn verdict(&mut self, joined: Result<(Id, TaskOutcome), JoinError>) -> Result<(), OpsError> {
        let id = joined.as_ref().map_or_else(JoinError::id, |(id, _)| *id);
        let name = self.names.remove(&id).unwrap_or("unnamed");
        let asked = self.stop.is_cancelled();
        begin(&self.stop, name);
        match joined {
            Ok((_, Ok(()))) if asked => Ok(()),
            Ok((_, Ok(()))) => Err(OpsError::TaskEnded(name)),
            Ok((_, Err(source))) => Err(OpsError::TaskFailed { name, source }),
            Err(source) => Err(OpsError::TaskPanicked { name, source }),
        }
    }

    fn running(&self) -> Vec<&'static str> {
        let mut names: Vec<_> = self.names.values().copied().collect();
        names.sort_unstable();
        names
    }
}

/// The first error is the cause; what follows it is mostly its consequence.
fn keep_first(first: &mut Result<(), OpsError>, next: Result<(), OpsError>) {
    match (&first, next) {
        (Ok(()), next) => *first = next,
        (Err(_), Err(later)) => tracing::error!(error = %super::logs::Chain(&later), "while stopping"),
        (Err(_), Ok(())) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEADLINE: Duration = Duration::from_secs(10);

    struct Fixture {
        tasks: Tasks,
        stop: CancellationToken,
    }

    fn fixture() -> Fixture {
        let stop = CancellationToken::new();
        let mut tasks = Tasks::new(stop.clone());
        let told = stop.clone();
        tasks.spawn("patient", async move {
            told.cancelled().await;
            Ok::<_, std::io::Error>(())
        });
        Fixture { tasks, stop }
    }

    async fn ended(tasks: Tasks, drain_deadline: Duration) -> Result<(), String> {
        let run = tasks.run(Signals::catch().unwrap(), drain_deadline);
        let end = tokio::time::timeout(DEADLINE, run).await.expect("the process ends");
        end.map_err(|error| super::super::logs::Chain(&error).to_string())
    }

    #[tokio::test]
    async fn a_failing_task_ends_the_process_with_its_name_and_error() {
        let mut fixture = fixture();
        fixture.tasks.spawn("publisher", async { Err(std::io::Error::other("no route")) });
        let words = ended(fixture.tasks, DEADLINE).await.unwrap_err();
        assert_eq!(words, "task \"publisher\" failed: no route");
        assert!(fixture.stop.is_cancelled());
    }

    #[tokio::test]
    async fn a_task_that_just_ends_is_an_error_too() {
        let mut fixture = fixture();
        fixture.tasks.spawn("sweeper", async { Ok::<_, std::io::Error>(()) });
        let words = ended(fixture.tasks, DEADLINE).await.unwrap_err();
        assert!(words.starts_with("task \"sweeper\" ended although it was not asked to"), "{words}");
    }

    #[tokio::test]
    async fn a_panic_is_told_with_the_name_of_its_task() {
        let mut fixture = fixture();
        fixture
            .tasks
            .spawn("watchdog", async { if true { panic!("odd") } else { Ok::<_, std::io::Error>(()) } });
        let words = ended(fixture.tasks, DEADLINE).await.unwrap_err();
        assert!(words.starts_with("task \"watchdog\" panicked"), "{words}");
    }

    #[tokio::test]
    async fn a_thread_goes_on_while_another_is_busy_and_its_tasks_are_told_apart() {
        let mut fixture = fixture();
        let (busy, free) = (fixture.tasks.thread("busy").unwrap(), fixture.tasks.thread("free").unwrap());
        let (release, released) = std::sync::mpsc::channel::<()>();
        let (told, began) = tokio::sync::oneshot::channel();
        fixture.tasks.spawn_on(&busy, "worker", async move {
            let _ = told.send(());
            // Holds the thread, not only the task.
            released.recv_timeout(DEADLINE).map_err(std::io::Error::other)?;
            Err(std::io::Error::other("done"))
        });
        fixture.tasks.spawn_on(&free, "lease", async move {
            let waited = tokio::time::timeout(DEADLINE, began).await;
            waited.map_err(std::io::Error::other)?.map_err(std::io::Error::other)?;
            release.send(()).map_err(std::io::Error::other)?;
            std::future::pending::<Result<(), std::io::Error>>().await
        });
        let words = ended(fixture.tasks, Duration::from_millis(20)).await.unwrap_err();
        assert_eq!(words, "task \"worker\" failed: done");
    }

    #[tokio::test]
    async fn tasks_that_end_when_asked_end_the_process_well() {
        let fixture = fixture();
        fixture.stop.cancel();
        assert_eq!(ended(fixture.tasks, DEADLINE).await, Ok(()));
    }

    #[tokio::test]
    async fn a_task_that_does_not_end_is_cut_short_and_named() {
        let mut fixture = fixture();
        fixture.tasks.spawn("stubborn", std::future::pending::<Result<(), std::io::Error>>());
        fixture.stop.cancel();
        let words = ended(fixture.tasks, Duration::from_millis(20)).await.unwrap_err();
        assert_eq!(words, "stopped with tasks still at work: stubborn");
    }
}

//! What one input costs, and that none runs for ever.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::pace::{processor, slowness};
use super::{Target, memory};

/// An input that takes more of a processor ends the process, or one that takes longer and does nothing.
const HANGS: Duration = Duration::from_secs(60);
const IDLES: Duration = Duration::from_secs(180);
/// One that took too long is tried again before it is blamed: the machine may have been busy.
const TRIES: usize = 3;
/// Runs of inputs that have begun, for the watch.
static RUNS: AtomicU64 = AtomicU64::new(0);

/// How an input broke what must hold.
#[derive(Debug, Clone, PartialEq)]
pub enum Fault {
    /// Where, and with what words.
    Panics(String, String),
    Memory {
        taken: usize,
        most: usize,
    },
    Time {
        took: Duration,
        most: Duration,
    },
}

#[derive(Debug, Clone, Copy)]
pub struct Cost {
    pub time: Duration,
    pub bytes: usize,
}

thread_local! {
    static BEGUN: Cell<Option<(Instant, usize)>> = const { Cell::new(None) };
}
static PANICKED: Mutex<Option<(String, String)>> = Mutex::new(None);

/// A target has prepared what it needs: only what follows counts.
pub fn ready() {
    BEGUN.set(Some((Instant::now(), memory::begin())));
}

/// Panics say nothing by themselves: they are told with their input.
pub fn hush() {
    std::panic::set_hook(Box::new(|info| {
        let at = info.location().map(|at| format!("{}:{}", at.file(), at.line())).unwrap_or_default();
        *PANICKED.lock().unwrap() = Some((at, words(info.payload())));
    }));
}

fn words(payload: &dyn Any) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or_default().to_owned()
}

/// Runs the input. One that takes longer than it may is tried again, and may take longer the slower the machine is now.
pub fn measure(target: &Target, input: &[u8]) -> Result<Cost, Fault> {
    let limit = Duration::from_millis(target.limits.millis);
    let (mut cost, mut most) = (once(target, input)?, limit);
    for _ in 1..TRIES {
        if cost.time > most {
            most = limit.mul_f64(slowness());
            let before = processor();
            cost = once(target, input)?;
            cost.time = cost.time.min(processor().saturating_sub(before));
        }
    }
    match cost.time > most {
        true => Err(Fault::Time { took: cost.time, most }),
        false => Ok(cost),
    }
}

fn once(target: &Target, input: &[u8]) -> Result<Cost, Fault> {
    RUNS.fetch_add(1, Ordering::Relaxed);
    ready();
    let ran = catch_unwind(AssertUnwindSafe(|| (target.run)(input)));
    let (begun, live) = BEGUN.take().expect("it was made ready");
    let cost = Cost { time: begun.elapsed(), bytes: memory::end(live) };
    if ran.is_err() {
        let (at, words) = PANICKED.lock().unwrap().take().unwrap_or_default();
        return Err(Fault::Panics(at, words));
    }
    let most = target.limits.memory(input.len());
    match cost.bytes > most {
        true => Err(Fault::Memory { taken: cost.bytes, most }),
        false => Ok(cost),
    }
}

impl Fault {
    /// Faults of the same cause have the same.
    pub fn key(&self) -> String {
        match self {
            Self::Panics(at, _) => format!("panics at {at}"),
            Self::Memory { .. } => "memory".to_owned(),
            Self::Time { .. } => "time".to_owned(),
        }
    }

    /// What a stored input is called by.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Panics(..) => "panics",
            Self::Memory { .. } => "memory",
            Self::Time { .. } => "time",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Panics(at, words) => write!(f, "panics at {at}: {}", shortened(words)),
            Self::Memory { taken, most } => write!(f, "takes {taken} bytes of memory; {most} are the most"),
            Self::Time { took, most } => {
                write!(f, "takes {took:?} each of {TRIES} times; {most:?} are the most")
            }
        }
    }
}

/// The beginning of a text that may be long.
pub fn shortened(text: &str) -> &str {
    const BYTES_MAX: usize = 600;
    &text[..text.floor_char_boundary(BYTES_MAX)]
}

/// Ends the process if the same run of an input is under way for too long.
pub fn watch(end: &Receiver<()>) {
    let (mut last, mut before, mut run) = (Instant::now(), processor(), RUNS.load(Ordering::Relaxed));
    while let Err(RecvTimeoutError::Timeout) = end.recv_timeout(Duration::from_secs(1)) {
        let (took, now) = (processor().saturating_sub(before), RUNS.load(Ordering::Relaxed));
        if now != run {
            (last, before, run) = (Instant::now(), processor(), now);
        } else if took > HANGS || last.elapsed() > IDLES {
            eprintln!("an input runs for more than {took:?} of a processor");
            std::process::abort();
        }
    }
}

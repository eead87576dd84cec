//! The way into every call: is the library initialised, is the function there,
//! does a fault want to happen, then the work, then the log.

use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nvml_wrapper_sys::bindings::nvmlReturn_t;

use crate::abi::Handle;
use crate::code::{self, Answer, Code};
use crate::control::Fault;
use crate::driver::since;
use crate::node::{self, Node};
use crate::{session, state};

/// Declares exported functions that need an initialised library.
macro_rules! nvml {
    ($($(#[$meta:meta])* fn $name:ident($first:ident: $ft:ty $(, $arg:ident: $ty:ty)* $(,)?) |$node:ident| $body:block)*) => {$(
        $(#[$meta])*
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($first: $ft $(, $arg: $ty)*) -> nvml_wrapper_sys::bindings::nvmlReturn_t {
            #[allow(clippy::unnecessary_cast)]
            let about = $first as usize;
            $crate::call::enter(stringify!($name), about, |$node: &$crate::node::Node| -> $crate::code::Answer { $body })
        }
    )*};
}
pub(crate) use nvml;

/// Runs one call about `about`, the first argument: a handle, or anything else.
pub fn enter(name: &'static str, about: usize, work: impl FnOnce(&Node) -> Answer) -> nvmlReturn_t {
    if session::is_open() { run(name, about, work) } else { Code::UNINITIALIZED.0 }
}

/// Runs one call that needs no initialised library.
pub fn enter_closed(name: &'static str, work: impl FnOnce(&Node) -> Answer) -> nvmlReturn_t {
    run(name, 0, work)
}

/// A function that exists and that no board here can do.
pub fn stub(name: &'static str) -> nvmlReturn_t {
    enter(name, 0, |_| Err(Code::NOT_SUPPORTED))
}

fn run(name: &'static str, about: usize, work: impl FnOnce(&Node) -> Answer) -> nvmlReturn_t {
    let started = Instant::now();
    let node = match node::load() {
        Ok(node) => node,
        Err(Code(number)) => return number,
    };
    // A panic must not cross into C.
    let number = match catch_unwind(AssertUnwindSafe(|| {
        prepare(&node, name, about)?;
        work(&node)?;
        faults(&node, name, about, true)
    })) {
        Ok(Ok(())) => 0,
        Ok(Err(Code(number))) => number,
        Err(_) => Code::UNKNOWN.0,
    };
    if node.control.log_calls {
        log(&node, name, about, number, started.elapsed());
    }
    number
}

/// Everything that can stand between a caller and the work.
fn prepare(node: &Node, name: &'static str, about: usize) -> Answer {
    if since(name) > node.driver_major || node.control.missing.iter().any(|m| m == name) {
        return Err(Code::FUNCTION_NOT_FOUND);
    }
    faults(node, name, about, false)
}

/// The faults that are met before the work, or those that are met once it is done.
fn faults(node: &Node, name: &'static str, about: usize, done: bool) -> Answer {
    if node.control.faults.is_empty() {
        return Ok(());
    }
    let board = Handle::decode(about).and_then(Handle::board);
    for key in [name, "*"] {
        for (at, fault) in node.control.faults.get(key).map_or(&[][..], |f| f.as_slice()).iter().enumerate() {
            let elsewhere = fault.gpu.is_some_and(|wanted| Some(wanted) != board);
            if fault.done != done || elsewhere || !due(node, key, at, fault) {
                continue;
            }
            if fault.delay_ms > 0 {
                std::thread::sleep(Duration::from_millis(fault.delay_ms));
            }
            if let Some(number) = fault.code.as_deref().and_then(code::parse)
                && number != 0
            {
                return Err(Code(number));
            }
        }
    }
    Ok(())
}

/// Counts a call against a counted fault, over all processes.
fn due(node: &Node, key: &str, at: usize, fault: &Fault) -> bool {
    if fault.times.is_none() && fault.after == 0 {
        return true;
    }
    let counter = format!("{key}#{at}#{}", serde_json::to_string(fault).unwrap_or_default());
    let met = state::update(&node.dir, node.board.key, |s| {
        let hits = s.fault_hits.entry(counter).or_insert(0);
        *hits = hits.saturating_add(1);
        Ok(*hits)
    });
    let met = met.unwrap_or(u64::MAX);
    met > fault.after && fault.times.is_none_or(|times| met <= fault.after.saturating_add(times))
}

fn log(node: &Node, name: &str, about: usize, number: nvmlReturn_t, took: Duration) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let board = Handle::decode(about).and_then(Handle::board).map_or("-".to_owned(), |b| b.to_string());
    let line = format!(
        "{}.{:06} {} {name} {board} {} {}\n",
        now.as_secs(),
        now.subsec_micros(),
        std::process::id(),
        code::name(number),
        took.as_micros()
    );
    let file = std::fs::OpenOptions::new().create(true).append(true).open(node.dir.join("calls.log"));
    if let Ok(mut file) = file {
        let _ = file.write_all(line.as_bytes());
    }
}

//! A signal ends the run between two steps, so that everything is put back on the way out.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{SigSet, Signal};

static STOP: AtomicBool = AtomicBool::new(false);

/// From now on SIGINT, SIGTERM and SIGHUP only set a mark. To be called before there are other threads.
pub fn watch() -> Result<()> {
    let mut set = SigSet::empty();
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        set.add(signal);
    }
    set.thread_block().context("block signals")?;
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        while let Ok(signal) = set.wait() {
            eprintln!("gpu-check: {signal}: ending the tenants, putting the compute mode back");
            STOP.store(true, Ordering::Relaxed);
        }
    })?;
    Ok(())
}

pub fn stopped() -> bool {
    STOP.load(Ordering::Relaxed)
}

/// An error once a signal came.
pub fn go_on() -> Result<()> {
    if stopped() {
        bail!("the run was stopped by a signal");
    }
    Ok(())
}

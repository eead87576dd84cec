//! A signal ends the run between two steps, so that everything is put back on the way out.
//!
//! Handlers, not a blocked mask: child processes would inherit a mask, and never hear of SIGTERM.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

static STOP: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// From now on SIGINT, SIGTERM and SIGHUP only set a mark.
pub fn watch() -> Result<()> {
    let stop = STOP.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, stop.clone()).context("handle signals")?;
    }
    Ok(())
}

pub fn stopped() -> bool {
    STOP.get().is_some_and(|stop| stop.load(Ordering::Relaxed))
}

/// An error once a signal came.
pub fn go_on() -> Result<()> {
    if stopped() {
        bail!("the run was stopped by a signal; what it changed is put back");
    }
    Ok(())
}

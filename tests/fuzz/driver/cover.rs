//! Which inputs reach code that none before has reached, where the driver is compiled for it (hack/fuzz/cover.sh, as
//! `make soak` does). Without it every input is as good as any.
//!
//! The compiler gives each edge of the driver's code a counter of one byte, and calls [the function below][init] with
//! all of a crate before `main` (LLVM, SanitizerCoverage, "Inline 8bit-counters").
//!
//! [init]: __sanitizer_cov_8bit_counters_init

#![allow(unsafe_code)]

use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

static COUNTERS: Mutex<Vec<&'static [AtomicU8]>> = Mutex::new(Vec::new());

#[unsafe(no_mangle)]
extern "C" fn __sanitizer_cov_8bit_counters_init(start: *const AtomicU8, end: *const AtomicU8) {
    let length = (end as usize).saturating_sub(start as usize);
    // SAFETY: the compiler's own call: bytes of the program, which nobody but its code and this file touches.
    let counters = unsafe { std::slice::from_raw_parts(start, length) };
    if let Ok(mut all) = COUNTERS.lock() {
        all.push(counters);
    }
}

/// The other half of what the compiler tells; not needed.
#[unsafe(no_mangle)]
extern "C" fn __sanitizer_cov_pcs_init(_start: *const usize, _end: *const usize) {}

/// What was reached so far, by edge: how often, as powers of two.
pub struct Cover {
    counters: Vec<&'static [AtomicU8]>,
    reached: Vec<Vec<u8>>,
}

impl Cover {
    pub fn new() -> Self {
        let counters = COUNTERS.lock().unwrap().clone();
        let reached = counters.iter().map(|all| vec![0; all.len()]).collect();
        Self { counters, reached }
    }

    pub fn is_there(&self) -> bool {
        !self.counters.is_empty()
    }

    /// Takes the counters back to zero; true if something was reached that was not before.
    pub fn take(&mut self) -> bool {
        let mut news = false;
        for (counters, reached) in self.counters.iter().zip(&mut self.reached) {
            // Most of them are zero, after each input: eight at a time.
            // SAFETY: eight bytes that may be changed through a shared reference are as good as one such number.
            let (head, words, tail) = unsafe { counters.align_to::<AtomicU64>() };
            let last = counters.len() - tail.len();
            let touched = words.iter().enumerate().filter(|(_, word)| word.load(Relaxed) != 0);
            let touched = touched.flat_map(|(at, _)| head.len() + 8 * at..head.len() + 8 * at + 8);
            for at in (0..head.len()).chain(touched).chain(last..counters.len()) {
                news |= count(&counters[at], &mut reached[at]);
            }
        }
        news
    }

    pub fn edges(&self) -> usize {
        self.reached.iter().flatten().filter(|reached| **reached > 0).count()
    }
}

fn count(counter: &AtomicU8, reached: &mut u8) -> bool {
    let count = counter.swap(0, Relaxed);
    let bit = count.checked_ilog2().map_or(0, |power| 1 << power);
    let news = bit & !*reached != 0;
    *reached |= bit;
    news
}

//! The allocator: the system's, with a count. Above a limit it gives nothing, which ends the process.

#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::null_mut;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

/// So much and no more for one input: the machine is not to suffer.
const MOST: usize = 1 << 30;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static END: AtomicUsize = AtomicUsize::new(usize::MAX);

pub struct Counting;

/// From here on the peak counts. Returns what is in use.
pub fn begin() -> usize {
    let live = LIVE.load(Relaxed);
    PEAK.store(live, Relaxed);
    END.store(live + MOST, Relaxed);
    live
}

/// The peak since [`begin`], beyond what was in use then.
pub fn end(begun: usize) -> usize {
    END.store(usize::MAX, Relaxed);
    PEAK.load(Relaxed).saturating_sub(begun)
}

fn take(size: usize) -> bool {
    let live = LIVE.fetch_add(size, Relaxed) + size;
    if live > END.load(Relaxed) {
        LIVE.fetch_sub(size, Relaxed);
        return false;
    }
    PEAK.fetch_max(live, Relaxed);
    true
}

// SAFETY: every call is passed on to the system's allocator as it came, or answered with null, which means that there
// is no memory; the counters allocate nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !take(layout.size()) {
            return null_mut();
        }
        // SAFETY: the caller keeps what `alloc` asks of it.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !take(layout.size()) {
            return null_mut();
        }
        // SAFETY: the caller keeps what `alloc_zeroed` asks of it.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the pointer came from the system's allocator, with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if size > layout.size() && !take(size - layout.size()) {
            return null_mut();
        }
        LIVE.fetch_sub(layout.size().saturating_sub(size), Relaxed);
        // SAFETY: the pointer came from the system's allocator, with this layout; the caller keeps the rest.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

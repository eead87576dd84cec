//! Does the driver see what it is for? Targets that fail, each in its way; a full run begins with them.

use std::hint::black_box;
use std::time::{Duration, Instant};

use super::{Form, Limits, Target};

/// What each of them must be blamed for.
pub fn targets() -> [(Target, &'static str); 5] {
    [
        (target("self-panics", |_| panic!("as it should")), "as it should"),
        (target("self-hoards", |_| drop(black_box(vec![1_u8; 8 << 20]))), "bytes of memory"),
        (target("self-exhausts", |_| drop(black_box(Vec::<u8>::with_capacity(8 << 30)))), "signal"),
        (target("self-overflows", |_| assert_eq!(deep(1 << 20), 0)), "overflowed its stack"),
        (dawdles(), "of 3 times"),
    ]
}

pub fn is_one(name: &str) -> bool {
    name.starts_with("self-")
}

fn target(name: &'static str, run: fn(&[u8])) -> Target {
    let seeds = || vec![b"input".to_vec()];
    Target { name, seeds, words: &[], form: Form::Text, limits: Limits::PARSER, run }
}

/// Takes three hundred times as long as it may.
fn dawdles() -> Target {
    let run = |_: &[u8]| {
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(300) {
            black_box(());
        }
    };
    Target { limits: Limits { millis: 1, ..Limits::PARSER }, ..target("self-dawdles", run) }
}

fn deep(left: u64) -> u64 {
    let block = black_box([left; 16]);
    if left == 0 { 0 } else { deep(left - 1) + black_box(block)[0] }
}

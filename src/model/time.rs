//! Which kind of time is for what, and how long to wait after failures. A decision has no clock: it is given one of these as an argument.
//!
//! | what is asked | type | who reads the clock |
//! |---|---|---|
//! | how long since something was seen; when is it due? In decisions | [`Moment`] | the loop that calls them |
//! | when does a wait end? In loops and edges | tokio's `Instant`, which tests can stop | the task itself |
//! | how long did it take; when does a thread give up? | std's `Instant` | who measures, threads |
//! | at what time of day, as the API server and people read it | `jiff::Timestamp` | the loop or edge that writes it |
//! | the same, where a file or a protocol has whole seconds since 1970 | an integer, and its field says so | as above |
//! | when was a file changed, when does a certificate end? | std's `SystemTime`, because the libraries have it so | as above |

use std::time::Duration;

/// Since the loop that asks began: monotonic, comparable only within one run of that loop, and never stored or shown.
pub type Moment = Duration;

/// How long to wait before the next try after so many failures in a row: `first` after one, twice as long after each
/// further one, and never longer than `longest`. Nothing without a failure.
pub fn back_off(first: Duration, failures: u32, longest: Duration) -> Duration {
    let Some(doublings) = failures.checked_sub(1) else { return Duration::ZERO };
    first.saturating_mul(1 << doublings.min(16)).min(longest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_however_often_it_fails() {
        let (first, longest) = (Duration::from_secs(1), Duration::from_secs(60));
        let pauses =
            [0, 1, 2, 3, 6, 7, u32::MAX].map(|failures| back_off(first, failures, longest).as_secs());
        assert_eq!(pauses, [0, 1, 2, 4, 32, 60, 60]);
        assert_eq!(back_off(Duration::MAX, 2, Duration::MAX), Duration::MAX);
    }
}

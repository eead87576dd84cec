//! Which kind of time is for what. A decision has no clock: it is given one of these as an argument.
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

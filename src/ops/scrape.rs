//! The metrics' text. A large cluster's is megabytes, and whoever reaches the port may ask for it as often as he
//! likes and read it as slowly: it is made once for all who ask at the same time, and few copies are kept.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::body::Bytes;

/// Who asks within this gets the same text.
const FRESH: Duration = Duration::from_millis(100);
/// While so many are still being read, no other is made.
const COPIES_MAX: usize = 4;

/// Oldest first.
#[derive(Debug, Default)]
pub(super) struct Scrapes(Mutex<Vec<Made>>);

#[derive(Debug)]
struct Made {
    at: Instant,
    text: Arc<str>,
}

struct Shared(Arc<str>);

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl Scrapes {
    pub fn text(&self, make: impl FnOnce() -> Result<String, fmt::Error>) -> Result<Bytes, fmt::Error> {
        let mut made = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let newest = made.pop();
        made.retain(|one| Arc::strong_count(&one.text) > 1);
        made.extend(newest);
        match made.last() {
            Some(last) if last.at.elapsed() < FRESH || made.len() >= COPIES_MAX => {}
            _ => {
                let text = Arc::from(make()?);
                made.retain(|one| Arc::strong_count(&one.text) > 1);
                made.push(Made { at: Instant::now(), text });
            }
        }
        let text = made.last().map(|last| last.text.clone()).ok_or(fmt::Error)?;
        Ok(Bytes::from_owner(Shared(text)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As time would make them.
    fn age(scrapes: &Scrapes) {
        for one in scrapes.0.lock().unwrap().iter_mut() {
            one.at = one.at.checked_sub(FRESH).unwrap();
        }
    }

    #[test]
    fn one_text_is_for_all_who_ask_at_once_and_slow_readers_keep_few() {
        let scrapes = Scrapes::default();
        let ask = |text: &str| scrapes.text(|| Ok(text.to_owned())).unwrap();
        let (first, same) = (ask("a"), ask("b"));
        assert_eq!((&first[..], &same[..]), (&b"a"[..], &b"a"[..]));
        let mut slow = vec![first];
        for text in ["c", "d", "e", "f", "g"] {
            age(&scrapes);
            slow.push(ask(text));
        }
        assert_eq!(slow.last().unwrap(), "e", "no more than four are kept");
        drop((slow, same));
        age(&scrapes);
        assert_eq!(ask("h"), "h");
        assert_eq!(scrapes.0.lock().unwrap().len(), 1);
        age(&scrapes);
        assert!(scrapes.text(|| Err(fmt::Error)).is_err());
    }
}

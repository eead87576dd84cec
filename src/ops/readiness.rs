//! Ready when everything that was awaited has happened. Each thing is a token; dropping it says "done".

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What the process still waits for. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Readiness(Arc<Mutex<OpenTokens>>);

#[derive(Debug, Default)]
struct OpenTokens {
    next: u64,
    tokens: BTreeMap<u64, (&'static str, Instant)>,
}

/// Holds back readiness until it is dropped.
#[must_use = "a token that is dropped at once holds nothing back"]
#[derive(Debug)]
pub struct Token {
    of: Readiness,
    id: u64,
}

/// One thing that has not happened yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Awaited {
    pub name: &'static str,
    pub since: Duration,
}

impl Readiness {
    /// Not ready until the token is dropped. To be called for everything before the first token is
    /// released: a process that was ready should not become unready.
    pub fn wait_for(&self, name: &'static str) -> Token {
        let mut waiting = self.lock();
        let id = waiting.next;
        waiting.next += 1;
        waiting.tokens.insert(id, (name, Instant::now()));
        Token { of: self.clone(), id }
    }

    /// What is still awaited, in the order in which it was asked for. Empty: ready.
    pub fn awaited(&self) -> Vec<Awaited> {
        let waiting = self.lock();
        waiting.tokens.values().map(|(name, from)| Awaited { name, since: from.elapsed() }).collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, OpenTokens> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        let (removed, left) = {
            let mut waiting = self.of.lock();
            (waiting.tokens.remove(&self.id), waiting.tokens.len())
        };
        if let Some((name, from)) = removed {
            tracing::info!(name, elapsed_ms = from.elapsed().as_secs_f64() * 1e3, awaited = left, "ready");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(readiness: &Readiness) -> Vec<&'static str> {
        readiness.awaited().iter().map(|awaited| awaited.name).collect()
    }

    #[test]
    fn what_is_awaited_is_listed_until_its_own_token_is_dropped() {
        let readiness = Readiness::default();
        let slices = readiness.wait_for("slices published");
        let kubelet = readiness.wait_for("kubelet registered");
        let again = readiness.wait_for("slices published");
        assert_eq!(names(&readiness), ["slices published", "kubelet registered", "slices published"]);
        drop(slices);
        assert_eq!(names(&readiness), ["kubelet registered", "slices published"]);
        drop((kubelet, again));
        assert!(names(&readiness).is_empty());
    }
}

//! Writes that are decided and not yet under way, in the order in which they are to be. A claim has one write at a
//! time, so that no order between claims is wrong; but the shares of a GPU wait for its hold and for the look at it.

use std::collections::VecDeque;

use crate::controller::write::Write;

#[derive(Debug, Default)]
pub struct Pending {
    /// What others wait for.
    first: VecDeque<Write>,
    then: VecDeque<Write>,
}

impl Pending {
    pub fn add(&mut self, writes: Vec<Write>) {
        for write in writes {
            match write {
                Write::Hold(..) | Write::WatchBarrier(_) => self.first.push_back(write),
                _ => self.then.push_back(write),
            }
        }
    }

    pub fn is_empty(&self) -> bool {
        self.first.is_empty() && self.then.is_empty()
    }

    pub fn take(&mut self) -> Option<Write> {
        self.first.pop_front().or_else(|| self.then.pop_front())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::allocation::ClaimVersion;
    use crate::controller::view::GpuRef;
    use crate::model::claim::{ClaimKeys, ClaimRef};

    fn at(name: &str) -> ClaimVersion {
        let claim = ClaimRef { namespace: "ml".into(), name: name.into(), uid: name.into() };
        ClaimVersion { claim, resource_version: "1".into() }
    }

    fn hold(gpu: &str) -> Write {
        Write::Hold(GpuRef::new(&"a".into(), &gpu.into()), None)
    }

    #[test]
    fn holds_and_looks_go_first_and_each_kind_as_it_came() {
        let mut pending = Pending::default();
        assert!(pending.is_empty() && pending.take().is_none());
        let mut keys = ClaimKeys::default();
        let [one, two] = ["one", "two"].map(|name| Write::Clear(keys.issue(), at(name)));
        pending.add(vec![one.clone(), hold("gpu-0")]);
        pending.add(vec![two.clone(), Write::WatchBarrier(at("hold")), hold("gpu-1")]);
        let taken: Vec<Write> = std::iter::from_fn(|| pending.take()).collect();
        let right = [hold("gpu-0"), Write::WatchBarrier(at("hold")), hold("gpu-1"), one, two];
        assert_eq!(taken, right);
        assert!(pending.is_empty());
    }
}

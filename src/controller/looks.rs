//! For which units it is looked who may end: so many in a round, shared between namespaces and then between units. The one
//! whose look is longest ago is next, so that whoever asks in vain many times takes no look of another's.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::controller::Moment;
use crate::controller::queue::UnitKey;

/// Units that are looked at in a round, at most.
const AT_ONCE_MAX: usize = 4;
/// A unit is looked at again after so long, if something has changed.
const EVERY: Duration = Duration::from_secs(1);
/// Where units are left over, there is another round so much later: looks are no reason to be at work all the time.
const LEFT_OVER: Duration = Duration::from_millis(200);
/// A namespace for which nobody has looked for so long is as one for which nobody ever did.
const REMEMBERED: Duration = Duration::from_secs(60);

/// A unit that was looked at.
#[derive(Debug, Clone, Copy)]
pub struct LookedUnit {
    /// The versions of what was known of holders and of capacity.
    pub known: (u64, u64),
    pub at: Moment,
    /// It was put off until then, whatever changes. None: it is looked at again when something has changed.
    pub again: Option<Moment>,
    /// The next look begins after so many nodes, to which this one came.
    pub from: usize,
}

#[derive(Debug, Default)]
pub struct Looks {
    units: BTreeMap<UnitKey, LookedUnit>,
    /// Of each namespace the last look for one of its units.
    namespaces: BTreeMap<String, Moment>,
    /// Units may be looked at, for which there was no look left in the last round: the next is due then.
    left_over: Option<Moment>,
}

impl Looks {
    /// The unit may be looked at now, as far as looks decide that. `present`: as [`LookedUnit::known`].
    pub fn is_due(&self, key: &UnitKey, present: (u64, u64), now: Moment) -> bool {
        self.units.get(key).is_none_or(|looked| match looked.again {
            Some(again) => again <= now,
            None => looked.known != present && looked.at + EVERY <= now,
        })
    }

    /// Which of these units, each with its namespace, are looked at in this round; true if others have to wait for the next
    /// one. Of each namespace, and then of its units, the one whose look is longest ago comes first.
    pub fn first<'a>(
        &self,
        units: impl Iterator<Item = (&'a UnitKey, &'a str)>,
    ) -> (BTreeSet<UnitKey>, bool) {
        let looked = |key: &UnitKey| self.units.get(key).map(|looked| looked.at);
        let mut due: Vec<_> =
            units.enumerate().map(|(nth, (key, namespace))| (namespace, looked(key), nth, key)).collect();
        due.sort_unstable();
        let mut ranks: BTreeMap<&str, usize> = BTreeMap::new();
        let (mut all, mut seen) = (Vec::with_capacity(due.len()), BTreeSet::new());
        // Pods of a gang that start one by one have a turn each, and the same key.
        for (namespace, _, nth, key) in due.into_iter().filter(|(.., key)| seen.insert(*key)) {
            let rank = ranks.entry(namespace).or_default();
            all.push((*rank, self.namespaces.get(namespace), nth, key));
            *rank += 1;
        }
        all.sort_unstable();
        let first = all.iter().take(AT_ONCE_MAX).map(|(.., key)| (*key).clone()).collect();
        (first, all.len() > AT_ONCE_MAX)
    }

    /// A round begins.
    pub fn begin(&mut self) {
        self.left_over = None;
    }

    /// Units are left over for the next round.
    pub fn leave(&mut self, now: Moment) {
        self.left_over = Some(now.saturating_add(LEFT_OVER));
    }

    /// So many nodes need not be looked at: the last look came to them, and found nothing there.
    pub fn from(&self, key: &UnitKey) -> usize {
        self.units.get(key).map_or(0, |looked| looked.from)
    }

    /// [`LookedUnit::known`] of a look of which the rest is to come.
    pub fn begun(&self, key: &UnitKey) -> Option<(u64, u64)> {
        self.units.get(key).filter(|looked| looked.from > 0).map(|looked| looked.known)
    }

    /// A unit of this namespace was looked at.
    pub fn note(&mut self, (key, namespace): (&UnitKey, &str), looked: LookedUnit) {
        self.units.insert(key.clone(), looked);
        self.namespaces.insert(namespace.to_owned(), looked.at);
    }

    /// Forgets who does not wait any more.
    pub fn tidy(&mut self, is_queued: impl Fn(&UnitKey) -> bool, now: Moment) {
        self.units.retain(|key, _| is_queued(key));
        self.namespaces.retain(|_, at| now < at.saturating_add(REMEMBERED));
    }

    /// When the next look may be. `present`: as [`LookedUnit::known`].
    pub fn next(&self, present: (u64, u64), now: Moment) -> Option<Moment> {
        // Units that were looked at too soon.
        let again = self.units.values().filter_map(|looked| match looked.again {
            Some(again) => Some(again),
            None => (looked.known != present).then(|| looked.at + EVERY),
        });
        again.filter(|due| *due > now).chain(self.left_over).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Moment = Duration::from_secs(1000);

    fn unit(name: &str) -> UnitKey {
        UnitKey::Pod(name.into())
    }

    fn looked(at: Moment) -> LookedUnit {
        LookedUnit { known: (0, 0), at, again: None, from: 0 }
    }

    #[test]
    fn looks_are_shared_between_namespaces_and_then_between_units() {
        let mut all = Looks::default();
        let many: Vec<UnitKey> = (0..40).map(|nth| unit(&format!("m{nth:02}"))).collect();
        let one = unit("one");
        let mut now = NOW;
        let mut looks: BTreeMap<UnitKey, usize> = BTreeMap::new();
        for _ in 0..20 {
            let units = many.iter().map(|key| (key, "many")).chain([(&one, "ml")]);
            let (first, others) = all.first(units);
            assert!(others && first.len() == AT_ONCE_MAX && first.contains(&one), "{first:?}");
            for key in first {
                let namespace = if key == one { "ml" } else { "many" };
                all.note((&key, namespace), looked(now));
                *looks.entry(key).or_default() += 1;
            }
            now += EVERY;
        }
        assert!(many.iter().all(|key| (1..=2).contains(&looks[key])), "each in its turn: {looks:?}");
        // With more namespaces than looks each comes in its turn, too.
        let names: Vec<String> = (0..6).map(|nth| format!("n{nth}")).collect();
        let units: Vec<UnitKey> = names.iter().map(|name| unit(name)).collect();
        let mut served = BTreeSet::new();
        for _ in 0..2 {
            let (first, _) = all.first(units.iter().zip(names.iter().map(String::as_str)));
            for key in first {
                let nth = units.iter().position(|unit| *unit == key).unwrap();
                all.note((&key, &names[nth]), looked(now));
                served.insert(key);
            }
        }
        assert_eq!(served.len(), 6);
        assert!(!all.first(units[..2].iter().map(|key| (key, "ml"))).1);
        let turns = (0..20).flat_map(|_| &units[..2]).map(|key| (key, "ml"));
        assert_eq!(Looks::default().first(turns), (units[..2].iter().cloned().collect(), false));
    }
}

//! What the shares of a namespace may come to together, as annotations of the Namespace say, and what they come to. Who
//! may write namespaces decides: tenants with the roles `edit` and `admin` may not. Whole GPUs, MIG devices and shares that
//! kube-scheduler places are not counted here; MIG devices that the controller places are.

use std::collections::BTreeMap;

use crate::model::claim::ClaimKey;
use crate::model::names::{MAX_SHARE_GPUS, MAX_SHARE_MEMORY};
use crate::model::quantity::{Bytes, Quantity};

/// Bytes of an annotation's text that are repeated.
const TEXT_BYTES_MAX: usize = 64;

/// Of a namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bounds {
    /// In MiB.
    memory: Bound,
    /// A share counts once for each GPU that it is on.
    gpus: Bound,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
enum Bound {
    #[default]
    None,
    Most(u64),
    /// What stands there. Until it is corrected nothing more is placed: whoever wrote it wanted a bound.
    Unreadable(String),
}

/// What shares come to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Amounts {
    pub mib: u64,
    pub gpus: u64,
}

impl Amounts {
    pub fn plus(self, other: Self) -> Self {
        Self { mib: self.mib.saturating_add(other.mib), gpus: self.gpus.saturating_add(other.gpus) }
    }

    pub fn minus(self, other: Self) -> Self {
        Self { mib: self.mib.saturating_sub(other.mib), gpus: self.gpus.saturating_sub(other.gpus) }
    }
}

impl Bounds {
    /// By the annotations of a Namespace.
    pub fn of(annotations: Option<&BTreeMap<String, String>>) -> Self {
        let text = |name: &str| annotations.and_then(|all| all.get(name)).map(|text| text.trim());
        let bound = |name: &str, read: fn(&str) -> Option<u64>| match text(name) {
            None => Bound::None,
            Some(text) => read(text).map_or_else(|| Bound::Unreadable(beginning(text)), Bound::Most),
        };
        Self { memory: bound(MAX_SHARE_MEMORY, mib), gpus: bound(MAX_SHARE_GPUS, |text| text.parse().ok()) }
    }

    /// MiB of shares at most; none: no bound that can be read.
    pub fn max_mib(&self) -> Option<u64> {
        self.memory.most()
    }

    /// GPUs of shares at most; none: no bound that can be read.
    pub fn max_gpus(&self) -> Option<u64> {
        self.gpus.most()
    }

    /// There is none.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// What is wrong with the annotations, and what to do, in words.
    pub fn problems(&self) -> impl Iterator<Item = String> {
        let memory = self.memory.problem(MAX_SHARE_MEMORY, "amount of memory", "64Gi");
        let gpus = self.gpus.problem(MAX_SHARE_GPUS, "number of GPUs", "4");
        memory.into_iter().chain(gpus)
    }

    /// Why shares that come to `asked` may not be placed beside those of the namespace that come to `used`; none: they
    /// may.
    pub fn exceeded(&self, namespace: &str, used: Amounts, asked: Amounts) -> Option<String> {
        if let Some(problem) = self.problems().next() {
            return Some(format!("no share is placed in namespace {namespace}: its annotation {problem}"));
        }
        let memory = self.memory.words(used.mib, asked.mib, " MiB of shares");
        let gpus = self.gpus.words(used.gpus, asked.gpus, " GPUs of shares");
        let named = [(memory, MAX_SHARE_MEMORY), (gpus, MAX_SHARE_GPUS)];
        let told = named.into_iter().filter_map(|(words, name)| Some(format!("{} ({name})", words?)));
        let told: Vec<String> = told.collect();
        (!told.is_empty()).then(|| format!("namespace {namespace} {}", told.join("; ")))
    }
}

impl Bound {
    fn most(&self) -> Option<u64> {
        match self {
            Self::Most(most) => Some(*most),
            Self::None | Self::Unreadable(_) => None,
        }
    }

    fn problem(&self, name: &str, what: &str, such: &str) -> Option<String> {
        match self {
            Self::Unreadable(text) => {
                Some(format!("{name} is {text:?}, which is no {what}; write one such as {such}"))
            }
            Self::None | Self::Most(_) => None,
        }
    }

    fn words(&self, used: u64, asked: u64, unit: &str) -> Option<String> {
        let Self::Most(most) = *self else { return None };
        if used.saturating_add(asked) <= most {
            return None;
        }
        let hint = match asked > most {
            true => "which is more than all of it",
            false => "which is placed once others of the namespace have ended",
        };
        Some(format!("may have {most}{unit}; {used} are used and {asked} are asked for, {hint}"))
    }
}

/// Whole MiB, rounded down. Less than one MiB was not meant in bytes.
fn mib(text: &str) -> Option<u64> {
    let bytes = text.parse::<Quantity>().ok().and_then(Quantity::units_ceil).map(Bytes)?;
    (bytes.0 == 0 || bytes.mib_floor() > 0).then(|| bytes.mib_floor())
}

fn beginning(text: &str) -> String {
    text[..text.floor_char_boundary(TEXT_BYTES_MAX)].to_owned()
}

/// What claims have, or are to have, of which namespace.
#[derive(Debug, Default)]
pub struct NamespaceUsage {
    claims: BTreeMap<ClaimKey, (String, Amounts)>,
    namespaces: BTreeMap<String, Amounts>,
}

impl NamespaceUsage {
    /// A claim has so much now. `namespace`: its own, as far as it is still known.
    pub fn set(&mut self, claim: ClaimKey, namespace: Option<&str>, now: Amounts) {
        let before = self.claims.remove(&claim);
        let namespace =
            before.as_ref().map(|(namespace, _)| namespace.clone()).or(namespace.map(str::to_owned));
        let Some(namespace) = namespace else { return };
        let before = before.map_or(Amounts::default(), |(_, amounts)| amounts);
        let sum = self.of(&namespace).minus(before).plus(now);
        match sum == Amounts::default() {
            true => drop(self.namespaces.remove(&namespace)),
            false => drop(self.namespaces.insert(namespace.clone(), sum)),
        }
        if now != Amounts::default() {
            self.claims.insert(claim, (namespace, now));
        }
    }

    pub fn of(&self, namespace: &str) -> Amounts {
        self.namespaces.get(namespace).copied().unwrap_or_default()
    }

    pub fn of_claim(&self, claim: ClaimKey) -> Amounts {
        self.claims.get(&claim).map_or(Amounts::default(), |(_, amounts)| *amounts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::claim::ClaimKeys;

    fn bounds(memory: &str, gpus: &str) -> Bounds {
        let given = [(MAX_SHARE_MEMORY, memory), (MAX_SHARE_GPUS, gpus)];
        let given = given.into_iter().filter(|(_, text)| !text.is_empty());
        let annotations = given.map(|(name, text)| (name.to_owned(), text.to_owned())).collect();
        Bounds::of(Some(&annotations))
    }

    fn amounts(mib: u64, gpus: u64) -> Amounts {
        Amounts { mib, gpus }
    }

    #[test]
    fn a_bound_is_kept_to_the_last_mib_and_gpu_and_told_with_all_three_numbers() {
        assert!(bounds("", "").is_none() && Bounds::of(None).is_none());
        let none = bounds("", "").exceeded("ml", amounts(u64::MAX, 9), amounts(1, 1));
        assert_eq!(none, None);
        let both = bounds("64Gi", "4");
        assert_eq!(both.exceeded("ml", amounts(45_056, 3), amounts(20_480, 1)), None);
        assert_eq!(
            both.exceeded("ml", amounts(45_056, 3), amounts(20_481, 1)).unwrap(),
            "namespace ml may have 65536 MiB of shares; 45056 are used and 20481 are asked for, which is placed once \
             others of the namespace have ended (tranche.dev/max-share-memory)"
        );
        let words = both.exceeded("ml", amounts(0, 0), amounts(70_000, 5)).unwrap();
        assert!(
            words.contains("may have 65536 MiB of shares; 0 are used and 70000 are asked for"),
            "{words}"
        );
        assert!(words.contains("may have 4 GPUs of shares; 0 are used and 5 are asked for"), "{words}");
        assert_eq!(words.matches("more than all of it").count(), 2, "{words}");
        assert!(bounds("0", "").exceeded("ml", amounts(0, 0), amounts(1, 1)).is_some());
        assert!(bounds("", "0").exceeded("ml", amounts(0, 0), amounts(1, 1)).is_some());
    }

    #[test]
    fn what_cannot_be_read_lets_nothing_through_and_says_what_to_write() {
        for (memory, gpus, words) in [
            (
                "lots",
                "",
                "max-share-memory is \"lots\", which is no amount of memory; write one such as 64Gi",
            ),
            ("64", "", "max-share-memory is \"64\""),
            ("-1Gi", "", "max-share-memory is \"-1Gi\""),
            ("", "1.5", "max-share-gpus is \"1.5\", which is no number of GPUs; write one such as 4"),
            ("64Gi", "-1", "max-share-gpus is \"-1\""),
        ] {
            let bad = bounds(memory, gpus);
            let refused = bad.exceeded("ml", amounts(0, 0), amounts(1, 1)).unwrap();
            assert!(refused.starts_with("no share is placed in namespace ml: its annotation"), "{refused}");
            assert!(refused.contains(words), "{refused}");
            assert_eq!(bad.problems().count(), 1);
        }
        let long = "é".repeat(1000);
        assert!(bounds(&long, "").problems().next().unwrap().len() < 300);
    }

    #[test]
    fn claims_are_summed_by_namespace_until_they_have_nothing() {
        let (mut usage, mut keys) = (NamespaceUsage::default(), ClaimKeys::default());
        let [a, b, c] = [(); 3].map(|()| keys.issue());
        usage.set(a, Some("ml"), amounts(1000, 1));
        usage.set(b, Some("ml"), amounts(500, 2));
        usage.set(c, Some("other"), amounts(7, 1));
        assert_eq!((usage.of("ml"), usage.of("other")), (amounts(1500, 3), amounts(7, 1)));
        usage.set(a, Some("ml"), amounts(600, 1));
        // Nobody knows the claim any more.
        usage.set(b, None, Amounts::default());
        assert_eq!(usage.of("ml"), amounts(600, 1));
        usage.set(a, None, Amounts::default());
        usage.set(a, None, amounts(1, 1));
        assert_eq!((usage.of("ml"), usage.claims.len(), usage.namespaces.len()), (amounts(0, 0), 1, 1));
    }
}

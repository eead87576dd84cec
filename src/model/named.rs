//! Values by name. Devices and nodes are many and alike: what two of them have in common is there once.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Values by name, in the order of the names.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Named<K: ?Sized, V: ?Sized> {
    names: Arc<[Arc<K>]>,
    /// As many as there are names.
    values: Box<[Arc<V>]>,
}

impl<K: ?Sized, V: ?Sized> Default for Named<K, V> {
    fn default() -> Self {
        Self { names: Arc::new([]), values: Box::new([]) }
    }
}

impl<K: ?Sized, V: ?Sized> Clone for Named<K, V> {
    fn clone(&self) -> Self {
        Self { names: Arc::clone(&self.names), values: self.values.clone() }
    }
}

impl<K: Ord + ?Sized, V: ?Sized> Named<K, V> {
    pub fn get<Q: Ord + ?Sized>(&self, name: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        let at = self.names.binary_search_by(|one| (**one).borrow().cmp(name)).ok()?;
        self.values.get(at).map(|value| &**value)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.names.iter().zip(&self.values).map(|(name, value)| (&**name, &**value))
    }

    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.names.iter().map(|name| &**name)
    }

    /// The same with another value of a name.
    #[must_use]
    pub fn with(&self, name: impl Into<Arc<K>>, value: impl Into<Arc<V>>) -> Self {
        let known = self.names.iter().cloned().zip(self.values.iter().cloned());
        known.chain([(name.into(), value.into())]).collect()
    }
}

impl<K: Ord + ?Sized, V: PartialEq + ?Sized> Named<K, V> {
    /// Takes names and values that the other has as well from there.
    pub fn share(&mut self, other: &Self) {
        let at = |name: &Arc<K>| other.names.binary_search(name).ok();
        for (name, value) in self.names.iter().zip(&mut self.values) {
            let Some(worth) = at(name).and_then(|at| other.values.get(at)) else { continue };
            if value == worth {
                value.clone_from(worth);
            }
        }
        if self.names == other.names {
            self.names.clone_from(&other.names);
        } else {
            let shared = |name: &Arc<K>| at(name).and_then(|at| other.names.get(at)).unwrap_or(name).clone();
            self.names = self.names.iter().map(shared).collect();
        }
    }
}

impl<K: Ord + ?Sized, V: ?Sized, N: Into<Arc<K>>, W: Into<Arc<V>>> FromIterator<(N, W)> for Named<K, V> {
    /// The last value of a name counts.
    fn from_iter<I: IntoIterator<Item = (N, W)>>(all: I) -> Self {
        let all = all.into_iter().map(|(name, value)| (name.into(), value.into()));
        let (names, values): (Vec<Arc<K>>, Vec<Arc<V>>) = all.collect::<BTreeMap<_, _>>().into_iter().unzip();
        Self { names: names.into(), values: values.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_value_of_a_name_counts_and_what_is_alike_is_there_once() {
        let of = |all: &[(&str, &str)]| -> Named<str, str> { all.iter().copied().collect() };
        let one = of(&[("b", "1"), ("a", "2"), ("b", "3")]);
        assert_eq!(one.iter().collect::<Vec<_>>(), [("a", "2"), ("b", "3")]);
        assert_eq!((one.get("b"), one.get("c")), (Some("3"), None));
        let mut more = of(&[("a", "2"), ("b", "4"), ("c", "5")]);
        let before = more.clone();
        more.share(&one);
        assert_eq!(more, before, "the same is said");
        assert!(Arc::ptr_eq(&more.values[0], &one.values[0]) && Arc::ptr_eq(&more.names[1], &one.names[1]));
        assert!(!Arc::ptr_eq(&more.values[1], &one.values[1]), "the values differ");
        let mut alike = of(&[("a", "9"), ("b", "3")]);
        alike.share(&one);
        assert!(Arc::ptr_eq(&alike.names, &one.names) && Arc::ptr_eq(&alike.values[1], &one.values[1]));
        assert_eq!(alike, of(&[("a", "9"), ("b", "3")]));
        assert_eq!(one.with("a", "7"), of(&[("a", "7"), ("b", "3")]));
    }
}

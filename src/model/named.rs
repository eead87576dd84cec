//! What stands under qualified names. Devices are many and alike: what two of them have in common is there once.

use std::sync::Arc;

use super::facts::QualifiedName;

/// Values by name, in the order of the names.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Named<V>(Vec<(Arc<QualifiedName>, Arc<V>)>);

impl<V> Default for Named<V> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<V> Named<V> {
    fn place(&self, name: &QualifiedName) -> Result<usize, usize> {
        self.0.binary_search_by(|(one, _)| (**one).cmp(name))
    }

    pub fn get(&self, name: &QualifiedName) -> Option<&V> {
        self.place(name).ok().and_then(|at| self.0.get(at)).map(|(_, value)| &**value)
    }

    pub fn keys(&self) -> impl Iterator<Item = &QualifiedName> {
        self.0.iter().map(|(name, _)| &**name)
    }

    pub fn insert(&mut self, name: QualifiedName, value: V) {
        let entry = (Arc::new(name), Arc::new(value));
        match self.place(&entry.0) {
            Ok(at) => self.0[at] = entry,
            Err(at) => self.0.insert(at, entry),
        }
    }
}

impl<V: PartialEq> Named<V> {
    /// Takes names and values that the other has as well from there.
    pub fn share(&mut self, other: &Self) {
        for (name, value) in &mut self.0 {
            let Some((like, worth)) = other.place(name).ok().and_then(|at| other.0.get(at)) else { continue };
            name.clone_from(like);
            if value == worth {
                value.clone_from(worth);
            }
        }
    }
}

impl<V> FromIterator<(QualifiedName, V)> for Named<V> {
    fn from_iter<I: IntoIterator<Item = (QualifiedName, V)>>(all: I) -> Self {
        let mut named = Self::default();
        all.into_iter().for_each(|(name, value)| named.insert(name, value));
        named.0.shrink_to_fit();
        named
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_value_of_a_name_counts_and_what_is_alike_is_there_once() {
        let name = |text: &str| QualifiedName::of(text, "d");
        let of = |all: &[(&str, &str)]| -> Named<String> {
            all.iter().map(|(key, value)| (name(key), (*value).to_owned())).collect()
        };
        let one = of(&[("b", "1"), ("a", "2"), ("b", "3")]);
        assert_eq!(one.keys().map(|name| name.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!((one.get(&name("b")), one.get(&name("c"))), (Some(&"3".to_owned()), None));
        let mut other = of(&[("a", "2"), ("b", "4"), ("c", "5")]);
        let before = other.clone();
        other.share(&one);
        assert_eq!(other, before, "the same is said");
        assert!(Arc::ptr_eq(&other.0[0].1, &one.0[0].1) && Arc::ptr_eq(&other.0[1].0, &one.0[1].0));
        assert!(!Arc::ptr_eq(&other.0[1].1, &one.0[1].1), "the values differ");
    }
}

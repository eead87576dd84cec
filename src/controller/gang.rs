//! How many pods of a gang start together, and who says so. Pure: it knows neither pods nor their groups' objects.

use std::collections::BTreeMap;
use std::sync::Arc;

/// How many pods of a unit start together at least.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Minimum {
    /// Nobody says: all that are there, once no more have come for a while.
    AllThere,
    Pods(Need),
    /// None may start now.
    None(Obstacle),
}

/// Why no pod of a unit may start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Obstacle {
    /// The pod's scheduler puts pods into PodGroups, and has put this one into none yet.
    NoGroup { scheduler: String },
    /// The PodGroup that the pod names does not exist yet.
    NoObject { scheduler: String },
    /// PodGroups of this API group have not been listed: nobody knows how many pods start together.
    NotListed { api: &'static str },
    /// What the PodGroup's status says: its queue does not let it start.
    Refused { words: String },
}

/// A number of pods, and of which parts of the gang some of them have to be: Volcano's tasks, KAI's subgroups.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Need {
    pods: usize,
    /// None: any of them.
    parts: Option<Arc<BTreeMap<String, usize>>>,
    /// Pods that ask for no share are counted as well: a launcher.
    counts_all: bool,
}

/// Pods of a gang that need no place any more.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Placed {
    /// They have their place.
    pods: usize,
    parts: BTreeMap<String, usize>,
    /// They ask for no share.
    others: usize,
    others_parts: BTreeMap<String, usize>,
}

impl Minimum {
    /// Of a pod that is in no gang.
    pub const ONE: Self = Self::Pods(Need { pods: 1, parts: None, counts_all: false });

    pub fn pods(pods: usize) -> Self {
        Self::Pods(Need::new(pods, BTreeMap::new()))
    }

    /// A pod starts whatever becomes of the others.
    pub fn is_one(&self) -> bool {
        matches!(self, Self::Pods(need) if need.pods <= 1)
    }

    /// What two pods of one gang say together: the one that asks for more counts.
    pub fn stronger(self, other: Self) -> Self {
        match (self, other) {
            (none @ Self::None(_), _) | (_, none @ Self::None(_)) => none,
            (Self::Pods(a), Self::Pods(b)) => Self::Pods(if b.pods > a.pods { b } else { a }),
            (pods @ Self::Pods(_), Self::AllThere) | (Self::AllThere, pods) => pods,
        }
    }
}

impl Need {
    /// At least `pods` in all, and of each part at least its number.
    pub fn new(pods: usize, mut parts: BTreeMap<String, usize>) -> Self {
        parts.retain(|_, pods| *pods > 0);
        let together = parts.values().fold(0, |sum: usize, pods| sum.saturating_add(*pods));
        let parts = (!parts.is_empty()).then(|| Arc::new(parts));
        Self { pods: pods.max(together), parts, counts_all: false }
    }

    /// As whoever groups pods counts them: those that ask for no share among them.
    #[must_use]
    pub fn of_all(self) -> Self {
        Self { counts_all: true, ..self }
    }

    pub fn count(&self) -> usize {
        self.pods
    }

    /// Pods that ask for no share are counted as well.
    pub fn counts_all(&self) -> bool {
        self.counts_all
    }

    /// Of certain parts of the gang some have to be there.
    pub fn has_parts(&self) -> bool {
        self.parts.is_some()
    }

    /// What is still needed beside pods that have their place.
    pub fn beside(&self, placed: &Placed) -> Self {
        let of = |parts: &BTreeMap<String, usize>, part: &String| parts.get(part).copied().unwrap_or(0);
        let left = |(part, pods): (&String, &usize)| {
            let others = if self.counts_all { of(&placed.others_parts, part) } else { 0 };
            (part.clone(), pods.saturating_sub(of(&placed.parts, part)).saturating_sub(others))
        };
        let others = if self.counts_all { placed.others } else { 0 };
        let pods = self.pods.saturating_sub(placed.pods).saturating_sub(others);
        let parts = self.parts.iter().flat_map(|parts| parts.iter()).map(left).collect();
        Self { counts_all: self.counts_all, ..Self::new(pods, parts) }
    }

    /// Which of these pods start together, by their places in the list: of each part the first ones, then the first of
    /// all. `there`: each pod's part. None: they are too few.
    pub fn choose(&self, there: &[Option<&str>]) -> Option<Vec<usize>> {
        let mut left = self.parts.as_deref().cloned().unwrap_or_default();
        let (mut chosen, mut others) = (Vec::new(), Vec::new());
        for (at, part) in there.iter().enumerate() {
            match part.and_then(|part| left.get_mut(part)).filter(|left| **left > 0) {
                Some(left) => {
                    *left -= 1;
                    chosen.push(at);
                }
                None => others.push(at),
            }
        }
        if left.values().any(|left| *left > 0) || there.len() < self.pods {
            return None;
        }
        chosen.extend(others.into_iter().take(self.pods.saturating_sub(chosen.len())));
        chosen.sort_unstable();
        Some(chosen)
    }
}

impl Placed {
    pub fn add(&mut self, part: Option<&str>) {
        self.pods += 1;
        if let Some(part) = part {
            *self.parts.entry(part.to_owned()).or_default() += 1;
        }
    }

    /// A pod that asks for no share.
    pub fn add_other(&mut self, part: Option<&str>) {
        self.others += 1;
        if let Some(part) = part {
            *self.others_parts.entry(part.to_owned()).or_default() += 1;
        }
    }

    /// How many of them count for this need.
    pub fn counted(&self, need: &Need) -> usize {
        self.pods + if need.counts_all { self.others } else { 0 }
    }

    /// No pod has its place; others do not count.
    pub fn is_none(&self) -> bool {
        self.pods == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn need(pods: usize, parts: &[(&str, usize)]) -> Need {
        Need::new(pods, parts.iter().map(|(part, pods)| ((*part).to_owned(), *pods)).collect())
    }

    #[test]
    fn parts_come_first_and_others_fill_up() {
        let there = [Some("worker"), Some("worker"), Some("worker"), Some("master"), None];
        assert_eq!(need(3, &[("master", 1)]).choose(&there), Some(vec![0, 1, 3]));
        assert_eq!(need(0, &[("master", 1), ("worker", 2)]).choose(&there), Some(vec![0, 1, 3]));
        assert_eq!(need(5, &[("master", 1)]).choose(&there), Some(vec![0, 1, 2, 3, 4]));
        assert_eq!(need(6, &[]).choose(&there), None);
        assert_eq!(need(1, &[("master", 2)]).choose(&there), None);
        assert_eq!(need(1, &[("nobody", 1)]).choose(&there), None);
    }

    #[test]
    fn what_is_placed_is_needed_no_more() {
        let whole = need(4, &[("master", 1), ("worker", 2)]);
        let mut placed = Placed::default();
        placed.add(Some("worker"));
        placed.add(None);
        assert_eq!(whole.beside(&placed), need(2, &[("master", 1), ("worker", 1)]));
        (0..3).for_each(|_| placed.add(Some("worker")));
        // Four are there, but no master.
        assert_eq!(whole.beside(&placed), need(1, &[("master", 1)]));
        placed.add(Some("master"));
        assert_eq!(whole.beside(&placed).count(), 0);
    }

    #[test]
    fn a_launcher_counts_where_all_pods_are_counted() {
        let mut placed = Placed::default();
        placed.add_other(Some("launcher"));
        let whole = need(5, &[("launcher", 1), ("worker", 4)]);
        assert_eq!(whole.beside(&placed), whole);
        assert_eq!(whole.clone().of_all().beside(&placed), need(4, &[("worker", 4)]).of_all());
        assert!(placed.is_none());
    }

    #[test]
    fn the_stronger_of_two_counts() {
        let refused = Minimum::None(Obstacle::NotListed { api: "a" });
        assert_eq!(Minimum::AllThere.stronger(Minimum::pods(2)), Minimum::pods(2));
        assert_eq!(Minimum::pods(3).stronger(Minimum::pods(2)), Minimum::pods(3));
        assert_eq!(Minimum::pods(3).stronger(refused.clone()), refused);
        assert!(Minimum::ONE.is_one() && Minimum::pods(0).is_one() && !Minimum::AllThere.is_one());
    }
}

//! PodDisruptionBudgets: which pods they are about, and how many of these may go now. Where they may not be seen there
//! are none here, and the API server's answer to an eviction is all that is known of them.

use std::collections::BTreeMap;

use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};

use crate::controller::view::{ClusterView, Kind, News, Pod, groups};
use crate::feasible::PodLabels;
use crate::select::TICKS_PER_UNIT;

/// Budgets of a namespace whose selectors are kept. Where there are more, the namespace's pods stay.
const BUDGETS_OF_NAMESPACE_MAX: usize = 64;
/// Labels and values that a selector names. One with more is as if it were about all pods, and let none go.
const NAMED_MAX: usize = 256;
/// The same of all selectors of a namespace: whoever looks for victims pays for reading them, for each pod. Where there are
/// more, the namespace's pods stay.
const NAMED_OF_NAMESPACE_MAX: usize = 1024;
/// Bytes of them.
const SELECTOR_BYTES_MAX: usize = 16 << 10;

#[derive(Debug, Default)]
pub(super) struct Budgets {
    /// By namespace, then by namespace and name as one text.
    all: BTreeMap<String, BTreeMap<String, DisruptionBudget>>,
}

/// Which budgets are about a pod, and what it took to find out.
pub struct BudgetsOf<'a> {
    pub guard: BudgetGuard<'a>,
    /// In ticks of [`TICKS_PER_UNIT`].
    pub ticks: u64,
}

pub enum BudgetGuard<'a> {
    /// These, each with how many pods it lets go now.
    By(Vec<(&'a str, u32)>),
    /// Nobody knows: there are too many.
    Stays,
}

impl BudgetsOf<'_> {
    /// No budget is about it.
    pub fn is_unguarded(&self) -> bool {
        matches!(&self.guard, BudgetGuard::By(all) if all.is_empty())
    }
}

#[derive(Debug, Clone, PartialEq)]
struct DisruptionBudget {
    about: About,
    allowed: u32,
}

#[derive(Debug, Clone, PartialEq)]
enum About {
    Nothing,
    Chosen {
        selector: LabelSelector,
        /// Labels and values that it names.
        named: usize,
    },
    /// It is one too many: what it is about is not kept.
    Beyond,
}

impl About {
    fn named(&self) -> usize {
        match self {
            Self::Nothing | Self::Beyond => 0,
            Self::Chosen { named, .. } => *named,
        }
    }
}

impl Budgets {
    pub fn keys(&self) -> impl Iterator<Item = &String> {
        self.all.values().flat_map(BTreeMap::keys)
    }
}

impl ClusterView {
    pub(super) fn set_budget(&mut self, object: PodDisruptionBudget) -> Vec<News> {
        let key = groups::key_of(&object.metadata);
        let namespace = object.metadata.namespace.unwrap_or_default();
        let allowed = object.status.and_then(|status| status.disruptions_allowed).unwrap_or(0);
        let allowed = u32::try_from(allowed).unwrap_or(0);
        let selector = object.spec.and_then(|spec| spec.selector);
        let all = self.optional.budgets.all.entry(namespace.clone()).or_default();
        let had_all = all.values().all(|one| one.about != About::Beyond);
        let others = all.iter().filter(|(of, one)| **of != key && one.about != About::Beyond);
        let (count, named) =
            others.fold((1, 0), |(count, named), (_, one)| (count + 1, named + one.about.named()));
        let fresh = DisruptionBudget::of(selector, allowed);
        let fits = count <= BUDGETS_OF_NAMESPACE_MAX && named + fresh.about.named() <= NAMED_OF_NAMESPACE_MAX;
        let fresh = if fits { fresh } else { DisruptionBudget { about: About::Beyond, allowed: 0 } };
        let is_told = had_all && fresh.about == About::Beyond;
        let before = all.insert(key, fresh.clone());
        let mut news = if before.as_ref() == Some(&fresh) { Vec::new() } else { vec![News::Budgets] };
        news.extend(is_told.then(|| {
            News::Trouble(format!(
                "namespace {namespace} has more than {BUDGETS_OF_NAMESPACE_MAX} PodDisruptionBudgets, or their \
                 selectors name more than {NAMED_OF_NAMESPACE_MAX} labels and values: none of its pods ends for others"
            ))
        }));
        news
    }

    pub(super) fn drop_budget(&mut self, key: &str) -> Vec<News> {
        let gone = self.optional.budgets.all.values_mut().any(|all| all.remove(key).is_some());
        self.optional.budgets.all.retain(|_, all| !all.is_empty());
        if gone { vec![News::Budgets] } else { Vec::new() }
    }

    /// They may be seen, and all of them are known.
    pub fn knows_budgets(&self) -> bool {
        self.lists.complete.contains(&Kind::Budgets)
    }

    /// The budgets that are about a pod.
    pub fn budgets_of(&self, pod: &Pod) -> BudgetsOf<'_> {
        let mut ticks = 0;
        let mut found = Vec::new();
        // Who has more labels than are kept stays, whatever is found here.
        let none = PodLabels::default();
        let labels = pod.standing.labels.as_deref().unwrap_or(&none);
        for (key, budget) in self.optional.budgets.all.get(&pod.at.namespace).into_iter().flatten() {
            let is_about = match &budget.about {
                About::Beyond => return BudgetsOf { guard: BudgetGuard::Stays, ticks },
                About::Nothing => false,
                About::Chosen { selector, named } => {
                    ticks += TICKS_PER_UNIT * (1 + *named as u64);
                    selects(selector, labels)
                }
            };
            if is_about {
                found.push((key.as_str(), budget.allowed));
            }
        }
        BudgetsOf { guard: BudgetGuard::By(found), ticks }
    }
}

impl DisruptionBudget {
    fn of(selector: Option<LabelSelector>, allowed: u32) -> Self {
        let Some(selector) = selector else { return Self { about: About::Nothing, allowed } };
        let labels = selector.match_labels.iter().flatten();
        let labels = labels.map(|(name, text)| (2, name.len() + text.len()));
        let of = |one: &LabelSelectorRequirement| {
            let values = one.values.iter().flatten();
            (1 + values.clone().count(), one.key.len() + values.map(String::len).sum::<usize>())
        };
        let of_expressions = selector.match_expressions.iter().flatten().map(of);
        let (named, bytes) = labels.chain(of_expressions).fold((0, 0), |(named, bytes), one| {
            (usize::saturating_add(named, one.0), usize::saturating_add(bytes, one.1))
        });
        match named <= NAMED_MAX && bytes <= SELECTOR_BYTES_MAX {
            true => Self { about: About::Chosen { selector, named }, allowed },
            // A selector that says nothing chooses all.
            false => {
                Self { about: About::Chosen { selector: LabelSelector::default(), named: 0 }, allowed: 0 }
            }
        }
    }
}

/// As the API server reads it: a selector that says nothing chooses all.
fn selects(selector: &LabelSelector, labels: &PodLabels) -> bool {
    let has = |(name, text): (&String, &String)| labels.get(name.as_str()) == Some(text.as_str());
    selector.match_labels.iter().flatten().all(has)
        && selector.match_expressions.iter().flatten().all(|one| holds(one, labels))
}

fn holds(one: &LabelSelectorRequirement, labels: &PodLabels) -> bool {
    let found = labels.get(one.key.as_str());
    let named = |text: &str| one.values.iter().flatten().any(|value| value == text);
    match one.operator.as_str() {
        "In" => found.is_some_and(named),
        "NotIn" => !found.is_some_and(named),
        "Exists" => found.is_some(),
        "DoesNotExist" => found.is_none(),
        // Of a newer API: it may well be about the pod.
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn chooses(selector: Value, labels: Value) -> bool {
        let labels: BTreeMap<String, String> = serde_json::from_value(labels).unwrap();
        let labels = labels.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
        selects(&serde_json::from_value(selector).unwrap(), &labels)
    }

    #[test]
    fn a_selector_chooses_as_the_api_server_does() {
        let labels = json!({"app": "web", "tier": "front"});
        assert!(chooses(json!({}), labels.clone()) && chooses(json!({}), json!({})));
        assert!(chooses(json!({"matchLabels": {"app": "web"}}), labels.clone()));
        assert!(!chooses(json!({"matchLabels": {"app": "web", "tier": "back"}}), labels.clone()));
        for (operator, values, right) in [
            ("In", json!(["front", "back"]), true),
            ("In", json!(["back"]), false),
            ("NotIn", json!(["back"]), true),
            ("NotIn", json!(["front"]), false),
            ("Exists", json!(null), true),
            ("DoesNotExist", json!(null), false),
        ] {
            let one = json!({"key": "tier", "operator": operator, "values": values});
            assert_eq!(chooses(json!({"matchExpressions": [one]}), labels.clone()), right, "{operator}");
        }
        let missing = json!({"key": "zone", "operator": "NotIn", "values": ["a"]});
        assert!(chooses(json!({"matchExpressions": [missing]}), labels));
    }
}

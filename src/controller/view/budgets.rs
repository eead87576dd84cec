//! PodDisruptionBudgets: which pods they are about, and how many of these may go now. Where they may not be seen there
//! are none here, and the API server's answer to an eviction is all that is known of them.

use std::collections::BTreeMap;

use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};

use crate::controller::view::{ClusterView, News, Pod, groups};

#[derive(Debug, Default)]
pub(super) struct Budgets {
    /// By namespace, then by namespace and name as one text.
    all: BTreeMap<String, BTreeMap<String, Budget>>,
}

#[derive(Debug, Clone, PartialEq)]
struct Budget {
    /// None: it is about no pod.
    selector: Option<LabelSelector>,
    allowed: u32,
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
        let selector = object.spec.and_then(|spec| spec.selector);
        let fresh = Budget { selector, allowed: u32::try_from(allowed).unwrap_or(0) };
        let before = self.optional.budgets.all.entry(namespace).or_default().insert(key, fresh.clone());
        if before.as_ref() == Some(&fresh) { Vec::new() } else { vec![News::Budgets] }
    }

    pub(super) fn drop_budget(&mut self, key: &str) -> Vec<News> {
        let gone = self.optional.budgets.all.values_mut().any(|all| all.remove(key).is_some());
        self.optional.budgets.all.retain(|_, all| !all.is_empty());
        if gone { vec![News::Budgets] } else { Vec::new() }
    }

    /// The budgets that are about a pod, and how many pods each lets go now.
    pub fn budgets_of(&self, pod: &Pod) -> impl Iterator<Item = (&str, u32)> {
        let all = self.optional.budgets.all.get(&pod.at.namespace);
        let labels = pod.standing.labels.clone();
        all.into_iter().flatten().filter_map(move |(key, budget)| {
            let selector = budget.selector.as_ref()?;
            selects(selector, &labels).then_some((key.as_str(), budget.allowed))
        })
    }
}

/// As the API server reads it: a selector that says nothing chooses all.
fn selects(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> bool {
    let has = |(name, text): (&String, &String)| labels.get(name) == Some(text);
    selector.match_labels.iter().flatten().all(has)
        && selector.match_expressions.iter().flatten().all(|one| holds(one, labels))
}

fn holds(one: &LabelSelectorRequirement, labels: &BTreeMap<String, String>) -> bool {
    let found = labels.get(&one.key);
    let named = |text: &String| one.values.iter().flatten().any(|value| value == text);
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
        selects(&serde_json::from_value(selector).unwrap(), &serde_json::from_value(labels).unwrap())
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

//! `spec.nodeSelector`, and the required part of node affinity: the pod's own, and that of its volumes.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{NodeSelectorRequirement, NodeSelectorTerm};

use super::{Demands, Node, Unfit};
use crate::model::named::Named;

type Labels = Named<str, str>;

/// Both must match.
pub fn unmatched(pod: &Demands, node: &Node) -> Option<Unfit> {
    selector(pod.node_selector(), &node.labels).or_else(|| affinity(pod, node))
}

fn selector(wanted: &BTreeMap<String, String>, labels: &Labels) -> Option<Unfit> {
    wanted.iter().find_map(|(key, wanted)| match labels.get(key.as_str()) {
        Some(found) if found == wanted => None,
        Some(found) => {
            let (key, wanted, found) = (key.clone(), wanted.clone(), found.to_owned());
            Some(Unfit::Selector { key, wanted, found })
        }
        None => Some(Unfit::SelectorLabel { key: key.clone(), wanted: wanted.clone() }),
    })
}

fn affinity(pod: &Demands, node: &Node) -> Option<Unfit> {
    let terms = &pod.affinity()?.node_selector_terms;
    unmet_terms(terms, node).map(|failed| Unfit::Affinity { terms: terms.len(), failed })
}

/// The first bound volume of the pod that the node cannot reach.
pub fn unreached(pod: &Demands, node: &Node) -> Option<Unfit> {
    pod.volumes().iter().find_map(|volume| {
        let terms = volume.reach.node_selector_terms();
        let failed = unmet_terms(terms, node)?;
        let failed = match terms.len() {
            1 => failed,
            several => {
                format!("none of the {several} terms of its node affinity matches; of the last, {failed}")
            }
        };
        Some(Unfit::Volume { claim: volume.claim.to_string(), failed })
    })
}

/// What fails of the last term, if none matches. Terms are alternatives; a term without any requirement matches nothing,
/// and so does a list without a term.
fn unmet_terms(terms: &[NodeSelectorTerm], node: &Node) -> Option<String> {
    let mut failed = "it has none".to_owned();
    for term in terms {
        failed = unmet(term, node)?;
    }
    Some(failed)
}

/// The first requirement of a term that is not met; all must be.
fn unmet(term: &NodeSelectorTerm, node: &Node) -> Option<String> {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    if expressions.is_empty() && fields.is_empty() {
        return Some("it is empty, which matches no node".to_owned());
    }
    let label = |one: &NodeSelectorRequirement| node.labels.get(one.key.as_str());
    let by_label = |one: &&NodeSelectorRequirement| !label_meets(one, label(one));
    let name = node.name().as_str();
    let failed = expressions.iter().find(by_label).map(|one| (one, label(one)));
    let by_field = |one: &&NodeSelectorRequirement| !field_meets(one, name);
    let failed = failed.or_else(|| fields.iter().find(by_field).map(|one| (one, Some(name))));
    failed.map(|(one, found)| {
        let values = one.values.as_deref().unwrap_or_default().join(", ");
        let found = found.map_or("the label is missing".to_owned(), |found| format!("it is {found:?}"));
        format!("{} {} [{values}] fails: {found}", one.key, one.operator)
    })
}

/// What is malformed (the API server lets none through) is not met.
fn label_meets(one: &NodeSelectorRequirement, found: Option<&str>) -> bool {
    let values = one.values.as_deref().unwrap_or_default();
    let listed = |found: &str| values.iter().any(|value| value == found);
    match (one.operator.as_str(), found) {
        ("In", found) => found.is_some_and(listed),
        // Also without the label.
        ("NotIn", found) => !found.is_some_and(listed),
        ("Exists", found) => found.is_some(),
        ("DoesNotExist", found) => found.is_none(),
        ("Gt", Some(found)) => compare(found, values).is_some_and(|(found, limit)| found > limit),
        ("Lt", Some(found)) => compare(found, values).is_some_and(|(found, limit)| found < limit),
        _ => false,
    }
}

fn compare(found: &str, values: &[String]) -> Option<(i64, i64)> {
    let [limit] = values else { return None };
    Some((found.parse().ok()?, limit.parse().ok()?))
}

/// The only field is the node's name, with one value.
fn field_meets(one: &NodeSelectorRequirement, name: &str) -> bool {
    let [value] = one.values.as_deref().unwrap_or_default() else { return false };
    match (one.key.as_str(), one.operator.as_str()) {
        ("metadata.name", "In") => name == value,
        ("metadata.name", "NotIn") => name != value,
        _ => false,
    }
}

//! The API server's limits on slices (resource.k8s.io/v1), and those that it leaves to the allocator.
//! A slice with a violation is never sent: it would be refused as a whole, with every GPU in it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use k8s_openapi::api::resource::v1::{CounterSet, Device, DeviceAttribute, DeviceCapacity, DeviceTaint};

use super::{
    COUNTER_SETS_PER_SLICE, COUNTERS_PER_SET, DEVICES_PER_SLICE, ENTRIES_PER_DEVICE, SliceContent,
    TAINTS_PER_DEVICE, VALUE_BYTES, policy,
};
use crate::model::names::{is_dns_label, is_dns_subdomain};
use crate::model::quantity::Quantity;

const LABEL_BYTES: usize = 63;
const SUBDOMAIN_BYTES: usize = 253;
/// A domain before an attribute's or capacity's name.
const DOMAIN_BYTES: usize = 63;
const IDENTIFIER_BYTES: usize = 32;
const COUNTER_SETS_CONSUMED: usize = 2;
const BINDING_CONDITIONS: usize = 4;

/// One limit that is not kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// e.g. `slices[0].devices[gpu-3].attributes[uuid]`
    pub path: String,
    pub problem: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.problem)
    }
}

/// Every limit that the slices of one pool do not keep. Empty: they can be published.
pub fn violations(contents: &[SliceContent]) -> Vec<Violation> {
    let mut found = Violations::default();
    found.check(contents.is_empty(), "slices", || "are none: a pool has at least one slice".to_owned());
    let mut names = BTreeSet::new();
    for (index, content) in contents.iter().enumerate() {
        let path = format!("slices[{index}]");
        found.slice(&path, content, contents);
        for device in &content.devices {
            let path = format!("{path}.devices[{}]", device.name);
            found.check(!names.insert(&device.name), &path, || "is listed twice in the pool".to_owned());
            found.device(&path, device);
        }
    }
    found.counters(contents);
    found.0
}

#[derive(Default)]
struct Violations(Vec<Violation>);

impl Violations {
    fn check(&mut self, wrong: bool, path: &str, problem: impl FnOnce() -> String) {
        if wrong {
            self.0.push(Violation { path: path.to_owned(), problem: problem() });
        }
    }

    fn limit(&mut self, path: &str, what: &str, count: usize, most: usize) {
        self.check(count > most, path, || format!("has {count} {what}; at most {most} are allowed"));
    }

    fn slice(&mut self, path: &str, content: &SliceContent, all: &[SliceContent]) {
        let (node, pool) = (content.node.as_str(), content.pool.to_string());
        self.check(!is_dns_subdomain(node), &format!("{path}.nodeName"), || {
            format!("{node:?} is not a valid DNS subdomain")
        });
        let pool_is_well = pool.len() <= SUBDOMAIN_BYTES && pool.split('/').all(is_dns_subdomain);
        self.check(!pool_is_well, &format!("{path}.pool"), || format!("{pool:?} is not a valid pool name"));
        let apart = all.iter().any(|other| other.pool != content.pool || other.node != content.node);
        self.check(apart, path, || "is of another pool or node than the others".to_owned());
        self.limit(path, "devices", content.devices.len(), DEVICES_PER_SLICE);
    }

    /// A pool in which a device consumes what no slice has, or of whose counter sets two have one name, is no pool to the
    /// allocator.
    fn counters(&mut self, contents: &[SliceContent]) {
        let mut sets: BTreeMap<&str, &CounterSet> = BTreeMap::new();
        for (index, content) in contents.iter().enumerate() {
            let path = format!("slices[{index}]");
            let both = !content.counters.is_empty() && !content.devices.is_empty();
            self.check(both, &path, || "has devices and counter sets; a slice has either".to_owned());
            self.limit(&path, "counter sets", content.counters.len(), COUNTER_SETS_PER_SLICE);
            for set in &content.counters {
                let path = format!("{path}.sharedCounters[{}]", set.name);
                self.check(sets.insert(&set.name, set).is_some(), &path, || {
                    "is there twice in the pool".to_owned()
                });
                self.check(set.counters.is_empty(), &path, || "has no counters".to_owned());
                self.limit(&path, "counters", set.counters.len(), COUNTERS_PER_SET);
                let names = std::iter::once(&set.name).chain(set.counters.keys());
                for name in names.filter(|name| !is_dns_label(name)) {
                    self.check(true, &path, || format!("{name:?} is not a valid DNS label"));
                }
            }
        }
        for device in contents.iter().flat_map(|content| &content.devices) {
            let path = format!("devices[{}]", device.name);
            let consumed: Vec<_> = device.consumes_counters.iter().flatten().collect();
            let shared = !consumed.is_empty() && device.allow_multiple_allocations == Some(true);
            // kubernetes/kubernetes#139034 and the bugs after it.
            self.check(shared, &path, || {
                "consumes counters and can be shared; no device does both".to_owned()
            });
            let empty = !consumed.is_empty() && device.capacity.as_ref().is_none_or(BTreeMap::is_empty);
            self.check(empty, &path, || "consumes counters and has no capacity".to_owned());
            for part in consumed {
                let set = sets.get(part.counter_set.as_str());
                let unknown = |name: &&String| set.is_none_or(|set| !set.counters.contains_key(*name));
                if let Some(name) = part.counters.keys().find(unknown) {
                    let words = || format!("consumes {name} of {}, which no slice has", part.counter_set);
                    self.check(true, &path, words);
                }
            }
        }
    }

    fn device(&mut self, path: &str, device: &Device) {
        self.check(!is_dns_label(&device.name), path, || {
            "has a name that is not a valid DNS label".to_owned()
        });
        let own = device.node_name.is_some() || device.node_selector.is_some() || device.all_nodes.is_some();
        self.check(own, path, || "has a node selection of its own; the slice has one".to_owned());
        let attributes = device.attributes.iter().flatten();
        let capacities = device.capacity.iter().flatten();
        let entries = attributes.clone().count() + capacities.clone().count();
        self.limit(path, "attributes and capacities", entries, ENTRIES_PER_DEVICE);
        for (name, value) in attributes {
            self.attribute(&format!("{path}.attributes[{name}]"), name, value);
        }
        let shared = device.allow_multiple_allocations == Some(true);
        for (name, capacity) in capacities {
            self.capacity(&format!("{path}.capacity[{name}]"), name, capacity, shared);
        }
        let empty_share = shared && device.capacity.as_ref().is_none_or(BTreeMap::is_empty);
        self.check(empty_share, path, || "can be shared without limit: it has no capacity".to_owned());
        self.optional_parts(path, device);
    }

    fn optional_parts(&mut self, path: &str, device: &Device) {
        let taints: Vec<_> = device.taints.iter().flatten().collect();
        self.limit(path, "taints", taints.len(), TAINTS_PER_DEVICE);
        for taint in taints {
            self.taint(&format!("{path}.taints[{}]", taint.key), taint);
        }
        let sets: Vec<_> = device.consumes_counters.iter().flatten().collect();
        self.limit(path, "counter sets", sets.len(), COUNTER_SETS_CONSUMED);
        for set in sets {
            self.limit(path, "counters of one set", set.counters.len(), COUNTERS_PER_SET);
        }
        for conditions in [&device.binding_conditions, &device.binding_failure_conditions] {
            let count = conditions.iter().flatten().count();
            self.limit(path, "binding conditions", count, BINDING_CONDITIONS);
        }
    }

    fn attribute(&mut self, path: &str, name: &str, value: &DeviceAttribute) {
        self.check(!is_qualified(name), path, || "has a name that is not a C identifier".to_owned());
        let lists = [
            value.bools.as_ref().map(Vec::len),
            value.ints.as_ref().map(Vec::len),
            value.strings.as_ref().map(Vec::len),
            value.versions.as_ref().map(Vec::len),
        ];
        let scalars =
            [value.bool.is_some(), value.int.is_some(), value.string.is_some(), value.version.is_some()];
        let values = scalars.iter().filter(|given| **given).count()
            + lists.iter().filter(|list| list.is_some()).count();
        self.check(values != 1, path, || format!("has {values} values; it needs exactly one"));
        self.check(lists.contains(&Some(0)), path, || "is an empty list".to_owned());
        for text in [&value.string, &value.version].into_iter().flatten() {
            self.limit(path, "bytes", text.len(), VALUE_BYTES);
        }
        let version = value.version.as_deref().unwrap_or("0.0.0");
        self.check(!is_semver(version), path, || format!("{version:?} is not a semantic version"));
    }

    fn capacity(&mut self, path: &str, name: &str, capacity: &DeviceCapacity, shared: bool) {
        self.check(!is_qualified(name), path, || "has a name that is not a C identifier".to_owned());
        let total = match capacity.value.0.parse::<Quantity>() {
            Ok(total) => total,
            Err(error) => return self.check(true, path, || error.to_string()),
        };
        match &capacity.request_policy {
            Some(_) if !shared => {
                self.check(true, path, || "has a request policy, but the device cannot be shared".to_owned());
            }
            Some(policy) => {
                for (field, problem) in policy::problems(policy, total) {
                    self.check(true, &format!("{path}.requestPolicy.{field}"), || problem);
                }
            }
            None => self.check(shared, path, || {
                "has no request policy: the first share would take all of it".to_owned()
            }),
        }
    }

    fn taint(&mut self, path: &str, taint: &DeviceTaint) {
        let known = ["None", "NoSchedule", "NoExecute"].contains(&taint.effect.as_str());
        self.check(!known, path, || format!("{:?} is not a valid effect", taint.effect));
        let (domain, key) = taint.key.split_once('/').unwrap_or(("x", &taint.key));
        let well = is_dns_subdomain(domain) && is_label_value(key) && !key.is_empty();
        self.check(!well, path, || "has a key that is not a valid label key".to_owned());
        let value = taint.value.as_deref().unwrap_or_default();
        self.check(!is_label_value(value), path, || format!("{value:?} is not a valid label value"));
    }
}

/// `identifier` or `domain/identifier`.
fn is_qualified(name: &str) -> bool {
    let (domain, identifier) = name.split_once('/').unwrap_or(("x", name));
    let first = |c: char| c.is_ascii_alphabetic() || c == '_';
    domain.len() <= DOMAIN_BYTES
        && is_dns_subdomain(domain)
        && identifier.len() <= IDENTIFIER_BYTES
        && identifier.starts_with(first)
        && identifier.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

fn is_label_value(text: &str) -> bool {
    let edge = |c: char| c.is_ascii_alphanumeric();
    let inner = |c: char| edge(c) || ['-', '_', '.'].contains(&c);
    text.is_empty()
        || (text.len() <= LABEL_BYTES
            && text.chars().all(inner)
            && text.starts_with(edge)
            && text.ends_with(edge))
}

/// Semantic Versioning 2.0.0, strictly.
fn is_semver(text: &str) -> bool {
    let (rest, build) = text.split_once('+').map_or((text, None), |(rest, build)| (rest, Some(build)));
    let (core, pre) = rest.split_once('-').map_or((rest, None), |(core, pre)| (core, Some(pre)));
    let number = |part: &str| part.parse::<u64>().is_ok_and(|n| n.to_string() == part);
    let word = |part: &str| !part.is_empty() && part.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    let pre_part = |part: &str| word(part) && (number(part) || !part.chars().all(|c| c.is_ascii_digit()));
    core.split('.').count() == 3
        && core.split('.').all(number)
        && pre.is_none_or(|pre| pre.split('.').all(pre_part))
        && build.is_none_or(|build| build.split('.').all(word))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::model::names::{NodeName, PoolName};

    fn slice(devices: Value) -> SliceContent {
        SliceContent {
            node: NodeName::new("node-a"),
            pool: PoolName::new("node-a"),
            devices: serde_json::from_value(devices).unwrap(),
            counters: Vec::new(),
        }
    }

    fn problems(device: Value) -> Vec<String> {
        violations(&[slice(json!([device]))]).iter().map(ToString::to_string).collect()
    }

    #[track_caller]
    fn refused(device: Value, words: &str) {
        let problems = problems(device);
        assert!(problems.iter().any(|problem| problem.contains(words)), "{problems:?} lacks {words:?}");
    }

    #[test]
    fn a_device_within_the_limits_passes() {
        assert_eq!(
            problems(json!({
                "name": "gpu-0",
                "allowMultipleAllocations": true,
                "attributes": {"uuid": {"string": "x".repeat(64)}, "a.example.com/b_1": {"int": 1},
                               "v": {"version": "1.2.3-rc.1+x"}},
                "capacity": {"memory": {"value": "80Gi", "requestPolicy": {"default": "80Gi"}}},
                "taints": [{"key": "gpu.nvidia.com/health", "effect": "NoSchedule", "value": "xid-79"}],
            })),
            Vec::<String>::new()
        );
    }

    #[test]
    fn what_the_api_server_refuses_is_named() {
        let with = |key: &str, value: Value| json!({"name": "gpu-0", key: value});
        refused(json!({"name": "GPU-0"}), "not a valid DNS label");
        refused(json!({"name": "x".repeat(64)}), "not a valid DNS label");
        refused(
            with("attributes", json!({"1a": {"int": 1}})),
            "attributes[1a]: has a name that is not a C identifier",
        );
        refused(with("attributes", json!({"a": {}})), "has 0 values");
        refused(with("attributes", json!({"a": {"int": 1, "bool": true}})), "has 2 values");
        refused(with("attributes", json!({"a": {"string": "x".repeat(65)}})), "65 bytes");
        refused(with("attributes", json!({"a": {"ints": []}})), "empty list");
        for version in ["1.2", "01.2.3", "1.2.3.4", "1.2.3-", "1.2.3-01", "v1.2.3"] {
            refused(with("attributes", json!({"a": {"version": version}})), "not a semantic version");
        }
        refused(with("capacity", json!({"memory": {"value": "80GiB"}})), "capacity[memory]: \"80GiB\"");
        refused(
            with("capacity", json!({"memory": {"value": "1", "requestPolicy": {"default": "1"}}})),
            "cannot be shared",
        );
        refused(with("allowMultipleAllocations", json!(true)), "no capacity");
        refused(
            json!({"name": "g", "allowMultipleAllocations": true, "capacity": {"memory": {"value": "1"}}}),
            "no request policy",
        );
        refused(with("taints", json!([{"key": "a/b", "effect": "Explode"}])), "is not a valid effect");
        refused(with("nodeName", json!("n")), "node selection of its own");
        let many: serde_json::Map<_, _> = (0..33).map(|i| (format!("a{i}"), json!({"int": i}))).collect();
        refused(with("attributes", many.into()), "has 33 attributes and capacities");
    }

    fn counted(set: Value, device: Value) -> Vec<String> {
        let counters =
            SliceContent { counters: serde_json::from_value(json!([set])).unwrap(), ..slice(json!([])) };
        violations(&[slice(json!([device])), counters]).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn counters_are_checked_over_the_whole_pool() {
        let set = json!({"name": "gpu-0-counter-set", "counters": {"memory-slice-0": {"value": "1"}}});
        let capacity = json!({"memory": {"value": "1Gi"}});
        let device = |counter: &str| {
            json!({"name": "m", "capacity": capacity, "consumesCounters":
                [{"counterSet": "gpu-0-counter-set", "counters": {counter: {"value": "1"}}}]})
        };
        assert_eq!(counted(set.clone(), device("memory-slice-0")), [""; 0]);
        let refused = |set: &Value, device: Value, words: &str| {
            let found = counted(set.clone(), device);
            assert!(found.iter().any(|one| one.contains(words)), "{found:?} lacks {words:?}");
        };
        refused(&set, device("memory-slice-1"), "memory-slice-1 of gpu-0-counter-set, which no slice has");
        let mut shared = device("memory-slice-0");
        shared["allowMultipleAllocations"] = json!(true);
        refused(&set, shared, "no device does both");
        let mut empty = device("memory-slice-0");
        empty["capacity"] = json!({});
        refused(&set, empty, "has no capacity");
        refused(
            &json!({"name": "Set_1", "counters": {"a": {"value": "1"}}}),
            json!({"name": "m"}),
            "DNS label",
        );
        refused(&json!({"name": "s", "counters": {}}), json!({"name": "m"}), "has no counters");
        let many: serde_json::Map<_, _> = (0..33).map(|i| (format!("c{i}"), json!({"value": "1"}))).collect();
        refused(&json!({"name": "s", "counters": many}), json!({"name": "m"}), "33 counters");
        let mut both = slice(json!([{"name": "m"}]));
        both.counters = serde_json::from_value(json!([set])).unwrap();
        assert!(violations(&[both.clone()])[0].problem.contains("a slice has either"));
        both.devices.clear();
        let twice = violations(&[both.clone(), both]);
        assert!(
            twice[0].to_string().contains("sharedCounters[gpu-0-counter-set]: is there twice"),
            "{twice:?}"
        );
    }

    #[test]
    fn what_the_allocator_refuses_is_named_too() {
        let twice = [slice(json!([{"name": "gpu-0"}])), slice(json!([{"name": "gpu-0"}]))];
        assert!(violations(&twice)[0].to_string().contains("slices[1].devices[gpu-0]: is listed twice"));
        let full: Vec<_> = (0..65).map(|i| json!({"name": format!("gpu-{i}")})).collect();
        assert!(violations(&[slice(json!(full))])[0].problem.contains("65 devices"));
        assert!(violations(&[])[0].problem.contains("are none"));
        let mut odd = slice(json!([]));
        odd.node = NodeName::new("Node_A");
        assert!(violations(&[odd])[0].problem.contains("not a valid DNS subdomain"));
    }
}

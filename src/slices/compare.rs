//! What was sent against what is stored. An API server may fill in defaults, write a quantity in another
//! form, or leave out what its feature gates do not know: none of these is an edit by someone else.

use std::collections::BTreeSet;
use std::fmt;

use k8s_openapi::api::resource::v1::ResourceSliceSpec;
use serde_json::Value;

use crate::model::quantity::Quantity;

/// Fields that were sent and not stored, as paths without indices, e.g.
/// `spec.devices[].allowMultipleAllocations`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Dropped(BTreeSet<String>);

/// Which part of a path belongs to which feature gate of the API server.
const FEATURES: [(&str, &str); 8] = [
    (".allowMultipleAllocations", "DRAConsumableCapacity"),
    (".requestPolicy", "DRAConsumableCapacity"),
    (".taints", "DRADeviceTaints"),
    (".consumesCounters", "DRAPartitionableDevices"),
    (".sharedCounters", "DRAPartitionableDevices"),
    (".bindingConditions", "DRADeviceBindingConditions"),
    (".bindingFailureConditions", "DRADeviceBindingConditions"),
    (".bindsToNode", "DRADeviceBindingConditions"),
];

impl Dropped {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }

    /// True if the API server keeps no shares (KEP-5075): then GPUs can only be published whole.
    pub fn shares(&self) -> bool {
        self.paths().any(|path| path.ends_with(".allowMultipleAllocations"))
    }

    /// True if the API server keeps no counters (KEP-4815): then what may be made of a board must not be published.
    pub fn counters(&self) -> bool {
        self.paths().any(makes_counters)
    }

    /// Those of the fields that make counters.
    pub fn of_counters(&self) -> Self {
        Self(self.0.iter().filter(|path| makes_counters(path)).cloned().collect())
    }

    /// The feature gates that presumably are off.
    pub fn features(&self) -> BTreeSet<&'static str> {
        let of = |path: &str| FEATURES.iter().find(|(part, _)| path.ends_with(part)).map(|(_, name)| *name);
        self.paths().filter_map(of).collect()
    }

    /// Those of the fields that make shares.
    pub fn of_shares(&self) -> Self {
        let makes_shares =
            |path: &&String| path.ends_with(".allowMultipleAllocations") || path.ends_with(".requestPolicy");
        Self(self.0.iter().filter(makes_shares).cloned().collect())
    }

    /// Adds what `other` lacks too.
    pub fn merge(&mut self, other: Self) {
        self.0.extend(other.0);
    }
}

fn makes_counters(path: &str) -> bool {
    path.ends_with(".consumesCounters") || path.ends_with(".sharedCounters")
}

impl fmt::Display for Dropped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let paths: Vec<_> = self.paths().collect();
        write!(f, "{}", paths.join(", "))?;
        let features: Vec<_> = self.features().into_iter().collect();
        if !features.is_empty() {
            write!(f, " (feature gate {} is off in the API server)", features.join(", "))?;
        }
        Ok(())
    }
}

/// What the API server left out of a slice that it was sent.
pub fn dropped(sent: &ResourceSliceSpec, stored: &ResourceSliceSpec) -> Dropped {
    Dropped(compare(sent, stored).missing)
}

/// True if `stored` is what becomes of `sent` at an API server that drops `known`.
pub(super) fn same(sent: &ResourceSliceSpec, stored: &ResourceSliceSpec, known: &Dropped) -> bool {
    let found = compare(sent, stored);
    !found.different && found.missing.is_subset(&known.0)
}

#[derive(Default)]
struct FieldDifference {
    /// Sent, but not stored.
    missing: BTreeSet<String>,
    /// Another value, or something more than was sent.
    different: bool,
}

/// Pool generation and slice count are left to the caller.
fn compare(sent: &ResourceSliceSpec, stored: &ResourceSliceSpec) -> FieldDifference {
    let value = |spec: &ResourceSliceSpec| {
        let mut spec = spec.clone();
        spec.pool.generation = 0;
        spec.pool.resource_slice_count = 0;
        serde_json::to_value(spec).unwrap_or_default()
    };
    let mut found = FieldDifference::default();
    found.walk("spec", &value(sent), &value(stored));
    found
}

impl FieldDifference {
    fn walk(&mut self, path: &str, sent: &Value, stored: &Value) {
        match (sent, stored) {
            (Value::Object(sent), Value::Object(stored)) => {
                for (key, value) in sent {
                    let path = format!("{path}.{key}");
                    match stored.get(key) {
                        Some(stored) => self.walk(&path, value, stored),
                        None => _ = self.missing.insert(path),
                    }
                }
                let more = |key: &String| !sent.contains_key(key) && !is_default(&format!("{path}.{key}"));
                self.different |= stored.keys().any(more);
            }
            (Value::Array(sent), Value::Array(stored)) if sent.len() == stored.len() => {
                let path = format!("{path}[]");
                for (sent, stored) in sent.iter().zip(stored) {
                    self.walk(&path, sent, stored);
                }
            }
            _ => self.different |= sent != stored && !same_quantity(path, sent, stored),
        }
    }
}

/// What the API server fills in.
fn is_default(path: &str) -> bool {
    path.ends_with(".taints[].timeAdded")
}

fn same_quantity(path: &str, sent: &Value, stored: &Value) -> bool {
    let parse = |value: &Value| value.as_str().and_then(|text| text.parse::<Quantity>().ok());
    (path.contains(".capacity.") || path.contains(".counters."))
        && matches!((parse(sent), parse(stored)), (Some(a), Some(b)) if a == b)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn spec(devices: Value) -> ResourceSliceSpec {
        serde_json::from_value(json!({
            "driver": "gpu.nvidia.com", "nodeName": "n",
            "pool": {"name": "n", "generation": 1, "resourceSliceCount": 1}, "devices": devices,
        }))
        .unwrap()
    }

    fn shareable() -> Value {
        json!([{
            "name": "gpu-0", "allowMultipleAllocations": true,
            "taints": [{"key": "a/b", "effect": "NoSchedule"}],
            "capacity": {"memory": {"value": "1024", "requestPolicy": {"default": "1Ki"}}},
        }])
    }

    #[test]
    fn what_the_server_fills_in_or_writes_otherwise_is_the_same() {
        let mut stored = shareable();
        stored[0]["taints"][0]["timeAdded"] = json!("2026-01-01T00:00:00Z");
        stored[0]["capacity"]["memory"]["value"] = json!("1Ki");
        let (sent, stored) = (spec(shareable()), spec(stored));
        assert!(same(&sent, &stored, &Dropped::default()));
        assert!(dropped(&sent, &stored).is_empty());
    }

    #[test]
    fn a_gate_that_is_off_is_told_by_what_is_missing() {
        let stored = spec(json!([{"name": "gpu-0", "capacity": {"memory": {"value": "1Ki"}}}]));
        let sent = spec(shareable());
        let dropped = dropped(&sent, &stored);
        assert_eq!(
            dropped.paths().collect::<Vec<_>>(),
            [
                "spec.devices[].allowMultipleAllocations",
                "spec.devices[].capacity.memory.requestPolicy",
                "spec.devices[].taints",
            ]
        );
        assert!(dropped.shares());
        assert_eq!(
            dropped.features().into_iter().collect::<Vec<_>>(),
            ["DRAConsumableCapacity", "DRADeviceTaints"]
        );
        assert!(!same(&sent, &stored, &Dropped::default()), "not before it is known to be dropped");
        assert!(same(&sent, &stored, &dropped));
    }

    #[test]
    fn an_edit_is_no_drop() {
        let sent = spec(shareable());
        for edit in [
            json!([]),
            json!([{"name": "gpu-1", "allowMultipleAllocations": true,
                    "taints": [{"key": "a/b", "effect": "NoSchedule"}],
                    "capacity": {"memory": {"value": "1024", "requestPolicy": {"default": "1Ki"}}}}]),
            json!([{"name": "gpu-0", "bindsToNode": true, "allowMultipleAllocations": true,
                    "taints": [{"key": "a/b", "effect": "NoSchedule"}],
                    "capacity": {"memory": {"value": "1024", "requestPolicy": {"default": "1Ki"}}}}]),
        ] {
            let stored = spec(edit);
            assert!(!same(&sent, &stored, &dropped(&sent, &stored)), "{stored:?}");
        }
    }
}

//! Out of a review's object, what is looked at, and nothing else: who sends a review has not shown yet that he is
//! worth the memory. What is skipped is neither copied nor checked, and what is kept is counted: a value of two bytes
//! can take hundreds in memory.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::model::names::DRIVER;

/// Of one object: ten times what a large pod or claim has. In the worst form, some 6 MiB.
pub const VALUES_MAX: usize = 16 * 1024;

/// What is kept of a value.
#[derive(Debug)]
pub(super) enum Keep {
    All,
    /// Of an object these fields; of others nothing but their kind.
    Fields(&'static [(&'static str, Keep)]),
    /// So much of each entry of a list.
    Each(&'static Keep),
    /// `driver`, and `parameters` if they are for ours.
    Opaque,
}

const SPEC: Keep = Keep::Fields(&[(
    "devices",
    Keep::Fields(&[
        ("requests", Keep::All),
        ("constraints", Keep::All),
        ("config", Keep::Each(&Keep::Fields(&[("requests", Keep::All), ("opaque", Keep::Opaque)]))),
    ]),
)]);
const NAMES: Keep = Keep::Fields(&[("name", Keep::All), ("generateName", Keep::All)]);
pub(super) const CLAIM: Keep = Keep::Fields(&[("metadata", NAMES), ("spec", SPEC)]);
pub(super) const TEMPLATE: Keep =
    Keep::Fields(&[("metadata", NAMES), ("spec", Keep::Fields(&[("spec", SPEC)]))]);
const LABELLED: Keep = Keep::Fields(&[
    ("name", Keep::All),
    ("generateName", Keep::All),
    ("namespace", Keep::All),
    ("labels", Keep::All),
    ("annotations", Keep::All),
]);
pub(super) const POD: Keep = Keep::Fields(&[("metadata", LABELLED), ("spec", Keep::All)]);
/// What makes pods of a template, such as a Job.
pub(super) const WORKLOAD: Keep =
    Keep::Fields(&[("metadata", LABELLED), ("spec", Keep::Fields(&[("template", POD)]))]);

/// Before and after, each `null` if it is not there.
#[derive(Debug, Default)]
pub(super) struct Objects {
    pub object: Value,
    pub old_object: Value,
}

#[derive(Debug)]
pub(super) enum Unread {
    /// This one has more than [`VALUES_MAX`] values that would have to be looked at.
    TooMuch(&'static str),
    Broken(serde_json::Error),
}

/// Both objects of a review, as far as `keep` says.
pub(super) fn objects(body: &[u8], keep: &Keep) -> Result<Objects, Unread> {
    let budget = ByteBudget::default();
    let mut json = serde_json::Deserializer::from_slice(body);
    let mut objects = Objects::default();
    let read = Within { name: "request", then: Both { keep, budget: &budget, objects: &mut objects } };
    let read = read.deserialize(&mut json).and_then(|()| json.end());
    match (read, budget.exceeded.get()) {
        (Ok(()), _) => Ok(objects),
        (Err(_), Some(which)) => Err(Unread::TooMuch(which)),
        (Err(error), None) => Err(Unread::Broken(error)),
    }
}

/// What may still be kept, of which object.
#[derive(Debug, Default)]
struct ByteBudget {
    spent: Cell<usize>,
    which: Cell<&'static str>,
    exceeded: Cell<Option<&'static str>>,
}

impl ByteBudget {
    fn begin(&self, which: &'static str) {
        self.which.set(which);
        self.spent.set(0);
    }

    fn spend<E: Error>(&self) -> Result<(), E> {
        self.spent.set(self.spent.get() + 1);
        if self.spent.get() <= VALUES_MAX {
            return Ok(());
        }
        self.exceeded.set(Some(self.which.get()));
        Err(E::custom("too many values"))
    }
}

/// One field of an object is read with `then`, the others are skipped.
struct Within<T> {
    name: &'static str,
    then: T,
}

impl<'de, T: DeserializeSeed<'de, Value = ()>> DeserializeSeed<'de> for Within<T> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de, T: DeserializeSeed<'de, Value = ()>> Visitor<'de> for Within<T> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with {}", self.name)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<(), A::Error> {
        let Self { name, then } = self;
        let mut then = Some(then);
        while let Some(key) = fields.next_key::<String>()? {
            match then.take_if(|_| key == name) {
                Some(then) => fields.next_value_seed(then)?,
                None => drop(fields.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}

struct Both<'a> {
    keep: &'a Keep,
    budget: &'a ByteBudget,
    objects: &'a mut Objects,
}

impl<'de> DeserializeSeed<'de> for Both<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Both<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an admission request")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<(), A::Error> {
        let Self { keep, budget, objects } = self;
        while let Some(key) = fields.next_key::<String>()? {
            let (which, into) = match key.as_str() {
                "object" => ("object", &mut objects.object),
                "oldObject" => ("oldObject", &mut objects.old_object),
                _ => {
                    fields.next_value::<IgnoredAny>()?;
                    continue;
                }
            };
            budget.begin(which);
            *into = fields.next_value_seed(PartialValue { keep, budget })?;
        }
        Ok(())
    }
}

/// A value, as far as it is kept.
#[derive(Clone, Copy)]
struct PartialValue<'a> {
    keep: &'a Keep,
    budget: &'a ByteBudget,
}

impl<'de> DeserializeSeed<'de> for PartialValue<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Value, D::Error> {
        self.budget.spend()?;
        json.deserialize_any(self)
    }
}

impl<'a> PartialValue<'a> {
    fn of_field(self, name: &str) -> Option<PartialValue<'a>> {
        let keep = match self.keep {
            Keep::All => Some(self.keep),
            Keep::Fields(known) => known.iter().find(|(known, _)| *known == name).map(|(_, keep)| keep),
            Keep::Each(_) | Keep::Opaque => None,
        };
        keep.map(|keep| PartialValue { keep, budget: self.budget })
    }

    fn opaque<'de, A: MapAccess<'de>>(self, mut fields: A) -> Result<Value, A::Error> {
        let all = PartialValue { keep: &Keep::All, budget: self.budget };
        let mut kept = Map::new();
        // Only what nobody writes in this order.
        let mut early: Option<&'de RawValue> = None;
        while let Some(name) = fields.next_key::<String>()? {
            match (name.as_str(), kept.get("driver").map(|driver| *driver == DRIVER)) {
                ("driver", _) => drop(kept.insert(name, fields.next_value_seed(all)?)),
                ("parameters", Some(true)) => drop(kept.insert(name, fields.next_value_seed(all)?)),
                ("parameters", None) => early = Some(fields.next_value()?),
                _ => drop(fields.next_value::<IgnoredAny>()?),
            }
        }
        if let (Some(early), true) = (early, kept.get("driver").is_some_and(|driver| *driver == DRIVER)) {
            let mut json = serde_json::Deserializer::from_str(early.get());
            kept.insert("parameters".to_owned(), all.deserialize(&mut json).map_err(A::Error::custom)?);
        }
        Ok(Value::Object(kept))
    }
}

impl<'de> Visitor<'de> for PartialValue<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let keep = match self.keep {
            Keep::All => self.keep,
            Keep::Each(keep) => keep,
            Keep::Fields(_) | Keep::Opaque => {
                while entries.next_element::<IgnoredAny>()?.is_some() {}
                return Ok(Value::Array(Vec::new()));
            }
        };
        let part = PartialValue { keep, budget: self.budget };
        let mut kept = Vec::new();
        while let Some(entry) = entries.next_element_seed(part)? {
            kept.push(entry);
        }
        Ok(Value::Array(kept))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Value, A::Error> {
        if let Keep::Opaque = self.keep {
            return self.opaque(fields);
        }
        let mut kept = Map::new();
        while let Some(name) = fields.next_key::<String>()? {
            match self.of_field(&name) {
                Some(part) => drop(kept.insert(name, fields.next_value_seed(part)?)),
                None => drop(fields.next_value::<IgnoredAny>()?),
            }
        }
        Ok(Value::Object(kept))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(object: &Value, keep: &Keep) -> Value {
        let body = json!({"request": {"object": object, "userInfo": {"object": 5}}}).to_string();
        objects(body.as_bytes(), keep).unwrap().object
    }

    fn claim(config: &[u8]) -> Vec<u8> {
        let before = br#"{"request":{"object":{"spec":{"devices":{"config":[{"opaque":"#;
        [&before[..], config, b"}]}}}}}"].concat()
    }

    fn too_much(body: &[u8], keep: &Keep) -> bool {
        matches!(objects(body, keep), Err(Unread::TooMuch("object")))
    }

    #[test]
    fn what_is_looked_at_is_kept_as_it_is() {
        let opaque = json!({"driver": DRIVER, "parameters": {"kind": "GpuShare", "memory": "1Gi", "odd": [1.5, null]}});
        let devices = json!({"requests": [{"name": "a", "exactly": {"deviceClassName": "x", "count": 2, "all": true}}],
            "config": [{"requests": ["a"], "opaque": opaque}]});
        let object = json!({"metadata": {"name": "c", "managedFields": [1, 2]}, "spec": {"devices": devices}, "status": {}});
        let kept = read(&object, &CLAIM);
        assert_eq!(kept["spec"]["devices"], devices);
        assert_eq!(kept["metadata"], json!({"name": "c"}));
        assert!(kept["status"].is_null());
        assert_eq!(
            read(&json!({"spec": {"spec": {"devices": devices}}}), &TEMPLATE)["spec"]["spec"]["devices"],
            devices
        );
        let pod = json!({"metadata": {"annotations": {"a": "b"}}, "spec": {"containers": [{"name": "x"}], "odd": -1}});
        assert_eq!(read(&pod, &POD), pod);
        // In whatever order, and of whatever kind.
        let turned = format!(r#"{{"parameters": {{"kind": "GpuShare"}}, "driver": "{DRIVER}"}}"#);
        let kept = objects(&claim(turned.as_bytes()), &CLAIM).unwrap().object;
        assert_eq!(kept["spec"]["devices"]["config"][0]["opaque"]["parameters"]["kind"], "GpuShare");
        for odd in [json!(5), json!(["a"]), json!("text"), Value::Null] {
            let kept =
                read(&json!({"spec": {"devices": {"config": odd}}}), &CLAIM)["spec"]["devices"]["config"]
                    .clone();
            assert_eq!((kept.is_array(), kept.is_null()), (odd.is_array(), odd.is_null()), "{odd}");
        }
    }

    #[test]
    fn foreign_parameters_are_passed_over_whatever_they_are() {
        let bytes: &[&[u8]] = &[
            b"\"\xff\xfe\"",
            br#""\ud800""#,
            &[b"[".repeat(100_000), b"]".repeat(100_000)].concat(),
            &[&b"["[..], &b"{\"\":0},".repeat(100_000), b"0]"].concat(),
        ];
        for parameters in bytes {
            let opaque = [br#"{"driver":"nic.example.com","parameters":"#, *parameters, b"}"].concat();
            let kept = objects(&claim(&opaque), &CLAIM).unwrap().object;
            let kept = &kept["spec"]["devices"]["config"][0]["opaque"];
            assert_eq!(*kept, json!({"driver": "nic.example.com"}));
        }
    }

    #[test]
    fn more_than_can_be_meant_is_not_read() {
        let many = [&b"["[..], &b"{\"\":0},".repeat(VALUES_MAX / 2), b"0]"].concat();
        let ours = [br#"{"driver":"gpu.nvidia.com","parameters":"#, &many[..], b"}"].concat();
        assert!(too_much(&claim(&ours), &CLAIM));
        let turned = [br#"{"parameters":"#, &many[..], br#","driver":"gpu.nvidia.com"}"#].concat();
        assert!(too_much(&claim(&turned), &CLAIM));
        let pod = [br#"{"request":{"object":{"spec":{"containers":"#, &many[..], b"}}}}"].concat();
        assert!(too_much(&pod, &POD));
        assert!(matches!(objects(b"{\"request\": {", &POD), Err(Unread::Broken(_))));
    }
}

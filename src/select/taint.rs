//! Taints of devices, and which of them a request tolerates (KEP-5055).

use k8s_openapi::api::resource::v1::{DeviceTaint, DeviceToleration};

/// Keeps claims off a device that do not tolerate it. Taints of other effects keep nobody off, and are none here.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Taint {
    pub key: String,
    pub value: String,
    pub effect: Effect,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Effect {
    NoSchedule,
    /// Also ends pods that use the device: that is the controller-manager's to do.
    NoExecute,
}

/// What a request bears.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Toleration {
    /// None: every key.
    key: Option<String>,
    /// None: every value.
    value: Option<String>,
    /// None: every effect.
    effect: Option<String>,
}

impl Toleration {
    /// About so many bytes.
    pub fn weight(&self) -> usize {
        let texts = [&self.key, &self.value, &self.effect];
        size_of::<Self>() + texts.into_iter().flatten().map(String::len).sum::<usize>()
    }
}

impl Effect {
    fn as_str(self) -> &'static str {
        match self {
            Self::NoSchedule => "NoSchedule",
            Self::NoExecute => "NoExecute",
        }
    }
}

impl std::fmt::Display for Taint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let equals = if self.value.is_empty() { "" } else { "=" };
        write!(f, "{}{equals}{}:{}", self.key, self.value, self.effect.as_str())
    }
}

impl Taint {
    /// None: it keeps nobody off. Effects that are not known are like None, as the API says.
    pub fn of(taint: &DeviceTaint) -> Option<Self> {
        let effect = [Effect::NoSchedule, Effect::NoExecute];
        let effect = effect.into_iter().find(|one| one.as_str() == taint.effect)?;
        Some(Self { key: taint.key.clone(), value: taint.value.clone().unwrap_or_default(), effect })
    }
}

impl Toleration {
    /// None: its operator is not known, so that it tolerates nothing.
    pub fn of(toleration: &DeviceToleration) -> Option<Self> {
        let some = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let value = match toleration.operator.as_deref() {
            Some("Exists") => None,
            None | Some("" | "Equal") => Some(toleration.value.clone().unwrap_or_default()),
            Some(_) => return None,
        };
        Some(Self { key: some(&toleration.key), value, effect: some(&toleration.effect) })
    }

    /// How long (`tolerationSeconds`) does not matter for what may be chosen.
    pub fn tolerates(&self, taint: &Taint) -> bool {
        let any_or = |wanted: &Option<String>, found: &str| wanted.as_ref().is_none_or(|one| one == found);
        any_or(&self.key, &taint.key)
            && any_or(&self.value, &taint.value)
            && any_or(&self.effect, taint.effect.as_str())
    }
}

/// The first taint that none of the tolerations bears.
pub fn untolerated<'a>(taints: &'a [Taint], tolerations: &[Toleration]) -> Option<&'a Taint> {
    taints.iter().find(|taint| !tolerations.iter().any(|one| one.tolerates(taint)))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn taint(key: &str, value: &str, effect: &str) -> Option<Taint> {
        Taint::of(&serde_json::from_value(json!({"key": key, "value": value, "effect": effect})).unwrap())
    }

    fn toleration(fields: Value) -> Option<Toleration> {
        Toleration::of(&serde_json::from_value(fields).unwrap())
    }

    #[test]
    fn a_toleration_bears_what_its_key_value_and_effect_name() {
        let taint = taint("gpu/xid", "79", "NoExecute").unwrap();
        for (fields, tolerates) in [
            (json!({"operator": "Exists"}), true),
            (json!({"key": "gpu/xid", "operator": "Exists"}), true),
            (json!({"key": "gpu/xid", "operator": "Exists", "effect": "NoExecute"}), true),
            (json!({"key": "gpu/xid", "operator": "Exists", "effect": "NoSchedule"}), false),
            (json!({"key": "other", "operator": "Exists"}), false),
            (json!({"key": "gpu/xid", "value": "79"}), true),
            (json!({"key": "gpu/xid", "operator": "Equal", "value": "79", "tolerationSeconds": 5}), true),
            (json!({"key": "gpu/xid", "operator": "", "value": "79"}), true),
            (json!({"key": "gpu/xid", "operator": "Equal", "value": "48"}), false),
            (json!({"key": "gpu/xid"}), false),
            (json!({"key": "", "operator": "Equal", "value": "79", "effect": ""}), true),
        ] {
            assert_eq!(toleration(fields.clone()).unwrap().tolerates(&taint), tolerates, "{fields}");
        }
        assert_eq!(toleration(json!({"operator": "SomethingNew"})), None);
    }

    #[test]
    fn every_taint_must_be_borne_and_other_effects_keep_nobody_off() {
        assert_eq!(taint("a", "", "None"), None);
        assert_eq!(taint("a", "", "PreferNoSchedule"), None);
        let taints = [taint("a", "1", "NoSchedule").unwrap(), taint("b", "", "NoExecute").unwrap()];
        let words = |found: Option<&Taint>| found.map(ToString::to_string);
        let (a, b) = (json!({"key": "a", "operator": "Exists"}), json!({"key": "b"}));
        let (a, b) = (toleration(a).unwrap(), toleration(b).unwrap());
        assert_eq!(words(untolerated(&taints, &[])), Some("a=1:NoSchedule".to_owned()));
        assert_eq!(words(untolerated(&taints, std::slice::from_ref(&a))), Some("b:NoExecute".to_owned()));
        assert_eq!(untolerated(&taints, &[b, a]), None);
        assert_eq!(untolerated(&[], &[]), None);
    }
}

//! One object of a list or a watch, read by itself: what does not fit our types is told with its metadata, and does
//! not take the others with it.
//!
//! kube's DeserializeGuard says the same; it makes a tree of each object and copies the tree, which costs the
//! controller more than all its decisions.

use std::borrow::Cow;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

/// From JSON text only (`serde_json::from_str` and the like); in an event of a watch the type comes first, as the API
/// server writes it.
#[derive(Debug, Clone)]
pub(super) struct Guarded<K>(pub Result<K, Misfit>);

/// An object that does not fit.
#[derive(Debug, Clone)]
pub(super) struct Misfit {
    pub metadata: ObjectMeta,
    pub problem: String,
}

impl<'de, K: DeserializeOwned> Deserialize<'de> for Guarded<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Envelope {
            metadata: ObjectMeta,
        }
        let text = Box::<RawValue>::deserialize(deserializer)?;
        let problem = match serde_json::from_str(text.get()) {
            Ok(object) => return Ok(Self(Ok(object))),
            Err(problem) => problem.to_string(),
        };
        let Envelope { metadata } = serde_json::from_str(text.get()).map_err(D::Error::custom)?;
        Ok(Self(Err(Misfit { metadata, problem })))
    }
}

impl<K: Resource> Resource for Guarded<K> {
    type DynamicType = K::DynamicType;
    type Scope = K::Scope;

    fn kind(of: &K::DynamicType) -> Cow<'_, str> {
        K::kind(of)
    }
    fn group(of: &K::DynamicType) -> Cow<'_, str> {
        K::group(of)
    }
    fn version(of: &K::DynamicType) -> Cow<'_, str> {
        K::version(of)
    }
    fn plural(of: &K::DynamicType) -> Cow<'_, str> {
        K::plural(of)
    }
    fn meta(&self) -> &ObjectMeta {
        self.0.as_ref().map_or_else(|misfit| &misfit.metadata, K::meta)
    }
    fn meta_mut(&mut self) -> &mut ObjectMeta {
        self.0.as_mut().map_or_else(|misfit| &mut misfit.metadata, K::meta_mut)
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use kube::core::{ObjectList, WatchEvent};

    use super::*;

    const GOOD: &str = r#"{"metadata": {"name": "good"}, "spec": {"containers": []}}"#;
    const BAD: &str = r#"{"metadata": {"name": "bad", "uid": "1"}, "spec": {"containers": "none"}}"#;

    #[test]
    fn one_that_does_not_fit_leaves_the_list_to_the_others() {
        let list = format!(
            r#"{{"apiVersion": "v1", "kind": "PodList", "metadata": {{}}, "items": [{BAD}, {GOOD}]}}"#
        );
        let list: ObjectList<Guarded<Pod>> = serde_json::from_str(&list).unwrap();
        let [bad, good] = &list.items[..] else { panic!("{list:?}") };
        let misfit = bad.0.as_ref().unwrap_err();
        assert_eq!(
            (misfit.metadata.name.as_deref(), misfit.metadata.uid.as_deref()),
            (Some("bad"), Some("1"))
        );
        assert!(misfit.problem.contains("expected a sequence"), "{}", misfit.problem);
        assert_eq!(good.0.as_ref().unwrap().metadata.name.as_deref(), Some("good"));
    }

    #[test]
    fn watches_bring_them_one_by_one() {
        for (object, fits) in [(GOOD, true), (BAD, false)] {
            let line = format!(r#"{{"type":"MODIFIED","object":{object}}}"#);
            let event: WatchEvent<Guarded<Pod>> = serde_json::from_str(&line).unwrap();
            let WatchEvent::Modified(object) = event else { panic!("{event:?}") };
            assert_eq!(object.0.is_ok(), fits);
        }
        let nameless = r#"{"type":"ADDED","object":{"spec":{"containers":"none"}}}"#;
        assert!(serde_json::from_str::<WatchEvent<Guarded<Pod>>>(nameless).is_err());
    }
}

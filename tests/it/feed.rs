//! What the controller follows, read from an API server in memory: whatever one object holds, the others come.

use futures::StreamExt;
use futures::stream::BoxStream;
use k8s_openapi::Metadata;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};
use tranche::cluster::KubeCluster;
use tranche::cluster::feed::{Change, WatchEvent};
use tranche::cluster::pod_groups::PodGroupApi;

use crate::mock_api::{Failure, MockApi, PATIENCE, Verb};
use crate::objects::share;

const CLAIMS: &str = "resourceclaims";
const RULES: &str = "devicetaintrules";
const GROUPS: &str = "podgroups";

/// What is told of claims, in words.
struct Told(BoxStream<'static, Change>);

impl Told {
    fn of(api: &MockApi) -> Self {
        Self(KubeCluster::with_client(api.client()).feed())
    }

    async fn next(&mut self) -> String {
        let of_claim = |change| match change {
            Change::Claim(seen) => Some(words(seen)),
            _ => None,
        };
        self.next_of(of_claim).await
    }

    /// The next thing that is told of a kind.
    async fn next_of(&mut self, kind: impl Fn(Change) -> Option<String>) -> String {
        let next = async {
            loop {
                if let Some(words) = kind(self.0.next().await.unwrap()) {
                    return words;
                }
            }
        };
        tokio::time::timeout(PATIENCE, next).await.expect("something is told")
    }

    async fn expect(&mut self, expected: &[&str]) {
        for one in expected {
            assert_eq!(self.next().await, *one);
        }
    }
}

fn words<K: Metadata<Ty = ObjectMeta>>(seen: WatchEvent<K>) -> String {
    let name = |meta: &ObjectMeta| meta.name.clone().unwrap_or_default();
    match seen {
        WatchEvent::Anew => "anew".to_owned(),
        WatchEvent::Complete => "complete".to_owned(),
        WatchEvent::Listed(object) => format!("listed {}", name(object.metadata())),
        WatchEvent::Stored(object) => format!("stored {}", name(object.metadata())),
        WatchEvent::Deleted(meta) => format!("deleted {}", name(&meta)),
        WatchEvent::Unreadable { rest, listed, .. } => {
            format!("unreadable {} {listed}", name(rest.metadata()))
        }
        WatchEvent::Interrupted { problem, .. } => format!("interrupted: {problem}"),
    }
}

/// A claim with parameters of another driver.
fn strange(name: &str, parameters: Value) -> Value {
    let mut claim = share(name, json!({"memory": "1Gi"}));
    claim["spec"]["devices"]["config"] =
        json!([{"opaque": {"driver": "nic.example.com", "parameters": parameters}}]);
    claim
}

#[tokio::test]
async fn a_claim_with_any_parameters_is_one_among_others() {
    let api = MockApi::new();
    api.serve_bytes("@bytes", b"\xff\xfe");
    api.serve_bytes("@half", b"\\ud800");
    api.serve_bytes("\"@deep\"", &[vec![b'['; 10_000], vec![b']'; 10_000]].concat());
    for (name, text) in [("a", "@bytes"), ("b", "@half"), ("c", "@deep")] {
        api.put(CLAIMS, strange(name, json!({"x": text})));
    }
    api.put(CLAIMS, share("usual", json!({"memory": "1Gi"})));
    let mut told = Told::of(&api);
    told.expect(&["anew", "listed a", "listed b", "listed c", "listed usual", "complete"]).await;
    api.put(CLAIMS, strange("d", json!({"x": "@bytes"})));
    api.put(CLAIMS, share("later", json!({"memory": "1Gi"})));
    api.remove(CLAIMS, "d");
    told.expect(&["stored d", "stored later", "deleted d"]).await;
}

#[tokio::test]
async fn what_does_not_fit_is_told_by_name() {
    let api = MockApi::new();
    let mut claim = share("bad", json!({"memory": "1Gi"}));
    claim["spec"]["devices"]["requests"] = "none".into();
    api.put(CLAIMS, claim);
    api.put(CLAIMS, share("good", json!({"memory": "1Gi"})));
    let mut told = Told::of(&api);
    told.expect(&["anew", "unreadable bad true", "listed good", "complete"]).await;
    api.edit(CLAIMS, |claim| claim["metadata"]["labels"]["a"] = "b".into());
    told.expect(&["unreadable bad false", "stored good"]).await;
}

#[tokio::test]
async fn pages_are_one_list() {
    let api = MockApi::new();
    api.page(2);
    for name in ["a", "b", "c", "d", "e"] {
        api.put(CLAIMS, share(name, json!({"memory": "1Gi"})));
    }
    let mut told = Told::of(&api);
    told.expect(&["anew", "listed a", "listed b", "listed c", "listed d", "listed e", "complete"]).await;
    assert_eq!(api.count(Verb::List, CLAIMS), 3);
    // The watch begins where the list was.
    api.put(CLAIMS, share("f", json!({"memory": "1Gi"})));
    told.expect(&["stored f"]).await;
}

#[tokio::test]
async fn a_page_that_has_expired_begins_the_list_anew() {
    let api = MockApi::new();
    api.page(1);
    for name in ["a", "b"] {
        api.put(CLAIMS, share(name, json!({"memory": "1Gi"})));
    }
    let mut told = Told::of(&api);
    told.expect(&["anew", "listed a"]).await;
    api.fail(Verb::List, CLAIMS, Failure::Status(410, "Expired"));
    let words = told.next().await;
    assert!(words.starts_with("interrupted: "), "{words}");
    told.expect(&["anew", "listed a", "listed b", "complete"]).await;
}

#[tokio::test]
async fn a_watch_that_ends_goes_on_where_it_was_and_one_from_history_begins_anew() {
    let api = MockApi::new();
    api.put(CLAIMS, share("a", json!({"memory": "1Gi"})));
    let mut told = Told::of(&api);
    told.expect(&["anew", "listed a", "complete"]).await;
    api.put(CLAIMS, share("b", json!({"memory": "1Gi"})));
    told.expect(&["stored b"]).await;
    api.cut_watches(false);
    tokio::select! {
        words = told.next() => panic!("nothing has happened: {words}"),
        () = api.until("the watch to begin again", |api| api.count(Verb::Watch, CLAIMS) == 2) => {}
    }
    api.put(CLAIMS, share("c", json!({"memory": "1Gi"})));
    told.expect(&["stored c"]).await;
    assert_eq!((api.count(Verb::List, CLAIMS), api.count(Verb::Watch, CLAIMS)), (1, 2));
    api.cut_watches(true);
    let words = told.next().await;
    assert!(words.contains("too old resource version"), "{words}");
    told.expect(&["anew", "listed a", "listed b", "listed c", "complete"]).await;
    for failure in [Failure::Broken, Failure::Status(500, "InternalError")] {
        api.fail(Verb::Watch, CLAIMS, failure);
    }
    for _ in 0..2 {
        let words = told.next().await;
        assert!(words.starts_with("interrupted: "), "{words}");
    }
    api.put(CLAIMS, share("e", json!({"memory": "1Gi"})));
    told.expect(&["stored e"]).await;
}

/// A right that is taken away for a moment, as while roles are written anew.
#[tokio::test]
async fn what_was_seen_is_not_gone_because_it_may_not_be_seen() {
    let api = MockApi::new();
    let rule = |name: &str| json!({"metadata": {"name": name}, "spec": {"taint": {"key": "k", "effect": "NoSchedule"}}});
    api.put(RULES, rule("a"));
    let mut told = Told::of(&api);
    let of_rule = |change| match change {
        Change::TaintRule(seen) => Some(words(seen)),
        _ => None,
    };
    for expected in ["anew", "listed a", "complete"] {
        assert_eq!(told.next_of(of_rule).await, expected);
    }
    api.fail(Verb::Watch, RULES, Failure::Status(403, "Forbidden"));
    api.cut_watches(false);
    let words = told.next_of(of_rule).await;
    assert!(words.starts_with("interrupted: "), "{words}");
    api.put(RULES, rule("b"));
    assert_eq!(told.next_of(of_rule).await, "stored b");
}

/// Without the right nobody knows which groups there are; without the API there are none.
#[tokio::test]
async fn podgroups_that_may_not_be_seen_are_not_none() {
    let of_volcano = |change| match change {
        Change::PodGroup(PodGroupApi::Volcano, seen) => Some(words(seen)),
        _ => None,
    };
    let api = MockApi::new();
    PodGroupApi::ALL.iter().for_each(|_| api.fail(Verb::List, GROUPS, Failure::Status(403, "Forbidden")));
    let mut told = Told::of(&api);
    assert_eq!(told.next_of(of_volcano).await, "anew");
    let said = told.next_of(of_volcano).await;
    assert!(said.starts_with("interrupted: "), "{said}");
    api.put(GROUPS, json!({"metadata": {"name": "g", "namespace": "ml"}, "spec": {"minMember": 2}}));
    for expected in ["anew", "listed g", "complete"] {
        assert_eq!(told.next_of(of_volcano).await, expected);
    }
    let without = MockApi::new();
    without.unserve(GROUPS);
    let mut told = Told::of(&without);
    for expected in ["anew", "anew", "complete"] {
        assert_eq!(told.next_of(of_volcano).await, expected);
    }
}

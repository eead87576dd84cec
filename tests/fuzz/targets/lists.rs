//! The readers of lists and watches: answers of the API server, whose objects tenants have written.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use axum::body::{Body as AnswerBody, Bytes};
use futures::stream;
use futures::{FutureExt, StreamExt};
use http::{Request, Response};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Client;
use kube::client::Body;
use serde_json::{Map, Value, json};
use tranche::cluster::KubeCluster;
use tranche::cluster::feed::{Change, WatchEvent};
use tranche::cluster::makers::{Maker, MakerChange, MakerKind};

use super::claims::FIELDS;
use super::jsons;
use crate::driver::meter::ready;
use crate::driver::{Form, Limits, Target};

/// The kinds that the controller follows, as paths name them.
const KINDS: [&str; 7] =
    ["pods", "nodes", "resourceclaims", "resourceslices", "deviceclasses", "devicetaintrules", "namespaces"];
/// So often nothing comes before nothing more is expected.
const IDLE_POLLS: usize = 40;
/// No input has so many objects.
const CHANGES_MAX: usize = 100_000;

pub fn targets() -> Vec<Target> {
    vec![feed_target(), list_target(), makers_target()]
}

fn makers_target() -> Target {
    Target {
        name: "makers",
        seeds: makers_seeds,
        words: &[
            "\"ADDED\"",
            "\"DELETED\"",
            "\"object\":",
            "\"metadata\":",
            "\"annotations\":{",
            "\"tranche.dev/gpu-share\":",
            "\"tranche.dev/share-template-name\":\"t\"",
            "\"deletionTimestamp\":\"2026-01-01T00:00:00Z\"",
            "\"uid\":\"u\"",
            "\"code\":410",
            "\"continue\":\"x\"",
            "\n",
            "list",
            "watch",
        ],
        form: Form::Text,
        limits: Limits { length: 32 << 10, millis: 2000, bytes: 2 << 20, per_byte: 150 },
        run: makers,
    }
}

fn feed_target() -> Target {
    Target {
        name: "feed",
        seeds: feed_seeds,
        words: &[
            "\"ADDED\"",
            "\"MODIFIED\"",
            "\"DELETED\"",
            "\"BOOKMARK\"",
            "\"ERROR\"",
            "\"PATCHED\"",
            "\"type\":",
            "\"object\":",
            "\"metadata\":",
            "\"resourceVersion\":\"8\"",
            "\"code\":410",
            "\"items\":[",
            "\"continue\":\"x\"",
            "{\"type\":\"ADDED\",\"object\":{\"metadata\":{\"name\":\"z\",\"uid\":\"z\"}}}\n",
            "\n",
            "}",
            "{",
            "pods",
            "watch",
        ],
        form: Form::Text,
        limits: Limits { length: 32 << 10, millis: 2000, bytes: 2 << 20, per_byte: 150 },
        run: feed,
    }
}

fn list_target() -> Target {
    Target {
        name: "list",
        seeds: || {
            let claim = |name: &str, parameters: Value| {
                json!({"metadata": {"name": name, "namespace": "ml", "uid": name, "managedFields": [{}]},
                    "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "c"}}],
                        "config": [{"opaque": {"driver": "nic.example.com", "parameters": parameters}}]}}})
            };
            let list = json!({"kind": "ResourceClaimList", "metadata": {"resourceVersion": "7"},
                "items": [claim("a", json!({"x": [[[]]]})), claim("b", json!("\u{e9}\n\\"))]});
            jsons(&[list, json!({"items": []}), json!({"items": null, "metadata": {"continue": ""}})])
        },
        words: FIELDS,
        form: Form::Json,
        limits: Limits { length: 32 << 10, millis: 2000, bytes: 2 << 20, per_byte: 100 },
        run: list,
    }
}

/// A first line says which kind, whether its list or its watch, and in parts of how many bytes; the rest is the body.
fn feed_seeds() -> Vec<Vec<u8>> {
    let object = |name: &str, version: &str, more: Value| {
        let mut object =
            json!({"metadata": {"name": name, "namespace": "ml", "uid": name, "resourceVersion": version}});
        object.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap_or_default());
        object
    };
    let event = |kind: &str, object: Value| format!("{}\n", json!({"type": kind, "object": object}));
    let claim = |name: &str, version: &str| {
        let devices = json!({"requests": [{"name": "gpu", "exactly": {"deviceClassName": "shared.gpu.nvidia.com"}}],
            "config": [{"opaque": {"driver": "nic.example.com", "parameters": {"x": [[{}]]}}}]});
        object(name, version, json!({"spec": {"devices": devices}}))
    };
    let bookmark = event("BOOKMARK", json!({"metadata": {"resourceVersion": "9"}}));
    let error =
        event("ERROR", json!({"kind": "Status", "code": 410, "message": "too old", "reason": "Expired"}));
    let body = [
        event("ADDED", claim("a", "2")),
        event("MODIFIED", claim("a", "3")),
        bookmark.clone(),
        event("PATCHED", claim("a", "4")),
        event("DELETED", claim("a", "10")),
    ]
    .concat();
    let strange = |bytes: &[u8]| {
        let whole = event("ADDED", claim("@", "2"));
        let parts: Vec<&[u8]> = whole.split('@').map(str::as_bytes).collect();
        [
            b"resourceclaims watch 5\n".as_slice(),
            &parts.join(bytes),
            event("ADDED", claim("b", "3")).as_bytes(),
        ]
        .concat()
    };
    let deep = [vec![b'['; 5000], vec![b']'; 5000]].concat();
    let misfit = event("ADDED", object("p", "2", json!({"spec": {"containers": "none"}})));
    let list = json!({"metadata": {"resourceVersion": "7"}, "items": [claim("a", "1"), claim("b", "2")]});
    let node = object("n", "2", json!({"status": {"allocatable": {"cpu": "x"}}}));
    let mut seeds = vec![strange(b"\xff\xfe"), strange(b"\\ud800"), strange(b"\",\"x\":{}, \"y\":\"")];
    seeds.push(
        [b"resourceclaims watch 0\n{\"type\":\"ADDED\",\"object\":".as_slice(), &deep, b"}\n"].concat(),
    );
    let texts = [
        format!("resourceclaims watch 0\n{body}"),
        format!("resourceclaims watch 1\n{body}{error}"),
        format!("resourceclaims watch 9\n{}", &body[..body.len() - 20]),
        format!("pods watch 0\n{misfit}{bookmark}"),
        format!("nodes watch 64\n{}", event("ADDED", node)),
        format!("resourceslices watch 3\n{bookmark}{error}"),
        format!("resourceclaims list 4\n{list}"),
        format!("pods list 0\n{}", json!({"items": [null, 1, {"metadata": null}], "metadata": {}})),
        format!("devicetaintrules list 0\n{}", json!({"kind": "Status", "code": 404})),
    ];
    seeds.extend(texts.map(String::into_bytes));
    seeds
}

/// The body of one kind's list or watch, and what an undamaged watch tells is seen: each object once, and the next
/// watch begins where this one has ended.
fn feed(input: &[u8]) {
    let (head, body) = match input.iter().position(|byte| *byte == b'\n') {
        Some(at) => (&input[..at], &input[at + 1..]),
        None => (&b""[..], input),
    };
    let head = String::from_utf8_lossy(head).into_owned();
    let mut words = head.split(' ');
    let kind = words.next().and_then(|word| KINDS.iter().find(|kind| **kind == word)).copied();
    let (kind, is_watch) = (kind.unwrap_or("resourceclaims"), words.next() != Some("list"));
    let part = words.next().and_then(|word| word.parse().ok()).filter(|part| *part > 0).unwrap_or(usize::MAX);
    let bytes = Bytes::copy_from_slice(body);
    // Versions with which a watch of the kind was asked for.
    let watched: Arc<Mutex<Vec<String>>> = Arc::default();
    let asked = watched.clone();
    let listed = Arc::new(Mutex::new(false));
    let service = tower::service_fn(move |request: Request<Body>| {
        let (path, query) =
            (request.uri().path().to_owned(), request.uri().query().unwrap_or_default().to_owned());
        let (is_kind, wants_watch) = (path.ends_with(&format!("/{kind}")), query.contains("watch=true"));
        let again = match (is_kind, wants_watch) {
            (true, true) => {
                let version = query.split('&').find_map(|pair| pair.strip_prefix("resourceVersion="));
                let mut asked = asked.lock().unwrap();
                asked.push(version.unwrap_or_default().to_owned());
                asked.len() > 1
            }
            (true, false) => std::mem::replace(&mut *listed.lock().unwrap(), true),
            _ => true,
        };
        let answer = match (wants_watch, is_kind && !again && wants_watch == is_watch) {
            (_, true) => {
                let parts: Vec<_> = bytes.chunks(part).map(Bytes::copy_from_slice).collect();
                AnswerBody::from_stream(stream::iter(parts.into_iter().map(Ok::<_, Infallible>)))
            }
            (true, false) => AnswerBody::from_stream(stream::pending::<Result<Bytes, Infallible>>()),
            (false, false) => AnswerBody::from(r#"{"metadata":{"resourceVersion":"1"},"items":[]}"#),
        };
        async move { Ok::<_, Infallible>(Response::new(answer)) }
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _entered = runtime.enter();
    let cluster = KubeCluster::with_client(Client::new(service, "default"));
    ready();
    let counts = runtime.block_on(drain(&cluster));
    let Some(expected) = is_watch.then(|| told(body)).flatten() else { return };
    assert_eq!(counts.stored + counts.deleted + counts.unreadable, expected.objects, "{counts:?}");
    assert!(counts.deleted <= expected.deleted, "{counts:?}");
    if let (Some(version), Some(next)) = (expected.version, watched.lock().unwrap().get(1)) {
        assert_eq!(*next, version, "the next watch begins elsewhere");
    }
}

/// The first line says whether a list or a watch, and in parts of how many bytes.
fn makers_seeds() -> Vec<Vec<u8>> {
    let job = |name: &str, more: Value| {
        let mut meta = json!({"name": name, "namespace": "ml", "uid": name, "resourceVersion": "3", "annotations": {
            "tranche.dev/share-template-name": format!("{name}-gpu-share"), "tranche.dev/gpu-share": "{}"}});
        meta.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap_or_default());
        json!({"metadata": meta, "spec": {"template": {"spec": {"containers": [{}]}}}})
    };
    let event = |kind: &str, object: Value| format!("{}\n", json!({"type": kind, "object": object}));
    let long = json!({"annotations": {"tranche.dev/share-template-name": "t", "tranche.dev/gpu-share": " ".repeat(5000)}});
    let ending = json!({"deletionTimestamp": "2026-01-01T00:00:00Z"});
    let list = json!({"metadata": {"resourceVersion": "7"}, "items": [job("a", json!({})), job("b", long), job("c", ending)]});
    let body = [
        event("ADDED", job("a", json!({}))),
        event("MODIFIED", job("a", json!({"annotations": null}))),
        event("BOOKMARK", json!({"metadata": {"resourceVersion": "9"}})),
        event("ADDED", json!({"metadata": {"name": "no-uid"}})),
        event("DELETED", job("a", json!({}))),
    ]
    .concat();
    let error = event("ERROR", json!({"kind": "Status", "code": 410, "message": "too old"}));
    let texts = [
        format!("list 0\n{list}"),
        format!("list 5\n{list}"),
        format!("list 0\n{}", json!({"items": [null, 1, {"metadata": null}]})),
        format!("watch 0\n{body}"),
        format!("watch 3\n{body}{error}"),
    ];
    texts.map(String::into_bytes).to_vec()
}

/// What is kept of objects that make pods is short, whoever has written them, and names whom it is of.
fn makers(input: &[u8]) {
    let (head, body) = match input.iter().position(|byte| *byte == b'\n') {
        Some(at) => (&input[..at], &input[at + 1..]),
        None => (&b""[..], input),
    };
    let head = String::from_utf8_lossy(head).into_owned();
    let mut words = head.split(' ');
    let is_watch = words.next() == Some("watch");
    let part = words.next().and_then(|word| word.parse().ok()).filter(|part| *part > 0).unwrap_or(usize::MAX);
    let (bytes, answered) = (Bytes::copy_from_slice(body), Arc::new(Mutex::new(false)));
    let service = tower::service_fn(move |request: Request<Body>| {
        let wants_watch = request.uri().query().unwrap_or_default().contains("watch=true");
        let is_asked = wants_watch == is_watch
            && !std::mem::replace(&mut *answered.lock().unwrap(), wants_watch == is_watch);
        let answer = match (is_asked, wants_watch) {
            (true, _) => {
                let parts: Vec<_> = bytes.chunks(part).map(Bytes::copy_from_slice).collect();
                AnswerBody::from_stream(stream::iter(parts.into_iter().map(Ok::<_, Infallible>)))
            }
            (false, true) => AnswerBody::from_stream(stream::pending::<Result<Bytes, Infallible>>()),
            (false, false) => AnswerBody::from(r#"{"metadata":{"resourceVersion":"1"},"items":[]}"#),
        };
        async move { Ok::<_, Infallible>(Response::new(answer)) }
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _entered = runtime.enter();
    let cluster = KubeCluster::with_client(Client::new(service, "default"));
    let text = str::to_owned;
    let job =
        MakerKind { group: text("batch"), version: text("v1"), plural: text("jobs"), kind: text("Job") };
    ready();
    runtime.block_on(async {
        let (mut changes, mut idle, mut seen) = (cluster.labelled_makers(&job), 0, 0);
        while idle < IDLE_POLLS {
            match changes.next().now_or_never() {
                Some(Some(change)) => {
                    (idle, seen) = (0, seen + 1);
                    assert!(seen < CHANGES_MAX, "it has no end");
                    if let MakerChange::Stored(Maker { template, share, owner, .. }) = change {
                        assert!(
                            template.len() <= 253 && share.len() <= 4096,
                            "{} {}",
                            template.len(),
                            share.len()
                        );
                        assert_eq!((owner.api_version.as_str(), owner.kind.as_str()), ("batch/v1", "Job"));
                    }
                }
                Some(None) => panic!("it has ended"),
                None => {
                    idle += 1;
                    tokio::task::yield_now().await;
                }
            }
        }
    });
}

#[derive(Debug, Default)]
struct Counts {
    stored: usize,
    deleted: usize,
    unreadable: usize,
}

impl Counts {
    fn add<K>(&mut self, seen: &WatchEvent<K>) {
        match seen {
            WatchEvent::Stored(_) => self.stored += 1,
            WatchEvent::Deleted(_) => self.deleted += 1,
            WatchEvent::Unreadable { listed: false, .. } => self.unreadable += 1,
            _ => {}
        }
    }
}

/// Takes what comes until nothing does. A pause after a failure is not waited for.
async fn drain(cluster: &KubeCluster) -> Counts {
    let (mut feed, mut counts, mut idle, mut changes) = (cluster.feed(), Counts::default(), 0, 0);
    while idle < IDLE_POLLS {
        match feed.next().now_or_never() {
            Some(Some(change)) => {
                (idle, changes) = (0, changes + 1);
                assert!(changes < CHANGES_MAX, "it has no end");
                match &change {
                    Change::Pod(seen) => counts.add(seen),
                    Change::Node(seen) => counts.add(seen),
                    Change::Claim(seen) => counts.add(seen),
                    Change::Slice(seen) => counts.add(seen),
                    Change::Class(seen) => counts.add(seen),
                    Change::TaintRule(seen) => counts.add(seen),
                    Change::Namespace(seen) => counts.add(seen),
                    Change::Budget(seen) => counts.add(seen),
                    Change::Volume(seen) => counts.add(seen),
                    Change::PodGroup(_, seen) => counts.add(seen),
                    Change::BindRequest(seen) => counts.add(seen),
                }
            }
            Some(None) => panic!("the feed has ended"),
            None => {
                idle += 1;
                tokio::task::yield_now().await;
            }
        }
    }
    counts
}

/// What a watch that nobody can read in two ways tells.
struct Told {
    objects: usize,
    deleted: usize,
    /// The last version, if the watch has ended without an error and has told of anything.
    version: Option<String>,
}

fn told(body: &[u8]) -> Option<Told> {
    let text = std::str::from_utf8(body).ok().filter(|text| !text.contains('\\'))?;
    let mut found = Told { objects: 0, deleted: 0, version: None };
    let mut version = None;
    for event in serde_json::Deserializer::from_str(text).into_iter::<Value>() {
        let event = event.ok()?;
        // What stands twice may be read either way, and so may what stands beside it.
        let event = event.as_object().filter(|event| event.len() == 2)?;
        let (kind, object) = (event.get("type")?.as_str()?, event.get("object")?);
        let fresh = object.pointer("/metadata/resourceVersion");
        if fresh.is_some_and(|fresh| fresh.as_str().is_none_or(str::is_empty)) {
            return None;
        }
        match kind {
            "ADDED" | "MODIFIED" => found.objects += 1,
            "DELETED" => (found.objects, found.deleted) = (found.objects + 1, found.deleted + 1),
            "BOOKMARK" => {}
            "ERROR" => return once(text).then_some(found),
            _ => continue,
        }
        version = fresh.and_then(Value::as_str).map(str::to_owned).or(version);
    }
    found.version = version.filter(|version| version.bytes().all(|byte| byte.is_ascii_alphanumeric()));
    once(text).then_some(found)
}

/// No field that counts stands twice in an event: there are as many as there are events at most.
fn once(text: &str) -> bool {
    let events = serde_json::Deserializer::from_str(text).into_iter::<Value>().filter(Result::is_ok).count();
    ["\"type\"", "\"object\"", "\"metadata\"", "\"resourceVersion\""]
        .iter()
        .all(|field| text.matches(field).count() <= events)
}

/// What serde can read whole is read whole here, too; the rest costs nobody anything.
fn list(input: &[u8]) {
    let body = input.to_vec();
    let service = tower::service_fn(move |request: Request<Body>| {
        // Slices are listed beside the claims; pages come but once.
        let is_asked = request.uri().path().ends_with("/resourceclaims")
            && !request.uri().query().unwrap_or_default().contains("continue=");
        let body = if is_asked { body.clone() } else { br#"{"items":[]}"#.to_vec() };
        async move { Ok::<_, std::io::Error>(Response::new(Body::from(body))) }
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _entered = runtime.enter();
    let cluster = KubeCluster::with_client(Client::new(service, "default"));
    ready();
    let found = runtime.block_on(cluster.survey());
    let Some(count) = readable(input) else { return };
    assert_eq!(found.expect("it is a list").claims.len(), count);
}

/// How many claims are in a list that nobody can read in two ways.
fn readable(input: &[u8]) -> Option<usize> {
    let text = std::str::from_utf8(input).ok()?;
    let twice = |name: &str| text.matches(name).count() > 1;
    if twice("items")
        || twice("continue")
        || twice("resourceVersion")
        || text.matches("metadata").count() > 64
        || text.contains('\\')
    {
        return None;
    }
    let list: Value = serde_json::from_str(text).ok()?;
    let about = list.get("metadata").map_or(Some(Map::new()), |about| about.as_object().cloned())?;
    let text =
        |name: &str| about.get(name).map_or(Some(""), |text| text.as_str().or(text.is_null().then_some("")));
    if text("resourceVersion").is_none() || text("continue") != Some("") {
        return None;
    }
    let items = list.get("items")?.as_array()?;
    let read = |item: &Value| serde_json::from_value::<ResourceClaim>(item.clone()).is_ok();
    items.iter().all(|item| item.is_object() && read(item)).then_some(items.len())
}

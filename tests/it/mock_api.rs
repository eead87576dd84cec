//! An API server in memory, behind a real kube client. It stores objects, counts resourceVersions, refuses
//! stale writes, selects by field and tells watchers, as the real one does; it can drop fields as one
//! without a feature gate does, fail calls, lose answers, cut watches and forget history.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::body::Body as AnswerBody;
use http::{Method, Request, Response};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::sync::watch;

/// Longest wait for anything in a test.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// The deadline of calls where one of them gets no answer: [`MockApi::call_limit`].
pub const SHORT_CALL: Duration = Duration::from_secs(2);

#[derive(Clone)]
pub struct MockApi {
    state: Arc<Mutex<State>>,
    /// Counts what has happened: requests, writes, cuts.
    ticks: Arc<watch::Sender<u64>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verb {
    Get,
    List,
    Watch,
    Create,
    /// A creation that is not stored.
    DryRun,
    Update,
    /// Server-side apply of a claim's status.devices.
    Apply,
    /// A merge patch: of everything but the status, or of the status alone.
    Patch,
    Delete,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// Answers with this status and reason; nothing is done.
    Status(u16, &'static str),
    /// Answers with this status and message; nothing is done.
    Said(u16, &'static str),
    /// The connection breaks before anything is done.
    Broken,
    /// It is done, but the connection breaks before the answer.
    AnswerLost,
    /// No answer ever comes; nothing is done.
    Silent,
}

type Key = (String, String, String);

#[derive(Default)]
struct State {
    version: u64,
    objects: BTreeMap<Key, Value>,
    log: Vec<Happened>,
    /// Watches from before this version are told that it is gone (410).
    forgotten: u64,
    /// Watches opened in an earlier epoch end.
    epoch: u64,
    dropped: Vec<&'static str>,
    failures: VecDeque<(Verb, &'static str, Failure)>,
    requests: Vec<(Verb, String)>,
    not_served: Vec<&'static str>,
    /// The only namespace that the caller may look at.
    only: Option<String>,
    /// What is served in place of a text.
    bytes: Vec<(String, Vec<u8>)>,
    /// At most so many objects of a list at once, if not zero.
    page: usize,
    /// The entries of `status.devices` that a manager has, by their map keys.
    managers: BTreeMap<(Key, String), Vec<[String; 4]>>,
}

#[derive(Clone)]
struct Happened {
    version: u64,
    kind: &'static str,
    resource: String,
    object: Value,
}

/// A request taken apart.
struct Asked {
    verb: Verb,
    resource: String,
    namespace: String,
    name: String,
    /// `status`, `eviction`, or nothing.
    part: String,
    query: BTreeMap<String, String>,
    metadata_only: bool,
    body: Value,
}

enum Answer {
    Object(Value),
    Status(u16, &'static str, String),
    /// A PodDisruptionBudget forbids it.
    Protected,
    Watch {
        from: u64,
        epoch: u64,
    },
}

impl MockApi {
    pub fn new() -> Self {
        let state = State { version: 100, ..State::default() };
        Self { state: Arc::new(Mutex::new(state)), ticks: Arc::new(watch::Sender::new(0)) }
    }

    pub fn client(&self) -> Client {
        let api = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let api = api.clone();
            async move { api.serve(request).await }
        });
        Client::new(service, "default")
    }

    /// Stores an object as someone else would; `name`, `namespace` are taken from its metadata.
    pub fn put(&self, resource: &str, object: Value) -> Value {
        let stored = self.lock().store(resource, object);
        self.tick();
        stored
    }

    /// Edits every object of a resource, as someone else would.
    pub fn edit(&self, resource: &str, change: impl Fn(&mut Value)) {
        let objects = self.list(resource);
        for mut object in objects {
            change(&mut object);
            self.lock().store(resource, object);
        }
        self.tick();
    }

    /// Deletes the objects of a resource whose name contains `part`, as someone else would.
    pub fn remove(&self, resource: &str, part: &str) {
        let mut state = self.lock();
        let of = |key: &&Key| key.0 == resource && key.2.contains(part);
        let keys: Vec<Key> = state.objects.keys().filter(of).cloned().collect();
        for key in keys {
            state.remove(&key);
        }
        drop(state);
        self.tick();
    }

    pub fn list(&self, resource: &str) -> Vec<Value> {
        let state = self.lock();
        state.objects.iter().filter(|(key, _)| key.0 == resource).map(|(_, object)| object.clone()).collect()
    }

    /// From now on fields of these names are dropped from what is written.
    pub fn drop_fields(&self, names: &[&'static str]) {
        self.lock().dropped = names.to_vec();
    }

    /// Every path of this resource is unknown (404 without an object's name).
    pub fn unserve(&self, resource: &'static str) {
        self.lock().not_served.push(resource);
    }

    /// From now on the caller has a role in this namespace and none in the cluster: everything else is forbidden, but for
    /// the namespace itself.
    pub fn let_see_only(&self, namespace: &str) {
        self.lock().only = Some(namespace.to_owned());
    }

    /// From now on these bytes are served wherever `text` stands in an object: the real one keeps the text of opaque
    /// parameters as it came, whether it is UTF-8 or not.
    pub fn serve_bytes(&self, text: &str, bytes: &[u8]) {
        self.lock().bytes.push((text.to_owned(), bytes.to_vec()));
    }

    /// From now on lists come in pages of at most so many objects.
    pub fn page(&self, objects: usize) {
        self.lock().page = objects;
    }

    /// The next such request fails; several are taken in turn.
    pub fn fail(&self, verb: Verb, resource: &'static str, failure: Failure) {
        self.lock().failures.push_back((verb, resource, failure));
    }

    /// For a client's calls. A call that a slow machine answers late would be counted twice by the server: only where
    /// one is to get no answer, the deadline is short.
    pub fn call_limit(&self) -> Duration {
        let is_silent = |failure: &(_, _, Failure)| matches!(failure.2, Failure::Silent);
        if self.lock().failures.iter().any(is_silent) { SHORT_CALL } else { PATIENCE }
    }

    /// Whether everything that was to fail has failed.
    pub fn has_failed(&self) -> bool {
        self.lock().failures.is_empty()
    }

    /// Ends all watches; with `forget`, what they knew is history.
    pub fn cut_watches(&self, forget: bool) {
        let mut state = self.lock();
        state.epoch += 1;
        if forget {
            state.version += 1;
            state.forgotten = state.version;
        }
        drop(state);
        self.tick();
    }

    pub fn count(&self, verb: Verb, resource: &str) -> usize {
        self.lock().requests.iter().filter(|(v, r)| *v == verb && r == resource).count()
    }

    /// Creations, updates, applied statuses and deletions that were asked for.
    pub fn writes(&self, resource: &str) -> usize {
        [Verb::Create, Verb::Update, Verb::Apply, Verb::Patch, Verb::Delete]
            .map(|verb| self.count(verb, resource))
            .iter()
            .sum()
    }

    /// Waits until `holds`; fails the test with `what` if it takes too long.
    #[track_caller]
    pub fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) -> impl Future<Output = ()> {
        self.until_within(PATIENCE, what, holds)
    }

    /// The same for what takes a slow machine longer than [`PATIENCE`].
    #[track_caller]
    pub fn until_within(
        &self,
        patience: Duration,
        what: &str,
        holds: impl Fn(&Self) -> bool,
    ) -> impl Future<Output = ()> {
        let mut ticks = self.ticks.subscribe();
        let (what, caller) = (what.to_owned(), std::panic::Location::caller());
        async move {
            let wait = async {
                while !holds(self) {
                    ticks.changed().await.unwrap();
                }
            };
            if tokio::time::timeout(patience, wait).await.is_err() {
                let requests = self.lock().requests.clone();
                let last = &requests[requests.len().saturating_sub(12)..];
                panic!("{caller}: waited in vain for: {what}; the last requests were {last:?}");
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn tick(&self) {
        self.ticks.send_modify(|ticks| *ticks += 1);
    }

    async fn serve(&self, request: Request<Body>) -> Result<Response<AnswerBody>, std::io::Error> {
        let asked = Asked::read(request).await;
        let failure = self.lock().arrive(&asked);
        let broken = || Err(std::io::Error::other("connection reset by peer"));
        let answer = match failure {
            None => self.lock().answer(&asked),
            Some(Failure::Status(code, reason)) => {
                Answer::Status(code, reason, "as the test wants".to_owned())
            }
            Some(Failure::Said(code, message)) => Answer::Status(code, "Invalid", message.to_owned()),
            Some(Failure::Broken) => {
                self.tick();
                return broken();
            }
            Some(Failure::AnswerLost) => {
                self.lock().answer(&asked);
                self.tick();
                return broken();
            }
            Some(Failure::Silent) => {
                self.tick();
                return std::future::pending().await;
            }
        };
        self.tick();
        Ok(self.response(&asked, answer))
    }

    fn response(&self, asked: &Asked, answer: Answer) -> Response<AnswerBody> {
        let (code, body) = match answer {
            Answer::Object(object) => (200, AnswerBody::from(self.lock().served(&object.to_string()))),
            Answer::Status(code, reason, message) => {
                (code, AnswerBody::from(status(asked, code, reason, &message).to_string()))
            }
            Answer::Protected => {
                let message = "Cannot evict pod as it would violate the pod's disruption budget.";
                let mut status = status(asked, 429, "TooManyRequests", message);
                status["details"]["causes"] = json!([{"reason": "DisruptionBudget", "message": "The disruption budget b needs 1 healthy pods and has 1 currently"}]);
                (429, AnswerBody::from(status.to_string()))
            }
            Answer::Watch { from, epoch } => (200, self.stream(asked, from, epoch)),
        };
        Response::builder().status(code).header("content-type", "application/json").body(body).unwrap()
    }

    /// The events after version `from`, until the watches are cut.
    fn stream(&self, asked: &Asked, from: u64, epoch: u64) -> AnswerBody {
        let (resource, metadata_only) = (asked.resource.clone(), asked.metadata_only);
        let selector = asked.query.get("fieldSelector").cloned().unwrap_or_default();
        let start = (self.clone(), self.ticks.subscribe(), from);
        let stream = futures::stream::unfold(start, move |(api, mut ticks, mut from)| {
            let (resource, selector) = (resource.clone(), selector.clone());
            async move {
                loop {
                    let (news, ended) = {
                        let state = api.lock();
                        if from < state.forgotten {
                            // The real one says so within the stream, too, and ends it.
                            let gone = json!({"kind": "Status", "apiVersion": "v1", "metadata": {},
                                "status": "Failure", "code": 410, "reason": "Expired",
                                "message": "too old resource version"});
                            let line = watch_line("ERROR", &gone);
                            drop(state);
                            return Some((Ok(line.into_bytes()), (api, ticks, u64::MAX)));
                        }
                        let after = |happened: &&Happened| happened.version > from;
                        let news: Vec<Happened> = state.log.iter().filter(after).cloned().collect();
                        (news, state.epoch != epoch)
                    };
                    if let Some(last) = news.last() {
                        from = last.version;
                    }
                    let lines: String = news
                        .into_iter()
                        .filter(|one| one.resource == resource && selected(&one.object, &selector))
                        .map(|one| watch_line(one.kind, &shown(one.object, metadata_only)))
                        .collect();
                    if !lines.is_empty() {
                        let lines = api.lock().served(&lines);
                        return Some((Ok::<_, Infallible>(lines), (api, ticks, from)));
                    }
                    if ended || ticks.changed().await.is_err() {
                        return None;
                    }
                }
            }
        });
        AnswerBody::from_stream(stream)
    }
}

impl Asked {
    async fn read(request: Request<Body>) -> Self {
        let (parts, body) = request.into_parts();
        let uri = parts.uri;
        let query: BTreeMap<String, String> = uri
            .query()
            .unwrap_or_default()
            .split('&')
            .filter_map(|pair| pair.split_once('='))
            .map(|(key, value)| (key.to_owned(), unescaped(value)))
            .collect();
        let mut path: Vec<&str> = uri.path().trim_matches('/').split('/').collect();
        path.drain(..if path[0] == "api" { 2 } else { 3 });
        let namespace = if path[0] == "namespaces" && path.len() > 2 {
            path.drain(..2).nth(1).unwrap_or_default().to_owned()
        } else {
            String::new()
        };
        let name = path.get(1).unwrap_or(&"").to_string();
        let part = path.get(2).unwrap_or(&"").to_string();
        let watch = query.get("watch").is_some_and(|value| value == "true");
        let dry_run = query.get("dryRun").is_some_and(|value| value == "All");
        let verb = match parts.method {
            Method::POST if dry_run => Verb::DryRun,
            Method::GET if watch => Verb::Watch,
            Method::GET if name.is_empty() => Verb::List,
            Method::GET => Verb::Get,
            Method::POST => Verb::Create,
            Method::PUT => Verb::Update,
            Method::PATCH if parts.headers["content-type"] == "application/merge-patch+json" => Verb::Patch,
            Method::PATCH => Verb::Apply,
            Method::DELETE => Verb::Delete,
            other => panic!("{other} is not served"),
        };
        let accept = parts.headers.get("accept").map_or("", |value| value.to_str().unwrap());
        let metadata_only = accept.contains("PartialObjectMetadata");
        let resource = path[0].to_owned();
        let bytes = body.collect_bytes().await.unwrap();
        let body = serde_json::from_slice(&bytes).unwrap_or_default();
        Self { verb, resource, namespace, name, part, query, metadata_only, body }
    }

    fn key(&self) -> Key {
        (self.resource.clone(), self.namespace.clone(), self.name.clone())
    }
}

impl State {
    /// Notes the request; says how it is to fail, if it is.
    fn arrive(&mut self, asked: &Asked) -> Option<Failure> {
        self.requests.push((asked.verb, asked.resource.clone()));
        let due = self
            .failures
            .iter()
            .position(|(verb, resource, _)| *verb == asked.verb && *resource == asked.resource)?;
        self.failures.remove(due).map(|(_, _, failure)| failure)
    }

    fn answer(&mut self, asked: &Asked) -> Answer {
        if self.not_served.iter().any(|resource| *resource == asked.resource) {
            return Answer::Status(
                404,
                "NotFound",
                "the server could not find the requested resource".to_owned(),
            );
        }
        let is_own = |only: &String| {
            asked.namespace == *only || (asked.resource == "namespaces" && asked.name == *only)
        };
        if self.only.as_ref().is_some_and(|only| !is_own(only)) {
            let message = format!("{} is forbidden: User \"dev\" cannot look at it", asked.resource);
            return Answer::Status(403, "Forbidden", message);
        }
        match asked.verb {
            Verb::List => self.listed(asked),
            Verb::Watch => self.watched(asked),
            Verb::Create if asked.part == "eviction" => self.evict(asked),
            Verb::Create => self.create(asked),
            Verb::DryRun => {
                let mut object = asked.body.clone();
                self.drop_unknown(&mut object);
                Answer::Object(object)
            }
            Verb::Get => match self.objects.get(&asked.key()) {
                Some(object) => Answer::Object(shown(object.clone(), asked.metadata_only)),
                None => not_found(),
            },
            Verb::Update => self.update(asked),
            Verb::Apply => self.apply(asked),
            Verb::Patch => self.patch(asked),
            Verb::Delete => self.delete(asked),
        }
    }

    fn listed(&self, asked: &Asked) -> Answer {
        let selector = asked.query.get("fieldSelector").cloned().unwrap_or_default();
        let mut items: Vec<Value> = self
            .objects
            .iter()
            .filter(|(key, object)| key.0 == asked.resource && selected(object, &selector))
            .filter(|(key, _)| asked.namespace.is_empty() || key.1 == asked.namespace)
            .map(|(_, object)| shown(object.clone(), asked.metadata_only))
            .collect();
        // The version of the first page, and how many objects were told.
        let begun = asked.query.get("continue").and_then(|token| token.split_once('-'));
        let begun = begun.and_then(|(version, told)| Some((version.parse().ok()?, told.parse().ok()?)));
        let (version, told): (u64, usize) = begun.unwrap_or((self.version, 0));
        if version < self.forgotten {
            return Answer::Status(410, "Expired", "the provided continue parameter is too old".to_owned());
        }
        items.drain(..told.min(items.len()));
        let mut metadata = json!({"resourceVersion": version.to_string()});
        let limit: Option<usize> = asked.query.get("limit").and_then(|limit| limit.parse().ok());
        if limit.is_some() && self.page > 0 && items.len() > self.page {
            items.truncate(self.page);
            metadata["continue"] = format!("{version}-{}", told + self.page).into();
        }
        Answer::Object(json!({
            "apiVersion": "v1", "kind": "List", "metadata": metadata, "items": items,
        }))
    }

    fn served(&self, text: &str) -> Vec<u8> {
        let mut bytes = text.as_bytes().to_vec();
        for (text, with) in &self.bytes {
            while let Some(at) = bytes.windows(text.len()).position(|part| part == text.as_bytes()) {
                bytes.splice(at..at + text.len(), with.iter().copied());
            }
        }
        bytes
    }

    fn watched(&self, asked: &Asked) -> Answer {
        let from = asked.query.get("resourceVersion").and_then(|v| v.parse().ok()).unwrap_or(self.version);
        Answer::Watch { from, epoch: self.epoch }
    }

    fn create(&mut self, asked: &Asked) -> Answer {
        let mut object = asked.body.clone();
        let meta = &mut object["metadata"];
        if meta["name"].is_null() {
            let prefix = meta["generateName"].as_str().unwrap_or_default();
            meta["name"] = format!("{}{:05}", &prefix[..prefix.len().min(58)], self.version).into();
        }
        if !asked.namespace.is_empty() {
            meta["namespace"] = asked.namespace.clone().into();
        }
        let key = (asked.resource.clone(), asked.namespace.clone(), text(&meta["name"]));
        if self.objects.contains_key(&key) {
            return Answer::Status(409, "AlreadyExists", format!("{} exists", key.2));
        }
        self.drop_unknown(&mut object);
        Answer::Object(self.store(&asked.resource, object))
    }

    fn update(&mut self, asked: &Asked) -> Answer {
        let Some(stored) = self.objects.get(&asked.key()) else { return not_found() };
        let mut object = asked.body.clone();
        let version = &object["metadata"]["resourceVersion"];
        if !version.is_null() && *version != stored["metadata"]["resourceVersion"] {
            return Answer::Status(409, "Conflict", "the object has been modified".to_owned());
        }
        let uid = &object["metadata"]["uid"];
        if !uid.is_null() && *uid != stored["metadata"]["uid"] {
            return Answer::Status(409, "Conflict", "Precondition failed: UID".to_owned());
        }
        match asked.part.as_str() {
            "status" => {
                if let Some(refused) = refused_status(stored, &object) {
                    return refused;
                }
                let status = object["status"].take();
                object = stored.clone();
                object["status"] = status;
            }
            _ => object["metadata"]["uid"] = stored["metadata"]["uid"].clone(),
        }
        self.drop_unknown(&mut object);
        Answer::Object(self.store(&asked.resource, object))
    }

    /// The manager's entries of `status.devices` become those that are given, by the list's map key.
    fn apply(&mut self, asked: &Asked) -> Answer {
        assert_eq!(
            asked.query.get("force").map(String::as_str),
            Some("true"),
            "a status is applied with force"
        );
        let manager = asked.query["fieldManager"].clone();
        let Some(stored) = self.objects.get(&asked.key()) else { return not_found() };
        let mut object = stored.clone();
        let uid = &asked.body["metadata"]["uid"];
        if !uid.is_null() && *uid != object["metadata"]["uid"] {
            let message = "metadata.uid: Invalid value: field is immutable";
            return Answer::Status(422, "Invalid", message.to_owned());
        }
        let list = |value: &Value| value["status"]["devices"].as_array().cloned().unwrap_or_default();
        let key = |entry: &Value| ["driver", "pool", "device", "shareID"].map(|field| text(&entry[field]));
        let results = object["status"]["allocation"]["devices"]["results"].as_array().cloned();
        let (given, before) = (list(&asked.body), list(&object));
        for entry in &given {
            if !results.iter().flatten().any(|result| key(result) == key(entry)) {
                let message = "status.devices: Invalid value: must be an allocated device in the claim";
                return Answer::Status(422, "Invalid", message.to_owned());
            }
        }
        let owned = self.managers.insert((asked.key(), manager), given.iter().map(key).collect());
        let gone = |entry: &Value| owned.iter().flatten().any(|mine| *mine == key(entry));
        let others =
            before.into_iter().filter(|entry| !gone(entry) && !given.iter().any(|g| key(g) == key(entry)));
        if !self.dropped.contains(&"status.devices") {
            object["status"]["devices"] = others.chain(given.iter().cloned()).collect();
        }
        Answer::Object(self.store(&asked.resource, object))
    }

    /// RFC 7396, with the preconditions that the object's metadata names.
    fn patch(&mut self, asked: &Asked) -> Answer {
        let Some(stored) = self.objects.get(&asked.key()) else { return not_found() };
        let mut patch = asked.body.clone();
        for field in ["uid", "resourceVersion"] {
            let wanted = patch["metadata"].as_object_mut().and_then(|meta| meta.remove(field));
            if wanted.is_some_and(|wanted| wanted != stored["metadata"][field]) {
                return Answer::Status(409, "Conflict", format!("the object has been modified: {field}"));
            }
        }
        let mut object = stored.clone();
        match asked.part.as_str() {
            "status" => {
                if let Some(refused) = refused_status(stored, &patch) {
                    return refused;
                }
                merge(&mut object["status"], &patch["status"]);
                if object["status"]["allocation"].is_null() {
                    object["status"].as_object_mut().map(|status| status.remove("devices"));
                }
            }
            _ => {
                patch.as_object_mut().map(|patch| patch.remove("status"));
                merge(&mut object, &patch);
            }
        }
        self.drop_unknown(&mut object);
        Answer::Object(self.store(&asked.resource, object))
    }

    fn delete(&mut self, asked: &Asked) -> Answer {
        let key = asked.key();
        let Some(stored) = self.objects.get(&key) else { return not_found() };
        for field in ["uid", "resourceVersion"] {
            let wanted = &asked.body["preconditions"][field];
            if !wanted.is_null() && *wanted != stored["metadata"][field] {
                return Answer::Status(409, "Conflict", format!("Precondition failed: {field}"));
            }
        }
        self.remove(&key);
        Answer::Object(json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}))
    }

    /// The pod ends: it is marked, or is gone at once where it was never bound. A PodDisruptionBudget that matches by its
    /// labels and allows no disruption forbids it; several always do, as there, with the code of a success.
    fn evict(&mut self, asked: &Asked) -> Answer {
        let key = asked.key();
        let Some(stored) = self.objects.get(&key) else { return not_found() };
        let mut pod = stored.clone();
        let is_meant = |budget: &&Value| {
            let labels = budget["spec"]["selector"]["matchLabels"].as_object();
            budget["metadata"]["namespace"] == pod["metadata"]["namespace"]
                && labels.is_some_and(|labels| labels.iter().all(|(k, v)| pod["metadata"]["labels"][k] == *v))
        };
        let budgets = self.objects.iter().filter(|(key, _)| key.0 == "poddisruptionbudgets");
        let budgets: Vec<&Value> = budgets.map(|(_, budget)| budget).filter(is_meant).collect();
        if budgets.len() > 1 {
            let message = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not \
                support.";
            return Answer::Object(json!({"kind": "Status", "apiVersion": "v1", "metadata": {},
                "status": "Failure", "message": message, "code": 500}));
        }
        if budgets.iter().any(|budget| budget["status"]["disruptionsAllowed"] == 0) {
            return Answer::Protected;
        }
        let wanted = &asked.body["deleteOptions"]["preconditions"]["uid"];
        if !wanted.is_null() && *wanted != pod["metadata"]["uid"] {
            let message = format!("the UID in the precondition ({wanted}) does not match the UID in record");
            return Answer::Status(409, "Conflict", message);
        }
        match pod["spec"]["nodeName"].is_string() {
            true => {
                pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
                self.store(&asked.resource, pod);
            }
            false => self.remove(&key),
        }
        Answer::Object(json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}))
    }

    /// Stores under a new version; one without a change keeps its own, as there.
    fn store(&mut self, resource: &str, mut object: Value) -> Value {
        let meta = &object["metadata"];
        let key = (resource.to_owned(), text(&meta["namespace"]), text(&meta["name"]));
        let old = self.objects.get(&key);
        if let Some(old) = old {
            let mut like = object.clone();
            like["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"].clone();
            if like == *old {
                return like;
            }
        }
        let kind = if old.is_some() { "MODIFIED" } else { "ADDED" };
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        if object["metadata"]["uid"].is_null() {
            object["metadata"]["uid"] = format!("uid-{}", self.version).into();
        }
        self.objects.insert(key, object.clone());
        self.happened(kind, resource, object.clone());
        object
    }

    fn remove(&mut self, key: &Key) {
        if let Some(mut object) = self.objects.remove(key) {
            self.version += 1;
            object["metadata"]["resourceVersion"] = self.version.to_string().into();
            self.happened("DELETED", &key.0, object);
        }
    }

    fn happened(&mut self, kind: &'static str, resource: &str, object: Value) {
        let version = self.version;
        self.log.push(Happened { version, kind, resource: resource.to_owned(), object });
    }

    fn drop_unknown(&self, object: &mut Value) {
        fn walk(value: &mut Value, names: &[&str]) {
            match value {
                Value::Object(map) => {
                    map.retain(|key, _| !names.contains(&key.as_str()));
                    map.values_mut().for_each(|value| walk(value, names));
                }
                Value::Array(items) => items.iter_mut().for_each(|value| walk(value, names)),
                _ => {}
            }
        }
        walk(&mut object["spec"], &self.dropped);
        if let Some(allocation) = object.pointer_mut("/status/allocation") {
            walk(allocation, &self.dropped);
        }
    }
}

fn merge(object: &mut Value, patch: &Value) {
    let Value::Object(fields) = patch else {
        *object = patch.clone();
        return;
    };
    if !object.is_object() {
        *object = json!({});
    }
    for (name, value) in fields {
        match (value, object.as_object_mut()) {
            (Value::Null, Some(object)) => drop(object.remove(name)),
            (value, Some(object)) => merge(object.entry(name).or_insert(Value::Null), value),
            _ => {}
        }
    }
}

/// An allocation can be given and taken away, not changed.
fn refused_status(stored: &Value, asked: &Value) -> Option<Answer> {
    let (old, new) = (&stored["status"]["allocation"], &asked["status"]["allocation"]);
    let changed = !old.is_null() && new.is_object() && old != new;
    let message = "status.allocation: Invalid value: field is immutable";
    changed.then(|| Answer::Status(422, "Invalid", message.to_owned()))
}

fn not_found() -> Answer {
    Answer::Status(404, "NotFound", "not found".to_owned())
}

fn status(asked: &Asked, code: u16, reason: &str, message: &str) -> Value {
    // Only a real "not found" names the object.
    let served = !message.contains("requested resource");
    let details = if served { json!({"name": asked.name, "kind": asked.resource}) } else { json!({}) };
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "code": code, "reason": reason, "message": message, "details": details,
    })
}

fn shown(object: Value, metadata_only: bool) -> Value {
    if !metadata_only {
        return object;
    }
    json!({
        "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"],
    })
}

/// One event; the type comes first, as in the real one's.
fn watch_line(kind: &str, object: &Value) -> String {
    format!("{{\"type\":\"{kind}\",\"object\":{object}}}\n")
}

/// `a.b=c,d.e!=f`
fn selected(object: &Value, selector: &str) -> bool {
    selector.split(',').filter_map(|term| term.split_once('=')).all(|(path, wanted)| {
        let (path, equal) = path.strip_suffix('!').map_or((path, true), |path| (path, false));
        let found = path.split('.').fold(object, |value, key| &value[key]);
        (text(found) == wanted) == equal
    })
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn unescaped(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let digits = [rest.next().unwrap(), rest.next().unwrap()];
                u8::from_str_radix(std::str::from_utf8(&digits).unwrap(), 16).unwrap()
            }
            b'+' => b' ',
            other => other,
        });
    }
    String::from_utf8(bytes).unwrap()
}

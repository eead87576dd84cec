//! What can be known of a claim before it is allocated: that its parameters can be read, that they are meant
//! for requests that are there, and that each share says how much it is.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::classes::{ClassAmount, ClassOwner, KnownClasses};
use super::review::Problem;
use super::selectors::SelectorBudget;
use super::{messages, selectors};
use crate::model::claim::ConfigSource;
use crate::model::names::{DRIVER, RequestName};
use crate::params::{self, AskedError, Params, ShareGrant, ShareSource};
use crate::select::{CLAIM_ENTRIES_MAX, CONSTRAINED_MAX};

/// The API server takes 32 requests, 32 configurations, and 32 names of requests in each.
const ENTRIES_TOO_MANY: usize = 65;
/// It takes 8 alternatives of a request.
const ALTERNATIVES_TOO_MANY: usize = 17;
/// A request and its alternative are DNS labels, with a slash between them 127 bytes.
const NAME_TOO_LONG: usize = 128;
/// The class whose shares kube-scheduler places.
const WHOLE_CLASS: &str = "gpu.nvidia.com";
/// The most problems that one answer lists.
const PROBLEMS_MAX: usize = 16;
/// The most request names that a message about an unknown request lists.
const NAMES_MAX: usize = 8;

/// A request, or one alternative of a `firstAvailable` request.
struct ClaimRequest<'a> {
    name: RequestName,
    class: &'a str,
    whose: ClassOwner,
    /// Its fields.
    body: &'a Value,
    /// Where they stand below `spec.devices`.
    at: String,
}

impl ClaimRequest<'_> {
    /// The controller places it, or kube-scheduler by its capacities.
    fn is_share(&self) -> bool {
        self.is_controllers() || self.has_capacity()
    }

    fn is_controllers(&self) -> bool {
        matches!(self.whose, ClassOwner::Controller(_))
    }

    fn has_capacity(&self) -> bool {
        has_capacity(self.body)
    }

    /// Names and quantities of its capacities. What is no text is no quantity either.
    fn capacity(&self) -> impl Iterator<Item = (&str, &str)> {
        let requests = self.body["capacity"]["requests"].as_object();
        requests.into_iter().flatten().map(|(name, quantity)| (name.as_str(), text(quantity)))
    }
}

/// The fields of a request name amounts.
fn has_capacity(body: &Value) -> bool {
    body["capacity"]["requests"].as_object().is_some_and(|amounts| !amounts.is_empty())
}

/// A configuration for our driver.
struct CheckedConfig<'a> {
    /// Where its parameters stand.
    at: String,
    /// Names of requests, or of their alternatives. None: it applies to all.
    requests: BTreeSet<&'a str>,
    /// None: a problem that is told already.
    params: Option<Params>,
}

impl CheckedConfig<'_> {
    fn applies_to(&self, request: &RequestName) -> bool {
        let names = || [request.as_str(), request.base()];
        self.requests.is_empty() || names().iter().any(|name| self.requests.contains(name))
    }
}

/// The requests of a claim, and all names by which they may be meant.
struct KnownRequests<'a> {
    all: &'a [ClaimRequest<'a>],
    names: BTreeSet<&'a str>,
}

impl<'a> KnownRequests<'a> {
    fn of(all: &'a [ClaimRequest<'a>]) -> Self {
        let names = all.iter().flat_map(|request| [request.name.as_str(), request.name.base()]).collect();
        Self { all, names }
    }

    fn has(&self, name: &str) -> bool {
        self.names.contains(name)
    }
}

/// Everything that is wrong with a claim's spec, which stands at `at` of its object.
pub(super) fn problems(
    spec: &Value,
    at: &str,
    classes: &KnownClasses,
    budget: &mut SelectorBudget,
) -> Vec<Problem> {
    let devices = &spec["devices"];
    let at = format!("{at}.devices");
    if let Some(problem) = longer_than_any(devices, &at) {
        return vec![problem];
    }
    let requests = requests(devices, &at, classes);
    let mut found = Vec::new();
    let configs = configs(devices, &at, &requests, &mut found);
    for request in requests.iter().filter(|request| request.is_controllers()) {
        if found.len() >= PROBLEMS_MAX {
            break;
        }
        found.extend(of_share(request, &configs));
        found.extend(without_meaning(request));
    }
    found.extend(requests.iter().filter_map(too_little));
    if let Some(problem) =
        more_than_is_read(&requests, &at).or_else(|| too_many_constrained(devices, &requests, &at))
    {
        found.push(problem);
        return found;
    }
    found.extend(selectors::problems(&format!("{at}.requests"), texts(&requests), budget));
    found.extend(beside_shares(&requests));
    found.extend(configs.iter().filter_map(|config| misplaced(config, &requests)));
    found
}

/// What the author of a good claim may not expect: shares of several GPUs have one MPS daemon, which serves no others;
/// and not all of the claim could be checked.
pub(super) fn warning(spec: &Value, classes: &KnownClasses) -> Option<&'static str> {
    let named = |body: &Value| classes.is_beyond(text(&body["deviceClassName"]));
    let unread = list(&spec["devices"]["requests"]).any(|request| {
        let alternatives = || list(&request["firstAvailable"]);
        match alternatives().next() {
            Some(_) => alternatives().any(named),
            None if request["exactly"].is_null() => named(request),
            None => named(&request["exactly"]),
        }
    });
    if unread {
        return Some(messages::CLASS_NOT_READ);
    }
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    let requests = requests(&spec["devices"], "", classes);
    let configs = configs(&spec["devices"], "", &requests, &mut Vec::new());
    for request in requests.iter().filter(|request| request.is_share() && has_daemon(request, &configs)) {
        // Of alternatives one is taken.
        let most = counts.entry(request.name.base()).or_default();
        *most = (*most).max(request.body["count"].as_u64().unwrap_or(1));
    }
    let all = counts.into_values().fold(0, u64::saturating_add);
    (all > 1).then_some(messages::SEVERAL_SHARES)
}

/// What the API server will refuse, too, but has not yet: below, everything is held against everything.
fn longer_than_any(devices: &Value, at: &str) -> Option<Problem> {
    for field in ["requests", "config"] {
        let entries = || list(&devices[field]);
        let alternatives = || entries().map(|entry| &entry["firstAvailable"]);
        let selectors = || entries().map(|entry| &entry["requests"]);
        let count = |entries: &Value| list(entries).count();
        let longest = selectors().chain([&devices[field]]).map(count).max().unwrap_or(0);
        let most = alternatives().map(count).max().unwrap_or(0);
        let alternatives = alternatives().flat_map(list).chain(entries()).map(|entry| &entry["name"]);
        let names = alternatives.chain(selectors().flat_map(list));
        let widest = names.map(|name| text(name).len()).max().unwrap_or(0);
        let what = match (longest, most, widest) {
            (ENTRIES_TOO_MANY.., ..) => {
                format!("a list of {longest} entries, which is more than a claim may have")
            }
            (_, ALTERNATIVES_TOO_MANY.., _) => {
                format!("a request of {most} alternatives, which is more than a request may have")
            }
            (.., NAME_TOO_LONG..) => format!("a name of {widest} bytes, which is longer than a name may be"),
            _ => continue,
        };
        return Some(Problem { field: format!("{at}.{field}"), words: format!("has {what}") });
    }
    None
}

/// A claim for shares has more entries than the controller reads.
fn more_than_is_read(requests: &[ClaimRequest<'_>], at: &str) -> Option<Problem> {
    let entries = |request: &ClaimRequest<'_>| {
        1 + list(&request.body["selectors"]).count() + list(&request.body["tolerations"]).count()
    };
    let is_ours = requests.iter().any(ClaimRequest::is_controllers);
    let entries: usize = requests.iter().map(entries).sum();
    (is_ours && entries > CLAIM_ENTRIES_MAX)
        .then(|| Problem { field: format!("{at}.requests"), words: messages::entries(entries) })
}

/// The controller refuses such a pod, too; the author of a single claim learns it here.
fn too_many_constrained(devices: &Value, requests: &[ClaimRequest<'_>], at: &str) -> Option<Problem> {
    let all = list(&devices["requests"]).count();
    let named = |constraint: &Value| match list(&constraint["requests"]).count() {
        0 => all,
        named => named,
    };
    let is_ours = requests.iter().any(ClaimRequest::is_controllers);
    let constrained: usize = list(&devices["constraints"]).map(named).sum();
    (is_ours && constrained > CONSTRAINED_MAX)
        .then(|| Problem { field: format!("{at}.constraints"), words: messages::constrained(constrained) })
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// In the form of `v1` and `v1beta2` (`exactly`) and in that of `v1beta1` (the fields beside the name).
fn requests<'a>(devices: &'a Value, at: &str, classes: &KnownClasses) -> Vec<ClaimRequest<'a>> {
    let mut all = Vec::new();
    for (index, request) in list(&devices["requests"]).enumerate() {
        let at = format!("{at}.requests[{index}]");
        let name = text(&request["name"]);
        let alternatives: Vec<_> = list(&request["firstAvailable"]).collect();
        if alternatives.is_empty() {
            let (body, at) = match &request["exactly"] {
                Value::Null => (request, at.clone()),
                exactly => (exactly, format!("{at}.exactly")),
            };
            all.push(ClaimRequest {
                name: RequestName::new(name),
                class: text(&body["deviceClassName"]),
                whose: classes.whose(text(&body["deviceClassName"])),
                body,
                at,
            });
        }
        all.extend(alternatives.into_iter().enumerate().map(|(index, alternative)| ClaimRequest {
            name: RequestName::new(format!("{name}/{}", text(&alternative["name"]))),
            class: text(&alternative["deviceClassName"]),
            whose: classes.whose(text(&alternative["deviceClassName"])),
            body: alternative,
            at: format!("{at}.firstAvailable[{index}]"),
        }));
    }
    all
}

/// Those for our driver. What is wrong with them is put into `found`.
fn configs<'a>(
    devices: &'a Value,
    at: &str,
    requests: &[ClaimRequest<'_>],
    found: &mut Vec<Problem>,
) -> Vec<CheckedConfig<'a>> {
    let known = KnownRequests::of(requests);
    list(&devices["config"])
        .enumerate()
        .filter(|(_, config)| config["opaque"]["driver"] == DRIVER)
        .map(|(index, config)| read(config, &format!("{at}.config[{index}]"), &known, found))
        .collect()
}

/// The claim asks for shares by this request, not the controller for whole GPUs or MIG devices.
fn has_daemon(request: &ClaimRequest<'_>, configs: &[CheckedConfig<'_>]) -> bool {
    let shares = configs.iter().filter(|config| config.applies_to(&request.name));
    let mut share = shares.filter_map(|config| match &config.params {
        Some(Params::Share(share)) => Some(share),
        _ => None,
    });
    let said = share.next_back().map_or(ShareSource::Nowhere, ShareSource::ByClaim);
    let asked = params::asked(said, request.capacity());
    !(request.is_controllers() && asked.is_ok_and(|share| share.is_whole() || share.is_mig()))
}

fn read<'a>(
    config: &'a Value,
    at: &str,
    known: &KnownRequests<'_>,
    found: &mut Vec<Problem>,
) -> CheckedConfig<'a> {
    let requests = || list(&config["requests"]).map(text);
    for (index, name) in requests().enumerate() {
        if found.len() < PROBLEMS_MAX && !known.has(name) {
            let known = known.all;
            let names = known.iter().take(NAMES_MAX).map(|request| request.name.as_str());
            let mut names: Vec<&str> = names.collect();
            names.extend((known.len() > NAMES_MAX).then_some("..."));
            found.push(Problem {
                field: format!("{at}.requests[{index}]"),
                words: format!("the claim has no request {name:?}; its requests are {}", names.join(", ")),
            });
        }
    }
    let at = format!("{at}.opaque.parameters");
    let params = decode(&config["opaque"]["parameters"], &at).map_err(|problem| found.push(problem)).ok();
    CheckedConfig { at, requests: requests().collect(), params }
}

fn decode(parameters: &Value, at: &str) -> Result<Params, Problem> {
    // Whatever is in it: nobody is to be told how to write a grant well.
    let grant = Params::Grant(ShareGrant { devices: Vec::new() });
    let read = match parameters["kind"] == grant.kind() {
        true => Ok(grant),
        false => params::decode(parameters),
    };
    let read = read.and_then(|params| params.check_source(ConfigSource::FromClaim).map(|()| params));
    let read = read.and_then(|params| params::check_new(&params).map(|()| params));
    read.map_err(|error| Problem {
        field: match error.path.as_str() {
            "parameters" => at.to_owned(),
            path => format!("{at}.{path}"),
        },
        words: error.problem,
    })
}

/// What is wrong with a request of a class of the controller's. Of several configurations the last one counts,
/// as a whole (KEP-3063).
fn of_share(request: &ClaimRequest<'_>, configs: &[CheckedConfig<'_>]) -> Vec<Problem> {
    let mut found = Vec::new();
    let mut share = None;
    for config in configs.iter().filter(|config| config.applies_to(&request.name)) {
        match &config.params {
            // Told already; what it was meant to say is not known.
            None => return found,
            Some(Params::Share(given)) => share = Some((config, given)),
            Some(other) if messages::may_stand_beside_shares(other, config.requests.is_empty()) => {}
            Some(other) => found.push(Problem {
                field: format!("{}.kind", config.at),
                words: messages::other_kind(other, &request.name),
            }),
        }
    }
    let ClassOwner::Controller(amount) = request.whose else { return found };
    let said = share.map_or(ShareSource::Nowhere, |(_, share)| ShareSource::ByClaim(share));
    let error = match (params::asked(said, request.capacity()), amount) {
        (Ok(_), _) | (Err(AskedError::Missing), ClassAmount::Said | ClassAmount::Unknown) => return found,
        (Err(error), _) => error,
    };
    found.push(match (error.field(), &error, share) {
        (Some(field), ..) => Problem { field: format!("{}.{field}", request.at), words: error.to_string() },
        (None, AskedError::LimitOfWhole { field }, Some((config, _))) => {
            Problem { field: format!("{}.{field}", config.at), words: error.to_string() }
        }
        (None, _, share) => without_amount(request, share.map(|(config, _)| config)),
    });
    found
}

/// A share that kube-scheduler places, and rounds up to 1 MiB: who asks for less has forgotten the unit.
fn too_little(request: &ClaimRequest<'_>) -> Option<Problem> {
    let is_scheduled = request.whose == ClassOwner::Scheduler && request.class == WHOLE_CLASS;
    let (_, quantity) = request.capacity().find(|(name, _)| is_scheduled && *name == params::MEMORY)?;
    let words = params::requested_memory(quantity).err()?;
    Some(Problem { field: format!("{}.capacity.requests[{}]", request.at, params::MEMORY), words })
}

/// A request of which nobody says how much it is for. `config`: its GpuShare.
fn without_amount(request: &ClaimRequest<'_>, config: Option<&CheckedConfig<'_>>) -> Problem {
    let advice = r#"write memory (such as 2000Mi) or fraction (such as "0.25")"#;
    let (class, dropped) = (request.class, messages::CAPACITY_DROPPED);
    match config {
        Some(config) => Problem {
            field: config.at.clone(),
            words: format!(
                "does not say how much of a GPU request \"{}\" of class {class} is for; {advice}; {dropped}",
                request.name
            ),
        },
        None => Problem {
            field: request.at.clone(),
            words: format!(
                "class {class} needs to know how much of a GPU the claim asks for; add to config an opaque \
                 entry for driver {DRIVER} of kind GpuShare, and there {advice}, or write capacity.requests.memory in \
                 the request (Kubernetes 1.36 and newer); {dropped}"
            ),
        },
    }
}

/// Fields of a request that the controller's classes have no use for.
fn without_meaning(request: &ClaimRequest<'_>) -> Vec<Problem> {
    let ClaimRequest { body, at, .. } = request;
    let mode = text(&body["allocationMode"]);
    let told = [
        (!matches!(mode, "" | "ExactCount"), "allocationMode", messages::ALLOCATION_MODE),
        (body["adminAccess"] == true, "adminAccess", messages::ADMIN_ACCESS),
    ];
    let told = told.into_iter().filter(|(given, ..)| *given);
    told.map(|(_, field, words)| Problem { field: format!("{at}.{field}"), words: words.to_owned() })
        .collect()
}

/// The selectors of requests of the controller's class, each with its place.
fn texts<'a>(requests: &'a [ClaimRequest<'_>]) -> impl Iterator<Item = (String, &'a str)> {
    requests.iter().filter(|request| request.is_controllers()).flat_map(|request| {
        list(&request.body["selectors"]).enumerate().map(|(index, selector)| {
            (
                format!("{}.selectors[{index}].cel.expression", request.at),
                text(&selector["cel"]["expression"]),
            )
        })
    })
}

/// Requests of other classes in a claim for shares: it gets one allocation, and kube-scheduler and the controller
/// cannot both write it.
fn beside_shares(requests: &[ClaimRequest<'_>]) -> Vec<Problem> {
    if !requests.iter().any(ClaimRequest::is_controllers) {
        return Vec::new();
    }
    let others = requests.iter().filter(|request| request.whose == ClassOwner::Scheduler);
    let told = |other: &ClaimRequest<'_>| Problem {
        field: format!("{}.deviceClassName", other.at),
        words: messages::other_class(other.class),
    };
    others.map(told).collect()
}

/// A limit for a request of another class than the controller's, in the words of `prepare`, which would refuse it, too.
/// An entry that names no request means the claim's shares, if it has some.
fn misplaced(config: &CheckedConfig<'_>, requests: &[ClaimRequest<'_>]) -> Option<Problem> {
    let Some(Params::Share(share)) = &config.params else { return None };
    let has_shares = requests.iter().any(ClaimRequest::is_share);
    let meant = requests.iter().filter(|request| config.applies_to(&request.name));
    let meant = meant.filter(|request| request.is_share() || !config.requests.is_empty() || !has_shares);
    // Of a class that is not known, a share that kube-scheduler places shows by its capacities.
    let others = |request: &&ClaimRequest<'_>| match request.whose {
        ClassOwner::Controller(_) => false,
        ClassOwner::Scheduler => true,
        ClassOwner::Unknown => request.has_capacity(),
    };
    meant.filter(others).find_map(|request| {
        let what = || format!("request \"{}\" of class {}", request.name, request.class);
        let is_mig = request.has_capacity() && request.class == WHOLE_CLASS && share.is_mig();
        let (field, words) = if is_mig {
            ("minimumIsolation", params::MIG_OF_SCHEDULED_SHARE.to_owned())
        } else if request.is_share() {
            let field = share.requested()?;
            (field, params::limit_of_scheduled_share(field, &what()))
        } else {
            let field = share.limit()?;
            (field, params::limit_of_whole(field, &what()))
        };
        Some(Problem { field: format!("{}.{field}", config.at), words })
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::admission::{ReviewAnswer, ReviewVerdict, validate};
    use crate::model::names::SHARED_CLASS;
    use crate::select::NOT_FOR_THE_SCHEDULER;

    fn asked(kind: &str, operation: &str, object: Value, old: Value) -> ReviewAnswer {
        let body = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002", "operation": operation, "namespace": "ml",
            "kind": {"group": "resource.k8s.io", "version": "v1", "kind": kind},
            "object": object, "oldObject": old}});
        validate(&serde_json::to_vec(&body).unwrap(), &known()).unwrap()
    }

    fn all() -> SelectorBudget {
        SelectorBudget::of(u64::MAX)
    }

    /// A class of the scheduler's, and one of the controller's.
    fn known() -> KnownClasses {
        let class = |name: &str, selector: &str| {
            let selectors = json!([{"cel": {"expression": selector}}]);
            serde_json::from_value(json!({"metadata": {"name": name}, "spec": {"selectors": selectors}}))
                .unwrap()
        };
        let whole = "device.driver == 'gpu.nvidia.com'";
        KnownClasses::of(&[
            class("gold.example.com", whole),
            class("nic.example.com", "device.driver == 'nic.example.com'"),
            class("team-a-shares", NOT_FOR_THE_SCHEDULER),
        ])
    }

    fn claim(devices: &Value) -> Value {
        json!({"metadata": {"name": "c"}, "spec": {"devices": devices}})
    }

    fn shared(name: &str) -> Value {
        json!({"name": name, "exactly": {"deviceClassName": SHARED_CLASS}})
    }

    fn share(requests: Value, mut fields: Value) -> Value {
        fields["apiVersion"] = json!("tranche.dev/v1alpha1");
        fields["kind"] = json!("GpuShare");
        json!({"requests": requests, "opaque": {"driver": DRIVER, "parameters": fields}})
    }

    /// `field: words` of each problem.
    fn told(devices: Value) -> Vec<String> {
        let answer = asked("ResourceClaim", "CREATE", claim(&devices), Value::Null);
        let status = &answer.review["response"]["status"];
        let causes: Vec<String> = list(&status["details"]["causes"])
            .map(|cause| format!("{}: {}", text(&cause["field"]), text(&cause["message"])))
            .collect();
        assert_eq!(causes.is_empty(), answer.verdict == ReviewVerdict::Allowed, "{answer:?}");
        assert!(causes.iter().all(|line| text(&status["message"]).contains(line)), "{status}");
        causes
    }

    fn only(devices: Value) -> String {
        let mut told = told(devices.clone());
        assert_eq!(told.len(), 1, "{devices}: {told:?}");
        told.remove(0)
    }

    #[test]
    fn good_claims_pass() {
        for devices in [
            json!({"requests": [shared("gpu")], "config": [share(json!(["gpu"]), json!({"memory": "2000Mi"}))]}),
            json!({"requests": [shared("gpu")], "config": [share(json!([]), json!({"fraction": "0.25"}))]}),
            json!({"requests": [shared("a"), shared("b")], "config": [
                share(json!(["a"]), json!({"fraction": "0.25", "compute": 10})),
                share(json!(["b"]), json!({"memory": "10Gi", "minimumIsolation": "mps", "maxProcesses": 2}))]}),
            json!({"requests": [shared("gpu")], "config": [share(json!(["gpu"]),
                json!({"memory": "9Gi", "compute": 20, "minimumIsolation": "mig", "maxProcesses": 60}))]}),
            // The last one that applies counts.
            json!({"requests": [shared("a"), shared("b")], "config": [
                share(json!([]), json!({"memory": "1Gi"})), share(json!(["b"]), json!({"fraction": "1"}))]}),
            json!({"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}], "config": [
                share(json!(["gpu"]), json!({"minimumIsolation": "mps"}))]}),
            json!({"requests": [{"name": "gpu", "firstAvailable": [
                {"name": "most", "deviceClassName": SHARED_CLASS},
                {"name": "part", "deviceClassName": SHARED_CLASS}]}], "config": [
                share(json!(["gpu"]), json!({"memory": "9Gi"})), share(json!(["gpu/part"]), json!({"memory": "1Gi"}))]}),
            // v1beta1.
            json!({"requests": [{"name": "gpu", "deviceClassName": SHARED_CLASS, "count": 2}],
                "config": [share(json!(["gpu"]), json!({"memory": "1Gi"}))]}),
            json!({"requests": [{"name": "nic", "exactly": {"deviceClassName": "nic.example.com"}}], "config": [
                {"opaque": {"driver": "nic.example.com", "parameters": {"kind": "ShareGrant", "memory": "x"}}}]}),
            json!({}),
        ] {
            assert_eq!(told(devices.clone()), [""; 0], "{devices}");
        }
    }

    #[test]
    fn lists_and_names_that_no_claim_may_have_are_refused_before_they_are_compared() {
        let many = |count: usize| json!((0..count).map(|n| shared(&format!("r{n}"))).collect::<Vec<_>>());
        assert!(
            only(json!({"requests": many(65)}))
                .starts_with("spec.devices.requests: has a list of 65 entries")
        );
        let config = json!({"requests": (0..65).map(|n| format!("r{n}")).collect::<Vec<_>>()});
        assert!(
            only(json!({"config": [config]})).starts_with("spec.devices.config: has a list of 65 entries")
        );
        let long = "x".repeat(128);
        for devices in [
            json!({"requests": [shared(&long)]}),
            json!({"requests": [{"name": "a", "firstAvailable": [{"name": long}]}]}),
            json!({"config": [{"requests": [long], "opaque": {"driver": DRIVER}}]}),
        ] {
            assert!(only(devices).contains("has a name of 128 bytes"));
        }
        let either = |count: usize| {
            let of = |nth: usize| json!({"name": format!("s{nth}"), "deviceClassName": SHARED_CLASS});
            let all: Vec<Value> = (0..count).map(of).collect();
            json!({"requests": [{"name": "a", "firstAvailable": all}],
                "config": [share(json!(["a"]), json!({"memory": "1Gi"}))]})
        };
        assert!(only(either(17)).starts_with("spec.devices.requests: has a request of 17 alternatives"));
        assert_eq!(told(either(16)), [""; 0]);
        // What is left is told in few words.
        let other = json!({"opaque": {"driver": DRIVER, "parameters": {"apiVersion": "resource.nvidia.com/v1beta1",
            "kind": "GpuConfig", "sharing": {"strategy": "TimeSlicing"}}}});
        let answer = asked(
            "ResourceClaim",
            "CREATE",
            claim(&json!({"requests": many(64), "config": vec![other; 64]})),
            Value::Null,
        );
        assert_eq!(answer.verdict, ReviewVerdict::Refused);
        assert!(answer.review.to_string().len() < 16 * 1024, "{}", answer.review);
    }

    #[test]
    fn what_passes_unchecked_is_not_read_and_its_author_is_told() {
        let body = |kind: &str, operation: &str| {
            let wrong =
                claim(&json!({"requests": [shared("a")], "config": [share(json!(["b"]), json!({}))]}));
            let group = if kind == "Pod" { "" } else { "resource.k8s.io" };
            let review = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
                "uid": "u", "operation": operation, "kind": {"group": group, "version": "v1", "kind": kind},
                "object": wrong}});
            serde_json::to_vec(&review).unwrap()
        };
        assert_eq!(
            validate(&body("ResourceClaim", "CREATE"), &known()).unwrap().verdict,
            ReviewVerdict::Refused
        );
        for (kind, operation, told) in
            [("ResourceClaim", "CREATE", 1), ("ResourceClaim", "DELETE", 0), ("Pod", "CREATE", 0)]
        {
            let answer = crate::admission::pass_unchecked(&body(kind, operation)).unwrap();
            let warnings = list(&answer.review["response"]["warnings"]).map(text).collect::<Vec<_>>();
            assert_eq!(
                (answer.verdict, warnings.len()),
                (ReviewVerdict::Allowed, told),
                "{kind} {operation}"
            );
            assert!(
                warnings.iter().all(|words| words.starts_with("the claim was not checked")),
                "{warnings:?}"
            );
        }
    }

    #[test]
    fn each_mistake_is_told_with_the_full_path() {
        let parameters = |parameters: Value| {
            json!({"requests": [shared("gpu")], "config": [
                {"opaque": {"driver": "nic.example.com", "parameters": {}}},
                {"requests": ["gpu"], "opaque": {"driver": DRIVER, "parameters": parameters}}]})
        };
        let share = |mut fields: Value| {
            fields["apiVersion"] = json!("tranche.dev/v1alpha1");
            fields["kind"] = json!("GpuShare");
            parameters(fields)
        };
        let mps = |mps: Value| {
            json!({"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}], "config": [
                {"opaque": {"driver": DRIVER, "parameters": {"apiVersion": "resource.nvidia.com/v1beta1",
                    "kind": "GpuConfig", "sharing": {"strategy": "MPS", "mpsConfig": mps}}}}]})
        };
        const AT: &str = "spec.devices.config[1].opaque.parameters";
        for (devices, path, words) in [
            (share(json!({"memory": "ten"})), ".memory: ", "ten"),
            (share(json!({"memory": "0"})), ".memory: ", "not a valid amount of memory"),
            (share(json!({"memory": "1Gi", "fraction": "0.5"})), ".fraction: ", "one of the two"),
            (share(json!({"fraction": "1.5"})), ".fraction: ", "1.5"),
            (share(json!({"fraction": "NaN"})), ".fraction: ", "NaN"),
            (share(json!({"memory": "1Gi", "compute": 0})), ".compute: ", "1 to 100"),
            (share(json!({"memory": "1Gi", "maxProcesses": 99})), ".maxProcesses: ", "99"),
            (
                share(json!({"fraction": 1, "maxProcesses": 4})),
                ".maxProcesses: ",
                "the fraction 1 is the whole GPU",
            ),
            (share(json!({"fraction": "1", "compute": 50})), ".compute: ", "nothing would enforce the limit"),
            (share(json!({"memory": "1Gi", "minimumIsolation": "hard"})), ".minimumIsolation: ", "kernel"),
            (share(json!({"memroy": "1Gi"})), ".memroy: ", "unknown field"),
            (share(json!({})), ": ", "does not say how much"),
            (parameters(json!("text")), ": ", "JSON object"),
            (
                parameters(json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "Share"})),
                ".kind: ",
                "GpuShare",
            ),
            (
                parameters(
                    json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "ShareGrant", "devices": []}),
                ),
                ".kind: ",
                "write a GpuShare",
            ),
            (
                parameters(json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig"})),
                ".kind: ",
                "use GpuShare",
            ),
            (
                parameters(json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "MigDeviceConfig"})),
                ".kind: ",
                "use GpuShare",
            ),
        ] {
            let line = told(devices.clone()).into_iter().next().unwrap_or_else(|| panic!("{devices} passed"));
            assert!(line.starts_with(&format!("{AT}{path}")) && line.contains(words), "{devices}: {line}");
        }
        let line = only(mps(json!({"defaultPinnedDeviceMemoryLimit": "ten"})));
        let path =
            "spec.devices.config[0].opaque.parameters.sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: ";
        assert!(line.starts_with(path), "{line}");
        let line = only(mps(json!({"defaultPinnedDeviceMemoryLimit": "2000"})));
        assert_eq!(line, format!("{path}2000 bytes are less than 1 MiB; did you mean 2000Mi?"));
    }

    #[test]
    fn a_share_without_an_amount_is_told_where_it_is_asked_for() {
        let line = only(json!({"requests": [shared("gpu")]}));
        assert!(line.starts_with("spec.devices.requests[0].exactly: class shared.gpu.nvidia.com"), "{line}");
        assert!(line.contains("kind GpuShare") && line.contains("2000Mi"), "{line}");
        // Written for another request.
        let other = json!({"requests": [shared("a"), shared("b")],
            "config": [share(json!(["a"]), json!({"memory": "1Gi"}))]});
        assert!(only(other).starts_with("spec.devices.requests[1].exactly: "));
        let alternative = json!({"requests": [{"name": "gpu", "firstAvailable": [
            {"name": "part", "deviceClassName": SHARED_CLASS}]}]});
        assert!(only(alternative).starts_with("spec.devices.requests[0].firstAvailable[0]: "));
        let old = json!({"requests": [{"name": "gpu", "deviceClassName": SHARED_CLASS}]});
        assert!(only(old).starts_with("spec.devices.requests[0]: "));
        // The last one that applies counts as a whole.
        let taken_back = json!({"requests": [shared("a")], "config": [
            share(json!([]), json!({"memory": "1Gi"})), share(json!(["a"]), json!({"compute": 5}))]});
        let line = only(taken_back);
        assert!(
            line.starts_with("spec.devices.config[1].opaque.parameters: does not say how much"),
            "{line}"
        );
    }

    #[test]
    fn all_mistakes_are_told_at_once() {
        let devices = json!({"requests": [shared("a"), shared("b")], "config": [
            share(json!(["a"]), json!({"memory": "much"})),
            share(json!(["c", "b"]), json!({"fraction": "2"})),
            share(json!([]), json!({"apiVersion": 1, "more": 1}))]});
        let told = told(devices);
        let starts = [
            "config[0].opaque.parameters.memory",
            "config[1].requests[0]",
            "config[1].opaque.parameters.fraction",
            "config[2].opaque.parameters.more",
        ];
        assert_eq!(told.len(), starts.len(), "{told:?}");
        for (line, start) in told.iter().zip(starts) {
            assert!(line.starts_with(&format!("spec.devices.{start}: ")), "{line}");
        }
        assert!(told[1].contains("no request \"c\"; its requests are a, b"), "{}", told[1]);
    }

    #[test]
    fn a_limit_for_a_request_that_is_given_whole_is_refused_with_the_way_out() {
        for class in ["gpu.nvidia.com", "mig.nvidia.com", "gold.example.com"] {
            let whole = json!({"name": "gpu", "exactly": {"deviceClassName": class}});
            for (fields, field) in [
                (json!({"memory": "1Gi"}), "memory"),
                (json!({"fraction": "0.5", "compute": 50}), "fraction"),
                (json!({"compute": 50}), "compute"),
                (json!({"maxProcesses": 2, "minimumIsolation": "mps"}), "maxProcesses"),
            ] {
                for named in [json!([]), json!(["gpu"])] {
                    let line = only(json!({"requests": [whole], "config": [share(named, fields.clone())]}));
                    let at = format!("spec.devices.config[0].opaque.parameters.{field}: ");
                    let words = params::limit_of_whole(field, &format!("request \"gpu\" of class {class}"));
                    assert_eq!(line, format!("{at}{words}"));
                }
            }
        }
    }

    #[test]
    fn the_amount_of_a_share_that_kube_scheduler_places_stands_in_its_request() {
        let part = json!({"deviceClassName": "gpu.nvidia.com", "capacity": {"requests": {"memory": "9Gi"}}});
        let part = json!({"name": "part", "exactly": part});
        for (fields, field, capacity) in [
            (json!({"memory": "9Gi"}), "memory", "memory"),
            (json!({"fraction": "0.5"}), "fraction", "memory"),
            (json!({"compute": 50}), "compute", "compute"),
        ] {
            let line = only(json!({"requests": [part], "config": [share(json!([]), fields)]}));
            assert!(
                line.starts_with(&format!("spec.devices.config[0].opaque.parameters.{field}: ")),
                "{line}"
            );
            assert!(line.contains(&format!("write capacity.requests.{capacity} in the request")), "{line}");
        }
        let mig = json!({"minimumIsolation": "mig"});
        let line = only(json!({"requests": [part], "config": [share(json!([]), mig.clone())]}));
        assert!(
            line.starts_with(
                "spec.devices.config[0].opaque.parameters.minimumIsolation: mig is what no share"
            ),
            "{line}"
        );
        let of_mig =
            json!({"deviceClassName": "mig.nvidia.com", "capacity": {"requests": {"memory": "9Gi"}}});
        let of_mig = json!({"name": "part", "exactly": of_mig});
        assert_eq!(told(json!({"requests": [of_mig], "config": [share(json!([]), mig)]})), [""; 0]);
        // Beside a whole GPU, an entry for all requests means the share.
        let whole = json!({"name": "whole", "exactly": {"deviceClassName": "gpu.nvidia.com"}});
        let processes = json!({"maxProcesses": 2});
        let both =
            |named: Value| json!({"requests": [whole, part], "config": [share(named, processes.clone())]});
        assert_eq!(told(both(json!([]))), [""; 0]);
        assert_eq!(told(both(json!(["part"]))), [""; 0]);
        assert!(only(both(json!(["whole"]))).contains("given whole"));
    }

    #[test]
    fn a_share_that_kube_scheduler_places_is_at_least_1_mib() {
        let of = |class: &str, memory: &str| json!({"deviceClassName": class, "capacity": {"requests": {"memory": memory}}});
        for (memory, words) in [
            ("2000", "2000 bytes are less than 1 MiB; did you mean 2000Mi?"),
            ("1048575", "1048575 bytes are less than 1 MiB; did you mean 1Mi?"),
            ("0", "0 is not a valid amount of memory; write one such as 2000Mi"),
        ] {
            let at = "spec.devices.requests[0].exactly.capacity.requests[memory]";
            let request = json!({"name": "gpu", "exactly": of("gpu.nvidia.com", memory)});
            assert_eq!(only(json!({"requests": [request]})), format!("{at}: {words}"));
            let at = "spec.devices.requests[0].firstAvailable[1].capacity.requests[memory]";
            let mut alternatives = [of("gpu.nvidia.com", "20Gi"), of("gpu.nvidia.com", memory)];
            for (alternative, name) in alternatives.iter_mut().zip(["a", "b"]) {
                alternative["name"] = json!(name);
            }
            let request = json!({"name": "gpu", "firstAvailable": alternatives});
            assert_eq!(only(json!({"requests": [request]})), format!("{at}: {words}"));
        }
        // Of another class nobody here knows what its memory is.
        for (class, memory) in
            [("gpu.nvidia.com", "1Mi"), ("nic.example.com", "2000"), ("new.example.com", "1")]
        {
            let request = json!({"name": "gpu", "exactly": of(class, memory)});
            assert_eq!(told(json!({"requests": [request]})), [""; 0], "{class}");
        }
    }

    #[test]
    fn a_claim_for_shares_of_several_gpus_is_taken_with_a_warning() {
        let warned = |requests: Value| {
            let config = [share(json!([]), json!({"memory": "1Gi"}))];
            let devices = json!({"requests": requests, "config": config});
            let answer = asked("ResourceClaim", "CREATE", claim(&devices), Value::Null);
            assert_eq!(answer.verdict, ReviewVerdict::Allowed, "{answer:?}");
            let warning = answer.review["response"]["warnings"][0].as_str().map(str::to_owned);
            assert!(warning.iter().all(|words| words.contains("one MPS daemon") && words.ends_with("apart")));
            warning.is_some()
        };
        let two = json!({"name": "gpu", "exactly": {"deviceClassName": SHARED_CLASS, "count": 2}});
        let either = json!({"name": "gpu", "firstAvailable": [
            {"name": "a", "deviceClassName": SHARED_CLASS}, {"name": "b", "deviceClassName": SHARED_CLASS}]});
        assert!(warned(json!([two])));
        assert!(warned(json!([shared("a"), shared("b")])));
        assert!(warned(json!([{"name": "gpu", "deviceClassName": SHARED_CLASS, "count": 3}])));
        assert!(!warned(json!([shared("a")])));
        assert!(!warned(json!([either])));
        assert!(messages::SEVERAL_SHARES.len() <= 256);
        // Those that kube-scheduler places meet on the node.
        let scheduled = |name: &str, count: u32| {
            let capacity = json!({"requests": {"memory": "2Gi"}});
            json!({"name": name, "exactly": {"deviceClassName": "gpu.nvidia.com", "count": count, "capacity": capacity}})
        };
        let whole =
            |name: &str| json!({"name": name, "exactly": {"deviceClassName": "gpu.nvidia.com", "count": 2}});
        let plain = |requests: Value| {
            let answer = asked("ResourceClaim", "CREATE", claim(&json!({"requests": requests})), Value::Null);
            assert_eq!(answer.verdict, ReviewVerdict::Allowed, "{answer:?}");
            answer.review["response"]["warnings"][0].as_str() == Some(messages::SEVERAL_SHARES)
        };
        assert!(plain(json!([scheduled("a", 2)])));
        assert!(plain(json!([scheduled("a", 1), scheduled("b", 1)])));
        assert!(!plain(json!([scheduled("a", 1)])));
        assert!(!plain(json!([scheduled("a", 1), whole("b")])));
        // Whole GPUs have no MPS daemon.
        let thousandths = |count: u32, thousandths: &str| {
            let capacity = json!({"requests": {"thousandths": thousandths}});
            json!({"deviceClassName": SHARED_CLASS, "count": count, "capacity": capacity})
        };
        let warning = |requests: Value, config: Value| {
            let devices = json!({"requests": requests, "config": config});
            let answer = asked("ResourceClaim", "CREATE", claim(&devices), Value::Null);
            assert_eq!(answer.verdict, ReviewVerdict::Allowed, "{answer:?}");
            !answer.review["response"]["warnings"].is_null()
        };
        let all = json!([share(json!([]), json!({"fraction": "1"}))]);
        assert!(!warning(json!([two, shared("b")]), all));
        assert!(!warning(json!([{"name": "gpu", "exactly": thousandths(2, "1k")}]), json!([])));
        assert!(warning(json!([{"name": "gpu", "exactly": thousandths(2, "999")}]), json!([])));
    }

    #[test]
    fn shares_and_other_devices_are_two_claims() {
        let whole = json!({"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}});
        let config = json!([share(json!([]), json!({"memory": "1Gi"}))]);
        let line = only(json!({"requests": [whole, shared("part")], "config": config}));
        assert!(
            line.starts_with("spec.devices.requests[0].exactly.deviceClassName: \"gpu.nvidia.com\""),
            "{line}"
        );
        assert!(line.contains("write two claims"), "{line}");
        let alternatives = json!([{"name": "part", "deviceClassName": SHARED_CLASS},
            {"name": "whole", "deviceClassName": "gpu.nvidia.com"}]);
        let line =
            only(json!({"requests": [{"name": "gpu", "firstAvailable": alternatives}], "config": config}));
        assert!(line.starts_with("spec.devices.requests[0].firstAvailable[1].deviceClassName: "), "{line}");
    }

    #[test]
    fn fields_without_meaning_for_shares_are_refused() {
        let fields = json!({"deviceClassName": SHARED_CLASS, "allocationMode": "All", "adminAccess": true});
        let lines = told(json!({"requests": [{"name": "gpu", "exactly": fields}],
            "config": [share(json!([]), json!({"memory": "1Gi"}))]}));
        let at = "spec.devices.requests[0].exactly";
        assert_eq!(lines.len(), 2, "{lines:?}");
        for (line, field) in lines.iter().zip(["allocationMode", "adminAccess"]) {
            assert!(line.starts_with(&format!("{at}.{field}: ")), "{line}");
        }
        let counted = json!({"deviceClassName": SHARED_CLASS, "allocationMode": "ExactCount", "count": 2});
        let devices = json!({"requests": [{"name": "gpu", "exactly": counted}],
            "config": [share(json!([]), json!({"memory": "1Gi"}))]});
        assert_eq!(told(devices), [""; 0]);
    }

    #[test]
    fn the_amount_may_stand_in_the_request_where_queues_and_quotas_count_it() {
        let asks = |class: &str, capacity: Value, config: Vec<Value>| {
            let exactly = json!({"deviceClassName": class, "capacity": {"requests": capacity}});
            json!({"requests": [{"name": "gpu", "exactly": exactly}], "config": config})
        };
        let gib = |gib: u32| json!({"memory": format!("{gib}Gi")});
        let said = |fields: Value| vec![share(json!(["gpu"]), fields)];
        for class in [SHARED_CLASS, "team-a-shares"] {
            for config in
                [vec![], said(gib(20)), said(json!({"compute": 25})), said(json!({"memory": "20480Mi"}))]
            {
                assert_eq!(told(asks(class, gib(20), config.clone())), [""; 0], "{config:?}");
            }
        }
        let at = "spec.devices.requests[0].exactly.capacity.requests";
        let line = only(asks(SHARED_CLASS, gib(20), said(gib(10))));
        assert!(line.starts_with(&format!("{at}[memory]: asks for 20480 MiB, but")), "{line}");
        assert!(line.contains("GpuShare says 10240 MiB"), "{line}");
        let line = only(asks("team-a-shares", json!({"memory": "20Gi", "compute": "25"}), vec![]));
        assert!(line.starts_with(&format!("{at}[compute]: ")), "{line}");
        assert!(
            only(asks(SHARED_CLASS, json!({"memory": 20}), vec![])).starts_with(&format!("{at}[memory]: "))
        );
        // As an API server that does not keep the field hands it on.
        let line = only(json!({"requests": [shared("gpu")]}));
        assert!(line.contains("feature gate DRAConsumableCapacity"), "{line}");
        let alternative =
            json!({"name": "a", "deviceClassName": SHARED_CLASS, "capacity": {"requests": gib(1)}});
        assert_eq!(told(json!({"requests": [{"name": "gpu", "firstAvailable": [alternative]}]})), [""; 0]);
    }

    #[test]
    fn a_claim_of_a_class_that_is_not_read_is_taken_with_a_warning() {
        let whole = serde_json::from_value(json!({"metadata": {"name": "a-whole"}, "spec": {}})).unwrap();
        let known = KnownClasses::of_some(&[whole]);
        let spec = |class: &str| json!({"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": class}}]}});
        assert_eq!(
            problems(&spec(SHARED_CLASS), "spec", &known, &mut all()),
            [],
            "it may say how much by itself"
        );
        for class in [SHARED_CLASS, "z-small"] {
            assert_eq!(warning(&spec(class), &known), Some(messages::CLASS_NOT_READ), "{class}");
        }
        assert_eq!(warning(&spec("a-whole"), &known), None);
        assert_eq!(warning(&spec("gpu.nvidia.com"), &known), None);
    }

    #[test]
    fn templates_are_read_one_level_deeper() {
        let devices =
            json!({"requests": [shared("gpu")], "config": [share(json!([]), json!({"memory": "x"}))]});
        let template = json!({"metadata": {"name": "t"}, "spec": {"spec": {"devices": devices}}});
        let answer = asked("ResourceClaimTemplate", "CREATE", template, Value::Null);
        let field = &answer.review["response"]["status"]["details"]["causes"][0]["field"];
        assert_eq!(field, "spec.spec.devices.config[0].opaque.parameters.memory");
    }

    #[test]
    fn updates_that_leave_the_spec_and_deletions_pass_whatever_the_spec_says() {
        let bad = claim(&json!({"requests": [shared("gpu")]}));
        let mut labelled = bad.clone();
        labelled["metadata"]["finalizers"] = json!([]);
        assert_eq!(asked("ResourceClaim", "UPDATE", labelled, bad.clone()).verdict, ReviewVerdict::Allowed);
        assert_eq!(
            asked("ResourceClaim", "DELETE", Value::Null, bad.clone()).verdict,
            ReviewVerdict::Allowed
        );
        let good = claim(
            &json!({"requests": [shared("gpu")], "config": [share(json!([]), json!({"memory": "1Gi"}))]}),
        );
        assert_eq!(asked("ResourceClaim", "UPDATE", bad, good).verdict, ReviewVerdict::Refused);
    }

    #[test]
    fn the_class_may_say_how_much() {
        let class = |config: Value| -> k8s_openapi::api::resource::v1::DeviceClass {
            serde_json::from_value(json!({"metadata": {"name": SHARED_CLASS}, "spec": {"config": config}}))
                .unwrap()
        };
        let says = |fields: Value| json!([{"opaque": share(json!([]), fields)["opaque"]}]);
        let devices = json!({"requests": [shared("gpu")]});
        let problems_with =
            |known: &KnownClasses| problems(&json!({"devices": devices}), "spec", known, &mut all()).len();
        assert_eq!(problems_with(&KnownClasses::of(&[class(json!([]))])), 1);
        assert_eq!(problems_with(&KnownClasses::of(&[class(says(json!({"compute": 5})))])), 1);
        assert_eq!(problems_with(&KnownClasses::of(&[class(says(json!({"memory": "1Gi"})))])), 0);
        assert_eq!(problems_with(&KnownClasses::default()), 0);
    }

    #[test]
    fn a_class_of_the_administrators_is_looked_at_as_the_shipped_one() {
        let of = |class: &str| json!({"name": "gpu", "exactly": {"deviceClassName": class, "allocationMode": "All"}});
        let lines = told(json!({"requests": [of("team-a-shares")]}));
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].contains("class team-a-shares needs to know how much"), "{lines:?}");
        assert!(lines[1].contains(".allocationMode: "), "{lines:?}");
        let exactly = json!({"deviceClassName": "team-a-shares"});
        let amount = share(json!([]), json!({"memory": "1Gi"}));
        let requests = json!([{"name": "own", "exactly": exactly}, shared("ours")]);
        assert_eq!(told(json!({"requests": requests, "config": [amount]})), [""; 0]);
        let requests = json!([{"name": "own", "exactly": exactly}, {"name": "gold", "exactly": {"deviceClassName": "gold.example.com"}}]);
        let line =
            only(json!({"requests": requests, "config": [share(json!(["own"]), json!({"memory": "1Gi"}))]}));
        assert!(line.contains("\"gold.example.com\" is not allocated by the controller"), "{line}");
        // A class that the webhook has not heard of yet may be anybody's.
        let new = json!({"requests": [{"name": "gpu", "exactly": {"deviceClassName": "new.example.com"}}],
            "config": [share(json!(["gpu"]), json!({"memory": "1Gi"}))]});
        assert_eq!(told(new), [""; 0]);
    }

    #[test]
    fn a_claim_for_shares_has_at_most_as_many_entries_as_the_controller_reads() {
        let devices = |class: &str, tolerations: usize| {
            let tolerations = vec![json!({"key": "k", "operator": "Exists"}); tolerations];
            let exactly = json!({"deviceClassName": class, "tolerations": tolerations});
            let config =
                if class == SHARED_CLASS { vec![share(json!([]), json!({"memory": "1Gi"}))] } else { vec![] };
            json!({"requests": [{"name": "gpu", "exactly": exactly}], "config": config})
        };
        assert_eq!(told(devices(SHARED_CLASS, CLAIM_ENTRIES_MAX - 1)), [""; 0]);
        let found = told(devices(SHARED_CLASS, CLAIM_ENTRIES_MAX));
        assert!(found.len() == 1 && found[0].starts_with("spec.devices.requests: "), "{found:?}");
        assert!(found[0].contains("513 ") && found[0].contains("512 are the most"), "{found:?}");
        assert_eq!(told(devices("other.example.com", CLAIM_ENTRIES_MAX)), [""; 0], "another's to judge");
    }

    #[test]
    fn the_constraints_of_a_claim_for_shares_name_at_most_as_many_requests_as_the_controller_reads() {
        let devices = |class: &str, constraints: Value| {
            let requests: Vec<_> = (0..16)
                .map(|n| json!({"name": format!("r{n}"), "exactly": {"deviceClassName": class}}))
                .collect();
            let config =
                if class == SHARED_CLASS { vec![share(json!([]), json!({"memory": "1Gi"}))] } else { vec![] };
            json!({"requests": requests, "config": config, "constraints": constraints})
        };
        let of_all = json!({"matchAttribute": "gpu.nvidia.com/productName"});
        let of_one = json!({"matchAttribute": "gpu.nvidia.com/productName", "requests": ["r0"]});
        let most = vec![of_all; CONSTRAINED_MAX / 16];
        assert_eq!(told(devices(SHARED_CLASS, json!(most))), [""; 0]);
        let more = json!([most, vec![of_one]].concat());
        let found = told(devices(SHARED_CLASS, more.clone()));
        assert!(found.len() == 1 && found[0].starts_with("spec.devices.constraints: "), "{found:?}");
        assert!(found[0].contains("name 257 requests") && found[0].contains("256 are the most"), "{found:?}");
        assert_eq!(told(devices("other.example.com", more)), [""; 0], "another's to judge");
    }
}

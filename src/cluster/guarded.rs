//! One object by itself, of the kinds that we read: what is wanted of it goes through the sieve and is parsed. One that
//! does not fit our types is told with as much of it as can be read, and does not take the others with it.

use k8s_openapi::Metadata;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::batch::v1::{CronJob, Job};
use k8s_openapi::api::core::v1::{Event, Namespace, Node, PersistentVolume, Pod, ResourceQuota};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::{
    DeviceClass, DeviceTaintRule, ResourceClaim, ResourceClaimTemplate, ResourceSlice,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::de::DeserializeOwned;

use super::bind_requests::BindRequest;
use super::cut::{OBJECT_BYTES_MAX, Piece};
use super::pod_groups::{Of, Served};
use super::sieve::{Keep, fields, sieve};
use crate::model::error_chain;
use crate::model::names::{MAX_SHARE_GPUS, MAX_SHARE_MEMORY, MOVABLE, OPT_IN_LABEL};

/// A kind that is read here.
pub(super) trait ReadKind:
    Metadata<Ty = ObjectMeta> + Resource<DynamicType = ()> + DeserializeOwned + Default + Send + 'static
{
    /// What is wanted.
    const KEEP: Keep;
    /// What is wanted of one that does not fit.
    const LEAST: Keep = Keep::Only(&[("metadata", IDENTITY)]);
}

const IDENTITY: Keep = Keep::Only(&[
    ("name", Keep::All),
    ("namespace", Keep::All),
    ("uid", Keep::All),
    ("resourceVersion", Keep::All),
    ("creationTimestamp", Keep::All),
    ("deletionTimestamp", Keep::All),
    ("labels", Keep::All),
    ("annotations", Keep::All),
]);
const BARE: Keep = Keep::Only(&[
    ("name", Keep::All),
    ("namespace", Keep::All),
    ("uid", Keep::All),
    ("resourceVersion", Keep::All),
]);
const METADATA: Keep = Keep::Except(&[("managedFields", Keep::Nothing)]);
/// Of the entries of a configuration.
const CONFIG: Keep = Keep::Except(&[("opaque", Keep::Opaque)]);
/// What a container runs, and with what: nothing that decides where.
const CONTAINER: Keep = Keep::Except(&[
    ("args", Keep::Nothing),
    ("command", Keep::Nothing),
    ("env", Keep::Nothing),
    ("envFrom", Keep::Nothing),
    ("lifecycle", Keep::Nothing),
    ("livenessProbe", Keep::Nothing),
    ("readinessProbe", Keep::Nothing),
    ("startupProbe", Keep::Nothing),
    ("volumeMounts", Keep::Nothing),
]);

/// Whether a volume may be bound to where its pod runs, and the PersistentVolumeClaim that says so.
const VOLUME: Keep = Keep::Only(&[
    ("name", Keep::All),
    ("persistentVolumeClaim", Keep::Only(&[("claimName", Keep::All)])),
    ("ephemeral", Keep::Only(&[])),
]);

impl ReadKind for ResourceClaim {
    const KEEP: Keep = Keep::Only(&[
        ("metadata", METADATA),
        ("spec", Keep::Except(&[("devices", Keep::Except(&[("config", CONFIG)]))])),
        (
            "status",
            Keep::Except(&[
                ("allocation", Keep::Except(&[("devices", Keep::Except(&[("config", CONFIG)]))])),
                // Conditions and data of ours; others' are theirs to write and to read.
                ("devices", Keep::Ours),
            ]),
        ),
    ]);
    const LEAST: Keep = Keep::Only(&[
        ("metadata", IDENTITY),
        ("status", Keep::Only(&[("allocation", Keep::Only(&[("devices", DEVICES)]))])),
    ]);
}

/// Which devices an allocation names.
const DEVICES: Keep = Keep::Only(&[(
    "results",
    Keep::Only(&[
        ("adminAccess", Keep::All),
        ("device", Keep::All),
        ("driver", Keep::All),
        ("pool", Keep::All),
        ("request", Keep::All),
    ]),
)]);

impl ReadKind for Pod {
    const KEEP: Keep = Keep::Only(&[
        ("metadata", METADATA),
        (
            "spec",
            Keep::Except(&[
                ("containers", CONTAINER),
                ("ephemeralContainers", Keep::Nothing),
                ("initContainers", CONTAINER),
                ("volumes", VOLUME),
            ]),
        ),
        ("status", Keep::All),
    ]);
}

impl ReadKind for Node {
    const KEEP: Keep = Keep::Only(&[
        ("metadata", Keep::Except(&[("annotations", Keep::Nothing), ("managedFields", Keep::Nothing)])),
        ("spec", Keep::All),
        (
            "status",
            Keep::Except(&[
                ("images", Keep::Nothing),
                ("volumesAttached", Keep::Nothing),
                ("volumesInUse", Keep::Nothing),
            ]),
        ),
    ]);
}

/// Whether it has opted in, and its bounds: there may be thousands, and anybody's tools write into them.
const OF_NAMESPACE: Keep = Keep::Only(&[(
    "metadata",
    Keep::Only(&[
        ("name", Keep::All),
        ("uid", Keep::All),
        ("resourceVersion", Keep::All),
        ("labels", Keep::Only(&[(OPT_IN_LABEL, Keep::All)])),
        (
            "annotations",
            Keep::Only(&[(MAX_SHARE_MEMORY, Keep::All), (MAX_SHARE_GPUS, Keep::All), (MOVABLE, Keep::All)]),
        ),
    ]),
)]);

impl ReadKind for Namespace {
    const KEEP: Keep = OF_NAMESPACE;
    const LEAST: Keep = OF_NAMESPACE;
}

impl ReadKind for BindRequest {
    const KEEP: Keep = Keep::Only(&[
        ("metadata", BARE),
        (
            "spec",
            Keep::Only(&[
                ("podName", Keep::All),
                (
                    "resourceClaimAllocations",
                    Keep::Only(&[("allocation", Keep::Only(&[("devices", DEVICES)]))]),
                ),
            ]),
        ),
        ("status", Keep::Only(&[("phase", Keep::All)])),
    ]);
    const LEAST: Keep = Keep::Only(&[("metadata", BARE)]);
}

impl<S: Served> ReadKind for Of<S> {
    const KEEP: Keep = Keep::Only(&[
        ("metadata", BARE),
        (
            "spec",
            Keep::Only(&[
                ("minMember", Keep::All),
                ("minSubGroup", Keep::All),
                ("minTaskMember", Keep::All),
                ("schedulingPolicy", Keep::All),
                ("subGroups", Keep::All),
            ]),
        ),
        (
            "status",
            Keep::Only(&[
                ("phase", Keep::All),
                ("schedulingConditions", Keep::All),
                ("succeeded", Keep::All),
            ]),
        ),
    ]);
    const LEAST: Keep = Keep::Only(&[("metadata", BARE)]);
}

/// Which pods it is about, and how many of them may go.
impl ReadKind for PodDisruptionBudget {
    const KEEP: Keep = Keep::Only(&[
        ("metadata", BARE),
        ("spec", Keep::Only(&[("selector", Keep::All)])),
        (
            "status",
            Keep::Only(&[
                ("disruptionsAllowed", Keep::All),
                ("currentHealthy", Keep::All),
                ("desiredHealthy", Keep::All),
                ("expectedPods", Keep::All),
            ]),
        ),
    ]);
    const LEAST: Keep = Keep::Only(&[("metadata", BARE)]);
}

/// Whose it is, and from where it can be reached: there may be tens of thousands.
impl ReadKind for PersistentVolume {
    const KEEP: Keep = Keep::Only(&[
        ("metadata", BARE),
        (
            "spec",
            Keep::Only(&[
                ("claimRef", Keep::Only(&[("namespace", Keep::All), ("name", Keep::All)])),
                ("nodeAffinity", Keep::Only(&[("required", Keep::All)])),
            ]),
        ),
        ("status", Keep::Only(&[("phase", Keep::All)])),
    ]);
    const LEAST: Keep = Keep::Only(&[("metadata", BARE)]);
}

impl ReadKind for ResourceSlice {
    const KEEP: Keep = Keep::Except(&[("metadata", METADATA)]);
}

impl ReadKind for DeviceClass {
    const KEEP: Keep = Keep::Only(&[("metadata", METADATA), ("spec", Keep::Except(&[("config", CONFIG)]))]);
}

impl ReadKind for DeviceTaintRule {
    const KEEP: Keep = Keep::Except(&[("metadata", METADATA)]);
}

impl ReadKind for ResourceClaimTemplate {
    const KEEP: Keep = Keep::Only(&[
        ("metadata", METADATA),
        (
            "spec",
            Keep::Except(&[("spec", Keep::Except(&[("devices", Keep::Except(&[("config", CONFIG)]))]))]),
        ),
    ]);
}

impl ReadKind for ResourceQuota {
    const KEEP: Keep = Keep::Except(&[("metadata", METADATA)]);
}

impl ReadKind for Event {
    const KEEP: Keep = Keep::Except(&[("metadata", METADATA)]);
}

/// Of what makes pods: whose it is, how many pods it wants, and what it says of itself.
const WORKLOAD: Keep = Keep::Only(&[
    ("metadata", METADATA),
    ("spec", Keep::Only(&[("replicas", Keep::All), ("suspend", Keep::All)])),
    ("status", Keep::Only(&[("conditions", Keep::All)])),
]);

impl ReadKind for Deployment {
    const KEEP: Keep = WORKLOAD;
}

impl ReadKind for ReplicaSet {
    const KEEP: Keep = WORKLOAD;
}

impl ReadKind for StatefulSet {
    const KEEP: Keep = WORKLOAD;
}

impl ReadKind for DaemonSet {
    const KEEP: Keep = WORKLOAD;
}

impl ReadKind for Job {
    const KEEP: Keep = WORKLOAD;
}

impl ReadKind for CronJob {
    const KEEP: Keep = WORKLOAD;
}

/// An object that does not fit.
#[derive(Debug, Clone)]
pub(super) struct Misfit<K> {
    /// What can be read of it. Without a UID and a name: nobody knows which it is.
    pub rest: K,
    pub problem: String,
}

pub(super) fn read<K: ReadKind>(piece: &Piece) -> Result<K, Misfit<K>> {
    let problem = if piece.whole {
        match parse(&piece.bytes, K::KEEP) {
            Ok(object) => return Ok(object),
            Err(problem) => problem,
        }
    } else {
        format!("it has more than {} MiB", OBJECT_BYTES_MAX >> 20)
    };
    let least = parse(&piece.bytes, K::LEAST);
    Err(Misfit { rest: least.unwrap_or_else(|_| named(&piece.bytes)), problem })
}

fn parse<K: DeserializeOwned>(object: &[u8], keep: Keep) -> Result<K, String> {
    let wanted = sieve(object, keep).map_err(|unfit| error_chain(&unfit))?;
    serde_json::from_slice(&wanted).map_err(|error| error.to_string())
}

/// An object of which nothing but its name is known, if that.
fn named<K: ReadKind>(object: &[u8]) -> K {
    let mut rest = K::default();
    let [metadata] = fields(object, ["metadata"]);
    let bare = metadata.and_then(|metadata| parse::<ObjectMeta>(metadata, BARE).ok());
    *rest.metadata_mut() = bare.unwrap_or_default();
    rest
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::model::names::DRIVER;

    fn whole(bytes: impl Into<Vec<u8>>) -> Piece {
        Piece { bytes: bytes.into(), whole: true }
    }

    fn identity(metadata: &ObjectMeta) -> [Option<&str>; 3] {
        [metadata.namespace.as_deref(), metadata.name.as_deref(), metadata.uid.as_deref()]
    }

    #[test]
    fn a_claim_is_read_whatever_others_wrote_into_it() {
        let claim = json!({
            "metadata": {"name": "a", "namespace": "ml", "uid": "1", "managedFields": [{"fieldsV1": {"f:x": {}}}]},
            "spec": {"devices": {
                "requests": [{"name": "gpu", "exactly": {"deviceClassName": "c"}}],
                "config": [{"opaque": {"driver": "nic.example.com", "parameters": {"x": "@"}}},
                    {"opaque": {"driver": DRIVER, "parameters": {"kind": "GpuShare"}}}],
            }},
            "status": {
                "allocation": {"devices": {"config": [
                    {"source": "FromClaim", "opaque": {"driver": "nic.example.com", "parameters": {"x": "@"}}}]}},
                "devices": [{"driver": "nic.example.com", "device": "n", "pool": "p", "data": {"x": "@"}},
                    {"driver": DRIVER, "device": "gpu-0", "pool": "node-a"}],
            },
        });
        for strange in [b"\xff\xfe".as_slice(), b"\\ud800", b"x"] {
            let text = claim.to_string();
            let bytes = text.split('@').map(str::as_bytes).collect::<Vec<_>>().join(strange);
            let read: ResourceClaim = read(&whole(bytes)).unwrap();
            assert_eq!(read.metadata.managed_fields, None);
            let devices = read.spec.unwrap().devices.unwrap();
            assert_eq!(devices.requests.unwrap()[0].name, "gpu");
            let config = devices.config.unwrap();
            let opaque = |nth: usize| config[nth].opaque.as_ref().unwrap();
            assert_eq!(
                (opaque(0).driver.as_str(), &opaque(0).parameters.0),
                ("nic.example.com", &json!(null))
            );
            assert_eq!(opaque(1).parameters.0, json!({"kind": "GpuShare"}));
            let status = read.status.unwrap();
            assert_eq!(status.devices.unwrap().len(), 1);
            assert_eq!(status.allocation.unwrap().devices.unwrap().config.unwrap().len(), 1);
        }
    }

    #[test]
    fn of_one_that_does_not_fit_what_it_names_is_told() {
        let result =
            json!({"driver": DRIVER, "pool": "node-a", "device": "gpu-0", "request": "r", "shareID": 7});
        let claim = json!({
            "metadata": {"name": "a", "namespace": "ml", "uid": "1", "finalizers": 7},
            "spec": {"devices": {"requests": "none"}},
            "status": {"allocation": {"devices": {"results": [result]}}},
        });
        let misfit = read::<ResourceClaim>(&whole(claim.to_string())).unwrap_err();
        assert!(misfit.problem.contains("expected a sequence"), "{}", misfit.problem);
        assert_eq!(identity(&misfit.rest.metadata), [Some("ml"), Some("a"), Some("1")]);
        let devices = misfit.rest.status.unwrap().allocation.unwrap().devices.unwrap();
        assert_eq!(devices.results.unwrap()[0].device, "gpu-0");
    }

    #[test]
    fn the_name_at_least_is_told() {
        let strange = r#"{"metadata":{"uid":"1","labels":[],"name":"bad"},"spec":{"containers":"none"}}"#;
        let misfit = read::<Pod>(&whole(strange)).unwrap_err();
        assert_eq!(identity(&misfit.rest.metadata), [None, Some("bad"), Some("1")]);
        let cut_off = Piece { bytes: strange.as_bytes()[..60].to_vec(), whole: false };
        let misfit = read::<Pod>(&cut_off).unwrap_err();
        assert!(misfit.problem.contains("16 MiB"), "{}", misfit.problem);
        assert_eq!(identity(&misfit.rest.metadata), [None, Some("bad"), Some("1")]);
        let nameless = read::<Pod>(&whole(r#"{"spec":{"containers":"none"}}"#)).unwrap_err();
        assert_eq!(identity(&nameless.rest.metadata), [None; 3]);
    }

    #[test]
    fn of_a_namespace_only_what_is_ours_is_kept() {
        let annotations =
            json!({MAX_SHARE_MEMORY: "64Gi", "kubectl.kubernetes.io/last-applied": "x".repeat(9999)});
        let labels = json!({OPT_IN_LABEL: "enabled", "team": "ml"});
        let namespace = json!({"metadata": {"name": "ml", "annotations": annotations, "labels": labels,
            "finalizers": ["a"]}, "spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Active"}});
        let Namespace { metadata, spec, status } = read(&whole(namespace.to_string())).unwrap();
        let kept = |map: Option<std::collections::BTreeMap<String, String>>| {
            map.unwrap().into_iter().collect::<Vec<_>>()
        };
        assert_eq!(kept(metadata.annotations), [(MAX_SHARE_MEMORY.to_owned(), "64Gi".to_owned())]);
        assert_eq!(kept(metadata.labels), [(OPT_IN_LABEL.to_owned(), "enabled".to_owned())]);
        assert_eq!((metadata.finalizers, spec, status), (None, None, None));
    }

    #[test]
    fn of_a_volume_its_claim_and_its_reach_are_kept() {
        let term = json!({"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]});
        let volume = json!({"metadata": {"name": "pv", "annotations": {"a": "b"}},
            "spec": {"claimRef": {"namespace": "ml", "name": "home", "uid": "1"}, "capacity": {"storage": "1Gi"},
                "csi": {"driver": "d", "volumeHandle": "x".repeat(9999)},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [term]}}},
            "status": {"phase": "Bound", "message": "x"}});
        let PersistentVolume { metadata, spec, status } = read(&whole(volume.to_string())).unwrap();
        assert_eq!((metadata.name.as_deref(), metadata.annotations), (Some("pv"), None));
        let spec = spec.unwrap();
        let claim = spec.claim_ref.unwrap();
        assert_eq!((claim.namespace.as_deref(), claim.name.as_deref()), (Some("ml"), Some("home")));
        assert_eq!(spec.node_affinity.unwrap().required.unwrap().node_selector_terms.len(), 1);
        assert_eq!((spec.capacity, spec.csi), (None, None));
        let status = status.unwrap();
        assert_eq!((status.phase.as_deref(), status.message), (Some("Bound"), None));
    }

    #[test]
    fn a_pod_keeps_what_decides_where_it_runs() {
        let container = json!({"name": "main", "env": [{"name": "A"}], "ports": [{"containerPort": 1}],
            "resources": {"limits": {"cpu": "1"}}});
        let pod = json!({"metadata": {"name": "p", "annotations": {"a": "b"}},
            "spec": {"containers": [container], "nodeName": "n", "volumes": [
                {"name": "v", "hostPath": {"path": "/"}},
                {"name": "w", "persistentVolumeClaim": {"claimName": "c"}},
                {"name": "x", "ephemeral": {"volumeClaimTemplate": {"spec": {"accessModes": ["x".repeat(99)]}}}}]},
            "status": {"phase": "Running"}});
        let pod: Pod = read(&whole(pod.to_string())).unwrap();
        let spec = pod.spec.unwrap();
        let main = &spec.containers[0];
        assert!(main.resources.is_some() && main.env.is_none());
        let volumes = spec.volumes.unwrap_or_default();
        assert!(volumes.iter().all(|one| one.host_path.is_none()));
        let names: Vec<&str> = volumes.iter().map(|one| one.name.as_str()).collect();
        assert_eq!(names, ["v", "w", "x"]);
        let claims = volumes.iter().map(|one| one.persistent_volume_claim.as_ref());
        let claims: Vec<_> = claims.map(|one| one.map(|claim| claim.claim_name.as_str())).collect();
        assert_eq!(claims, [None, Some("c"), None], "whose it is");
        let templates: Vec<_> = volumes.iter().map(|one| one.ephemeral.as_ref()).collect();
        assert!(
            templates[2].is_some_and(|one| one.volume_claim_template.is_none()) && templates[1].is_none()
        );
        assert_eq!(spec.node_name.as_deref(), Some("n"));
        assert_eq!(pod.metadata.annotations.unwrap()["a"], "b");
    }
}

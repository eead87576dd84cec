//! The objects that tests create, as JSON.

use serde_json::{Value, json};

/// A request for one whole GPU.
pub fn gpu(name: &str) -> Value {
    json!({"name": name, "exactly": {"deviceClassName": "gpu.nvidia.com"}})
}

/// spec.devices of one GPU with a time slice: Default, Short, Medium or Long.
pub fn time_slicing(interval: &str) -> Value {
    let parameters = json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig",
        "sharing": {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": interval}}});
    let config =
        json!([{"requests": ["gpu"], "opaque": {"driver": "gpu.nvidia.com", "parameters": parameters}}]);
    json!({"requests": [gpu("gpu")], "config": config})
}

/// A claim of its own. `devices` is spec.devices.
pub fn claim(name: &str, devices: Value) -> Value {
    json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
           "metadata": {"name": name}, "spec": {"devices": devices}})
}

/// The template that makes such a claim for each pod.
pub fn template(name: &str, devices: Value) -> Value {
    json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate",
           "metadata": {"name": name}, "spec": {"spec": {"devices": devices}}})
}

/// A container that waits until it is told to end; `uses` is resources.claims.
pub fn container(name: &str, uses: Value) -> Value {
    json!({"name": name, "image": "docker.io/local/glibc:1", "imagePullPolicy": "Never",
           "resources": {"claims": uses}})
}

pub fn pod(name: &str, claims: Value, containers: Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {
        "terminationGracePeriodSeconds": 1, "resourceClaims": claims, "containers": containers}})
}

/// A pod of one container that uses the claim of this name.
pub fn user_of(claim: &str, pod_name: &str) -> Value {
    let claims = json!([{"name": "c", "resourceClaimName": claim}]);
    pod(pod_name, claims, json!([container("main", json!([{"name": "c"}]))]))
}

/// A pod of one container with a claim by this template.
pub fn by_template(template: &str, pod_name: &str) -> Value {
    let claims = json!([{"name": "c", "resourceClaimTemplateName": template}]);
    pod(pod_name, claims, json!([container("main", json!([{"name": "c"}]))]))
}

/// The same pod, for this node only.
pub fn on(node: &str, mut pod: Value) -> Value {
    pod["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": node});
    pod
}

/// A claim that is already given a device, as the scheduler would leave it: its status.
pub fn allocation(node: &str, device: &str) -> Value {
    json!({"allocation": {
        "allocationTimestamp": "2026-01-02T03:04:05Z",
        "devices": {"results": [
            {"request": "gpu", "driver": "gpu.nvidia.com", "pool": node, "device": device}]},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [
            {"key": "metadata.name", "operator": "In", "values": [node]}]}]}}})
}

//! The objects that tests create, as JSON.

use serde_json::{Value, json};

/// A request for one whole GPU.
pub fn gpu(name: &str) -> Value {
    json!({"name": name, "exactly": {"deviceClassName": "gpu.nvidia.com"}})
}

/// A request for a part of a GPU: memory such as `2000Mi`, percent of compute (0: not capped).
pub fn share(memory: &str, compute: u32) -> Value {
    let mut amounts = json!({"memory": memory});
    if compute > 0 {
        amounts["compute"] = json!(compute.to_string());
    }
    let mut request = gpu("gpu");
    request["exactly"]["capacity"] = json!({"requests": amounts});
    request
}

/// The same request, of this GPU only.
pub fn of_gpu(uuid: &str, mut request: Value) -> Value {
    let is = format!("device.attributes['gpu.nvidia.com'].uuid == '{uuid}'");
    request["exactly"]["selectors"] = json!([{"cel": {"expression": is}}]);
    request
}

/// spec.devices.config of the driver's own parameters for request `gpu`.
pub fn parameters(api: &str, kind: &str, mut fields: Value) -> Value {
    fields["apiVersion"] = json!(api);
    fields["kind"] = json!(kind);
    json!([{"requests": ["gpu"], "opaque": {"driver": "gpu.nvidia.com", "parameters": fields}}])
}

/// spec.devices of one GPU with a time slice: Default, Short, Medium or Long.
pub fn time_slicing(interval: &str) -> Value {
    let sharing = json!({"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": interval}});
    let config = parameters("resource.nvidia.com/v1beta1", "GpuConfig", json!({"sharing": sharing}));
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

/// The same pod, not as root.
pub fn as_nobody(mut pod: Value) -> Value {
    pod["spec"]["securityContext"] = json!({"runAsNonRoot": true, "runAsUser": 65534});
    for container in pod["spec"]["containers"].as_array_mut().into_iter().flatten() {
        container["securityContext"] = json!({"allowPrivilegeEscalation": false});
    }
    pod
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

/// The same for a share: memory such as `30Gi`, percent of compute.
pub fn allocation_of_share(node: &str, device: &str, memory: &str, compute: u32) -> Value {
    let mut status = allocation(node, device);
    let result = &mut status["allocation"]["devices"]["results"][0];
    result["shareID"] = json!("6f0c1f2e-9f1a-4a53-8f7b-3d1c5a3f0b6e");
    result["consumedCapacity"] = json!({"memory": memory, "compute": compute.to_string(), "shares": "1"});
    status
}

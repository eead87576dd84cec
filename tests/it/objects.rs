//! Nodes with GPUs of 80 GiB that can be shared, and claims for shares of them, as an API server has them.

use serde_json::{Value, json};

use crate::mock_api::MockApi;

const DRIVER: &str = "gpu.nvidia.com";

/// A node with room, and the slice of its GPUs.
pub fn put_node(api: &MockApi, name: &str, gpus: u32, spec: Value) {
    api.put(
        "nodes",
        json!({"metadata": {"name": name, "uid": format!("{name}-uid")}, "spec": spec,
        "status": {"allocatable": {"cpu": "64", "memory": "512Gi", "pods": "110"}}}),
    );
    let devices: Vec<Value> = (0..gpus).map(|minor| device(name, minor)).collect();
    api.put(
        "resourceslices",
        json!({"metadata": {"name": format!("{name}-slice"), "uid": format!("{name}-slice")},
        "spec": {"driver": DRIVER, "nodeName": name, "devices": devices,
            "pool": {"name": name, "generation": 1, "resourceSliceCount": 1}}}),
    );
}

fn device(node: &str, minor: u32) -> Value {
    json!({"name": format!("gpu-{minor}"), "allowMultipleAllocations": true,
        "attributes": {"type": {"string": "gpu"}, "uuid": {"string": format!("GPU-{node}-{minor}")},
            "productName": {"string": "NVIDIA H100 80GB HBM3"}, "isolation": {"string": "mps"},
            "grantableMemoryMiB": {"int": 81920}, "shareSlots": {"int": 16}, "processesPerSlot": {"int": 3}},
        "capacity": {"memory": {"value": "80Gi"}, "compute": {"value": "100"}, "shares": {"value": "16"}}})
}

/// A claim for a share, in namespace ml; `share`: the fields of its GpuShare.
pub fn share(name: &str, share: Value) -> Value {
    let mut parameters = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare"});
    parameters.as_object_mut().unwrap().extend(share.as_object().unwrap().clone());
    json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "ml", "uid": name, "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"devices": {
            "requests": [{"name": "gpu", "exactly": {"deviceClassName": "shared.gpu.nvidia.com"}}],
            "config": [{"opaque": {"driver": DRIVER, "parameters": parameters}}]}}})
}

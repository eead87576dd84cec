//! How the requests of a claim are read: those of our class and those of others.

use k8s_openapi::api::resource::v1::{DeviceSelector, DeviceSubRequest, ExactDeviceRequest};

/// The CEL of selectors.
pub fn expressions(selectors: Option<&[DeviceSelector]>) -> Vec<String> {
    let all = selectors.into_iter().flatten();
    all.filter_map(|one| Some(one.cel.as_ref()?.expression.clone())).collect()
}

/// An alternative, as a request of its own would say it.
pub fn exact(sub: &DeviceSubRequest) -> ExactDeviceRequest {
    ExactDeviceRequest {
        allocation_mode: sub.allocation_mode.clone(),
        capacity: sub.capacity.clone(),
        count: sub.count,
        device_class_name: sub.device_class_name.clone(),
        selectors: sub.selectors.clone(),
        tolerations: sub.tolerations.clone(),
        ..ExactDeviceRequest::default()
    }
}

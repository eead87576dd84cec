//! Our slices as the API server has them, in the publisher's terms. Pure.

use k8s_openapi::api::resource::v1::ResourceSlice;
use tracing::warn;

use crate::cluster::{SliceRef, StoredSlice};
use crate::slices::{ExistingSlices, Obsolete};

/// What a look found, with those that cannot be read.
pub(super) fn seen(slices: Vec<StoredSlice>) -> ExistingSlices {
    let mut seen = ExistingSlices::default();
    for slice in slices {
        match slice {
            StoredSlice::Readable(slice) => seen.readable.push(*slice),
            StoredSlice::Unreadable { slice, problem } => {
                warn!(slice = slice.name, problem, "a slice of ours cannot be read");
                let SliceRef { name, uid, resource_version } = slice;
                seen.unreadable.push(Obsolete { name, uid, resource_version });
            }
        }
    }
    seen
}

/// The slice to be deleted.
pub(super) fn slice_ref(gone: &Obsolete) -> SliceRef {
    SliceRef {
        name: gone.name.clone(),
        uid: gone.uid.clone(),
        resource_version: gone.resource_version.clone(),
    }
}

/// A slice's name, UID and resourceVersion.
pub(super) fn entry(slice: &ResourceSlice) -> (String, (String, String)) {
    let meta = &slice.metadata;
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    (text(&meta.name), (text(&meta.uid), text(&meta.resource_version)))
}

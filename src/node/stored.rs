//! Our slices as the API server has them, in the publisher's terms. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::ResourceSlice;
use tracing::warn;

use crate::cluster::{SliceRef, StoredSlice};
use crate::slices::{ExistingSlices, Obsolete};

/// The slices as we last wrote or saw them in order.
#[derive(Default)]
pub(super) struct StoredSlices {
    /// Name to UID and resourceVersion.
    versions: BTreeMap<String, (String, String)>,
    /// The highest that was ever seen.
    generation: i64,
    /// One is gone without our doing.
    wiped: bool,
}

impl StoredSlices {
    /// What is stored, as of this look.
    pub fn remember(&mut self, seen: &ExistingSlices) {
        let generations = seen.readable.iter().map(|slice| slice.spec.pool.generation);
        self.generation = generations.max().unwrap_or(0).max(self.generation);
        let versions: BTreeMap<_, _> = seen.readable.iter().map(entry).collect();
        self.wiped |= self.versions.keys().any(|name| !versions.contains_key(name));
        self.versions = versions;
    }

    /// We have written it.
    pub fn note(&mut self, slice: &ResourceSlice) {
        self.generation = self.generation.max(slice.spec.pool.generation);
        self.versions.extend([entry(slice)]);
    }

    /// We delete it.
    pub fn forget(&mut self, name: &str) {
        self.versions.remove(name);
    }

    pub fn has(&self, slice: &SliceRef) -> bool {
        self.versions.get(&slice.name).is_some_and(|(uid, _)| *uid == slice.uid)
    }

    pub fn has_version(&self, slice: &SliceRef) -> bool {
        self.versions.get(&slice.name).is_some_and(|(_, version)| *version == slice.resource_version)
    }

    pub fn generation(&self) -> i64 {
        self.generation
    }

    pub fn is_wiped(&self) -> bool {
        self.wiped
    }

    /// Whether one was gone; it is there again.
    pub fn take_wiped(&mut self) -> bool {
        std::mem::take(&mut self.wiped)
    }
}

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
fn entry(slice: &ResourceSlice) -> (String, (String, String)) {
    let meta = &slice.metadata;
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    (text(&meta.name), (text(&meta.uid), text(&meta.resource_version)))
}

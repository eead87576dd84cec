//! Objects that are there and do not fit our types. They stay as they were last read, and keep nobody else from
//! anything.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::controller::view::{ClusterView, Kind, News, key};

impl ClusterView {
    /// The object can be read, or is not there any more.
    pub(super) fn readable(&mut self, kind: Kind, meta: &ObjectMeta) {
        if !self.unreadable.is_empty() {
            self.unreadable.remove(&(kind, key(kind, meta)));
        }
    }

    /// Notes that an object is there and cannot be read; it is left as it was. Told once.
    pub(super) fn unreadable(&mut self, kind: Kind, meta: &ObjectMeta, problem: &str) -> Option<News> {
        let key = key(kind, meta);
        if key.is_empty() {
            if self.lists.under_way.contains_key(&kind) {
                self.lists.doubtful.insert(kind);
            }
            return Some(News::Trouble(format!(
                "one of {kind:?} cannot be read, not even its name: {problem}"
            )));
        }
        self.listed(kind, meta);
        let namespace = meta.namespace.as_ref().map(|namespace| format!("{namespace}/")).unwrap_or_default();
        let name = meta.name.as_deref().unwrap_or_default();
        let fresh = self.unreadable.insert((kind, key));
        fresh.then(|| {
            News::Trouble(format!(
                "{kind:?} {namespace}{name} cannot be read and is left as it was: {problem}"
            ))
        })
    }

    /// Objects that are there and cannot be read.
    pub fn unreadables(&self) -> usize {
        self.unreadable.len()
    }
}

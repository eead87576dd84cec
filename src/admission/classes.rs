//! What is known of DeviceClasses when a claim is looked at: which are the controller's, and which of these say how much
//! a share is.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::DeviceClass;

use crate::model::names::{DRIVER, SHARED_CLASS};
use crate::params::{self, GpuShare, Params};
use crate::select::{Placer, placer};

/// Classes of ours that are kube-scheduler's, whoever reads them.
pub(super) const OF_THE_SCHEDULER: [&str; 2] = ["gpu.nvidia.com", "mig.nvidia.com"];

/// Whether a class of the controller's says by itself how much a share is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClassAmount {
    Said,
    NotSaid,
    /// The class could not be read. The controller checks again.
    Unknown,
}

/// Whose a class is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClassOwner {
    Controller(ClassAmount),
    Scheduler,
    /// It is not there yet, or could not be read: what depends on it is left to the controller and the node.
    Unknown,
}

/// The classes of the cluster, as far as they are known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KnownClasses {
    /// None: they could not be read.
    all: Option<BTreeMap<String, ClassOwner>>,
    /// There are more, which were not read.
    is_cut: bool,
}

impl KnownClasses {
    pub fn of(classes: &[DeviceClass]) -> Self {
        let whose = |class: &DeviceClass| match placer(class) {
            Placer::Controller => ClassOwner::Controller(amount(class)),
            Placer::Scheduler | Placer::Doubtful => ClassOwner::Scheduler,
        };
        let name = |class: &DeviceClass| class.metadata.name.clone().unwrap_or_default();
        Self { all: Some(classes.iter().map(|class| (name(class), whose(class))).collect()), is_cut: false }
    }

    /// The same of a cluster that has more classes than these: of the others nothing is known.
    pub fn of_some(classes: &[DeviceClass]) -> Self {
        Self { is_cut: true, ..Self::of(classes) }
    }

    pub(super) fn whose(&self, class: &str) -> ClassOwner {
        match (self.all.as_ref().map(|all| all.get(class)), class) {
            (Some(Some(whose)), _) => *whose,
            (Some(None), SHARED_CLASS) if !self.is_cut => ClassOwner::Controller(ClassAmount::NotSaid),
            (_, SHARED_CLASS) => ClassOwner::Controller(ClassAmount::Unknown),
            _ if OF_THE_SCHEDULER.contains(&class) => ClassOwner::Scheduler,
            _ => ClassOwner::Unknown,
        }
    }

    /// The cluster has more classes than are read, and this may be one of the others.
    pub(super) fn is_beyond(&self, class: &str) -> bool {
        let unread = self.all.as_ref().is_some_and(|all| !all.contains_key(class));
        self.is_cut && unread && !OF_THE_SCHEDULER.contains(&class)
    }
}

fn amount(class: &DeviceClass) -> ClassAmount {
    let configs = class.spec.iter().flat_map(|spec| spec.config.iter().flatten());
    let said = configs.filter_map(|config| config.opaque.as_ref()).any(|opaque| {
        opaque.driver == DRIVER
            && matches!(
                params::decode(&opaque.parameters.0),
                Ok(Params::Share(GpuShare { amount: Some(_), .. }))
            )
    });
    if said { ClassAmount::Said } else { ClassAmount::NotSaid }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::select::NOT_FOR_THE_SCHEDULER;

    fn class(name: &str, selector: &str, fields: Value) -> DeviceClass {
        let mut parameters = json!({"apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare"});
        parameters.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let config = json!([{"opaque": {"driver": DRIVER, "parameters": parameters}}]);
        let selectors = json!([{"cel": {"expression": selector}}]);
        let spec = json!({"selectors": selectors, "config": config});
        serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap()
    }

    #[test]
    fn classes_are_known_by_their_selectors_and_what_they_say() {
        let known = KnownClasses::of(&[
            class("small", NOT_FOR_THE_SCHEDULER, json!({"memory": "1Gi"})),
            class("some", NOT_FOR_THE_SCHEDULER, json!({"compute": 5})),
            class("whole", "device.driver == 'gpu.nvidia.com'", json!({})),
        ]);
        assert_eq!(known.whose("small"), ClassOwner::Controller(ClassAmount::Said));
        assert_eq!(known.whose("some"), ClassOwner::Controller(ClassAmount::NotSaid));
        assert_eq!(known.whose("whole"), ClassOwner::Scheduler);
        assert_eq!(known.whose("not-yet"), ClassOwner::Unknown);
        assert_eq!(known.whose(SHARED_CLASS), ClassOwner::Controller(ClassAmount::NotSaid));
        let unread = KnownClasses::default();
        assert_eq!(unread.whose(SHARED_CLASS), ClassOwner::Controller(ClassAmount::Unknown));
        assert_eq!(unread.whose("gpu.nvidia.com"), ClassOwner::Scheduler);
        assert_eq!(unread.whose("small"), ClassOwner::Unknown);
    }

    #[test]
    fn of_a_class_beyond_those_that_are_read_nothing_is_known() {
        let first = class("a-whole", "device.driver == 'gpu.nvidia.com'", json!({}));
        let known = KnownClasses::of_some(std::slice::from_ref(&first));
        assert_eq!(known.whose("a-whole"), ClassOwner::Scheduler);
        assert_eq!(known.whose(SHARED_CLASS), ClassOwner::Controller(ClassAmount::Unknown));
        assert_eq!(known.whose("z-small"), ClassOwner::Unknown);
        let beyond = ["a-whole", SHARED_CLASS, "z-small", "gpu.nvidia.com"].map(|name| known.is_beyond(name));
        assert_eq!(beyond, [false, true, true, false]);
        assert!(!KnownClasses::of(&[first]).is_beyond("z-small"));
        assert!(!KnownClasses::default().is_beyond("z-small"));
    }
}

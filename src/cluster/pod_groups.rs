//! PodGroups of those who start pods together, as far as the controller reads them: how many, of which parts, and what
//! a queue says of them. Each API is optional: where it is not served there are none.
//!
//! Fields are those of Volcano's `scheduling.volcano.sh/v1beta1`, KAI's `scheduling.run.ai/v2alpha2` and Kubernetes'
//! `scheduling.k8s.io` (KEP-4671).

use std::collections::BTreeMap;
use std::marker::PhantomData;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;

use super::feed::WatchEvent;

/// An API that has PodGroups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PodGroupApi {
    Volcano,
    Kai,
    KubernetesV1Beta1,
    KubernetesV1Alpha3,
    KubernetesV1Alpha2,
}

impl PodGroupApi {
    pub const ALL: [Self; 5] = [
        Self::Volcano,
        Self::Kai,
        Self::KubernetesV1Beta1,
        Self::KubernetesV1Alpha3,
        Self::KubernetesV1Alpha2,
    ];

    /// The group of the API, as RBAC names it.
    pub fn group(self) -> &'static str {
        match self {
            Self::Volcano => Volcano::GROUP,
            Self::Kai => Kai::GROUP,
            Self::KubernetesV1Beta1 => KubernetesV1Beta1::GROUP,
            Self::KubernetesV1Alpha3 => KubernetesV1Alpha3::GROUP,
            Self::KubernetesV1Alpha2 => KubernetesV1Alpha2::GROUP,
        }
    }
}

/// A PodGroup of any of the APIs. A field that an API does not have is never set.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodGroup {
    pub metadata: ObjectMeta,
    pub spec: PodGroupSpec,
    pub status: PodGroupStatus,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodGroupSpec {
    /// Volcano's and KAI's.
    pub min_member: Option<i64>,
    /// Volcano's: by task.
    pub min_task_member: Option<BTreeMap<String, i64>>,
    /// KAI's.
    pub sub_groups: Option<Vec<SubGroup>>,
    /// KAI's: how many of the subgroups without a parent; none: all of them.
    pub min_sub_group: Option<i64>,
    /// Kubernetes'.
    pub scheduling_policy: Option<SchedulingPolicy>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct SubGroup {
    pub name: String,
    pub min_member: Option<i64>,
    /// How many of those that are a part of this one; none: all of them.
    pub min_sub_group: Option<i64>,
    /// The subgroup that has this one as a part.
    pub parent: Option<String>,
}

/// Without a gang every pod starts by itself.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct SchedulingPolicy {
    pub gang: Option<GangPolicy>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct GangPolicy {
    pub min_count: i64,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodGroupStatus {
    /// Volcano's.
    pub phase: Option<String>,
    /// Pods that have done their work.
    pub succeeded: Option<i64>,
    /// KAI's.
    pub scheduling_conditions: Option<Vec<SchedulingCondition>>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct SchedulingCondition {
    pub status: Option<String>,
    pub reasons: Option<Vec<UnschedulableReason>>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct UnschedulableReason {
    pub reason: Option<String>,
    pub message: Option<String>,
}

impl k8s_openapi::Resource for PodGroup {
    const API_VERSION: &'static str = "";
    const GROUP: &'static str = "";
    const KIND: &'static str = KIND;
    const VERSION: &'static str = "";
    const URL_PATH_SEGMENT: &'static str = PLURAL;
    type Scope = NamespaceResourceScope;
}

impl k8s_openapi::Metadata for PodGroup {
    type Ty = ObjectMeta;

    fn metadata(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn metadata_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

const KIND: &str = "PodGroup";
const PLURAL: &str = "podgroups";

/// Where a [`PodGroup`] is served.
pub(super) trait Served: Send + 'static {
    const API_VERSION: &'static str;
    const GROUP: &'static str;
    const VERSION: &'static str;
}

macro_rules! served {
    ($($name:ident: $group:literal, $version:literal;)*) => {$(
        #[derive(Debug, Clone)]
        pub(super) struct $name;

        impl Served for $name {
            const API_VERSION: &'static str = concat!($group, "/", $version);
            const GROUP: &'static str = $group;
            const VERSION: &'static str = $version;
        }
    )*};
}

served! {
    Volcano: "scheduling.volcano.sh", "v1beta1";
    Kai: "scheduling.run.ai", "v2alpha2";
    KubernetesV1Beta1: "scheduling.k8s.io", "v1beta1";
    KubernetesV1Alpha3: "scheduling.k8s.io", "v1alpha3";
    KubernetesV1Alpha2: "scheduling.k8s.io", "v1alpha2";
}

/// A PodGroup as one of the APIs serves it.
#[derive(Debug, Clone, Deserialize)]
#[serde(transparent, bound = "")]
pub(super) struct Of<S> {
    pub object: PodGroup,
    #[serde(skip)]
    served: PhantomData<fn() -> S>,
}

impl<S> Default for Of<S> {
    fn default() -> Self {
        Self { object: PodGroup::default(), served: PhantomData }
    }
}

impl<S: Served> k8s_openapi::Resource for Of<S> {
    const API_VERSION: &'static str = S::API_VERSION;
    const GROUP: &'static str = S::GROUP;
    const KIND: &'static str = KIND;
    const VERSION: &'static str = S::VERSION;
    const URL_PATH_SEGMENT: &'static str = PLURAL;
    type Scope = NamespaceResourceScope;
}

impl<S: Served> k8s_openapi::Metadata for Of<S> {
    type Ty = ObjectMeta;

    fn metadata(&self) -> &ObjectMeta {
        &self.object.metadata
    }

    fn metadata_mut(&mut self) -> &mut ObjectMeta {
        &mut self.object.metadata
    }
}

/// What a watch tells, whichever API it is of.
pub(super) fn of_any<S>(seen: WatchEvent<Of<S>>) -> WatchEvent<PodGroup> {
    match seen {
        WatchEvent::Anew => WatchEvent::Anew,
        WatchEvent::Listed(one) => WatchEvent::Listed(Box::new(one.object)),
        WatchEvent::Complete => WatchEvent::Complete,
        WatchEvent::Stored(one) => WatchEvent::Stored(Box::new(one.object)),
        WatchEvent::Deleted(meta) => WatchEvent::Deleted(meta),
        WatchEvent::Unreadable { rest, listed, problem } => {
            WatchEvent::Unreadable { rest: Box::new(rest.object), listed, problem }
        }
        WatchEvent::Interrupted { problem, is_forbidden } => {
            WatchEvent::Interrupted { problem, is_forbidden }
        }
    }
}

//! What a ResourceSlice says of a device.

use std::fmt;

use k8s_openapi::api::resource::v1::{Device, DeviceAttribute};

use crate::model::named::Named;
use crate::model::quantity::Quantity;

/// `domain/name` of an attribute or capacity.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QualifiedName {
    pub domain: String,
    pub name: String,
}

impl QualifiedName {
    /// A name without a domain belongs to the driver's.
    pub fn of(text: &str, driver: &str) -> Self {
        let (domain, name) = text.split_once('/').unwrap_or((driver, text));
        Self { domain: domain.to_owned(), name: name.to_owned() }
    }

    /// A fully qualified name, as `matchAttribute` wants it; none: the domain is missing.
    pub fn full(text: &str) -> Option<Self> {
        let (domain, name) = text.split_once('/')?;
        (!domain.is_empty() && !name.is_empty())
            .then(|| Self { domain: domain.to_owned(), name: name.to_owned() })
    }
}

impl fmt::Display for QualifiedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.domain, self.name)
    }
}

/// Values of different kinds are different, whatever they look like. Lists exist since 1.36.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AttributeValue {
    Bool(bool),
    Int(i64),
    String(String),
    /// Semantic version 2.0.0; the API server has checked it.
    Version(String),
    Bools(Vec<bool>),
    Ints(Vec<i64>),
    Strings(Vec<String>),
    Versions(Vec<String>),
}

impl AttributeValue {
    fn of(attribute: &DeviceAttribute) -> Option<Self> {
        let DeviceAttribute { bool, bools, int, ints, string, strings, version, versions } =
            attribute.clone();
        None.or(bool.map(Self::Bool))
            .or(int.map(Self::Int))
            .or(string.map(Self::String))
            .or(version.map(Self::Version))
            .or(bools.map(Self::Bools))
            .or(ints.map(Self::Ints))
            .or(strings.map(Self::Strings))
            .or(versions.map(Self::Versions))
    }
}

/// The attribute with all memory of a GPU, in MiB, and the capacity with what is counted of it.
const TOTAL: &str = "totalMemoryMiB";
const MEMORY: &str = "memory";

/// Behind the words about GPUs that such a selector leaves out.
pub const BY_TOTAL_MEMORY: &str = "the capacity memory of a GPU that is shared is what its shares can be granted, which is less \
                                   than it has: select by device.attributes['gpu.nvidia.com'].totalMemoryMiB";

/// The selector reads the capacity `memory`, as far as its text tells.
pub fn is_by_memory_capacity(selector: &str) -> bool {
    selector.split("device.capacity").skip(1).any(|after| {
        let after = after.split("device.").next().unwrap_or_default();
        after.contains(MEMORY)
    })
}

/// What a selector can see of a device.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceFacts {
    pub driver: String,
    pub attributes: Named<QualifiedName, AttributeValue>,
    pub capacity: Named<QualifiedName, Quantity>,
    /// It may be given to several claims at once.
    pub allow_multiple: bool,
}

impl DeviceFacts {
    /// The facts of a published device. An attribute of a kind that is not known, and a capacity that cannot be read,
    /// are left out: a selector that names them fails with words.
    pub fn of(driver: &str, device: &Device) -> Self {
        let attributes = device.attributes.iter().flatten();
        let capacity = device.capacity.iter().flatten();
        Self {
            driver: driver.to_owned(),
            attributes: attributes
                .filter_map(|(name, value)| {
                    Some((QualifiedName::of(name, driver), AttributeValue::of(value)?))
                })
                .collect(),
            capacity: capacity
                .filter_map(|(name, capacity)| {
                    Some((QualifiedName::of(name, driver), capacity.value.0.parse::<Quantity>().ok()?))
                })
                .collect(),
            allow_multiple: device.allow_multiple_allocations.unwrap_or(false),
        }
    }

    /// The same device, with all of its memory as the capacity, which is what can be granted where it is shared. None: it
    /// does not say, or that is all.
    pub fn by_total_memory(&self) -> Option<Self> {
        let (total, memory) =
            (QualifiedName::of(TOTAL, &self.driver), QualifiedName::of(MEMORY, &self.driver));
        let AttributeValue::Int(mib) = self.attributes.get(&total)? else { return None };
        let total = Quantity::from_units(u64::try_from(*mib).ok()?.checked_mul(1 << 20)?);
        (*self.capacity.get(&memory)? < total).then(|| {
            let mut facts = self.clone();
            facts.capacity = facts.capacity.with(memory, total);
            facts
        })
    }

    /// Takes what the other has as well from there: in memory it is then there once.
    pub fn share(&mut self, other: &Self) {
        self.attributes.share(&other.attributes);
        self.capacity.share(&other.capacity);
    }
}

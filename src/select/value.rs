//! Values while an expression is evaluated.

use std::cmp::Ordering;
use std::ops::Deref;
use std::rc::Rc;

use semver::Version;

use super::cost::{LIGHT, Meter};
use super::eval::Trouble;
use super::facts::{AttributeValue, DeviceFacts};
use crate::model::quantity::Quantity;

/// Longer than any name of an attribute or its domain can be.
const NAME_BYTES_MAX: usize = 256;
/// Of a text in a message.
const QUOTED_CHARS_MAX: usize = 64;

/// A text of the expression or the device, or one that was made. Either is shared, never copied.
#[derive(Debug, Clone)]
pub enum Text<'a> {
    Known(&'a str),
    Made(Rc<str>),
}

impl Deref for Text<'_> {
    type Target = str;

    fn deref(&self) -> &str {
        match self {
            Self::Known(text) => text,
            Self::Made(text) => text,
        }
    }
}

#[derive(Debug, Clone)]
pub enum Value<'a> {
    Null,
    Bool(bool),
    Int(i64),
    Text(Text<'a>),
    Quantity(Quantity),
    Version(Rc<Version>),
    List(Rc<Vec<Value<'a>>>),
    Map(Rc<Vec<(Value<'a>, Value<'a>)>>),
    Optional(Option<Rc<Value<'a>>>),
    Device,
    /// `device.attributes` or `device.capacity`
    Domains(FactTable),
    /// One domain of it.
    Names(FactTable, Text<'a>),
    /// The result so far of a row of which an element failed, and why.
    Failed(Rc<str>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FactTable {
    Attributes,
    Capacity,
}

impl FactTable {
    fn word(self) -> &'static str {
        match self {
            Self::Attributes => "attribute",
            Self::Capacity => "capacity",
        }
    }
}

impl<'a> Value<'a> {
    /// For messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "a bool",
            Self::Int(_) => "an int",
            Self::Text(_) => "a string",
            Self::Quantity(_) => "a quantity",
            Self::Version(_) => "a version",
            Self::List(_) => "a list",
            Self::Map(_) | Self::Domains(_) | Self::Names(..) => "a map",
            Self::Optional(_) => "an optional",
            Self::Device => "the device",
            Self::Failed(_) => "a failure",
        }
    }

    pub fn text(text: &'a str) -> Self {
        Self::Text(Text::Known(text))
    }

    pub fn some(value: Self) -> Self {
        Self::Optional(Some(Rc::new(value)))
    }

    pub fn made(text: impl Into<Rc<str>>) -> Self {
        Self::Text(Text::Made(text.into()))
    }

    fn attribute(value: &'a AttributeValue, meter: &mut Meter) -> Result<Self, Trouble> {
        fn list<'a, T>(
            all: &'a [T],
            meter: &mut Meter,
            one: impl Fn(&'a T, &mut Meter) -> Result<Value<'a>, Trouble>,
        ) -> Result<Value<'a>, Trouble> {
            meter.list(all.len())?;
            let all = all.iter().map(|element| one(element, meter));
            Ok(Value::List(Rc::new(all.collect::<Result<_, _>>()?)))
        }
        match value {
            AttributeValue::Bool(value) => Ok(Self::Bool(*value)),
            AttributeValue::Int(value) => Ok(Self::Int(*value)),
            AttributeValue::String(value) => Ok(Self::text(value)),
            AttributeValue::Version(value) => version(value, meter),
            AttributeValue::Bools(all) => list(all, meter, |one, _| Ok(Self::Bool(*one))),
            AttributeValue::Ints(all) => list(all, meter, |one, _| Ok(Self::Int(*one))),
            AttributeValue::Strings(all) => list(all, meter, |one, _| Ok(Self::text(one))),
            AttributeValue::Versions(all) => list(all, meter, |one, meter| version(one, meter)),
        }
    }

    /// What a map has under a name; nothing: it has none of that name.
    pub fn find(
        &self,
        key: &Value<'a>,
        device: &'a DeviceFacts,
        meter: &mut Meter,
    ) -> Result<Option<Self>, Trouble> {
        match (self, key) {
            (Self::Map(map), key) => {
                for (name, value) in map.iter() {
                    if name.equals(key, meter)? {
                        return Ok(Some(value.clone()));
                    }
                }
                Ok(None)
            }
            (Self::Device, Self::Text(name)) => Ok(part(device, name)),
            // An unknown domain is an empty map.
            (Self::Domains(table), Self::Text(domain)) => Ok(Some(Self::Names(*table, domain.clone()))),
            (Self::Names(table, domain), Self::Text(name)) => named(device, *table, domain, name, meter),
            (Self::Domains(_) | Self::Names(..), _) => Ok(None),
            _ => Err(format!("{} has nothing in it to look up", self.kind()).into()),
        }
    }

    /// The same, where it must be there.
    pub fn get(&self, key: &Value<'a>, device: &'a DeviceFacts, meter: &mut Meter) -> Result<Self, Trouble> {
        if let (Self::List(list), Self::Int(at)) = (self, key) {
            let found = usize::try_from(*at).ok().and_then(|at| list.get(at));
            let missing = || format!("a list of {} has no element {at}", list.len()).into();
            return found.cloned().ok_or_else(missing);
        }
        let words = || match (self, key) {
            (Self::Names(table, domain), Self::Text(name)) => {
                format!("the device has no {} {} in the domain {}", table.word(), short(name), short(domain))
            }
            (_, Self::Text(name)) => format!("{} has no key {:?}", self.kind(), short(name)),
            _ => format!("{} has no such key", self.kind()),
        };
        self.find(key, device, meter)?.ok_or_else(|| words().into())
    }

    /// The elements of a list, or the keys of a map.
    pub fn elements(&self, device: &'a DeviceFacts, meter: &mut Meter) -> Result<Elements<'a>, Trouble> {
        let fresh = |names: Vec<&'a str>, meter: &mut Meter| {
            meter.list(names.len())?;
            Ok(Elements::Of(Rc::new(names.into_iter().map(Self::text).collect())))
        };
        match self {
            Self::List(list) => Ok(Elements::Of(Rc::clone(list))),
            Self::Map(map) => Ok(Elements::KeysOf(Rc::clone(map))),
            Self::Domains(table) => {
                let mut domains: Vec<&str> = names(device, *table).map(|name| name.domain.as_str()).collect();
                domains.dedup();
                fresh(domains, meter)
            }
            Self::Names(table, domain) => {
                let all = names(device, *table).filter(|name| name.domain == **domain);
                fresh(all.map(|name| name.name.as_str()).collect(), meter)
            }
            _ => Err(format!("{} has no elements", self.kind()).into()),
        }
    }

    /// Values of different kinds are different. Each element that is looked at is paid for.
    pub fn equals(&self, other: &Self, meter: &mut Meter) -> Result<bool, Trouble> {
        meter.pay(LIGHT)?;
        Ok(match (self, other) {
            (Self::Null, Self::Null) => true,
            (Self::Bool(one), Self::Bool(other)) => one == other,
            (Self::Int(one), Self::Int(other)) => one == other,
            (Self::Text(one), Self::Text(other)) => {
                meter.read(one.len().min(other.len()))?;
                **one == **other
            }
            (Self::Quantity(one), Self::Quantity(other)) => one == other,
            (Self::Version(one), Self::Version(other)) => precedence(one, other, meter)?.is_eq(),
            (Self::Optional(None), Self::Optional(None)) => true,
            (Self::Optional(Some(one)), Self::Optional(Some(other))) => one.equals(other, meter)?,
            (Self::List(one), Self::List(other)) => {
                if one.len() != other.len() {
                    return Ok(false);
                }
                for (one, other) in one.iter().zip(other.iter()) {
                    if !one.equals(other, meter)? {
                        return Ok(false);
                    }
                }
                true
            }
            (Self::Device | Self::Domains(_) | Self::Names(..) | Self::Map(_), _)
            | (_, Self::Device | Self::Domains(_) | Self::Names(..) | Self::Map(_)) => {
                let words = format!("{} and {} cannot be compared here", self.kind(), other.kind());
                return Err(words.into());
            }
            _ => false,
        })
    }

    pub fn order(&self, other: &Self, meter: &mut Meter) -> Result<Ordering, Trouble> {
        match (self, other) {
            (Self::Bool(one), Self::Bool(other)) => Ok(one.cmp(other)),
            (Self::Int(one), Self::Int(other)) => Ok(one.cmp(other)),
            (Self::Text(one), Self::Text(other)) => {
                meter.read(one.len().min(other.len()))?;
                Ok((**one).cmp(&**other))
            }
            (Self::Quantity(_), Self::Quantity(_)) | (Self::Version(_), Self::Version(_)) => {
                Err(format!("{} is compared with isLessThan, isGreaterThan or compareTo", self.kind()).into())
            }
            _ => Err(format!("{} and {} have no order", self.kind(), other.kind()).into()),
        }
    }
}

/// What a fold goes over: shared with the value that it is of.
pub enum Elements<'a> {
    Of(Rc<Vec<Value<'a>>>),
    KeysOf(Rc<Vec<(Value<'a>, Value<'a>)>>),
}

impl<'a> Elements<'a> {
    pub fn len(&self) -> usize {
        match self {
            Self::Of(list) => list.len(),
            Self::KeysOf(map) => map.len(),
        }
    }

    pub fn all(&self) -> impl Iterator<Item = &Value<'a>> {
        let (list, map) = match self {
            Self::Of(list) => (Some(list), None),
            Self::KeysOf(map) => (None, Some(map)),
        };
        let keys = map.into_iter().flat_map(|map| map.iter()).map(|(key, _)| key);
        list.into_iter().flat_map(|list| list.iter()).chain(keys)
    }
}

/// The text for people; a long one is cut.
pub fn short(text: &str) -> String {
    match text.char_indices().nth(QUOTED_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

pub fn version<'a>(text: &str, meter: &mut Meter) -> Result<Value<'a>, Trouble> {
    meter.text(text.len())?;
    let version = Version::parse(text)
        .map_err(|error| format!("{:?} is not a semantic version: {error}", short(text)))?;
    Ok(Value::Version(Rc::new(version)))
}

/// Which version comes before which, whatever the build.
pub fn precedence(one: &Version, other: &Version, meter: &mut Meter) -> Result<Ordering, Trouble> {
    meter.read(one.pre.len().min(other.pre.len()))?;
    Ok(one.cmp_precedence(other))
}

fn names(device: &DeviceFacts, table: FactTable) -> Box<dyn Iterator<Item = &super::QualifiedName> + '_> {
    match table {
        FactTable::Attributes => Box::new(device.attributes.keys()),
        FactTable::Capacity => Box::new(device.capacity.keys()),
    }
}

fn part<'a>(device: &'a DeviceFacts, name: &str) -> Option<Value<'a>> {
    match name {
        "driver" => Some(Value::text(&device.driver)),
        "attributes" => Some(Value::Domains(FactTable::Attributes)),
        "capacity" => Some(Value::Domains(FactTable::Capacity)),
        "allowMultipleAllocations" => Some(Value::Bool(device.allow_multiple)),
        _ => None,
    }
}

fn named<'a>(
    device: &'a DeviceFacts,
    table: FactTable,
    domain: &str,
    name: &str,
    meter: &mut Meter,
) -> Result<Option<Value<'a>>, Trouble> {
    if domain.len() > NAME_BYTES_MAX || name.len() > NAME_BYTES_MAX {
        return Ok(None);
    }
    let key = super::QualifiedName { domain: domain.to_owned(), name: name.to_owned() };
    match table {
        FactTable::Attributes => {
            device.attributes.get(&key).map(|value| Value::attribute(value, meter)).transpose()
        }
        FactTable::Capacity => Ok(device.capacity.get(&key).copied().map(Value::Quantity)),
    }
}

//! Values while an expression is evaluated.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::rc::Rc;

use semver::Version;

use super::facts::{AttributeValue, DeviceFacts};
use crate::model::quantity::Quantity;

#[derive(Debug, Clone)]
pub enum Value<'a> {
    Null,
    Bool(bool),
    Int(i64),
    Text(Cow<'a, str>),
    Quantity(Quantity),
    Version(Rc<Version>),
    List(Rc<Vec<Value<'a>>>),
    Map(Rc<Vec<(Value<'a>, Value<'a>)>>),
    Optional(Option<Rc<Value<'a>>>),
    Device,
    /// `device.attributes` or `device.capacity`
    Domains(Table),
    /// One domain of it.
    Names(Table, Cow<'a, str>),
    /// The result so far of a row of which an element failed, and why.
    Failed(Rc<str>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Table {
    Attributes,
    Capacity,
}

impl Table {
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
        Self::Text(Cow::Borrowed(text))
    }

    pub fn some(value: Self) -> Self {
        Self::Optional(Some(Rc::new(value)))
    }

    /// Rough size, for bounding what an evaluation costs.
    pub fn weight(&self) -> usize {
        match self {
            Self::Text(text) => text.len() / 16,
            Self::List(list) => list.len(),
            Self::Map(map) => map.len(),
            _ => 0,
        }
    }

    fn attribute(value: &'a AttributeValue) -> Result<Self, String> {
        fn list<'a, T>(
            all: &'a [T],
            one: impl Fn(&'a T) -> Result<Value<'a>, String>,
        ) -> Result<Value<'a>, String> {
            Ok(Value::List(Rc::new(all.iter().map(one).collect::<Result<_, _>>()?)))
        }
        match value {
            AttributeValue::Bool(value) => Ok(Self::Bool(*value)),
            AttributeValue::Int(value) => Ok(Self::Int(*value)),
            AttributeValue::String(value) => Ok(Self::text(value)),
            AttributeValue::Version(value) => version(value),
            AttributeValue::Bools(all) => list(all, |one| Ok(Self::Bool(*one))),
            AttributeValue::Ints(all) => list(all, |one| Ok(Self::Int(*one))),
            AttributeValue::Strings(all) => list(all, |one| Ok(Self::text(one))),
            AttributeValue::Versions(all) => list(all, |one| version(one)),
        }
    }

    /// What a map has under a name; nothing: it has none of that name.
    pub fn find(&self, key: &Value<'a>, device: &'a DeviceFacts) -> Result<Option<Self>, String> {
        match (self, key) {
            (Self::Map(map), key) => {
                for (name, value) in map.iter() {
                    if name.equals(key)? {
                        return Ok(Some(value.clone()));
                    }
                }
                Ok(None)
            }
            (Self::Device, Self::Text(name)) => Ok(part(device, name)),
            // An unknown domain is an empty map.
            (Self::Domains(table), Self::Text(domain)) => Ok(Some(Self::Names(*table, domain.clone()))),
            (Self::Names(table, domain), Self::Text(name)) => named(device, *table, domain, name),
            (Self::Domains(_) | Self::Names(..), _) => Ok(None),
            _ => Err(format!("{} has nothing in it to look up", self.kind())),
        }
    }

    /// The same, where it must be there.
    pub fn get(&self, key: &Value<'a>, device: &'a DeviceFacts) -> Result<Self, String> {
        if let (Self::List(list), Self::Int(at)) = (self, key) {
            let found = usize::try_from(*at).ok().and_then(|at| list.get(at));
            return found.cloned().ok_or_else(|| format!("a list of {} has no element {at}", list.len()));
        }
        self.find(key, device)?.ok_or_else(|| match (self, key) {
            (Self::Names(table, domain), Self::Text(name)) => {
                format!("the device has no {} {name} in the domain {domain}", table.word())
            }
            (_, Self::Text(name)) => format!("{} has no key {name:?}", self.kind()),
            _ => format!("{} has no such key", self.kind()),
        })
    }

    /// The elements of a list, or the keys of a map.
    pub fn elements(&self, device: &'a DeviceFacts) -> Result<Vec<Self>, String> {
        let names = |table: Table| -> Box<dyn Iterator<Item = &'a super::QualifiedName> + 'a> {
            match table {
                Table::Attributes => Box::new(device.attributes.keys()),
                Table::Capacity => Box::new(device.capacity.keys()),
            }
        };
        Ok(match self {
            Self::List(list) => list.to_vec(),
            Self::Map(map) => map.iter().map(|(key, _)| key.clone()).collect(),
            Self::Domains(table) => {
                let mut domains: Vec<&str> = names(*table).map(|name| name.domain.as_str()).collect();
                domains.dedup();
                domains.into_iter().map(Self::text).collect()
            }
            Self::Names(table, domain) => {
                let all = names(*table).filter(|name| name.domain == **domain);
                all.map(|name| Self::text(&name.name)).collect()
            }
            _ => return Err(format!("{} has no elements", self.kind())),
        })
    }

    /// Values of different kinds are different.
    pub fn equals(&self, other: &Self) -> Result<bool, String> {
        Ok(match (self, other) {
            (Self::Null, Self::Null) => true,
            (Self::Bool(one), Self::Bool(other)) => one == other,
            (Self::Int(one), Self::Int(other)) => one == other,
            (Self::Text(one), Self::Text(other)) => one == other,
            (Self::Quantity(one), Self::Quantity(other)) => one == other,
            (Self::Version(one), Self::Version(other)) => one.cmp_precedence(other) == Ordering::Equal,
            (Self::Optional(None), Self::Optional(None)) => true,
            (Self::Optional(Some(one)), Self::Optional(Some(other))) => one.equals(other)?,
            (Self::List(one), Self::List(other)) => {
                if one.len() != other.len() {
                    return Ok(false);
                }
                for (one, other) in one.iter().zip(other.iter()) {
                    if !one.equals(other)? {
                        return Ok(false);
                    }
                }
                true
            }
            (Self::Device | Self::Domains(_) | Self::Names(..) | Self::Map(_), _)
            | (_, Self::Device | Self::Domains(_) | Self::Names(..) | Self::Map(_)) => {
                return Err(format!("{} and {} cannot be compared here", self.kind(), other.kind()));
            }
            _ => false,
        })
    }

    pub fn order(&self, other: &Self) -> Result<Ordering, String> {
        match (self, other) {
            (Self::Bool(one), Self::Bool(other)) => Ok(one.cmp(other)),
            (Self::Int(one), Self::Int(other)) => Ok(one.cmp(other)),
            (Self::Text(one), Self::Text(other)) => Ok(one.cmp(other)),
            (Self::Quantity(_), Self::Quantity(_)) | (Self::Version(_), Self::Version(_)) => {
                Err(format!("{} is compared with isLessThan, isGreaterThan or compareTo", self.kind()))
            }
            _ => Err(format!("{} and {} have no order", self.kind(), other.kind())),
        }
    }
}

pub fn version<'a>(text: &str) -> Result<Value<'a>, String> {
    let version =
        Version::parse(text).map_err(|error| format!("{text:?} is no semantic version: {error}"))?;
    Ok(Value::Version(Rc::new(version)))
}

fn part<'a>(device: &'a DeviceFacts, name: &str) -> Option<Value<'a>> {
    match name {
        "driver" => Some(Value::text(&device.driver)),
        "attributes" => Some(Value::Domains(Table::Attributes)),
        "capacity" => Some(Value::Domains(Table::Capacity)),
        "allowMultipleAllocations" => Some(Value::Bool(device.allow_multiple)),
        _ => None,
    }
}

fn named<'a>(
    device: &'a DeviceFacts,
    table: Table,
    domain: &str,
    name: &str,
) -> Result<Option<Value<'a>>, String> {
    let key = super::QualifiedName { domain: domain.to_owned(), name: name.to_owned() };
    match table {
        Table::Attributes => device.attributes.get(&key).map(Value::attribute).transpose(),
        Table::Capacity => Ok(device.capacity.get(&key).copied().map(Value::Quantity)),
    }
}

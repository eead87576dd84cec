//! The functions and operators that there are. Of the Kubernetes libraries: quantities, versions, `includes`, and strings
//! ([`super::strings`]; of the verbs of `format` those for strings and ints). What is missing here is refused when an
//! expression is compiled.

use std::cmp::Ordering;
use std::rc::Rc;

use semver::Version;

use super::cost::Meter;
use super::eval::Trouble;
use super::facts::DeviceFacts;
use super::strings;
use super::value::{Value, precedence, short, version};
use crate::model::quantity::Quantity;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Function {
    Not,
    Negate,
    Equal,
    Differ,
    Less,
    AtMost,
    More,
    AtLeast,
    In,
    Add,
    Subtract,
    Multiply,
    Divide,
    Remainder,
    /// True for all but false, and for errors: how `all` and `exists` know when they may stop.
    NotFalse,
    Size,
    ToInt,
    ToText,
    /// Its argument, as it is.
    Identity,
    Contains,
    StartsWith,
    EndsWith,
    LowerAscii,
    UpperAscii,
    Trim,
    CharAt,
    IndexOf,
    LastIndexOf,
    Replace,
    Split,
    Substring,
    Join,
    Quote,
    Format,
    Includes,
    ToQuantity,
    IsQuantity,
    IsGreater,
    IsLess,
    Compare,
    Sign,
    IsInteger,
    AsInteger,
    ToVersion,
    IsVersion,
    Major,
    Minor,
    Patch,
    Some,
    SomeNonZero,
    None,
    HasValue,
    Unwrap,
    /// `optional.or(optional)`, `optional.orValue(value)`: the second is only looked at if needed.
    Or,
    OrValue,
}

use Function as F;

/// Names as the parser gives them; all of them take so many arguments.
const OPERATORS: &[(&str, usize, F)] = &[
    ("!_", 1, F::Not),
    ("-_", 1, F::Negate),
    ("_==_", 2, F::Equal),
    ("_!=_", 2, F::Differ),
    ("_<_", 2, F::Less),
    ("_<=_", 2, F::AtMost),
    ("_>_", 2, F::More),
    ("_>=_", 2, F::AtLeast),
    ("@in", 2, F::In),
    ("_+_", 2, F::Add),
    ("_-_", 2, F::Subtract),
    ("_*_", 2, F::Multiply),
    ("_/_", 2, F::Divide),
    ("_%_", 2, F::Remainder),
    ("@not_strictly_false", 1, F::NotFalse),
    ("size", 1, F::Size),
    ("int", 1, F::ToInt),
    ("string", 1, F::ToText),
    ("dyn", 1, F::Identity),
    ("quantity", 1, F::ToQuantity),
    ("isQuantity", 1, F::IsQuantity),
    ("semver", 1, F::ToVersion),
    ("isSemver", 1, F::IsVersion),
    ("strings.quote", 1, F::Quote),
    ("optional.of", 1, F::Some),
    ("optional.ofNonZeroValue", 1, F::SomeNonZero),
    ("optional.none", 0, F::None),
];

/// Behind a dot; what is before it counts as the first argument.
const MEMBERS: &[(&str, usize, F)] = &[
    ("size", 1, F::Size),
    ("contains", 2, F::Contains),
    ("startsWith", 2, F::StartsWith),
    ("endsWith", 2, F::EndsWith),
    ("lowerAscii", 1, F::LowerAscii),
    ("upperAscii", 1, F::UpperAscii),
    ("trim", 1, F::Trim),
    ("charAt", 2, F::CharAt),
    ("indexOf", 2, F::IndexOf),
    ("indexOf", 3, F::IndexOf),
    ("lastIndexOf", 2, F::LastIndexOf),
    ("lastIndexOf", 3, F::LastIndexOf),
    ("replace", 3, F::Replace),
    ("replace", 4, F::Replace),
    ("split", 2, F::Split),
    ("split", 3, F::Split),
    ("substring", 2, F::Substring),
    ("substring", 3, F::Substring),
    ("join", 1, F::Join),
    ("join", 2, F::Join),
    ("format", 2, F::Format),
    ("includes", 2, F::Includes),
    ("isGreaterThan", 2, F::IsGreater),
    ("isLessThan", 2, F::IsLess),
    ("compareTo", 2, F::Compare),
    ("sign", 1, F::Sign),
    ("isInteger", 1, F::IsInteger),
    ("asInteger", 1, F::AsInteger),
    ("major", 1, F::Major),
    ("minor", 1, F::Minor),
    ("patch", 1, F::Patch),
    ("hasValue", 1, F::HasValue),
    ("value", 1, F::Unwrap),
    ("or", 2, F::Or),
    ("orValue", 2, F::OrValue),
];

impl Function {
    /// # Errors
    /// What is wrong with the name or the number of arguments.
    pub fn find(name: &str, member: bool, arguments: usize) -> Result<Self, String> {
        let table = if member { MEMBERS } else { OPERATORS };
        let mut named = table.iter().filter(|(known, ..)| *known == name).peekable();
        if named.peek().is_none() {
            return Err(format!("there is no function {name}"));
        }
        let found = named.find(|(_, wanted, _)| *wanted == arguments);
        found
            .map(|(.., function)| *function)
            .ok_or_else(|| format!("{name} does not take that many arguments"))
    }

    /// # Errors
    /// It cannot be applied to these, or costs too much.
    pub fn apply<'a>(
        self,
        arguments: &[Value<'a>],
        device: &'a DeviceFacts,
        meter: &mut Meter,
    ) -> Result<Value<'a>, Trouble> {
        match arguments {
            [] => Ok(Value::Optional(None)),
            [one] => self.of_one(one, device, meter),
            [one, other] => self.of_two(one, other, device, meter),
            more => self.of_more(more, meter),
        }
    }

    fn of_one<'a>(
        self,
        one: &Value<'a>,
        device: &'a DeviceFacts,
        meter: &mut Meter,
    ) -> Result<Value<'a>, Trouble> {
        match (self, one) {
            (F::Identity, value) => Ok(value.clone()),
            (F::Not, Value::Bool(value)) => Ok(Value::Bool(!value)),
            (F::Negate, Value::Int(value)) => {
                value.checked_neg().map(Value::Int).ok_or_else(|| overflow().into())
            }
            (F::Size, value) if !matches!(value, Value::Text(_)) => {
                count(value.elements(device, meter)?.len())
            }
            (F::ToInt, Value::Int(value)) => Ok(Value::Int(*value)),
            (F::ToText, Value::Int(value)) => Ok(Value::made(value.to_string())),
            (F::ToText, Value::Bool(value)) => Ok(Value::made(value.to_string())),
            (F::Some, value) => Ok(Value::some(value.clone())),
            (F::SomeNonZero, value) => {
                Ok(if zero(value) { Value::Optional(None) } else { Value::some(value.clone()) })
            }
            (F::Join, Value::List(list)) => strings::join(list, "", meter),
            (F::HasValue, Value::Optional(value)) => Ok(Value::Bool(value.is_some())),
            (F::Unwrap, Value::Optional(value)) => {
                value.as_deref().cloned().ok_or_else(|| "the optional has no value".to_owned().into())
            }
            (_, Value::Text(text)) => match self {
                F::ToText => Ok(one.clone()),
                _ => self.of_text(text, meter),
            },
            _ => self.of_number(one),
        }
    }

    fn of_more<'a>(self, arguments: &[Value<'a>], meter: &mut Meter) -> Result<Value<'a>, Trouble> {
        match (self, arguments) {
            (F::IndexOf, [Value::Text(text), Value::Text(part), Value::Int(start)]) => {
                strings::index_of(text, part, Some(*start), meter)
            }
            (F::LastIndexOf, [Value::Text(text), Value::Text(part), Value::Int(last)]) => {
                strings::last_index_of(text, part, Some(*last), meter)
            }
            (F::Replace, [Value::Text(text), Value::Text(old), Value::Text(new)]) => {
                strings::replace(text, old, new, None, meter)
            }
            (F::Replace, [Value::Text(text), Value::Text(old), Value::Text(new), Value::Int(limit)]) => {
                strings::replace(text, old, new, Some(*limit), meter)
            }
            (F::Split, [Value::Text(text), Value::Text(separator), Value::Int(limit)]) => {
                strings::split(text, separator, Some(*limit), meter)
            }
            (F::Substring, [Value::Text(text), Value::Int(start), Value::Int(end)]) => {
                strings::substring(text, *start, Some(*end), meter)
            }
            _ => {
                let kinds: Vec<_> = arguments.iter().map(Value::kind).collect();
                Err(format!("{} cannot be applied to {}", self.word(), kinds.join(", ")).into())
            }
        }
    }

    fn of_text<'a>(self, text: &str, meter: &mut Meter) -> Result<Value<'a>, Trouble> {
        match self {
            F::Size | F::ToInt => meter.read(text.len() / 16)?,
            F::LowerAscii | F::UpperAscii | F::Trim => meter.text(text.len())?,
            F::ToQuantity | F::IsQuantity | F::IsVersion => meter.read(text.len())?,
            // They pay themselves.
            F::ToVersion | F::Quote => {}
            _ => return Err(format!("{} cannot be applied to a string", self.word()).into()),
        }
        match self {
            F::Size => count(text.chars().count()),
            F::ToInt => text
                .parse()
                .map(Value::Int)
                .map_err(|_| format!("{:?} is not a whole number", short(text)).into()),
            F::LowerAscii => Ok(Value::made(text.to_ascii_lowercase())),
            F::UpperAscii => Ok(Value::made(text.to_ascii_uppercase())),
            F::Trim => Ok(Value::made(text.trim())),
            F::ToQuantity => quantity(text).map(Value::Quantity).map_err(Into::into),
            F::IsQuantity => Ok(Value::Bool(quantity(text).is_ok())),
            F::ToVersion => version(text, meter),
            F::Quote => strings::quote(text, meter),
            _ => Ok(Value::Bool(Version::parse(text).is_ok())),
        }
    }

    /// Quantities and versions.
    fn of_number<'a>(self, one: &Value<'a>) -> Result<Value<'a>, Trouble> {
        match (self, one) {
            (F::Sign, Value::Quantity(value)) => Ok(Value::Int(value.cmp(&Quantity::from_units(0)) as i64)),
            (F::IsInteger, Value::Quantity(value)) => Ok(Value::Bool(integer(*value).is_some())),
            (F::AsInteger, Value::Quantity(value)) => integer(*value)
                .map(Value::Int)
                .ok_or_else(|| format!("{value} is not a whole number that fits an int").into()),
            (F::Major, Value::Version(version)) => count(version.major),
            (F::Minor, Value::Version(version)) => count(version.minor),
            (F::Patch, Value::Version(version)) => count(version.patch),
            _ => Err(format!("{} cannot be applied to {}", self.word(), one.kind()).into()),
        }
    }

    fn of_two<'a>(
        self,
        one: &Value<'a>,
        other: &Value<'a>,
        device: &'a DeviceFacts,
        meter: &mut Meter,
    ) -> Result<Value<'a>, Trouble> {
        match (self, one, other) {
            (F::Equal, ..) => one.equals(other, meter).map(Value::Bool),
            (F::Differ, ..) => one.equals(other, meter).map(|same| Value::Bool(!same)),
            (F::Less, ..) => one.order(other, meter).map(|order| Value::Bool(order.is_lt())),
            (F::AtMost, ..) => one.order(other, meter).map(|order| Value::Bool(order.is_le())),
            (F::More, ..) => one.order(other, meter).map(|order| Value::Bool(order.is_gt())),
            (F::AtLeast, ..) => one.order(other, meter).map(|order| Value::Bool(order.is_ge())),
            (F::In, element, Value::List(list)) => among(element, list.iter(), meter).map(Value::Bool),
            (F::In, key, map @ (Value::Domains(_) | Value::Names(..) | Value::Map(_))) => {
                Ok(Value::Bool(has(map, key, device, meter)?))
            }
            (F::Includes, Value::List(list), element) => among(element, list.iter(), meter).map(Value::Bool),
            (F::Includes, value, element) => value.equals(element, meter).map(Value::Bool),
            (F::IsGreater, ..) => compare(one, other, meter).map(|order| Value::Bool(order.is_gt())),
            (F::IsLess, ..) => compare(one, other, meter).map(|order| Value::Bool(order.is_lt())),
            (F::Compare, ..) => compare(one, other, meter).map(|order| Value::Int(order as i64)),
            (F::CharAt, Value::Text(text), Value::Int(place)) => strings::char_at(text, *place, meter),
            (F::Substring, Value::Text(text), Value::Int(start)) => {
                strings::substring(text, *start, None, meter)
            }
            (F::Join, Value::List(list), Value::Text(separator)) => strings::join(list, separator, meter),
            (F::Format, Value::Text(text), Value::List(list)) => strings::format(text, list, meter),
            (_, Value::Text(one), Value::Text(other)) => self.of_texts(one, other, meter),
            (F::Add, Value::List(one), Value::List(other)) => {
                meter.list(one.len().saturating_add(other.len()))?;
                Ok(Value::List(Rc::new(one.iter().chain(other.iter()).cloned().collect())))
            }
            (_, Value::Int(one), Value::Int(other)) => self.arithmetic(*one, *other).map_err(Into::into),
            _ => {
                Err(format!("{} cannot be applied to {} and {}", self.word(), one.kind(), other.kind())
                    .into())
            }
        }
    }

    fn of_texts<'a>(self, one: &str, other: &str, meter: &mut Meter) -> Result<Value<'a>, Trouble> {
        match self {
            F::Contains => {
                // The API server counts a hundredth of a unit for each pair of bytes.
                let pairs = one.len().saturating_mul(other.len()) / 10;
                meter.read(pairs.max(one.len().saturating_add(other.len())))?;
                Ok(Value::Bool(one.contains(other)))
            }
            F::StartsWith => {
                meter.read(other.len())?;
                Ok(Value::Bool(one.starts_with(other)))
            }
            F::EndsWith => {
                meter.read(other.len())?;
                Ok(Value::Bool(one.ends_with(other)))
            }
            F::IndexOf => strings::index_of(one, other, None, meter),
            F::LastIndexOf => strings::last_index_of(one, other, None, meter),
            F::Split => strings::split(one, other, None, meter),
            F::Add => {
                meter.text(one.len().saturating_add(other.len()))?;
                Ok(Value::made([one, other].concat()))
            }
            _ => Err(format!("{} cannot be applied to a string and a string", self.word()).into()),
        }
    }

    fn arithmetic<'a>(self, one: i64, other: i64) -> Result<Value<'a>, String> {
        if matches!(self, F::Divide | F::Remainder) && other == 0 {
            return Err("a number is divided by zero".to_owned());
        }
        let result = match self {
            F::Add => one.checked_add(other),
            F::Subtract => one.checked_sub(other),
            F::Multiply => one.checked_mul(other),
            F::Divide => one.checked_div(other),
            F::Remainder => one.checked_rem(other),
            _ => return Err(format!("{} cannot be applied to two ints", self.word())),
        };
        result.map(Value::Int).ok_or_else(overflow)
    }

    /// As it is written.
    fn word(self) -> &'static str {
        let known = OPERATORS.iter().chain(MEMBERS).find(|(.., function)| *function == self);
        match known.map_or("", |(name, ..)| name) {
            "@in" => "in",
            name => name.trim_matches('_'),
        }
    }
}

fn overflow() -> String {
    "a number does not fit an int".to_owned()
}

fn count<'a>(count: impl TryInto<i64>) -> Result<Value<'a>, Trouble> {
    count.try_into().map(Value::Int).map_err(|_| overflow().into())
}

fn quantity(text: &str) -> Result<Quantity, String> {
    text.parse::<Quantity>().map_err(|error| error.to_string())
}

/// Whole and within an int.
fn integer(quantity: Quantity) -> Option<i64> {
    quantity.units_ceil().filter(|_| quantity.is_whole()).and_then(|units| i64::try_from(units).ok())
}

fn zero(value: &Value<'_>) -> bool {
    match value {
        Value::Null | Value::Bool(false) | Value::Int(0) | Value::Optional(None) => true,
        Value::Text(text) => text.is_empty(),
        Value::List(list) => list.is_empty(),
        Value::Map(map) => map.is_empty(),
        _ => false,
    }
}

fn among<'a: 'b, 'b>(
    element: &Value<'a>,
    list: impl Iterator<Item = &'b Value<'a>>,
    meter: &mut Meter,
) -> Result<bool, Trouble> {
    for one in list {
        if one.equals(element, meter)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// A domain is there if the device has anything of it, though looking it up never fails.
fn has<'a>(
    map: &Value<'a>,
    key: &Value<'a>,
    device: &'a DeviceFacts,
    meter: &mut Meter,
) -> Result<bool, Trouble> {
    match map {
        Value::Domains(_) => among(key, map.elements(device, meter)?.all(), meter),
        _ => Ok(map.find(key, device, meter)?.is_some()),
    }
}

fn compare(one: &Value<'_>, other: &Value<'_>, meter: &mut Meter) -> Result<Ordering, Trouble> {
    match (one, other) {
        (Value::Quantity(one), Value::Quantity(other)) => Ok(one.cmp(other)),
        (Value::Version(one), Value::Version(other)) => precedence(one, other, meter),
        _ => Err(format!("{} and {} cannot be compared", one.kind(), other.kind()).into()),
    }
}

//! CEL's library of strings, as kube-scheduler has it (cel-go, ext.Strings, version 2): what takes a place or makes a list,
//! and what puts values into a text.
//! Places count characters, not bytes. Each function pays before it works.
//!
//! Touches nothing but its arguments.

use super::cost::Meter;
use super::eval::Trouble;
use super::value::{Value, short};

/// `text.charAt(place)`: a character; the empty text at the end.
pub fn char_at<'a>(text: &str, place: i64, meter: &mut Meter) -> Result<Value<'a>, Trouble> {
    meter.read(text.len())?;
    let at = usize::try_from(place).ok().filter(|at| *at <= text.chars().count());
    let at = at.ok_or_else(|| outside(place))?;
    Ok(Value::made(text.chars().nth(at).map(String::from).unwrap_or_default()))
}

/// `text.indexOf(part)`, `text.indexOf(part, start)`: where the part begins first, from `start` on; -1 if nowhere.
pub fn index_of<'a>(
    text: &str,
    part: &str,
    start: Option<i64>,
    meter: &mut Meter,
) -> Result<Value<'a>, Trouble> {
    search(text, part, meter)?;
    let start = start.unwrap_or(0);
    if part.is_empty() {
        return Ok(Value::Int(start));
    }
    let from = usize::try_from(start).map_err(|_| outside(start))?;
    let Some((from, _)) = text.char_indices().nth(from) else { return Ok(Value::Int(-1)) };
    let found = text[from..].find(part).map(|at| text[..from + at].chars().count());
    place(found)
}

/// `text.lastIndexOf(part)`, `text.lastIndexOf(part, last)`: where the part begins last, at `last` or before; -1 if
/// nowhere.
pub fn last_index_of<'a>(
    text: &str,
    part: &str,
    last: Option<i64>,
    meter: &mut Meter,
) -> Result<Value<'a>, Trouble> {
    search(text, part, meter)?;
    let length = text.chars().count();
    let Some(last) = last else {
        let found = if part.is_empty() { Some(text.len()) } else { text.rfind(part) };
        return place(found.map(|at| text[..at].chars().count()));
    };
    if part.is_empty() {
        return Ok(Value::Int(last));
    }
    let last = usize::try_from(last).map_err(|_| outside(last))?;
    if last >= length {
        return Ok(Value::Int(-1));
    }
    // A part that begins at `last` ends behind it.
    let end = text.char_indices().nth(last + part.chars().count()).map_or(text.len(), |(at, _)| at);
    place(text[..end].rfind(part).map(|at| text[..at].chars().count()))
}

/// `text.replace(old, new)`, `text.replace(old, new, limit)`: the first `limit` of them, all if that is negative.
pub fn replace<'a>(
    text: &str,
    old: &str,
    new: &str,
    limit: Option<i64>,
    meter: &mut Meter,
) -> Result<Value<'a>, Trouble> {
    search(text, old, meter)?;
    let limit = limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
    let count = text.matches(old).take(limit).count();
    meter.text(text.len().saturating_add(count.saturating_mul(new.len())))?;
    Ok(Value::made(text.replacen(old, new, count)))
}

/// `text.split(separator)`, `text.split(separator, limit)`: at most `limit` parts, the last of which is what is left; all
/// if that is negative.
pub fn split<'a>(
    text: &str,
    separator: &str,
    limit: Option<i64>,
    meter: &mut Meter,
) -> Result<Value<'a>, Trouble> {
    search(text, separator, meter)?;
    let limit = limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
    let count = match separator {
        "" => text.chars().take(limit).count(),
        _ => text.splitn(limit, separator).count(),
    };
    // Each part is a text of its own.
    meter.list(count.saturating_mul(2))?;
    meter.text(text.len())?;
    let parts: Vec<&str> = match separator {
        "" => characters(text, limit),
        _ => text.splitn(limit, separator).collect(),
    };
    Ok(Value::List(parts.into_iter().map(Value::made).collect::<Vec<_>>().into()))
}

/// A text's characters one by one, the rest in the last of `limit`.
fn characters(text: &str, limit: usize) -> Vec<&str> {
    let starts: Vec<usize> = text.char_indices().map(|(at, _)| at).take(limit).collect();
    let ends = starts.iter().skip(1).copied().chain([text.len()]);
    starts.iter().zip(ends).map(|(start, end)| &text[*start..end]).collect()
}

/// `text.substring(start)`, `text.substring(start, end)`.
pub fn substring<'a>(
    text: &str,
    start: i64,
    end: Option<i64>,
    meter: &mut Meter,
) -> Result<Value<'a>, Trouble> {
    meter.text(text.len())?;
    let length = text.chars().count();
    let within = |place: i64| {
        usize::try_from(place).ok().filter(|place| *place <= length).ok_or_else(|| outside(place))
    };
    let (from, to) = (within(start)?, end.map_or(Ok(length), within)?);
    if from > to {
        return Err(format!("a part of a string from {from} to {to} ends before it begins").into());
    }
    Ok(Value::made(text.chars().skip(from).take(to - from).collect::<String>()))
}

/// `list.join()`, `list.join(separator)`.
pub fn join<'a>(list: &[Value<'_>], separator: &str, meter: &mut Meter) -> Result<Value<'a>, Trouble> {
    let text = |value: &Value<'_>| match value {
        Value::Text(text) => Ok(text.to_string()),
        other => Err(Trouble::from(format!("join takes a list of strings, and {} is in it", other.kind()))),
    };
    let mut bytes = list.len().saturating_mul(separator.len());
    for value in list {
        if let Value::Text(text) = value {
            bytes = bytes.saturating_add(text.len());
        }
    }
    // The parts once more, while they are put together.
    meter.text(bytes.saturating_mul(2))?;
    Ok(Value::made(list.iter().map(text).collect::<Result<Vec<_>, _>>()?.join(separator)))
}

/// `strings.quote(text)`: in quotation marks, with what would end or change a line escaped.
pub fn quote<'a>(text: &str, meter: &mut Meter) -> Result<Value<'a>, Trouble> {
    // Each character may need a second one.
    meter.text(text.len().saturating_mul(2).saturating_add(2))?;
    let mut quoted = String::from("\"");
    for character in text.chars() {
        match character {
            '\u{7}' => quoted.push_str("\\a"),
            '\u{8}' => quoted.push_str("\\b"),
            '\u{b}' => quoted.push_str("\\v"),
            '\u{c}' => quoted.push_str("\\f"),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            '\\' | '"' => quoted.extend(['\\', character]),
            other => quoted.push(other),
        }
    }
    quoted.push('"');
    Ok(Value::made(quoted))
}

/// A piece of a format.
enum Piece<'t> {
    As(&'t str),
    /// `%s`
    Text,
    /// `%d`
    Int,
}

/// `text.format(list)`: each `%s` becomes the next value (a string, an int, a bool or null), each `%d` the next int, `%%` a
/// percent sign. Other verbs, a precision, lists and maps are not known here.
pub fn format<'a>(text: &str, values: &[Value<'_>], meter: &mut Meter) -> Result<Value<'a>, Trouble> {
    meter.read(text.len())?;
    let pieces = pieces(text)?;
    let places = pieces.iter().filter(|piece| !matches!(piece, Piece::As(_))).count();
    if places != values.len() {
        let (given, expected) = (values.len(), places);
        let text = short(text);
        return Err(format!("format {text:?} is given {given} values where {expected} are expected").into());
    }
    let length = |value: &Value<'_>| match value {
        Value::Text(text) => text.len(),
        // An int has 20 digits at most, other values fewer characters.
        _ => 20,
    };
    meter.list(pieces.len())?;
    meter.text(values.iter().map(length).fold(text.len(), usize::saturating_add))?;
    let mut left = values.iter();
    let mut made = String::new();
    for piece in pieces {
        let (verb, value) = match piece {
            Piece::As(text) => {
                made.push_str(text);
                continue;
            }
            Piece::Text => ("%s", left.next()),
            Piece::Int => ("%d", left.next()),
        };
        match (verb, value) {
            (_, Some(Value::Int(value))) => made.push_str(&value.to_string()),
            ("%s", Some(Value::Text(text))) => made.push_str(text),
            ("%s", Some(Value::Bool(value))) => made.push_str(if *value { "true" } else { "false" }),
            ("%s", Some(Value::Null)) => made.push_str("null"),
            (_, other) => {
                let kind = other.map_or("nothing", Value::kind);
                return Err(format!("{verb} of format cannot be applied to {kind}").into());
            }
        }
    }
    Ok(Value::made(made))
}

fn pieces(text: &str) -> Result<Vec<Piece<'_>>, Trouble> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('%') {
        pieces.push(Piece::As(before));
        let verb = after.chars().next();
        pieces.push(match verb {
            Some('s') => Piece::Text,
            Some('d') => Piece::Int,
            Some('%') => Piece::As("%"),
            None => return Err("a format ends with %; write %% for a percent sign".to_owned().into()),
            Some(other) => {
                return Err(format!("%{other} of format is not supported; %s, %d and %% are").into());
            }
        });
        // Each of these verbs is one byte long.
        rest = &after[1..];
    }
    pieces.push(Piece::As(rest));
    Ok(pieces)
}

/// A part is looked for: as dear as `contains`.
fn search(text: &str, part: &str, meter: &mut Meter) -> Result<(), Trouble> {
    let pairs = text.len().saturating_mul(part.len()) / 10;
    meter.read(pairs.max(text.len().saturating_add(part.len())))
}

fn place<'a>(found: Option<usize>) -> Result<Value<'a>, Trouble> {
    found.map_or(Ok(Value::Int(-1)), |at| {
        i64::try_from(at).map(Value::Int).map_err(|_| "a number does not fit an int".to_owned().into())
    })
}

fn outside(place: i64) -> Trouble {
    format!("place {place} is outside of the string").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_format_that_is_wrong_is_not_quoted_in_full() {
        let long = "\u{1}".repeat(1 << 16);
        let Err(trouble) = format(&long, &[Value::Null], &mut Meter::default()) else {
            panic!("a value too many")
        };
        let words = format!("{trouble:?}");
        assert!(words.contains("is given 1 values") && words.len() < 4096, "{} bytes", words.len());
    }
}

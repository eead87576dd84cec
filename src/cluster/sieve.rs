//! An object of the API server without what is not ours to read: only the fields that are wanted go on to the parser,
//! the parameters of other drivers' configuration are passed over unread, and our own are held to limits, since whoever
//! may create a claim writes them. Text becomes UTF-8 as the API server's own decoder makes it so (encoding/json:
//! U+FFFD for bytes that are none, and for lone surrogates), so that what goes on never fails for its text.

use std::borrow::Cow;

use thiserror::Error;

use crate::model::names::DRIVER;

/// Brackets within brackets, in what goes on. The types of the API have a dozen.
const DEPTH_MAX: usize = 64;
/// Bytes of one entry's parameters. The API server takes 10 KiB of them; `<` and the like are six in JSON.
const PARAMETERS_BYTES_MAX: usize = 60 << 10;
/// Values in one entry's parameters, those within others counted, and of these the lists and objects, each of which
/// takes half a KiB once it is parsed. A grant of 32 GPUs, the largest that there can be, has 230 and 34.
const PARAMETERS_VALUES_MAX: usize = 1024;
const PARAMETERS_BRACKETS_MAX: usize = 64;
const PARAMETERS_DEPTH_MAX: usize = 8;

/// What of a value goes on. Of an array: what of each element.
#[derive(Debug, Clone, Copy)]
pub(super) enum Keep {
    All,
    Nothing,
    /// Of an object, these fields.
    Only(&'static [(&'static str, Keep)]),
    /// Of an object, all fields; of these, so much.
    Except(&'static [(&'static str, Keep)]),
    /// An object with `driver`; if that is another's, nothing.
    Ours,
    /// An object with `driver` and `parameters`: another's without the parameters.
    Opaque,
}

/// Why nothing of it goes on.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(super) enum SieveError {
    #[error("it is not valid JSON from byte {0} on")]
    NoJson(usize),
    #[error("it is nested more than {DEPTH_MAX} levels deep")]
    Deep,
}

/// What of an object goes on: JSON in UTF-8.
///
/// # Errors
/// It is no JSON where it had to be understood, or nests too deep there.
pub(super) fn sieve(object: &[u8], keep: Keep) -> Result<Vec<u8>, SieveError> {
    let mut out = Vec::with_capacity(object.len().min(4096));
    let mut from = Scanner { bytes: object, at: 0 };
    copy(&mut from, keep, 0, &mut out)?;
    Ok(out)
}

/// The values of these fields of an object, as far as the object can be read: it may be cut off.
pub(super) fn fields<'a, const N: usize>(object: &'a [u8], names: [&str; N]) -> [Option<&'a [u8]>; N] {
    let mut found = [None; N];
    let mut from = Scanner { bytes: object, at: 0 };
    let _ = from.each_field(|name, from| {
        let start = from.at;
        let value = from.skip();
        if let Some(nth) = names.iter().position(|one| one.as_bytes() == name) {
            // One that is cut off is told as far as it goes.
            let end = if value.is_ok() { from.at } else { from.bytes.len() };
            found[nth] = Some(&from.bytes[start..end]);
        }
        match found.iter().all(Option::is_some) {
            // There is no need to go on.
            true => Err(from.wrong()),
            false => value,
        }
    });
    found
}

fn copy(from: &mut Scanner<'_>, keep: Keep, depth: usize, out: &mut Vec<u8>) -> Result<(), SieveError> {
    if depth > DEPTH_MAX {
        return Err(SieveError::Deep);
    }
    match from.peek()? {
        b'{' => copy_object(from, keep, depth, out),
        b'[' => {
            out.push(b'[');
            let first = out.len();
            from.each_element(|from| {
                let mark = out.len();
                if mark > first {
                    out.push(b',');
                }
                let start = out.len();
                copy(from, keep, depth + 1, out)?;
                if out.len() == start {
                    out.truncate(mark);
                }
                Ok(())
            })?;
            out.push(b']');
            Ok(())
        }
        b'"' => {
            let text = from.text()?;
            out.push(b'"');
            out.extend_from_slice(readable(text).as_bytes());
            out.push(b'"');
            Ok(())
        }
        _ => {
            out.extend_from_slice(from.plain()?);
            Ok(())
        }
    }
}

fn copy_object(
    from: &mut Scanner<'_>,
    keep: Keep,
    depth: usize,
    out: &mut Vec<u8>,
) -> Result<(), SieveError> {
    if let Keep::Ours | Keep::Opaque = keep {
        return copy_of_driver(from, keep, depth, out);
    }
    out.push(b'{');
    let first = out.len();
    from.each_field(|name, from| {
        let keep = match keep {
            Keep::Only(names) => named(names, name).unwrap_or(Keep::Nothing),
            Keep::Except(names) => named(names, name).unwrap_or(Keep::All),
            keep => keep,
        };
        if let Keep::Nothing = keep {
            return from.skip();
        }
        if out.len() > first {
            out.push(b',');
        }
        put_name(name, out);
        copy(from, keep, depth + 1, out)
    })?;
    out.push(b'}');
    Ok(())
}

fn named(names: &[(&str, Keep)], name: &[u8]) -> Option<Keep> {
    names.iter().find(|(one, _)| one.as_bytes() == name).map(|(_, keep)| *keep)
}

fn put_name(name: &[u8], out: &mut Vec<u8>) {
    out.push(b'"');
    out.extend_from_slice(readable(name).as_bytes());
    out.extend_from_slice(b"\":");
}

/// An object that belongs to a driver. Nothing is written of one that is not to go on.
fn copy_of_driver(
    from: &mut Scanner<'_>,
    keep: Keep,
    depth: usize,
    out: &mut Vec<u8>,
) -> Result<(), SieveError> {
    let start = from.at;
    from.skip()?;
    let object = &from.bytes[start..from.at];
    let [driver, parameters] = fields(object, ["driver", "parameters"]);
    let name = driver.and_then(|driver| driver.strip_prefix(b"\"")?.strip_suffix(b"\""));
    let is_ours = name == Some(DRIVER.as_bytes());
    match (keep, is_ours) {
        (Keep::Opaque, _) => {
            out.extend_from_slice(b"{\"driver\":");
            copy_slice(driver.unwrap_or(b"\"\""), depth, out)?;
            if let Some(parameters) = parameters.filter(|_| is_ours) {
                out.extend_from_slice(b",\"parameters\":");
                copy_parameters(parameters, out);
            }
            out.push(b'}');
            Ok(())
        }
        (_, true) => copy_slice(object, depth, out),
        (_, false) => Ok(()),
    }
}

fn copy_slice(value: &[u8], depth: usize, out: &mut Vec<u8>) -> Result<(), SieveError> {
    copy(&mut Scanner { bytes: value, at: 0 }, Keep::All, depth, out)
}

/// Our own parameters, or in their place a text that says why they are left out: no parameters are a text.
fn copy_parameters(parameters: &[u8], out: &mut Vec<u8>) {
    let start = out.len();
    let problem = match measure(parameters) {
        Some(problem) => Some(problem),
        None => match copy_slice(parameters, DEPTH_MAX - PARAMETERS_DEPTH_MAX, out) {
            Ok(()) if serde_json::from_slice::<serde_json::Value>(&out[start..]).is_ok() => None,
            _ => Some("left out: they cannot be read"),
        },
    };
    if let Some(problem) = problem {
        out.truncate(start);
        out.push(b'"');
        out.extend_from_slice(problem.as_bytes());
        out.push(b'"');
    }
}

fn measure(parameters: &[u8]) -> Option<&'static str> {
    if parameters.len() > PARAMETERS_BYTES_MAX {
        return Some("left out: more than 60 KiB");
    }
    let (mut depth, mut values, mut brackets) = (0_usize, 1_usize, 0_usize);
    let mut from = Scanner { bytes: parameters, at: 0 };
    while let Some(byte) = from.bytes.get(from.at).copied() {
        match byte {
            b'"' => {
                if from.text().is_err() {
                    return Some("left out: they cannot be read");
                }
                continue;
            }
            b'{' | b'[' => {
                depth += 1;
                values += 1;
                brackets += 1;
            }
            b'}' | b']' => depth = depth.saturating_sub(1),
            b',' => values += 1,
            _ => {}
        }
        from.at += 1;
        if depth > PARAMETERS_DEPTH_MAX {
            return Some("left out: they are nested more than 8 levels deep");
        }
        if values > PARAMETERS_VALUES_MAX || brackets > PARAMETERS_BRACKETS_MAX {
            return Some("left out: more than 1024 values, or more than 64 lists and objects");
        }
    }
    None
}

/// The inside of a JSON text, in UTF-8 and without lone surrogates; other escapes stay as they are.
fn readable(text: &[u8]) -> Cow<'_, str> {
    let text = String::from_utf8_lossy(text);
    if !text.contains("\\u") {
        return text;
    }
    let mut whole = String::with_capacity(text.len());
    let mut rest = text.as_ref();
    while let Some(at) = rest.find('\\') {
        whole.push_str(&rest[..at]);
        rest = &rest[at..];
        let length = match (surrogate(rest), rest.get(6..).and_then(surrogate)) {
            (Some(Half::High), Some(Half::Low)) => 12,
            (Some(_), _) => {
                whole.push_str("\\ufffd");
                rest = &rest[6..];
                continue;
            }
            // What stands behind a backslash stands for itself.
            (None, _) => rest.char_indices().nth(2).map_or(rest.len(), |(at, _)| at),
        };
        whole.push_str(&rest[..length]);
        rest = &rest[length..];
    }
    whole.push_str(rest);
    Cow::Owned(whole)
}

enum Half {
    High,
    Low,
}

fn surrogate(escape: &str) -> Option<Half> {
    let digits = escape.strip_prefix("\\u")?.get(..4)?;
    match u16::from_str_radix(digits, 16).ok()? {
        0xd800..=0xdbff => Some(Half::High),
        0xdc00..=0xdfff => Some(Half::Low),
        _ => None,
    }
}

struct Scanner<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Scanner<'a> {
    fn wrong(&self) -> SieveError {
        SieveError::NoJson(self.at)
    }

    /// The next byte that is no white space, which is not taken.
    fn peek(&mut self) -> Result<u8, SieveError> {
        let white = |byte: &u8| matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
        while self.bytes.get(self.at).is_some_and(white) {
            self.at += 1;
        }
        self.bytes.get(self.at).copied().ok_or(self.wrong())
    }

    fn take(&mut self, byte: u8) -> Result<(), SieveError> {
        if self.peek()? != byte {
            return Err(self.wrong());
        }
        self.at += 1;
        Ok(())
    }

    /// What stands between the quotes.
    fn text(&mut self) -> Result<&'a [u8], SieveError> {
        self.take(b'"')?;
        let start = self.at;
        loop {
            let rest = self.bytes.get(self.at..).unwrap_or_default();
            let Some(run) = rest.iter().position(|byte| matches!(byte, b'"' | b'\\')) else {
                return Err(self.wrong());
            };
            self.at += run + 1;
            if rest[run] == b'"' {
                return Ok(&self.bytes[start..self.at - 1]);
            }
            self.at += 1;
        }
    }

    /// A number, true, false or null.
    fn plain(&mut self) -> Result<&'a [u8], SieveError> {
        let rest = &self.bytes[self.at..];
        let belongs = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.');
        let length = rest.iter().position(|byte| !belongs(byte)).unwrap_or(rest.len());
        if length == 0 {
            return Err(self.wrong());
        }
        self.at += length;
        Ok(&rest[..length])
    }

    /// Goes past a value, however deep it is: it is not understood, only its end is found.
    fn skip(&mut self) -> Result<(), SieveError> {
        if !matches!(self.peek()?, b'{' | b'[' | b'"') {
            return self.plain().map(drop);
        }
        let mut depth = 0_usize;
        loop {
            match self.bytes.get(self.at).ok_or(self.wrong())? {
                b'"' => drop(self.text()?),
                b'{' | b'[' => {
                    depth += 1;
                    self.at += 1;
                }
                b'}' | b']' => {
                    depth = depth.checked_sub(1).ok_or(self.wrong())?;
                    self.at += 1;
                }
                _ => self.at += 1,
            }
            if depth == 0 {
                return Ok(());
            }
        }
    }

    /// Goes through an object; `each` is told a field's name and must go past its value.
    fn each_field(
        &mut self,
        mut each: impl FnMut(&'a [u8], &mut Self) -> Result<(), SieveError>,
    ) -> Result<(), SieveError> {
        self.between(b'{', b'}', |from| {
            let name = from.text()?;
            from.take(b':')?;
            from.peek()?;
            each(name, from)
        })
    }

    fn each_element(
        &mut self,
        each: impl FnMut(&mut Self) -> Result<(), SieveError>,
    ) -> Result<(), SieveError> {
        self.between(b'[', b']', each)
    }

    fn between(
        &mut self,
        open: u8,
        close: u8,
        mut each: impl FnMut(&mut Self) -> Result<(), SieveError>,
    ) -> Result<(), SieveError> {
        self.take(open)?;
        if self.peek()? == close {
            self.at += 1;
            return Ok(());
        }
        loop {
            each(self)?;
            match self.peek()? {
                b',' => self.at += 1,
                byte if byte == close => {
                    self.at += 1;
                    return Ok(());
                }
                _ => return Err(self.wrong()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const SPEC: Keep = Keep::Except(&[("managedFields", Keep::Nothing), ("config", CONFIG)]);
    const CONFIG: Keep = Keep::Except(&[("opaque", Keep::Opaque)]);

    fn sieved(object: &[u8], keep: Keep) -> Value {
        serde_json::from_slice(&sieve(object, keep).unwrap()).unwrap()
    }

    fn entry(driver: &str, parameters: &[u8]) -> Vec<u8> {
        let head = format!(r#"{{"requests":["a"],"opaque":{{"driver":"{driver}","parameters":"#);
        [head.as_bytes(), parameters, b"}}"].concat()
    }

    fn config(entries: &[Vec<u8>]) -> Value {
        let body = [b"{\"managedFields\":[\"\xff\"],\"config\":[".as_slice(), &entries.join(&b','), b"]}"];
        sieved(&body.concat(), SPEC)
    }

    #[test]
    fn other_drivers_parameters_are_not_read() {
        let deep = [vec![b'['; 100_000], vec![b']'; 100_000]].concat();
        let strange: [&[u8]; 6] =
            [b"{\"a\":\"\xff\xfe\"}", br#""\ud800""#, br#"{"\udc00":1}"#, &deep, b"1e999", b"{\"}\\\"\":{}}"];
        for parameters in strange {
            let found = config(&[entry("nic.example.com", parameters), entry(DRIVER, b"{\"n\": 1 }")]);
            let expected = json!({"config": [
                {"requests": ["a"], "opaque": {"driver": "nic.example.com"}},
                {"requests": ["a"], "opaque": {"driver": DRIVER, "parameters": {"n": 1}}},
            ]});
            assert_eq!(
                found,
                expected,
                "{}",
                String::from_utf8_lossy(&parameters[..parameters.len().min(40)])
            );
        }
    }

    #[test]
    fn our_own_parameters_are_held_to_limits() {
        let many = [b"{\"a\":[".as_slice(), &[b"{\"\":0}".as_slice(); 200].join(&b','), b"]}"].concat();
        let deep = [vec![b'['; 9], vec![b']'; 9]].concat();
        let long = [b"{\"a\":\"".as_slice(), &vec![b'x'; PARAMETERS_BYTES_MAX], b"\"}"].concat();
        let wide = [b"[".as_slice(), &[b"0".as_slice(); 1100].join(&b','), b"]"].concat();
        for (parameters, words) in [
            (many, "64 lists"),
            (wide, "1024 values"),
            (deep, "8 levels deep"),
            (long, "60 KiB"),
            (b"{\"a\":1e999}".to_vec(), "read"),
        ] {
            let found = config(&[entry(DRIVER, &parameters)]);
            let text = found.pointer("/config/0/opaque/parameters").and_then(Value::as_str).unwrap();
            assert!(text.starts_with("left out: ") && text.contains(words), "{text}");
        }
        let usual = br#"{"kind":"GpuConfig","sharing":{"mpsConfig":{"limits":{"0":"1Gi"}}},"x":"\u003c\ud83d\ude00"}"#;
        let found = config(&[entry(DRIVER, usual)]);
        assert_eq!(found["config"][0]["opaque"]["parameters"]["x"], "<😀");
    }

    #[test]
    fn text_is_what_the_api_server_reads() {
        for (text, expected) in [
            (b"\"a\xff\xfeb\"".as_slice(), "a\u{fffd}\u{fffd}b"),
            (br#""\ud800""#, "\u{fffd}"),
            (br#""\ud800x\udc00y""#, "\u{fffd}x\u{fffd}y"),
            (br#""\ud800\ud83d\ude00""#, "\u{fffd}😀"),
            (br#""\\ud800 \u0041 \n \\\\u""#, "\\ud800 A \n \\\\u"),
            ("\"ä\\u00e4\"".as_bytes(), "ää"),
        ] {
            let found = sieved(text, Keep::All);
            assert_eq!(found, expected, "{}", String::from_utf8_lossy(text));
        }
    }

    #[test]
    fn only_what_is_wanted_goes_on() {
        const KEEP: Keep =
            Keep::Only(&[("a", Keep::All), ("b", Keep::Only(&[("c", Keep::All)])), ("d", Keep::Ours)]);
        let object = json!({"a": [1, "x", null, {"y": []}], "b": [{"c": 1, "e": 2}, null, {}], "z": {},
            "d": [{"driver": "nic.example.com"}, {"driver": DRIVER, "n": 1}, {"n": 2}, {"driver": 7}]});
        let expected =
            json!({"a": object["a"], "b": [{"c": 1}, null, {}], "d": [{"driver": DRIVER, "n": 1}]});
        assert_eq!(sieved(&serde_json::to_vec_pretty(&object).unwrap(), KEEP), expected);
        assert_eq!(sieved(b"{}", KEEP), json!({}));
    }

    #[test]
    fn what_nests_too_deep_or_is_no_json_is_told() {
        let deep = |depth: usize| [vec![b'['; depth], vec![b']'; depth]].concat();
        assert!(sieve(&deep(DEPTH_MAX + 1), Keep::All).is_ok());
        assert_eq!(sieve(&deep(DEPTH_MAX + 2), Keep::All), Err(SieveError::Deep));
        for text in ["", "{", "{\"a\"}", "[1 2]", "{\"a\":}", "\"", "[}", "{\"a\":\"\\"] {
            assert!(matches!(sieve(text.as_bytes(), Keep::All), Err(SieveError::NoJson(_))), "{text}");
        }
    }

    #[test]
    fn fields_are_found_in_what_is_cut_off() {
        let [meta, spec, status] =
            fields(br#"{"metadata":{"uid":"u"},"spec":{"a":["#, ["metadata", "spec", "status"]);
        assert_eq!(meta, Some(br#"{"uid":"u"}"#.as_slice()));
        assert_eq!((spec, status), (Some(br#"{"a":["#.as_slice()), None));
        assert_eq!(fields(b"[1]", ["a"]), [None]);
    }
}

//! Cuts the body of a list or a watch into objects, byte by byte, as it arrives: one object is in memory at a time,
//! and none beyond a limit. Text is left as it is: an object whose text is no UTF-8 is cut like any other.
//!
//! The API server writes well-formed JSON around the objects and inside them (encoding/json passes every raw value
//! through its own scanner), so that braces and quotes tell where an object ends.

use thiserror::Error;

/// An object of more bytes is told of by its beginning only. etcd takes 1.5 MiB by default, of which JSON may make six
/// times as many: `<`, `>` and `&` are written as `\u003c` and so on.
pub(super) const OBJECT_BYTES_MAX: usize = 16 << 20;
/// A field of a list beside its objects: its metadata, with the token of the next page.
const FIELD_BYTES_MAX: usize = 64 << 10;
/// The name of such a field.
const NAME_BYTES_MAX: usize = 64;

/// What stands in the body is not a list, or not a watch's events.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{expected} was expected, but there is byte {found:#04x}")]
pub(super) struct Garbled {
    expected: &'static str,
    found: u8,
}

/// A JSON value as it stands in the body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    /// All of it, or as much as the limit allows.
    pub bytes: Vec<u8>,
    pub whole: bool,
}

/// What a part of the body brought.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum StreamPart {
    /// Nothing that is complete: the next part is needed.
    Nothing,
    /// One object of the list, or one event of the watch.
    Object(Piece),
    /// A field of the list: its name and its value.
    Field(Vec<u8>, Piece),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CutState {
    /// Events of a watch, one behind the other, without an end.
    Events,
    Event,
    /// A list: before it, between its fields, within a field's name, and so on.
    Before,
    Fields,
    Name,
    Colon,
    Value,
    Field,
    Items,
    Item,
    Done,
}

#[derive(Debug)]
pub(super) struct Cutter {
    state: CutState,
    name: Vec<u8>,
    taker: Taker,
}

impl Cutter {
    /// `{"metadata": …, "items": [ … ]}`, in any order.
    pub fn list() -> Self {
        Self { state: CutState::Before, name: Vec::new(), taker: Taker::default() }
    }

    /// `{"type": …, "object": …}`, again and again.
    pub fn watch() -> Self {
        Self { state: CutState::Events, ..Self::list() }
    }

    /// The body may end here.
    pub fn may_end(&self) -> bool {
        matches!(self.state, CutState::Done | CutState::Events)
    }

    /// Takes from `part`, until something is complete. Tells how many bytes were taken.
    ///
    /// # Errors
    /// It is neither a list nor a watch's events: nothing further can be told apart.
    pub fn take(&mut self, part: &[u8]) -> Result<(usize, StreamPart), Garbled> {
        let mut at = 0;
        while let Some(byte) = part.get(at) {
            match self.state {
                CutState::Event | CutState::Item | CutState::Field | CutState::Name => {
                    let (used, complete) = self.taker.take(&part[at..]);
                    at += used;
                    if complete && let Some(found) = self.completed() {
                        return Ok((at, found));
                    }
                }
                _ => {
                    at += 1;
                    if !byte.is_ascii_whitespace() {
                        self.between(*byte)?;
                    }
                }
            }
        }
        Ok((at, StreamPart::Nothing))
    }

    fn completed(&mut self) -> Option<StreamPart> {
        let piece = self.taker.end();
        let (next, found) = match self.state {
            CutState::Event => (CutState::Events, Some(StreamPart::Object(piece))),
            CutState::Item => (CutState::Items, Some(StreamPart::Object(piece))),
            CutState::Field => {
                (CutState::Fields, Some(StreamPart::Field(std::mem::take(&mut self.name), piece)))
            }
            _ => {
                self.name = piece.bytes;
                (CutState::Colon, None)
            }
        };
        self.state = next;
        found
    }

    /// A byte that is outside of every value that is cut out.
    fn between(&mut self, byte: u8) -> Result<(), Garbled> {
        let garbled = |expected| Err(Garbled { expected, found: byte });
        match (self.state, byte) {
            (CutState::Events, b'{') => self.begin(CutState::Event, byte, OBJECT_BYTES_MAX),
            (CutState::Events, _) => return garbled("an event"),
            (CutState::Before, b'{') => self.state = CutState::Fields,
            (CutState::Before, _) => return garbled("a list"),
            (CutState::Fields, b',') => {}
            (CutState::Fields, b'"') => self.begin(CutState::Name, byte, NAME_BYTES_MAX),
            (CutState::Fields, b'}') => self.state = CutState::Done,
            (CutState::Fields, _) => return garbled("a field of the list"),
            (CutState::Colon, b':') => self.state = CutState::Value,
            (CutState::Colon, _) => return garbled("a colon after a field's name"),
            (CutState::Value, b'[') if self.name == b"\"items\"" => self.state = CutState::Items,
            (CutState::Value, _) => self.begin(CutState::Field, byte, FIELD_BYTES_MAX),
            (CutState::Items, b',') => {}
            (CutState::Items, b'{') => self.begin(CutState::Item, byte, OBJECT_BYTES_MAX),
            (CutState::Items, b']') => self.state = CutState::Fields,
            (CutState::Items, _) => return garbled("an object of the list"),
            (_, _) => return garbled("the end of the list"),
        }
        Ok(())
    }

    fn begin(&mut self, state: CutState, first: u8, limit: usize) {
        self.state = state;
        self.taker = Taker::of(first, limit);
    }
}

/// One JSON value, as it comes.
#[derive(Debug, Default)]
struct Taker {
    bytes: Vec<u8>,
    limit: usize,
    whole: bool,
    /// Brackets that are open.
    depth: usize,
    in_text: bool,
    /// The next byte of the text stands for itself.
    escaped: bool,
}

impl Taker {
    fn of(first: u8, limit: usize) -> Self {
        let depth = usize::from(matches!(first, b'{' | b'['));
        Self { bytes: vec![first], limit, whole: true, depth, in_text: first == b'"', escaped: false }
    }

    /// How many bytes belong to the value, and whether it ends with them. A number ends before the byte behind it.
    fn take(&mut self, part: &[u8]) -> (usize, bool) {
        let (used, complete) = self.measure(part);
        let room = self.limit.saturating_sub(self.bytes.len());
        self.whole &= used <= room;
        self.bytes.extend_from_slice(&part[..used.min(room)]);
        (used, complete)
    }

    fn measure(&mut self, part: &[u8]) -> (usize, bool) {
        let mut at = 0;
        while at < part.len() {
            let byte = part[at];
            if self.in_text {
                if self.escaped {
                    self.escaped = false;
                    at += 1;
                    continue;
                }
                let Some(run) = part[at..].iter().position(|byte| matches!(byte, b'"' | b'\\')) else {
                    return (part.len(), false);
                };
                at += run + 1;
                self.escaped = part[at - 1] == b'\\';
                self.in_text = self.escaped;
                if !self.in_text && self.depth == 0 {
                    return (at, true);
                }
                continue;
            }
            match byte {
                b'"' => self.in_text = true,
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' if self.depth <= 1 => {
                    let closed = self.depth == 1;
                    self.depth = 0;
                    return (at + usize::from(closed), true);
                }
                b'}' | b']' => self.depth -= 1,
                b',' if self.depth == 0 => return (at, true),
                _ => {}
            }
            at += 1;
        }
        (at, false)
    }

    fn end(&mut self) -> Piece {
        Piece { bytes: std::mem::take(&mut self.bytes), whole: self.whole }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is found in a body that arrives in parts of so many bytes.
    fn cut(mut cutter: Cutter, body: &[u8], bytes: usize) -> Result<(Vec<StreamPart>, Cutter), Garbled> {
        let mut all = Vec::new();
        for mut part in body.chunks(bytes) {
            while !part.is_empty() {
                let (used, found) = cutter.take(part)?;
                part = &part[used..];
                if found != StreamPart::Nothing {
                    all.push(found);
                }
            }
        }
        Ok((all, cutter))
    }

    fn object(bytes: &[u8]) -> StreamPart {
        StreamPart::Object(Piece { bytes: bytes.to_vec(), whole: true })
    }

    fn field(name: &str, bytes: &str) -> StreamPart {
        StreamPart::Field(name.as_bytes().to_vec(), Piece { bytes: bytes.into(), whole: true })
    }

    #[test]
    fn a_list_falls_into_its_objects_however_it_arrives() {
        let strange = b"{\"p\":\"\xff\xfe \\\"}]\\\\\",\"q\":[[{}],\"\\ud800\"]}";
        let body = [
            b"{\"kind\":\"List\", \"metadata\":{\"continue\":\"a{\"},\"items\":[{} ,".as_slice(),
            strange,
            b"\n],\"count\":2,\"none\":null}\n",
        ]
        .concat();
        for bytes in [1, 2, 3, 7, body.len()] {
            let (found, cutter) = cut(Cutter::list(), &body, bytes).unwrap();
            let expected = [
                field("\"kind\"", "\"List\""),
                field("\"metadata\"", "{\"continue\":\"a{\"}"),
                object(b"{}"),
                object(strange),
                field("\"count\"", "2"),
                field("\"none\"", "null"),
            ];
            assert_eq!(found, expected, "{bytes} at a time");
            assert!(cutter.may_end());
        }
    }

    #[test]
    fn lists_without_objects_are_lists() {
        for body in ["{\"items\":[]}", "{\"items\":null}", "{}"] {
            let (found, cutter) = cut(Cutter::list(), body.as_bytes(), 2).unwrap();
            assert!(
                cutter.may_end() && !found.iter().any(|one| matches!(one, StreamPart::Object(_))),
                "{body}"
            );
        }
    }

    #[test]
    fn events_come_one_by_one_with_or_without_lines() {
        let body = b"{\"a\":\"\xff\"}\n{\"b\":\n{}}{\"c\":[{}]}\r\n{\"d\"";
        let (found, cutter) = cut(Cutter::watch(), &body[..body.len() - 4], 1).unwrap();
        assert_eq!(found, [object(b"{\"a\":\"\xff\"}"), object(b"{\"b\":\n{}}"), object(b"{\"c\":[{}]}")]);
        assert!(cutter.may_end());
        assert!(!cut(Cutter::watch(), body, 3).unwrap().1.may_end(), "the last one is cut short");
    }

    #[test]
    fn what_is_too_large_is_passed_over_and_its_beginning_told() {
        let fat = [b"{\"a\":\"".as_slice(), &vec![b'x'; OBJECT_BYTES_MAX], b"\"}"].concat();
        let body = [b"{\"items\":[".as_slice(), &fat, b",{\"b\":1}]}"].concat();
        let (found, cutter) = cut(Cutter::list(), &body, 1 << 16).unwrap();
        let [StreamPart::Object(first), second] = &found[..] else { panic!("{} found", found.len()) };
        assert!(!first.whole && first.bytes[..] == fat[..OBJECT_BYTES_MAX]);
        assert_eq!(*second, object(b"{\"b\":1}"));
        assert!(cutter.may_end());
    }

    #[test]
    fn what_is_neither_is_told() {
        for body in ["[]", "<html>", "{\"items\":[1]}", "{\"items\" []}", "{1}", "{} x"] {
            assert!(cut(Cutter::list(), body.as_bytes(), 4).is_err(), "{body}");
        }
        assert!(cut(Cutter::watch(), b"{}]", 4).is_err());
        assert!(!cut(Cutter::list(), b"{\"items\":[{}", 4).unwrap().1.may_end());
    }
}

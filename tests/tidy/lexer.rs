//! Rust text with everything blanked that is not code: comments, the insides of strings, test modules.
//! Lines and columns stay where they are.

/// Comments and the contents of strings and characters become blanks.
pub fn code(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = skipped(bytes, at);
        if end > at {
            blank(&mut out[at..end]);
            at = end;
        } else {
            at += 1;
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

fn blank(bytes: &mut [u8]) {
    for byte in bytes.iter_mut().filter(|byte| **byte != b'\n') {
        *byte = b' ';
    }
}

/// Where the comment, string or character that starts here ends; `at` if none starts here.
fn skipped(bytes: &[u8], at: usize) -> usize {
    let rest = &bytes[at..];
    let in_word = at > 0 && is_word(bytes[at - 1]);
    match rest {
        [b'/', b'/', ..] => at + rest.iter().position(|b| *b == b'\n').unwrap_or(rest.len()),
        [b'/', b'*', ..] => block_comment(bytes, at),
        [b'"', ..] => string(bytes, at + 1),
        [b'r' | b'b' | b'c', ..] if !in_word => prefixed_string(bytes, at),
        [b'\'', ..] => character(bytes, at),
        _ => at,
    }
}

fn block_comment(bytes: &[u8], start: usize) -> usize {
    let (mut at, mut depth) = (start, 0usize);
    while at < bytes.len() {
        match &bytes[at..] {
            [b'/', b'*', ..] => (at, depth) = (at + 2, depth + 1),
            [b'*', b'/', ..] if depth == 1 => return at + 2,
            [b'*', b'/', ..] => (at, depth) = (at + 2, depth - 1),
            _ => at += 1,
        }
    }
    at
}

fn string(bytes: &[u8], inside: usize) -> usize {
    let mut at = inside;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// `r"…"`, `r#"…"#`, `b"…"`, `br#"…"#`, `c"…"`.
fn prefixed_string(bytes: &[u8], start: usize) -> usize {
    let letters = bytes[start..].iter().take_while(|b| matches!(b, b'r' | b'b' | b'c')).count();
    let after = start + letters;
    let hashes = bytes[after..].iter().take_while(|b| **b == b'#').count();
    let raw = bytes[start..after].contains(&b'r');
    if letters > 2 || bytes.get(after + hashes) != Some(&b'"') || (hashes > 0 && !raw) {
        return start;
    }
    if !raw {
        return string(bytes, after + 1);
    }
    let close: Vec<u8> = std::iter::once(b'"').chain(std::iter::repeat_n(b'#', hashes)).collect();
    let inside = after + hashes + 1;
    let found = bytes[inside..].windows(close.len()).position(|window| window == close);
    found.map_or(bytes.len(), |found| inside + found + close.len())
}

/// `'x'` and `'\n'`, but not the lifetime `'x`.
fn character(bytes: &[u8], start: usize) -> usize {
    let escaped = bytes.get(start + 1) == Some(&b'\\');
    // A character is at most 4 bytes, an escape at most `\u{10ffff}`.
    let reach = if escaped { 12 } else { 5 };
    let from = start + if escaped { 3 } else { 2 };
    let close = (from..(start + 1 + reach).min(bytes.len())).find(|at| bytes[*at] == b'\'');
    match close {
        Some(close) if escaped || std::str::from_utf8(&bytes[start + 1..close]).is_ok_and(one) => close + 1,
        _ => start,
    }
}

fn one(text: &str) -> bool {
    text.chars().count() == 1
}

pub fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// Code split into what is shipped and what is for tests only; both keep their lines.
pub struct Halves {
    pub shipped: String,
    pub tests: String,
}

/// Splits [`code`] at items under `#[cfg(test)]`.
pub fn halves(code: &str) -> Halves {
    let mut shipped = code.as_bytes().to_vec();
    let mut tests = code.as_bytes().to_vec();
    let mut from = 0;
    while let Some(found) = code[from..].find("#[cfg(test)]") {
        let start = from + found;
        let end = item_end(code.as_bytes(), start);
        blank(&mut shipped[start..end]);
        blank(&mut tests[from..start]);
        from = end;
    }
    blank(&mut tests[from..]);
    Halves {
        shipped: String::from_utf8_lossy(&shipped).into_owned(),
        tests: String::from_utf8_lossy(&tests).into_owned(),
    }
}

/// Where an item ends that starts here with its attributes: at its `;` or its closing brace.
fn item_end(code: &[u8], start: usize) -> usize {
    let mut brackets = 0usize;
    for (at, byte) in code.iter().enumerate().skip(start) {
        match byte {
            b'[' | b'(' => brackets += 1,
            b']' | b')' => brackets = brackets.saturating_sub(1),
            b';' if brackets == 0 => return at + 1,
            b'{' if brackets == 0 => return block_end(code, at),
            _ => {}
        }
    }
    code.len()
}

/// Just behind the brace that closes the one at `open`.
pub fn block_end(code: &[u8], open: usize) -> usize {
    let mut depth = 0usize;
    for (at, byte) in code.iter().enumerate().skip(open) {
        match byte {
            b'{' => depth += 1,
            b'}' if depth <= 1 => return at + 1,
            b'}' => depth -= 1,
            _ => {}
        }
    }
    code.len()
}

/// A path as it stands in the code, groups of `use` written out: `std::{fs, io}` gives two.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedPath {
    pub line: usize,
    pub path: String,
}

/// Every path and every single name in the code.
pub fn paths(code: &str) -> Vec<NamedPath> {
    let bytes = code.as_bytes();
    let mut found = Vec::new();
    let (mut at, mut line) = (0, 1);
    while at < bytes.len() {
        let end = if starts_word(bytes, at) { path(code, at, "", line, &mut found) } else { at + 1 };
        line += code[at..end].matches('\n').count();
        at = end;
    }
    found
}

fn starts_word(bytes: &[u8], at: usize) -> bool {
    let starts = bytes[at].is_ascii_alphabetic() || bytes[at] == b'_';
    starts && (at == 0 || !is_word(bytes[at - 1]))
}

/// Reads one path below a prefix; returns where it ends.
fn path(code: &str, start: usize, prefix: &str, line: usize, found: &mut Vec<NamedPath>) -> usize {
    let bytes = code.as_bytes();
    let word = bytes[start..].iter().take_while(|byte| is_word(**byte)).count();
    let mut end = start + word;
    let joint = if prefix.is_empty() { "" } else { "::" };
    let whole = format!("{prefix}{joint}{}", &code[start..end]);
    match bytes.get(end..end + 3) {
        Some([b':', b':', b'{']) => {
            let close = block_end(bytes, end + 2);
            let mut at = end + 3;
            while at < close {
                at = if starts_word(bytes, at) { path(code, at, &whole, line, found) } else { at + 1 };
            }
            end = close;
        }
        Some([b':', b':', next]) if is_word(*next) => return path(code, end + 2, &whole, line, found),
        Some([b':', b':', b'*']) => found.push(NamedPath { line, path: format!("{whole}::*") }),
        _ => found.push(NamedPath { line, path: whole }),
    }
    end
}

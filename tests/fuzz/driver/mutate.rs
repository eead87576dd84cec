//! Inputs made of other inputs, byte by byte and word by word.

use fastrand::Rng;

/// Inputs that are worth changing.
pub struct Pool {
    pub all: Vec<Vec<u8>>,
    words: Vec<Vec<u8>>,
}

/// What trips readers of any kind of text.
const ODD: &[&[u8]] = &[
    b"",
    b"0",
    b"-0",
    b"-1",
    b"1e999",
    b"NaN",
    b"255",
    b"256",
    b"65536",
    b"2147483647",
    b"2147483648",
    b"4294967295",
    b"4294967296",
    b"9223372036854775807",
    b"9223372036854775808",
    b"-9223372036854775808",
    b"18446744073709551615",
    b"18446744073709551616",
    b"340282366920938463463374607431768211456",
    b"0.0000000000000000001",
    b"\0",
    b"\xff",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\\ud800",
    "\u{e9}\u{20ac}\u{1f600}\u{301}".as_bytes(),
    "\u{feff}".as_bytes(),
    "\u{2028}".as_bytes(),
    b"\r\n",
    b"\t ",
    b"/../",
    b"{}",
    b"[]",
    b"\"",
    b"'",
    b"((((((((",
    b"[[[[[[[[",
    b"{\"a\":",
];

impl Pool {
    pub fn new(all: Vec<Vec<u8>>, words: &[&str]) -> Self {
        Self { all, words: words.iter().map(|word| word.as_bytes().to_vec()).collect() }
    }

    pub fn pick(&self, rng: &mut Rng) -> &[u8] {
        rng.choice(&self.all).map_or(&[], Vec::as_slice)
    }

    /// One of the target's words, or one that trips readers of any kind.
    pub fn word(&self, rng: &mut Rng) -> &[u8] {
        match rng.usize(0..3) {
            0 => rng.choice(ODD.iter()).copied().unwrap_or_default(),
            _ => rng.choice(&self.words).map_or(b"1", Vec::as_slice),
        }
    }
}

/// A few changes at once.
pub fn text(from: &[u8], pool: &Pool, length: usize, rng: &mut Rng) -> Vec<u8> {
    let mut bytes = from.to_vec();
    for _ in 0..1 << rng.u32(0..4) {
        change(&mut bytes, pool, length, rng);
    }
    bytes.truncate(length);
    bytes
}

fn change(bytes: &mut Vec<u8>, pool: &Pool, length: usize, rng: &mut Rng) {
    let at = rng.usize(0..=bytes.len());
    let part = at..(at + rng.usize(0..=16)).min(bytes.len());
    match rng.u8(0..12) {
        0 => {
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 1 << rng.u32(0..8);
            }
        }
        1 => {
            if let Some(byte) = bytes.get_mut(at) {
                *byte = rng.u8(..);
            }
        }
        2 => drop(bytes.drain(part)),
        3 => put(bytes, at, &[rng.u8(b' '..=b'~')]),
        4..7 => put(bytes, at, pool.word(rng)),
        7 => drop(bytes.splice(part, pool.word(rng).iter().copied())),
        8 => {
            let copy = bytes[part].to_vec();
            put(bytes, at, &copy.repeat(rng.usize(1..=8)));
        }
        9 => {
            // One thing many times, up to all that there is room for.
            let unit = if rng.bool() { pool.word(rng).to_vec() } else { bytes[part].to_vec() };
            let most = (length.saturating_sub(bytes.len()) / unit.len().max(1)).max(1);
            let times = if rng.bool() { rng.usize(1..=most) } else { rng.usize(1..=most.min(40)) };
            put(bytes, at, &unit.repeat(times));
        }
        10 => {
            let other = pool.pick(rng);
            let from = rng.usize(0..=other.len());
            let other = other[from..].to_vec();
            bytes.truncate(at);
            bytes.extend(other);
        }
        _ => number(bytes, at, pool, rng),
    }
}

fn put(bytes: &mut Vec<u8>, at: usize, what: &[u8]) {
    drop(bytes.splice(at..at, what.iter().copied()));
}

/// The next number becomes another one.
fn number(bytes: &mut Vec<u8>, at: usize, pool: &Pool, rng: &mut Rng) {
    let Some(start) = bytes[at..].iter().position(u8::is_ascii_digit).map(|found| at + found) else { return };
    let digits = bytes[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let known =
        std::str::from_utf8(&bytes[start..start + digits]).ok().and_then(|text| text.parse::<u64>().ok());
    let other = match (rng.u8(0..4), known) {
        (0, Some(known)) => known.wrapping_add(1).to_string().into_bytes(),
        (1, Some(known)) => known.wrapping_sub(1).to_string().into_bytes(),
        (2, Some(known)) => known.wrapping_mul(rng.u64(2..2000)).to_string().into_bytes(),
        _ => pool.word(rng).to_vec(),
    };
    drop(bytes.splice(start..start + digits, other));
}

/// Leaves out what can be left out, as long as the rest `stays` what it was.
pub fn smaller(input: &[u8], stays: &mut dyn FnMut(&[u8]) -> bool) -> Vec<u8> {
    let mut best = input.to_vec();
    let mut part = best.len() / 2;
    while part > 0 {
        let mut at = 0;
        while at < best.len() {
            let mut less = best.clone();
            less.drain(at..(at + part).min(best.len()));
            match stays(&less) {
                true => best = less,
                false => at += part,
            }
        }
        part /= 2;
    }
    best
}

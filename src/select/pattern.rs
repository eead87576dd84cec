//! Patterns of `matches`, compiled once, and what it costs to match one.
//!
//! The API server counts the pattern's length. That says little of one such as `[01]*1[01]{999}`: what a byte of text
//! may cost is the number of places in the pattern at which a match may stand, with repetitions written out.

use regex::{Regex, RegexBuilder};

/// Of a compiled pattern, and of what is kept while it is matched.
const PATTERN_BYTES_MAX: usize = 1 << 18;
const CACHE_BYTES_MAX: usize = 1 << 18;
/// A class such as `\w` has ranges all over Unicode; one in brackets has a few.
const CLASS_WEIGHT: u64 = 1_000;
const BRACKETS_WEIGHT: u64 = 20;

#[derive(Debug, Clone)]
pub struct Pattern {
    pub regex: Regex,
    /// Ticks per byte of text.
    rate: u64,
    /// About as many words of memory as it takes.
    pub weight: u64,
}

impl Pattern {
    /// # Errors
    /// What is wrong with it.
    pub fn new(pattern: &str) -> Result<Self, String> {
        let regex = RegexBuilder::new(pattern)
            .size_limit(PATTERN_BYTES_MAX)
            .dfa_size_limit(CACHE_BYTES_MAX)
            .build()
            .map_err(|error| {
                // The crate's words have several lines, with a picture; the last one says it.
                let words = error.to_string().lines().last().unwrap_or_default().to_owned();
                format!("the pattern {pattern:?}: {words}")
            })?;
        let Size { places, weight } = Size::of(pattern);
        let rate = places.max(pattern.chars().count().div_ceil(4) as u64);
        Ok(Self { regex, rate, weight })
    }

    /// Of matching it with a text, in ticks.
    pub fn cost(&self, text: &str) -> u64 {
        self.rate.saturating_mul(text.len() as u64 + 1)
    }
}

/// Of a pattern, or of a part of one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Size {
    places: u64,
    weight: u64,
}

impl Size {
    fn atom(weight: u64) -> Self {
        Self { places: 1, weight }
    }

    fn add(&mut self, other: Self) {
        self.places = self.places.saturating_add(other.places);
        self.weight = self.weight.saturating_add(other.weight);
    }

    fn times(self, count: u64) -> Self {
        Self { places: self.places.saturating_mul(count), weight: self.weight.saturating_mul(count) }
    }

    /// Of a pattern that is known to be one. What cannot be told apart here counts as more, not as less.
    fn of(pattern: &str) -> Self {
        // By open group: what is done, and the last element, which a repetition would be for.
        let mut open = vec![(Self::default(), Self::default())];
        let mut chars = pattern.chars().peekable();
        while let Some(one) = chars.next() {
            if one == '(' {
                open.push((Self::default(), Self::default()));
                continue;
            }
            let element = match one {
                ')' => {
                    let (mut sum, last) =
                        if open.len() > 1 { open.pop().unwrap_or_default() } else { continue };
                    sum.add(last);
                    sum
                }
                '{' => {
                    let count = repetitions(&mut chars);
                    if let Some((_, last)) = open.last_mut() {
                        *last = last.times(count);
                    }
                    continue;
                }
                '\\' => escape(chars.next()),
                '[' => brackets(&mut chars),
                '*' | '+' | '?' | '|' | '^' | '$' => continue,
                _ => Self::atom(4),
            };
            if let Some((sum, last)) = open.last_mut() {
                sum.add(std::mem::replace(last, element));
            }
        }
        open.into_iter().fold(Self::default(), |mut all, (sum, last)| {
            all.add(sum);
            all.add(last);
            all
        })
    }
}

fn escape(of: Option<char>) -> Size {
    Size::atom(if of.is_some_and(|one| "wWdDsSpP".contains(one)) { CLASS_WEIGHT } else { 4 })
}

/// The rest of `{2,5}`: the most that there may be; `{2,}` is two and a loop.
fn repetitions(chars: &mut impl Iterator<Item = char>) -> u64 {
    let inside: String = chars.take_while(|one| *one != '}').collect();
    let counts = inside.split(',').filter_map(|count| count.trim().parse::<u64>().ok());
    counts.max().unwrap_or(1).saturating_add(1)
}

/// The rest of a class in brackets, which may have others in it.
fn brackets(chars: &mut std::iter::Peekable<std::str::Chars<'_>>) -> Size {
    let (mut depth, mut size) = (1_u32, Size::atom(BRACKETS_WEIGHT));
    chars.next_if_eq(&'^');
    // Here it is no end.
    chars.next_if_eq(&']');
    while let Some(one) = chars.next() {
        match one {
            '\\' => size.weight = size.weight.saturating_add(escape(chars.next()).weight),
            '[' => depth += 1,
            ']' => depth -= 1,
            _ => size.weight = size.weight.saturating_add(4),
        }
        if depth == 0 {
            break;
        }
    }
    size
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repetitions_are_written_out() {
        for (pattern, places) in [
            ("", 0),
            ("^NVIDIA", 6),
            ("a{10}", 11),
            ("(ab){9}c", 21),
            ("((a{9}){9}b){9}", 1010),
            ("[a-z]]{4}", 6),
            ("[]a]{4}", 5),
            ("[^]a]{4}", 5),
            ("[a[bc]d]{4,9}", 10),
            (r"\{\d\w(x|y)*", 5),
            ("a{3,}", 4),
        ] {
            assert!(Regex::new(pattern).is_ok(), "{pattern}");
            assert_eq!(Size::of(pattern).places, places, "{pattern}");
        }
        assert_eq!(Size::of(r"[\w\d]").weight, 2 * CLASS_WEIGHT + BRACKETS_WEIGHT);
    }
}

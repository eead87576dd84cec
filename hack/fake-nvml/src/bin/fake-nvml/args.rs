//! The words of the command line: options anywhere, the rest in order.

use std::collections::VecDeque;
use std::str::FromStr;

pub struct Args {
    rest: VecDeque<String>,
}

impl Args {
    pub fn new(words: impl Iterator<Item = String>) -> Args {
        Args { rest: words.collect() }
    }

    /// Takes `--name value`, if it is there.
    pub fn option(&mut self, name: &str) -> Result<Option<String>, String> {
        let Some(at) = self.rest.iter().position(|w| w == name) else { return Ok(None) };
        self.rest.remove(at);
        self.rest.remove(at).map(Some).ok_or_else(|| format!("{name} wants a value"))
    }

    pub fn number<T: FromStr>(&mut self, name: &str) -> Result<Option<T>, String> {
        self.option(name)?.map(|text| parse(&text, name)).transpose()
    }

    pub fn flag(&mut self, name: &str) -> bool {
        let at = self.rest.iter().position(|w| w == name);
        at.is_some_and(|at| self.rest.remove(at).is_some())
    }

    /// Takes the next word.
    pub fn word(&mut self, what: &str) -> Result<String, String> {
        self.next().ok_or_else(|| format!("{what} is missing (see fake-nvml help)"))
    }

    pub fn next(&mut self) -> Option<String> {
        self.rest.pop_front()
    }

    pub fn value<T: FromStr>(&mut self, what: &str) -> Result<T, String> {
        let word = self.word(what)?;
        parse(&word, what)
    }

    /// All words that are left, at least one.
    pub fn all(&mut self, what: &str) -> Result<Vec<String>, String> {
        if self.rest.is_empty() {
            return Err(format!("{what} is missing (see fake-nvml help)"));
        }
        Ok(self.rest.drain(..).collect())
    }

    pub fn end(self) -> Result<(), String> {
        match self.rest.front() {
            None => Ok(()),
            Some(word) => Err(format!("what is {word}? (see fake-nvml help)")),
        }
    }
}

pub fn parse<T: FromStr>(text: &str, what: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("{what}: {text} is no such value"))
}

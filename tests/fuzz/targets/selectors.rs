//! CEL, as text and as expressions that are well formed and as costly as can be.

use std::fmt::Write;
use std::sync::LazyLock;

use fastrand::Rng;
use k8s_openapi::api::resource::v1::Device;
use tranche::select::{DeviceFacts, Selector};

use super::texts;
use crate::driver::meter::ready;
use crate::driver::{Form, Limits, Target};

const CASES: &str = include_str!("../../data/select/cases.txt");
const DEVICES: &str = include_str!("../../data/select/devices.json");

static KNOWN: LazyLock<Vec<DeviceFacts>> = LazyLock::new(|| {
    #[derive(serde::Deserialize)]
    struct Entry {
        driver: String,
        device: Device,
    }
    let all: std::collections::BTreeMap<String, Entry> = serde_json::from_str(DEVICES).unwrap();
    let facts = all.values().map(|entry| DeviceFacts::of(&entry.driver, &entry.device));
    facts.chain([DeviceFacts::default()]).collect()
});

const WORDS: &[&str] = &[
    "device",
    ".attributes",
    ".capacity",
    ".driver",
    "['gpu.nvidia.com']",
    "[?'x']",
    ".?",
    "has(",
    "(",
    ")",
    "==",
    "!=",
    "&&",
    "||",
    "?",
    ":",
    "1",
    "'t'",
    " in ",
    "[",
    "]",
    "{",
    "}",
    ",",
    "!",
    "-",
    "+",
    "*",
    "/",
    "%",
    "x",
    ".size()",
    ".all(x, ",
    ".exists(x, ",
    ".exists_one(x, ",
    ".map(x, ",
    ".filter(x, ",
    "cel.bind(x, ",
    "quantity(",
    "semver(",
    ".orValue(",
    ".optMap(x, ",
    ".matches('",
    "9223372036854775808",
    "0x",
    "1e5",
    "b'x'",
    "r'\\'",
    "'\\u12'",
    "\"\"\"",
    "{1: ",
    "optional.of(",
    ".contains(",
    "//",
    "`",
    "string(",
    "int(",
    "dyn(",
    "true",
    "false",
    "null",
    "1u",
    "é",
];

pub fn targets() -> Vec<Target> {
    let limits = Limits { length: 10 << 10, millis: 3000, bytes: 4 << 20, per_byte: 400 };
    // An evaluation may take 64 MiB.
    let evaluation = Limits { bytes: 80 << 20, ..limits };
    vec![
        Target {
            name: "selector",
            seeds: || {
                let lines = CASES.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
                lines
                    .filter_map(|line| Some(line.splitn(3, char::is_whitespace).nth(2)?.trim().into()))
                    .collect()
            },
            words: WORDS,
            form: Form::Text,
            limits,
            run: selector,
        },
        Target {
            name: "evaluator",
            seeds: || {
                texts(&[
                    "cel.bind(a, [1, 2], cel.bind(b, [a, a], b == b))",
                    "cel.bind(a, 'xy', cel.bind(b, a + a, [b, b].all(c, c in [a, b])))",
                    "[[1, 2], [3]].all(a, a.exists(b, b == 3) || a.map(b, b + 1) == [2, 3])",
                ])
            },
            words: WORDS,
            form: Form::Made(expression),
            limits: evaluation,
            run: selector,
        },
    ]
}

/// Compiles the text and asks it of all devices: an answer or words, and both are short.
fn selector(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let devices = &*KNOWN;
    ready();
    let selector = match Selector::compile(text) {
        Ok(selector) => selector,
        Err(error) => return assert_short(&error),
    };
    let reads = selector.reads();
    for device in devices {
        let _ = reads.values_read(device);
        if let Err(error) = selector.matches(device) {
            assert_short(&error);
        }
    }
}

fn assert_short(error: &impl ToString) {
    // Words quote parts of the text and values; a condition on a claim has room for some KiB.
    let words = error.to_string();
    assert!(words.len() <= 32 << 10, "{} bytes of words", words.len());
}

/// What is being written, and what it may name.
struct Maker<'a> {
    rng: &'a mut Rng,
    text: String,
    /// Variables in force.
    names: usize,
}

/// An expression that is well formed: copies of copies, deep values, folds in folds.
fn expression(rng: &mut Rng) -> String {
    let mut maker = Maker { rng, text: String::new(), names: 0 };
    match maker.rng.u8(0..6) {
        0 => maker.doubled(),
        1 => maker.nested(),
        2 => maker.patterns(),
        _ => maker.truth(6),
    }
    maker.text
}

impl Maker<'_> {
    fn put(&mut self, text: &str) {
        self.text.push_str(text);
    }

    fn name(&mut self) -> String {
        match self.names {
            0 => "device.driver".to_owned(),
            names => format!("v{}", self.rng.usize(0..names)),
        }
    }

    /// Binds a value to a name, and goes on with it.
    fn bind(&mut self, value: impl FnOnce(&mut Self), body: impl FnOnce(&mut Self)) {
        let name = self.names;
        let _ = write!(self.text, "cel.bind(v{name}, ");
        value(self);
        self.put(", ");
        self.names += 1;
        body(self);
        self.names -= 1;
        self.put(")");
    }

    /// Each name is made of copies of the one before: text or lists, by `+` or in brackets; the last is looked at.
    fn doubled(&mut self) {
        let (rounds, copies) = (self.rng.usize(1..40), self.rng.usize(2..12));
        let joint = *self.rng.choice([" + ", ", "].iter()).unwrap_or(&", ");
        let start = *self
            .rng
            .choice(["'x'", "[1]", "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx'", "{1: 2}"].iter())
            .unwrap_or(&"1");
        let mut text = format!("cel.bind(v0, {start}, ");
        for round in 1..rounds {
            let before = vec![format!("v{}", round - 1); copies].join(joint);
            let (open, close) = if joint == ", " { ("[", "]") } else { ("", "") };
            let _ = write!(text, "cel.bind(v{round}, {open}{before}{close}, ");
        }
        let last = format!("v{}", rounds - 1);
        let ends = [
            "LAST == LAST",
            "LAST in [LAST]",
            "size(LAST) > 0",
            "LAST.all(a, a == a)",
            "LAST < LAST",
            "[LAST, LAST].map(a, a) == [LAST]",
            "string(LAST) == LAST",
            "LAST.matches('(x*)*$')",
            "LAST.contains(LAST)",
            "dyn(LAST) != optional.of(LAST)",
            "int(LAST) == 1",
            "quantity(LAST).sign() == 1",
            "{LAST: 1}[LAST + LAST] == 1",
            "[LAST, LAST, LAST].exists(a, a.upperAscii() == a + 'x')",
            "LAST.upperAscii().lowerAscii().trim() == ''",
        ];
        let end = self.rng.choice(ends.iter()).copied().unwrap_or("true").replace("LAST", &last);
        self.put(&text);
        self.put(&end);
        self.put(&")".repeat(rounds));
    }

    /// A fold over copies of the element of the fold around it.
    fn nested(&mut self) {
        let (levels, copies) = (self.rng.usize(1..14), self.rng.usize(2..12));
        let fold =
            *self.rng.choice(["all", "exists", "map", "filter", "exists_one"].iter()).unwrap_or(&"all");
        let mut element = "[1]".to_owned();
        for level in 0..levels {
            let list = vec![element.as_str(); copies].join(",");
            let _ = write!(self.text, "[{list}].{fold}(a{level}, ");
            element = format!("a{level}");
        }
        let end = match self.rng.u8(0..3) {
            0 => format!("{element} == {element}"),
            1 => format!("[{element}, {element}] == [{element}, {element}]"),
            _ => format!("{element} in [{element}]"),
        };
        self.put(&end);
        self.put(&")".repeat(levels));
    }

    /// Many patterns, each as large as it may be once compiled.
    fn patterns(&mut self) {
        let count = self.rng.usize(1..200);
        let parts = [
            "(a{40}){40}",
            "[a-z]{1,200}",
            "(x*)*y",
            "\\\\pL{20}",
            "(?i)k{100}",
            ".*.*.*.*=.*",
            "(((a?){9}){9}){9}",
        ];
        for nth in 0..count {
            let part = self.rng.choice(parts.iter()).copied().unwrap_or("a");
            let _ = write!(
                self.text,
                "{}device.driver.matches('{nth}{part}')",
                if nth > 0 { " || " } else { "" }
            );
        }
    }

    fn truth(&mut self, depth: usize) {
        let depth = depth.saturating_sub(1);
        match self.rng.u8(0..if depth == 0 { 3 } else { 12 }) {
            0 => self.put("true"),
            1 => self.put("device.attributes['gpu.nvidia.com'].multiprocessors > 100"),
            2 => self.put("device.capacity['gpu.nvidia.com'].memory.isGreaterThan(quantity('10Gi'))"),
            3 | 4 => self.two(depth, Self::truth, &[" && ", " || ", " == "]),
            5 | 6 => self.two(depth, Self::value, &[" == ", " != ", " in "]),
            7 => self.bind(|maker| maker.value(depth), |maker| maker.truth(depth)),
            8 | 9 => self.fold(depth, &["all", "exists", "exists_one"], Self::truth),
            10 => {
                self.put("!(");
                self.truth(depth);
                self.put(")");
            }
            _ => {
                self.put("(");
                self.truth(depth);
                self.put(" ? ");
                self.truth(depth);
                self.put(" : ");
                self.truth(depth);
                self.put(")");
            }
        }
    }

    fn value(&mut self, depth: usize) {
        let depth = depth.saturating_sub(1);
        match self.rng.u8(0..if depth == 0 { 5 } else { 13 }) {
            0 => self.put("1"),
            1 => self.put("'text'"),
            2 | 3 => {
                let name = self.name();
                self.put(&name);
            }
            4 => self.put("device.attributes['gpu.nvidia.com'].?productName"),
            5..8 => self.list(depth),
            8 => self.two(depth, Self::value, &[" + ", " - ", " * "]),
            9 => self.fold(depth, &["map", "filter"], Self::value),
            10 => self.bind(|maker| maker.value(depth), |maker| maker.value(depth)),
            11 => {
                self.put("optional.of(");
                self.value(depth);
                self.put(")");
            }
            _ => {
                self.put("{1: ");
                self.value(depth);
                self.put(", 'k': ");
                self.value(depth);
                self.put("}[1]");
            }
        }
    }

    fn list(&mut self, depth: usize) {
        self.put("[");
        for nth in 0..self.rng.usize(0..6) {
            if nth > 0 {
                self.put(", ");
            }
            self.value(depth);
        }
        self.put("]");
    }

    fn two(&mut self, depth: usize, side: fn(&mut Self, usize), joints: &[&str]) {
        self.put("(");
        side(self, depth);
        let joint = self.rng.choice(joints.iter()).copied().unwrap_or(" == ");
        self.put(joint);
        side(self, depth);
        self.put(")");
    }

    fn fold(&mut self, depth: usize, names: &[&str], body: fn(&mut Self, usize)) {
        self.list(depth);
        let fold = self.rng.choice(names.iter()).copied().unwrap_or("all");
        let _ = write!(self.text, ".{fold}(v{}, ", self.names);
        self.names += 1;
        body(self, depth);
        self.names -= 1;
        self.put(")");
    }
}

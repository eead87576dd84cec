//! `GpuShare`: what a claim says of its part of a GPU.
//!
//! For class `shared.gpu.nvidia.com` it says how much, unless the request does so itself (`asked`). For a share that
//! kube-scheduler places, the amount stands in `capacity.requests`, and `GpuShare` adds only how firmly it must hold and
//! for how many processes.

use std::fmt;
use std::str::FromStr;

use serde::Deserialize;
use serde_json::Value;

use super::ParamsError;
use super::decode::read;
use crate::model::names::SHARED_CLASS;
use crate::model::quantity::{Bytes, Quantity};
use crate::model::share::{Isolation, Percent};

pub(super) const API_VERSION: &str = "tranche.dev/v1alpha1";
/// An MPS server has 48 client slots (60 from CUDA 13 on).
const PROCESSES_MAX: u32 = 60;
/// A bare number up to this may have been meant in MiB: 512 GiB.
const MEANT_AS_MIB_MAX: u64 = 512 << 10;
const BILLION: u32 = 1_000_000_000;

/// A decoded and validated `GpuShare`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GpuShare {
    pub amount: Option<Amount>,
    /// Of the multiprocessors. Not given: follows from a fraction, else no cap.
    pub compute: Option<Percent>,
    /// The weakest rung that will do.
    pub minimum_isolation: Option<Isolation>,
    /// Processes among which the memory is divided.
    pub max_processes: Option<u32>,
}

impl GpuShare {
    /// The first field, by its name, that limits what the claim's processes may use. Not `minimumIsolation`: a device
    /// that nobody else uses meets every level.
    pub fn limit(&self) -> Option<&'static str> {
        let amount = self.amount.map(Amount::field);
        amount.or(self.compute.map(|_| "compute")).or(self.max_processes.map(|_| "maxProcesses"))
    }

    /// It asks for the whole GPU: `fraction: "1"`. A `memory` that is all of a GPU is a share like any other: which GPU it
    /// would be all of is known only once one is chosen.
    pub fn is_whole(&self) -> bool {
        matches!(self.amount, Some(Amount::Fraction(fraction)) if fraction.is_whole())
    }

    /// It asks the controller for a MIG device of its own, which is made for it. A whole GPU needs none.
    pub fn is_mig(&self) -> bool {
        self.minimum_isolation == Some(Isolation::Mig) && !self.is_whole()
    }

    /// The first field, by its name, that would limit a claim which has the GPU whole, where nothing enforces a limit.
    /// `compute: 100` and `maxProcesses: 1` limit nothing.
    pub fn limit_beside_whole(&self) -> Option<&'static str> {
        let compute = self.compute.filter(|percent| percent.get() < 100).map(|_| "compute");
        compute.or(self.max_processes.filter(|most| *most > 1).map(|_| "maxProcesses"))
    }

    /// The first field, by its name, that stands in the request itself where kube-scheduler places the share.
    pub fn requested(&self) -> Option<&'static str> {
        self.amount.map(Amount::field).or(self.compute.map(|_| "compute"))
    }
}

/// Why `field` cannot limit `what`, a device or a request that is given whole.
pub fn limit_of_whole(field: &str, what: &str) -> String {
    format!(
        "GpuShare.{field} limits a share, but {what} is given whole, and nothing would enforce the limit; ask for a \
         share with class {SHARED_CLASS}, or with capacity.requests.memory (Kubernetes 1.36 and newer), or remove \
         the field"
    )
}

/// Why `field` cannot say how much `what` is, a device or a request of which kube-scheduler gives a share.
pub fn limit_of_scheduled_share(field: &str, what: &str) -> String {
    let capacity = if field == "compute" { "compute" } else { "memory" };
    format!(
        "GpuShare.{field} is for class {SHARED_CLASS}, but {what} is a share that kube-scheduler places; remove the \
         field and write capacity.requests.{capacity} in the request, or change its class"
    )
}

/// Why a share that kube-scheduler places cannot stand on the rung `mig`.
pub const MIG_OF_SCHEDULED_SHARE: &str = "mig is what no share has that kube-scheduler places; ask for a MIG device with \
                                          class shared.gpu.nvidia.com, by memory or fraction, or with class \
                                          mig.nvidia.com, by its profile";

/// How much of a GPU: exactly one of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Amount {
    Memory(Bytes),
    Fraction(Fraction),
}

impl Amount {
    /// Its name in a `GpuShare`.
    pub fn field(self) -> &'static str {
        match self {
            Self::Memory(_) => "memory",
            Self::Fraction(_) => "fraction",
        }
    }
}

/// More than 0, at most 1, exact to a billionth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fraction {
    billionths: u32,
}

impl Fraction {
    /// That part of `total`, rounded down to whole MiB: fractions that sum to 1 fit on one GPU. 0: it is less than any
    /// limit can express.
    pub fn of(self, total: Bytes) -> Bytes {
        let part = u128::from(total.0) * u128::from(self.billionths) / u128::from(BILLION);
        // Not more than `total`, which is a u64.
        Bytes::from_mib(Bytes(u64::try_from(part).unwrap_or(total.0)).mib_floor())
    }

    /// All of it: `1`.
    pub fn is_whole(self) -> bool {
        self.billionths == BILLION
    }

    /// None: it is no whole number of them.
    pub fn thousandths(self) -> Option<u32> {
        let each = BILLION / 1000;
        self.billionths.is_multiple_of(each).then_some(self.billionths / each)
    }

    /// In percent, rounded down, at least 1.
    pub fn percent(self) -> Option<Percent> {
        Percent::try_from(u64::from(self.billionths / (BILLION / 100)).max(1)).ok()
    }
}

/// A decimal number: `0.25`.
impl fmt::Display for Fraction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = format!("{}.{:09}", self.billionths / BILLION, self.billionths % BILLION);
        f.write_str(text.trim_end_matches('0').trim_end_matches('.'))
    }
}

impl FromStr for Fraction {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || {
            format!(
                "{text:?} is not a valid fraction of a GPU; write a decimal number above 0 and up to 1, such \
                 as \"0.25\""
            )
        };
        let (whole, part) = text.split_once('.').unwrap_or((text, ""));
        let digits = |digits: &str| digits.bytes().all(|b| b.is_ascii_digit());
        if !digits(whole) || !digits(part) || (whole.is_empty() && part.is_empty()) {
            return Err(bad());
        }
        let part = part.trim_end_matches('0');
        if part.len() > 9 {
            return Err(format!("{text:?} has more than 9 decimals; round it"));
        }
        let whole: u32 = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| bad())? };
        let part: u32 = format!("{part:0<9}").parse().map_err(|_| bad())?;
        let billionths = whole.checked_mul(BILLION).and_then(|whole| whole.checked_add(part));
        match billionths {
            Some(billionths @ 1..=BILLION) => Ok(Self { billionths }),
            _ => Err(bad()),
        }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Raw {
    #[serde(rename = "apiVersion")]
    _api_version: String,
    #[serde(rename = "kind")]
    _kind: String,
    memory: Option<Quantity>,
    /// Also as a number: YAML makes one of `0.25` without quotes.
    fraction: Option<Scalar>,
    /// Also as a text, with or without `%`.
    compute: Option<Scalar>,
    minimum_isolation: Option<String>,
    max_processes: Option<u32>,
}

/// A number, or a text that says one.
#[derive(Deserialize)]
#[serde(untagged, expecting = "must be a number, or a text that says one")]
enum Scalar {
    Text(String),
    Number(serde_json::Number),
}

impl Scalar {
    /// A number without an exponent.
    fn into_text(self) -> String {
        match self {
            Self::Text(text) => text,
            // As JSON a small one would have an exponent.
            Self::Number(number) if number.is_f64() => number.as_f64().unwrap_or_default().to_string(),
            Self::Number(number) => number.to_string(),
        }
    }
}

pub(super) fn decode(parameters: &Value) -> Result<GpuShare, ParamsError> {
    let raw: Raw = read(parameters)?;
    let amount = match (raw.memory, raw.fraction) {
        (None, None) => None,
        (Some(memory), None) => Some(Amount::Memory(bytes(memory)?)),
        (None, Some(fraction)) => Some(Amount::Fraction(
            fraction.into_text().parse().map_err(|problem: String| ParamsError::new("fraction", problem))?,
        )),
        (Some(_), Some(_)) => {
            return Err(ParamsError::new("fraction", "does not go with memory; write one of the two"));
        }
    };
    let compute = raw.compute.map(percent).transpose()?;
    if let Some(processes) = raw.max_processes
        && !(1..=PROCESSES_MAX).contains(&processes)
    {
        let problem = format!("{processes} is out of range; write 1 to {PROCESSES_MAX}");
        return Err(ParamsError::new("maxProcesses", problem));
    }
    // Of a fraction it is known only when the GPU is.
    if let (Some(Amount::Memory(memory)), Some(processes)) = (amount, raw.max_processes)
        && memory.mib_ceil() < u64::from(processes)
    {
        let mib = memory.mib_ceil();
        let problem = format!("{mib} MiB divided by {processes} leaves less than 1 MiB for each");
        return Err(ParamsError::new("maxProcesses", problem));
    }
    let minimum_isolation = raw.minimum_isolation.map(|word| isolation(&word)).transpose()?;
    Ok(GpuShare { amount, compute, minimum_isolation, max_processes: raw.max_processes })
}

/// `20`, `"20"` or `"20%"`.
fn percent(compute: Scalar) -> Result<Percent, ParamsError> {
    let text = compute.into_text();
    let wrong = |words: String| ParamsError::new("compute", words);
    let number = text.strip_suffix('%').unwrap_or(&text).trim_end();
    let number: u64 = number.parse().map_err(|_| {
        wrong(format!("{text:?} is not a valid percentage; write a whole number from 1 to 100, such as 25"))
    })?;
    Percent::try_from(number).map_err(|error| wrong(error.to_string()))
}

fn bytes(quantity: Quantity) -> Result<Bytes, ParamsError> {
    memory(quantity).map_err(|problem| ParamsError::new("memory", problem))
}

/// The least is 1 MiB: MPS counts in MiB, and who writes `2000` means no bytes.
fn memory(quantity: Quantity) -> Result<Bytes, String> {
    match quantity.units_ceil().filter(|bytes| *bytes > 0) {
        Some(bytes) => below_the_least(Bytes(bytes)).map_or(Ok(Bytes(bytes)), Err),
        None => Err(format!("{quantity} is not a valid amount of memory; write one such as 2000Mi")),
    }
}

/// What is wrong with so few bytes, if they are less than 1 MiB.
pub(super) fn below_the_least(bytes: Bytes) -> Option<String> {
    let Bytes(bytes) = bytes;
    let meant = if bytes <= MEANT_AS_MIB_MAX { bytes } else { 1 };
    let words = || format!("{bytes} bytes are less than 1 MiB; did you mean {meant}Mi?");
    (bytes < Bytes::from_mib(1).0).then(words)
}

/// The memory that a request's `capacity.requests.memory` asks for, whoever places it.
///
/// # Errors
/// It is no quantity, or less than the least: the words of a `GpuShare`'s `memory`.
pub fn requested_memory(text: &str) -> Result<Bytes, String> {
    let quantity = text.parse::<Quantity>();
    memory(
        quantity
            .map_err(|_| format!("{text:?} is not a valid amount of memory; write one such as 2000Mi"))?,
    )
}

fn isolation(word: &str) -> Result<Isolation, ParamsError> {
    Isolation::ALL.into_iter().find(|rung| rung.as_str() == word).ok_or_else(|| {
        ParamsError::new("minimumIsolation", format!("{word:?} is not known; use none, mps, kernel or mig"))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::params::{self, Params};

    fn share(fields: Value) -> Result<GpuShare, ParamsError> {
        let mut object = json!({"apiVersion": API_VERSION, "kind": "GpuShare"});
        object.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        params::decode(&object).map(|params| match params {
            Params::Share(share) => share,
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn a_share_is_memory_or_a_fraction() {
        let memory = share(json!({"memory": "2000Mi", "compute": 25, "maxProcesses": 2})).unwrap();
        assert_eq!(memory.amount, Some(Amount::Memory(Bytes::from_mib(2000))));
        assert_eq!((memory.compute.map(Percent::get), memory.max_processes), (Some(25), Some(2)));
        let fraction = share(json!({"fraction": "0.25", "minimumIsolation": "mps"})).unwrap();
        assert_eq!(fraction.minimum_isolation, Some(Isolation::Mps));
        assert_eq!(share(json!({})).unwrap(), GpuShare::default());
    }

    #[test]
    fn amounts_are_taken_as_people_write_them_and_never_a_thousandth_of_what_they_mean() {
        let same = |one: Value, other: Value| assert_eq!(share(one).unwrap(), share(other).unwrap());
        same(json!({"fraction": 0.25}), json!({"fraction": "0.25"}));
        same(json!({"fraction": 1}), json!({"fraction": "1"}));
        same(json!({"fraction": 1e-2}), json!({"fraction": "0.01"}));
        same(json!({"compute": "20%"}), json!({"compute": 20}));
        same(json!({"compute": "20"}), json!({"compute": 20}));
        for field in ["fraction", "compute"] {
            let said = share(json!({field: true})).unwrap_err().to_string();
            assert_eq!(said, format!("{field}: must be a number, or a text that says one"));
        }
        let words = |memory: &str| share(json!({"memory": memory})).unwrap_err().problem;
        assert_eq!(words("2000"), "2000 bytes are less than 1 MiB; did you mean 2000Mi?");
        assert_eq!(words("1023Ki"), "1047552 bytes are less than 1 MiB; did you mean 1Mi?");
        assert_eq!(share(json!({"memory": "1Mi"})).unwrap().amount, Some(Amount::Memory(Bytes::from_mib(1))));
    }

    #[test]
    fn a_fraction_is_rounded_down_to_whole_mib_and_percent() {
        let of =
            |text: &str, mib: u64| text.parse::<Fraction>().unwrap().of(Bytes::from_mib(mib)).mib_floor();
        assert_eq!(of("0.25", 80_496), 20_124);
        assert_eq!(of("0.333333333", 1000), 333);
        assert_eq!((of("1", 1000), of("1.0", 1000), of(".5", 1000)), (1000, 1000, 500));
        assert_eq!((of("0.000000001", 1000), of("0.001", 1000), of("0.000999999", 1000)), (0, 1, 0));
        let percent = |text: &str| text.parse::<Fraction>().unwrap().percent().map(Percent::get);
        assert_eq!(
            (percent("0.25"), percent("0.251"), percent("1"), percent("0.001")),
            (Some(25), Some(25), Some(100), Some(1))
        );
    }

    #[test]
    fn a_fraction_of_1_is_the_whole_gpu_and_nothing_else_is() {
        for (fields, whole) in [
            (json!({"fraction": "1"}), true),
            (json!({"fraction": 1}), true),
            (json!({"fraction": "1.000"}), true),
            (json!({"fraction": "0.999999999"}), false),
            (json!({"memory": "80Gi"}), false),
            (json!({}), false),
        ] {
            assert_eq!(share(fields.clone()).unwrap().is_whole(), whole, "{fields}");
        }
        let limit = |fields: Value| share(fields).unwrap().limit_beside_whole();
        assert_eq!(limit(json!({"fraction": 1, "compute": 100, "maxProcesses": 1})), None);
        assert_eq!(limit(json!({"fraction": 1, "minimumIsolation": "mig"})), None);
        let is_mig = |fields: Value| share(fields).unwrap().is_mig();
        assert!(is_mig(json!({"memory": "1Gi", "minimumIsolation": "mig", "compute": 20})));
        assert!(!is_mig(json!({"fraction": 1, "minimumIsolation": "mig"})), "a whole GPU meets every level");
        assert!(!is_mig(json!({"memory": "1Gi", "minimumIsolation": "kernel"})));
        assert_eq!(limit(json!({"fraction": 1, "compute": 99})), Some("compute"));
        assert_eq!(limit(json!({"fraction": 1, "maxProcesses": 2})), Some("maxProcesses"));
    }

    #[test]
    fn each_mistake_is_named_with_its_path() {
        for (fields, path) in [
            (json!({"memory": "1Gi", "fraction": "0.5"}), "fraction"),
            (json!({"memory": "0"}), "memory"),
            (json!({"memory": "2000"}), "memory"),
            (json!({"memory": 2000}), "memory"),
            (json!({"memory": "1023Ki"}), "memory"),
            (json!({"memory": "2000m"}), "memory"),
            (json!({"memory": "much"}), "memory"),
            (json!({"fraction": "1.5"}), "fraction"),
            (json!({"fraction": "NaN"}), "fraction"),
            (json!({"fraction": "0"}), "fraction"),
            (json!({"fraction": "-0.5"}), "fraction"),
            (json!({"fraction": ""}), "fraction"),
            (json!({"fraction": "1e-1"}), "fraction"),
            (json!({"fraction": "0.1234567891"}), "fraction"),
            (json!({"fraction": 1.5}), "fraction"),
            (json!({"fraction": 0}), "fraction"),
            (json!({"fraction": true}), "fraction"),
            (json!({"compute": "much"}), "compute"),
            (json!({"compute": "20%%"}), "compute"),
            (json!({"compute": "101%"}), "compute"),
            (json!({"compute": 20.5}), "compute"),
            (json!({"compute": -1}), "compute"),
            (json!({"compute": 0}), "compute"),
            (json!({"compute": 101}), "compute"),
            (json!({"maxProcesses": 0}), "maxProcesses"),
            (json!({"memory": "3Mi", "maxProcesses": 4}), "maxProcesses"),
            (json!({"minimumIsolation": "hard"}), "minimumIsolation"),
            (json!({"memoryMiB": 5}), "memoryMiB"),
        ] {
            let error = share(fields.clone()).expect_err(&fields.to_string());
            assert_eq!(error.path, path, "{fields}: {error}");
        }
    }
}

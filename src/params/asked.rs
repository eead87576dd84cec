//! How much of a GPU a request for a share of the controller's asks for: in the request's own `capacity.requests`
//! (KEP-5075), which queues and quotas count, in a `GpuShare`, or in both, which must agree then. Whoever reads such an
//! amount reads it here.

use std::fmt;

use thiserror::Error;

use super::gpu_share::requested_memory;
use super::{Amount, Fraction, GpuShare};
use crate::model::quantity::{Bytes, Quantity};

/// The names of capacities by which a request may say its amount: memory, and thousandths of what can be granted of the
/// GPU that is chosen.
pub const MEMORY: &str = "memory";
pub const THOUSANDTHS: &str = "thousandths";
/// Of the whole GPU.
const ALL_THOUSANDTHS: u64 = 1000;

/// Where a request's `GpuShare` is from. Of several the last that is meant for the request counts, as a whole
/// (KEP-3063).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShareSource<'a> {
    Nowhere,
    /// For all claims of the class, unless they say otherwise.
    ByClass(&'a GpuShare),
    ByClaim(&'a GpuShare),
}

/// Why a request does not say how much it asks for. The text is for the claim's author; the field comes before it.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum AskedError {
    /// Neither place says it.
    #[error("does not say how much of a GPU")]
    Missing,
    #[error(
        "means nothing for a share that the controller places, whose amount is memory, or thousandths of a GPU, without \
         a domain; a GpuShare says the rest (compute, maxProcesses)"
    )]
    Other { name: String },
    #[error("{problem}")]
    Memory { problem: String },
    #[error("{quantity:?} is not a valid part of a GPU; write whole thousandths from 1 to 1000, such as 250")]
    Thousandths { quantity: String },
    #[error("does not go with capacity.requests.memory; write one of the two")]
    Both,
    #[error(
        "asks for {request}, but the claim's GpuShare says {share}; write the same in both, or remove one"
    )]
    Disagree { name: &'static str, request: AmountText, share: AmountText },
    /// Where the GPU is given whole, nothing enforces what this field of the GpuShare limits.
    #[error(
        "limits a share, but the fraction 1 is the whole GPU, for the claim alone and without MPS, and nothing would \
         enforce the limit; remove it, or write memory, or a fraction below 1 such as \"0.999\""
    )]
    LimitOfWhole { field: &'static str },
    #[error("{mib} MiB divided by the GpuShare's maxProcesses {processes} leaves less than 1 MiB for each")]
    Processes { mib: u64, processes: u32 },
}

impl AskedError {
    /// The field, below the request's own; none: the request, or a field of the GpuShare.
    pub fn field(&self) -> Option<String> {
        let name = match self {
            Self::Missing | Self::LimitOfWhole { .. } => return None,
            Self::Other { name } => name,
            Self::Memory { .. } | Self::Processes { .. } => MEMORY,
            Self::Thousandths { .. } | Self::Both => THOUSANDTHS,
            Self::Disagree { name, .. } => name,
        };
        Some(format!("capacity.requests[{name}]"))
    }
}

/// An amount, as people read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AmountText(Amount);

impl fmt::Display for AmountText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Amount::Memory(bytes) => write!(f, "{} MiB", bytes.mib_ceil()),
            Amount::Fraction(fraction) => write!(f, "the fraction {fraction}"),
        }
    }
}

/// What the request asks for, always with an amount. `capacity`: names and quantities of its `capacity.requests`. What
/// stands there counts before what the class says; the claim's own `GpuShare` must say the same.
///
/// # Errors
/// There is no amount, one that cannot be, or two that differ.
pub fn asked<'a>(
    said: ShareSource<'_>,
    capacity: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> Result<GpuShare, AskedError> {
    let own = of_request(capacity)?;
    let (share, must_agree) = match said {
        ShareSource::Nowhere => (GpuShare::default(), false),
        ShareSource::ByClass(share) => (*share, false),
        ShareSource::ByClaim(share) => (*share, true),
    };
    let Some(request) = own else {
        return if share.amount.is_some() { without_limit_of_whole(share) } else { Err(AskedError::Missing) };
    };
    let name = match request {
        Amount::Memory(_) => MEMORY,
        Amount::Fraction(_) => THOUSANDTHS,
    };
    if let Some(said) = share.amount.filter(|said| must_agree && !is_same(request, *said)) {
        return Err(AskedError::Disagree { name, request: AmountText(request), share: AmountText(said) });
    }
    match (request, share.max_processes) {
        (Amount::Memory(memory), Some(processes)) if memory.mib_ceil() < u64::from(processes) => {
            Err(AskedError::Processes { mib: memory.mib_ceil(), processes })
        }
        _ => without_limit_of_whole(GpuShare { amount: Some(request), ..share }),
    }
}

/// A limit that cannot be enforced is refused.
fn without_limit_of_whole(share: GpuShare) -> Result<GpuShare, AskedError> {
    match share.limit_beside_whole().filter(|_| share.is_whole()) {
        Some(field) => Err(AskedError::LimitOfWhole { field }),
        None => Ok(share),
    }
}

/// Both come to the same grant on every GPU.
fn is_same(a: Amount, b: Amount) -> bool {
    match (a, b) {
        (Amount::Memory(a), Amount::Memory(b)) => a.mib_ceil() == b.mib_ceil(),
        (a, b) => a == b,
    }
}

fn of_request<'a>(
    capacity: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> Result<Option<Amount>, AskedError> {
    let (mut memory, mut part) = (None, None);
    for (name, quantity) in capacity {
        match name {
            MEMORY => memory = Some(bytes(quantity)?),
            THOUSANDTHS => part = Some(fraction(quantity)?),
            other => return Err(AskedError::Other { name: other.to_owned() }),
        }
    }
    match (memory, part) {
        (Some(_), Some(_)) => Err(AskedError::Both),
        (memory, part) => Ok(memory.map(Amount::Memory).or(part.map(Amount::Fraction))),
    }
}

fn bytes(text: &str) -> Result<Bytes, AskedError> {
    requested_memory(text).map_err(|problem| AskedError::Memory { problem })
}

fn fraction(text: &str) -> Result<Fraction, AskedError> {
    let number = text.parse::<Quantity>().ok().filter(|number| number.is_whole());
    let number =
        number.and_then(Quantity::units_ceil).filter(|number| (1..=ALL_THOUSANDTHS).contains(number));
    let decimal =
        number.map(|number| format!("{}.{:03}", number / ALL_THOUSANDTHS, number % ALL_THOUSANDTHS));
    let fraction = decimal.and_then(|decimal| decimal.parse().ok());
    fraction.ok_or_else(|| AskedError::Thousandths { quantity: text.to_owned() })
}

/// How a request says so much itself: name and quantity of a capacity. None: it cannot, since it is no whole number of
/// thousandths.
pub fn capacity_of(amount: Amount) -> Option<(&'static str, String)> {
    match amount {
        Amount::Memory(bytes) => Some((MEMORY, format!("{}Mi", bytes.mib_ceil()))),
        Amount::Fraction(fraction) => Some((THOUSANDTHS, fraction.thousandths()?.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(mib: u64) -> GpuShare {
        GpuShare { amount: Some(Amount::Memory(Bytes::from_mib(mib))), ..GpuShare::default() }
    }

    fn part(text: &str) -> GpuShare {
        GpuShare { amount: Some(Amount::Fraction(text.parse().unwrap())), ..GpuShare::default() }
    }

    #[test]
    fn an_amount_may_stand_in_the_request_in_a_gpu_share_or_the_same_in_both() {
        let compute = GpuShare { max_processes: Some(4), ..GpuShare::default() };
        for (said, capacity, amount) in [
            (ShareSource::Nowhere, vec![("memory", "20Gi")], memory(20_480)),
            (ShareSource::ByClaim(&memory(20_480)), vec![], memory(20_480)),
            (ShareSource::ByClaim(&memory(20_480)), vec![("memory", "20Gi")], memory(20_480)),
            // As they are granted: in whole MiB.
            (ShareSource::ByClaim(&memory(2000)), vec![("memory", "2097151999")], memory(2000)),
            (ShareSource::ByClass(&memory(1024)), vec![("memory", "20Gi")], memory(20_480)),
            (ShareSource::ByClass(&memory(1024)), vec![], memory(1024)),
            (
                ShareSource::ByClaim(&compute),
                vec![("memory", "4Mi")],
                GpuShare { max_processes: Some(4), ..memory(4) },
            ),
            (ShareSource::Nowhere, vec![("thousandths", "250")], part("0.25")),
            (ShareSource::ByClaim(&part("0.25")), vec![("thousandths", "250")], part("0.25")),
            (ShareSource::Nowhere, vec![("thousandths", "1k")], part("1")),
        ] {
            let found = asked(said, capacity.clone()).unwrap_or_else(|error| panic!("{capacity:?}: {error}"));
            let mib = |share: &GpuShare| match share.amount {
                Some(Amount::Memory(bytes)) => Some(bytes.mib_ceil()),
                _ => None,
            };
            let fraction = |share: &GpuShare| match share.amount {
                Some(Amount::Fraction(fraction)) => Some(fraction),
                _ => None,
            };
            assert_eq!((mib(&found), fraction(&found)), (mib(&amount), fraction(&amount)), "{capacity:?}");
            assert_eq!(found.max_processes, amount.max_processes);
        }
    }

    #[test]
    fn what_says_no_amount_or_two_is_refused_with_both_numbers_and_the_field() {
        let four = GpuShare { max_processes: Some(4), ..GpuShare::default() };
        let whole_of_four = GpuShare { max_processes: Some(4), ..part("1") };
        for (said, capacity, field, words) in [
            (ShareSource::ByClaim(&whole_of_four), vec![], None, "the fraction 1 is the whole GPU"),
            (
                ShareSource::ByClaim(&four),
                vec![("thousandths", "1k")],
                None,
                "nothing would enforce the limit",
            ),
            (
                ShareSource::ByClass(&four),
                vec![("thousandths", "1k")],
                None,
                "nothing would enforce the limit",
            ),
            (ShareSource::Nowhere, vec![], None, "does not say how much"),
            (ShareSource::ByClaim(&four), vec![], None, "does not say how much"),
            (
                ShareSource::ByClaim(&memory(10_240)),
                vec![("memory", "20Gi")],
                Some("capacity.requests[memory]"),
                "asks for 20480 MiB, but the claim's GpuShare says 10240 MiB",
            ),
            (
                ShareSource::ByClaim(&part("0.5")),
                vec![("memory", "20Gi")],
                Some("capacity.requests[memory]"),
                "asks for 20480 MiB, but the claim's GpuShare says the fraction 0.5",
            ),
            (
                ShareSource::ByClaim(&part("0.5")),
                vec![("thousandths", "250")],
                Some("capacity.requests[thousandths]"),
                "asks for the fraction 0.25, but the claim's GpuShare says the fraction 0.5",
            ),
            (
                ShareSource::Nowhere,
                vec![("memory", "1Gi"), ("thousandths", "1")],
                Some("capacity.requests[thousandths]"),
                "one of the two",
            ),
            (
                ShareSource::Nowhere,
                vec![("memory", "2000")],
                Some("capacity.requests[memory]"),
                "2000 bytes are less than 1 MiB; did you mean 2000Mi?",
            ),
            (
                ShareSource::Nowhere,
                vec![("memory", "0")],
                Some("capacity.requests[memory]"),
                "such as 2000Mi",
            ),
            (
                ShareSource::Nowhere,
                vec![("memory", "much")],
                Some("capacity.requests[memory]"),
                "\"much\" is not",
            ),
            (
                ShareSource::Nowhere,
                vec![("thousandths", "0")],
                Some("capacity.requests[thousandths]"),
                "1 to 1000",
            ),
            (
                ShareSource::Nowhere,
                vec![("thousandths", "1001")],
                Some("capacity.requests[thousandths]"),
                "1001",
            ),
            (
                ShareSource::Nowhere,
                vec![("thousandths", "0.5")],
                Some("capacity.requests[thousandths]"),
                "whole",
            ),
            (
                ShareSource::Nowhere,
                vec![("compute", "25")],
                Some("capacity.requests[compute]"),
                "GpuShare says the rest",
            ),
            (
                ShareSource::Nowhere,
                vec![("gpu.nvidia.com/memory", "1Gi")],
                Some("capacity.requests[gpu.nvidia.com/memory]"),
                "without a domain",
            ),
            (
                ShareSource::ByClaim(&four),
                vec![("memory", "3Mi")],
                Some("capacity.requests[memory]"),
                "3 MiB divided",
            ),
        ] {
            let error = asked(said, capacity.clone()).expect_err(words);
            assert_eq!(error.field().as_deref(), field, "{capacity:?}");
            assert!(error.to_string().contains(words), "{capacity:?}: {error}");
        }
    }
}

//! Kubernetes quantities, exactly: no floating point, no overflow, the API server's rounding.
//!
//! The grammar and the rounding are those of `k8s.io/apimachinery/pkg/api/resource`: a decimal number
//! with one of the suffixes `n u m "" k M G T P E`, `Ki Mi Gi Ti Pi Ei`, or a decimal exponent. What is
//! finer than a nano is rounded up, as there.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

const NANOS: i128 = 1_000_000_000;
pub const MIB: u64 = 1 << 20;

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    pub const fn from_mib(mib: u64) -> Self {
        Self(mib.saturating_mul(MIB))
    }
    /// Whole MiB, rounded down.
    pub const fn mib_floor(self) -> u64 {
        self.0 / MIB
    }
    /// Whole MiB, rounded up.
    pub const fn mib_ceil(self) -> u64 {
        self.0.div_ceil(MIB)
    }
    /// As a Kubernetes quantity with the largest binary suffix that keeps it exact: `80Gi`, `81559Mi`.
    pub fn to_quantity_string(self) -> String {
        const SUFFIXES: [(&str, u32); 6] =
            [("Ei", 60), ("Pi", 50), ("Ti", 40), ("Gi", 30), ("Mi", 20), ("Ki", 10)];
        for (suffix, shift) in SUFFIXES {
            if self.0 != 0 && self.0.trailing_zeros() >= shift {
                return format!("{}{suffix}", self.0 >> shift);
            }
        }
        self.0.to_string()
    }
}

/// An exact Kubernetes quantity, in nano-units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Quantity {
    nanos: i128,
}

/// Why a text is no quantity.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum QuantityError {
    #[error("{0:?} is not a quantity; write a number with an optional suffix, such as 2000Mi, 10Gi or 25")]
    Syntax(String),
    #[error("{0:?} is larger than a quantity can be")]
    Range(String),
}

impl Quantity {
    pub const fn from_units(units: u64) -> Self {
        Self { nanos: units as i128 * NANOS }
    }

    /// The value in whole units, rounded up as the API server's `Value()` does. `None` if it is
    /// negative or does not fit.
    pub fn units_ceil(self) -> Option<u64> {
        let units = self.nanos.div_euclid(NANOS) + i128::from(self.nanos.rem_euclid(NANOS) != 0);
        u64::try_from(units).ok()
    }

    /// The value in thousandths of a unit, rounded up as the API server's `MilliValue()` does. `None` if
    /// it is negative or does not fit.
    pub fn millis_ceil(self) -> Option<u64> {
        const MILLI: i128 = NANOS / 1000;
        let millis = self.nanos.div_euclid(MILLI) + i128::from(self.nanos.rem_euclid(MILLI) != 0);
        u64::try_from(millis).ok()
    }

    /// True if the value is a whole number of units.
    pub fn is_whole(self) -> bool {
        self.nanos % NANOS == 0
    }
}

impl FromStr for Quantity {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let syntax = || QuantityError::Syntax(text.to_owned());
        let range = || QuantityError::Range(text.to_owned());
        let (negative, rest) = match text.as_bytes().first() {
            Some(b'-') => (true, &text[1..]),
            Some(b'+') => (false, &text[1..]),
            _ => (false, text),
        };
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let (number, suffix) = rest.split_at(end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
            return Err(syntax());
        }
        if number.len() > 60 {
            return Err(range());
        }
        let scale = Scale::parse(suffix).ok_or_else(syntax)?;
        let fraction = fraction.trim_end_matches('0');
        let mut digits: i128 = 0;
        for digit in whole.bytes().chain(fraction.bytes()) {
            digits = digits
                .checked_mul(10)
                .and_then(|d| d.checked_add(i128::from(digit - b'0')))
                .ok_or_else(range)?;
        }
        let nanos = scale.apply(digits, fraction.len() as i32).ok_or_else(range)?;
        // The API server caps at 2^63-1 units.
        if nanos > i128::from(i64::MAX) * NANOS {
            return Err(range());
        }
        Ok(Self { nanos: if negative { -nanos } else { nanos } })
    }
}

/// What a suffix means.
#[derive(Clone, Copy)]
enum Scale {
    /// × 10^n
    Decimal(i32),
    /// × 2^n
    Binary(u32),
}

impl Scale {
    fn parse(suffix: &str) -> Option<Self> {
        Some(match suffix {
            "n" => Self::Decimal(-9),
            "u" => Self::Decimal(-6),
            "m" => Self::Decimal(-3),
            "" => Self::Decimal(0),
            "k" => Self::Decimal(3),
            "M" => Self::Decimal(6),
            "G" => Self::Decimal(9),
            "T" => Self::Decimal(12),
            "P" => Self::Decimal(15),
            "E" => Self::Decimal(18),
            "Ki" => Self::Binary(10),
            "Mi" => Self::Binary(20),
            "Gi" => Self::Binary(30),
            "Ti" => Self::Binary(40),
            "Pi" => Self::Binary(50),
            "Ei" => Self::Binary(60),
            exponent => {
                let digits = exponent.strip_prefix(['e', 'E'])?;
                let unsigned = digits.strip_prefix(['+', '-']).unwrap_or(digits);
                if unsigned.is_empty() || !unsigned.bytes().all(|b| b.is_ascii_digit()) {
                    return None;
                }
                Self::Decimal(digits.parse().ok()?)
            }
        })
    }

    /// `digits` with `decimals` of them behind the point, in nano-units, rounded up; `None` on overflow.
    fn apply(self, digits: i128, decimals: i32) -> Option<i128> {
        let (digits, exponent) = match self {
            Self::Decimal(exponent) => (digits, exponent),
            Self::Binary(shift) => (digits.checked_mul(1_i128 << shift)?, 0),
        };
        let exponent = exponent.checked_sub(decimals)?.checked_add(9)?;
        if digits == 0 {
            return Some(0);
        }
        if exponent >= 0 {
            return digits.checked_mul(10_i128.checked_pow(exponent.unsigned_abs())?);
        }
        match 10_i128.checked_pow(exponent.unsigned_abs()) {
            Some(divisor) => Some(digits.div_euclid(divisor) + i128::from(digits % divisor != 0)),
            None => Some(1), // finer than can be written: rounded up to one nano
        }
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_whole() {
            return match u64::try_from(self.nanos / NANOS) {
                Ok(units) => f.write_str(&Bytes(units).to_quantity_string()),
                Err(_) => write!(f, "{}", self.nanos / NANOS),
            };
        }
        let (divisor, suffix) = match () {
            () if self.nanos % 1_000_000 == 0 => (1_000_000, "m"),
            () if self.nanos % 1_000 == 0 => (1_000, "u"),
            () => (1, "n"),
        };
        write!(f, "{}{suffix}", self.nanos / divisor)
    }
}

impl Serialize for Quantity {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Quantity {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        /// A quantity may be written as a string or as a bare integer.
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = Quantity;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a quantity such as \"2000Mi\"")
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Quantity, E> {
                text.parse().map_err(E::custom)
            }
            fn visit_u64<E: serde::de::Error>(self, units: u64) -> Result<Quantity, E> {
                units.to_string().parse().map_err(E::custom)
            }
            fn visit_i64<E: serde::de::Error>(self, units: i64) -> Result<Quantity, E> {
                units.to_string().parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn units(text: &str) -> Option<u64> {
        text.parse::<Quantity>().ok()?.units_ceil()
    }

    #[test]
    fn suffixes_mean_what_the_api_server_makes_of_them() {
        // Expected values were worked out from the grammar by hand.
        for (text, expected) in [
            ("0", 0),
            ("1", 1),
            ("1.5", 2),
            ("100m", 1),
            ("1001m", 2),
            ("1k", 1_000),
            ("1Ki", 1_024),
            ("2000Mi", 2_097_152_000),
            ("10Gi", 10_737_418_240),
            ("0.5Gi", 536_870_912),
            ("1e3", 1_000),
            ("1E3", 1_000),
            ("1E-3", 1),
            ("1Ei", 1 << 60),
            ("+5", 5),
            (".5", 1),
            ("5.", 5),
            ("0.0000000001", 1),
            ("00080Gi", 80 << 30),
        ] {
            assert_eq!(units(text), Some(expected), "{text}");
        }
    }

    #[test]
    fn what_is_no_quantity_is_refused() {
        for text in
            ["", ".", "-", "Gi", "1gi", "1GiB", "1 Gi", "1e", "1e+", "1e3Mi", "NaN", "inf", "1..5", "0x10"]
        {
            assert!(matches!(text.parse::<Quantity>(), Err(QuantityError::Syntax(_))), "{text:?}");
        }
        for text in ["8Ei", "1e400", "99999999999999999999999999", "1e2147483648"] {
            assert!(text.parse::<Quantity>().is_err(), "{text:?}");
        }
        assert_eq!(units("-1"), None);
    }

    #[test]
    fn prints_the_largest_exact_suffix() {
        assert_eq!(Bytes(80 << 30).to_quantity_string(), "80Gi");
        assert_eq!(Bytes::from_mib(81_559).to_quantity_string(), "81559Mi");
        assert_eq!(Bytes(0).to_quantity_string(), "0");
        assert_eq!("1500m".parse::<Quantity>().unwrap().to_string(), "1500m");
    }

    proptest! {
        #[test]
        fn parsing_never_panics(text in "[-+]?[0-9.]{0,50}[a-zA-Z0-9+-]{0,6}") {
            let _ = text.parse::<Quantity>();
        }

        #[test]
        fn printing_and_parsing_are_inverse(units in 0..=i64::MAX as u64) {
            let quantity = Quantity::from_units(units);
            prop_assert_eq!(quantity.to_string().parse::<Quantity>(), Ok(quantity));
        }

        #[test]
        fn order_is_the_order_of_the_numbers(a in 0..1_u64 << 50, b in 0..1_u64 << 50) {
            let (qa, qb) = (format!("{a}m").parse::<Quantity>().unwrap(), format!("{b}m").parse::<Quantity>().unwrap());
            prop_assert_eq!(a.cmp(&b), qa.cmp(&qb));
        }
    }
}

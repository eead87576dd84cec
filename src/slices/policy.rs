//! Request policies of capacities (KEP-5075): what the API server accepts, and what of it we take to be
//! safe on every release.

use k8s_openapi::api::resource::v1::{CapacityRequestPolicy, CapacityRequestPolicyRange};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;

use crate::model::quantity::Quantity;

/// More than this many valid values are refused.
const VALID_VALUES: usize = 10;

/// What is wrong with `policy` of a capacity of `total`: field and problem.
pub(super) fn problems(policy: &CapacityRequestPolicy, total: Quantity) -> Vec<(&'static str, String)> {
    check(policy, total).err().into_iter().collect()
}

type Problem = (&'static str, String);

fn check(policy: &CapacityRequestPolicy, total: Quantity) -> Result<(), Problem> {
    // Without a default, a share that does not ask takes the entire capacity.
    let Some(default) = &policy.default else {
        return Err(("default", "is missing: a share that asks for nothing would take all of it".to_owned()));
    };
    let default = parse("default", default)?;
    match (&policy.valid_range, &policy.valid_values) {
        (Some(_), Some(_)) => Err(("validValues", "excludes validRange; give one of them".to_owned())),
        (Some(range), None) => check_range(range, default, total),
        (None, Some(values)) => check_values(values, default, total),
        (None, None) if default > total => Err(("default", "is more than the capacity".to_owned())),
        (None, None) => Ok(()),
    }
}

fn check_range(
    range: &CapacityRequestPolicyRange,
    default: Quantity,
    total: Quantity,
) -> Result<(), Problem> {
    let min = parse("validRange.min", &range.min)?;
    let max = range.max.as_ref().map(|max| parse("validRange.max", max)).transpose()?;
    let step = range.step.as_ref().map(|step| parse("validRange.step", step)).transpose()?;
    let highest = max.unwrap_or(total);
    if min > total || highest > total {
        return Err(("validRange", "goes beyond the capacity".to_owned()));
    }
    if min > highest {
        return Err(("validRange", "is empty: min is more than max".to_owned()));
    }
    if default < min || default > highest {
        return Err(("default", "is outside of validRange".to_owned()));
    }
    let Some(step) = step else { return Ok(()) };
    let units = |quantity: Quantity| quantity.is_whole().then(|| quantity.units_ceil()).flatten();
    let (Some(min), Some(step), Some(default), Some(highest), Some(total)) =
        (units(min), units(step), units(default), units(highest), units(total))
    else {
        // Servers before 1.37 round fractions up before they step.
        return Err(("validRange.step", "needs whole units in min, max, step, default and value".to_owned()));
    };
    if step == 0 || min.checked_add(step).is_none_or(|first| first > total) {
        return Err(("validRange.step", "is 0, or min + step is more than the capacity".to_owned()));
    }
    if (default - min) % step != 0 {
        return Err(("default", "is not min plus a multiple of step".to_owned()));
    }
    if max.is_some() && (highest - min) % step != 0 {
        return Err(("validRange.max", "is not min plus a multiple of step".to_owned()));
    }
    Ok(())
}

fn check_values(values: &[ApiQuantity], default: Quantity, total: Quantity) -> Result<(), Problem> {
    let values: Vec<Quantity> =
        values.iter().map(|value| parse("validValues", value)).collect::<Result<_, _>>()?;
    if values.is_empty() || values.len() > VALID_VALUES {
        return Err(("validValues", format!("has {} values; 1 to {VALID_VALUES} are allowed", values.len())));
    }
    if values.windows(2).any(|pair| pair[0] >= pair[1]) {
        return Err(("validValues", "is not ascending without repetition".to_owned()));
    }
    if values.last().is_some_and(|last| *last > total) {
        return Err(("validValues", "goes beyond the capacity".to_owned()));
    }
    if !values.contains(&default) {
        return Err(("default", "is not one of validValues".to_owned()));
    }
    Ok(())
}

fn parse(field: &'static str, quantity: &ApiQuantity) -> Result<Quantity, Problem> {
    quantity.0.parse().map_err(|error| (field, format!("{error}")))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn field(policy: Value) -> Option<&'static str> {
        let policy = serde_json::from_value(policy).unwrap();
        problems(&policy, "80Gi".parse().unwrap()).first().map(|(field, _)| *field)
    }

    #[test]
    fn policies_are_held_to_the_api_servers_rules() {
        let range = |min: &str, max: &str, step: &str, default: &str| {
            field(json!({"default": default, "validRange": {"min": min, "max": max, "step": step}}))
        };
        assert_eq!(range("1Mi", "80Gi", "1Mi", "80Gi"), None);
        assert_eq!(range("0", "80Gi", "1Mi", "0"), None);
        assert_eq!(range("1Mi", "81Gi", "1Mi", "80Gi"), Some("validRange"));
        assert_eq!(range("2Gi", "1Gi", "1Mi", "1Gi"), Some("validRange"));
        assert_eq!(range("1Mi", "80Gi", "1Mi", "0"), Some("default"));
        assert_eq!(range("1Mi", "80Gi", "3Mi", "1Mi"), Some("validRange.max"));
        assert_eq!(range("1Mi", "80Gi", "2Mi", "80Gi"), Some("default"));
        assert_eq!(range("1Mi", "80Gi", "80Gi", "1Mi"), Some("validRange.step"));
        assert_eq!(range("1Mi", "80Gi", "0", "1Mi"), Some("validRange.step"));
        assert_eq!(range("100m", "80Gi", "100m", "1"), Some("validRange.step"));
        assert_eq!(field(json!({"default": "1Gi", "validRange": {"min": "1Gi"}})), None);
        assert_eq!(field(json!({"default": "1Gi"})), None);
        assert_eq!(field(json!({"default": "1GiB"})), Some("default"));
        assert_eq!(field(json!({})), Some("default"));
        assert_eq!(field(json!({"validRange": {"min": "1Gi"}})), Some("default"));
        assert_eq!(field(json!({"default": "1", "validValues": ["1", "2"]})), None);
        assert_eq!(field(json!({"default": "3", "validValues": ["1", "2"]})), Some("default"));
        assert_eq!(field(json!({"default": "1", "validValues": ["1", "1"]})), Some("validValues"));
        assert_eq!(field(json!({"default": "1", "validValues": ["1", "81Gi"]})), Some("validValues"));
        assert_eq!(
            field(json!({"default": "1", "validValues": ["1"], "validRange": {"min": "1"}})),
            Some("validValues")
        );
    }
}

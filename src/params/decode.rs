//! From JSON to [`Params`], with the path of whatever is wrong.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;
use thiserror::Error;

use super::{Interval, MpsSettings, Params, Sharing, gpu_share, grant};
use crate::model::plain::in_plain_words;
use crate::model::quantity::{Bytes, Quantity};

const API_VERSION: &str = "resource.nvidia.com/v1beta1";
/// Where the limits of an MPS daemon stand.
const MPS_AT: &str = "sharing.mpsConfig";
const ALL_DEVICES: &str = "defaultPinnedDeviceMemoryLimit";
const PER_DEVICE: &str = "defaultPerDevicePinnedMemoryLimit";

/// Why parameters cannot be used. The text is shown to the author of the claim.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{path}: {problem}")]
pub struct ParamsError {
    /// Where in the parameters, e.g. `sharing.mpsConfig.defaultActiveThreadPercentage`.
    pub path: String,
    pub problem: String,
}

impl ParamsError {
    pub(super) fn new(path: &str, problem: impl Into<String>) -> Self {
        Self { path: path.to_owned(), problem: problem.into() }
    }
}

/// Decodes one opaque parameters object.
///
/// Fails on another `apiVersion` or `kind`, on unknown fields, and on settings that contradict each other.
pub fn decode(parameters: &Value) -> Result<Params, ParamsError> {
    let object =
        parameters.as_object().ok_or_else(|| ParamsError::new("parameters", "must be a JSON object"))?;
    let text = |key: &str| object.get(key).and_then(Value::as_str).unwrap_or_default();
    match (text("apiVersion"), text("kind")) {
        (API_VERSION, "GpuConfig") => {
            read::<RawGpuConfig>(parameters).and_then(|raw| Ok(Params::Gpu(sharing(raw.sharing)?)))
        }
        (API_VERSION, "MigDeviceConfig") => {
            let raw = read::<RawMigConfig>(parameters)?;
            let config = raw.sharing.map(|s| RawSharing {
                strategy: s.strategy,
                time_slicing_config: None,
                mps_config: s.mps_config,
            });
            Ok(Params::Mig(sharing(config)?))
        }
        (gpu_share::API_VERSION, "GpuShare") => gpu_share::decode(parameters).map(Params::Share),
        (gpu_share::API_VERSION, grant::KIND) => grant::decode(parameters).map(Params::Grant),
        (gpu_share::API_VERSION, kind) => {
            Err(ParamsError::new("kind", format!("{kind:?} is not known; use GpuShare")))
        }
        (API_VERSION, kind) => Err(ParamsError::new(
            "kind",
            format!("{kind:?} is not known; use GpuConfig for whole GPUs or MigDeviceConfig for MIG devices"),
        )),
        (version, _) => Err(ParamsError::new(
            "apiVersion",
            format!(
                "{version:?} is not known; this driver reads {API_VERSION} and {}",
                gpu_share::API_VERSION
            ),
        )),
    }
}

pub(super) fn read<T: for<'de> Deserialize<'de>>(parameters: &Value) -> Result<T, ParamsError> {
    serde_path_to_error::deserialize(parameters).map_err(|error| {
        let path = error.path().to_string();
        let path = if path == "." { "parameters".to_owned() } else { path };
        ParamsError { path, problem: in_plain_words(&error.into_inner().to_string()) }
    })
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawGpuConfig {
    #[serde(rename = "apiVersion")]
    _api_version: String,
    #[serde(rename = "kind")]
    _kind: String,
    sharing: Option<RawSharing>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawMigConfig {
    #[serde(rename = "apiVersion")]
    _api_version: String,
    #[serde(rename = "kind")]
    _kind: String,
    sharing: Option<RawMigSharing>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawSharing {
    strategy: String,
    time_slicing_config: Option<RawTimeSlicing>,
    mps_config: Option<RawMps>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawMigSharing {
    strategy: String,
    mps_config: Option<RawMps>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawTimeSlicing {
    interval: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawMps {
    default_active_thread_percentage: Option<u32>,
    default_pinned_device_memory_limit: Option<Quantity>,
    default_per_device_pinned_memory_limit: Option<BTreeMap<String, Quantity>>,
    multi_user: Option<bool>,
}

fn sharing(raw: Option<RawSharing>) -> Result<Option<Sharing>, ParamsError> {
    let Some(raw) = raw else { return Ok(None) };
    let sharing = match (raw.strategy.as_str(), raw.time_slicing_config, raw.mps_config) {
        ("TimeSlicing", config, None) => {
            Sharing::TimeSlicing(interval(config.and_then(|config| config.interval))?)
        }
        ("MPS", None, config) => Sharing::Mps(config.map(mps).transpose()?.unwrap_or_default()),
        ("TimeSlicing", _, Some(_)) => {
            return Err(ParamsError::new(
                "sharing.mpsConfig",
                "does not go with strategy TimeSlicing; remove it",
            ));
        }
        ("MPS", Some(_), _) => {
            return Err(ParamsError::new(
                "sharing.timeSlicingConfig",
                "does not go with strategy MPS; remove it",
            ));
        }
        (other, _, _) => {
            return Err(ParamsError::new(
                "sharing.strategy",
                format!("{other:?} is not known; use TimeSlicing or MPS"),
            ));
        }
    };
    Ok(Some(sharing))
}

fn interval(word: Option<String>) -> Result<Interval, ParamsError> {
    match word.as_deref() {
        None | Some("Default") => Ok(Interval::Default),
        Some("Short") => Ok(Interval::Short),
        Some("Medium") => Ok(Interval::Medium),
        Some("Long") => Ok(Interval::Long),
        Some(other) => Err(ParamsError::new(
            "sharing.timeSlicingConfig.interval",
            format!("{other:?} is not known; use Default, Short, Medium or Long"),
        )),
    }
}

/// What decodes, and no claim may say that has no device yet: a limit of less than 1 MiB. Apart from [`decode`], because
/// claims were prepared with such limits, and are read again while their pods run.
///
/// # Errors
/// The limit's path, and what was probably meant.
pub fn check_new(params: &Params) -> Result<(), ParamsError> {
    let (Params::Gpu(Some(Sharing::Mps(mps))) | Params::Mig(Some(Sharing::Mps(mps)))) = params else {
        return Ok(());
    };
    let all = mps.pinned_memory_limit.map(|limit| (format!("{MPS_AT}.{ALL_DEVICES}"), limit));
    let each = mps.per_device_pinned_memory_limit.iter();
    let each = each.map(|(device, limit)| (format!("{MPS_AT}.{PER_DEVICE}.{device}"), *limit));
    let wrong =
        |(path, limit)| gpu_share::below_the_least(limit).map(|problem| ParamsError { path, problem });
    all.into_iter().chain(each).find_map(wrong).map_or(Ok(()), Err)
}

fn mps(raw: RawMps) -> Result<MpsSettings, ParamsError> {
    if let Some(percent) = raw.default_active_thread_percentage
        && !(1..=100).contains(&percent)
    {
        return Err(ParamsError::new(
            &format!("{MPS_AT}.defaultActiveThreadPercentage"),
            format!("{percent} is out of range; write a percentage from 1 to 100"),
        ));
    }
    let limit = |path: String, quantity: Quantity| match quantity.units_ceil() {
        Some(bytes) if bytes > 0 => Ok(Bytes(bytes)),
        _ => Err(ParamsError {
            path,
            problem: format!("{quantity} is not a valid memory limit; write one such as 10Gi"),
        }),
    };
    Ok(MpsSettings {
        active_thread_percentage: raw.default_active_thread_percentage,
        pinned_memory_limit: raw
            .default_pinned_device_memory_limit
            .map(|quantity| limit(format!("{MPS_AT}.{ALL_DEVICES}"), quantity))
            .transpose()?,
        per_device_pinned_memory_limit: raw
            .default_per_device_pinned_memory_limit
            .unwrap_or_default()
            .into_iter()
            .map(|(device, quantity)| {
                let bytes = limit(format!("{MPS_AT}.{PER_DEVICE}.{device}"), quantity)?;
                Ok((device, bytes))
            })
            .collect::<Result<_, ParamsError>>()?,
        multi_user: raw.multi_user.unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn gpu_config(sharing: Value) -> Value {
        json!({"apiVersion": API_VERSION, "kind": "GpuConfig", "sharing": sharing})
    }

    #[test]
    fn time_slicing_as_users_of_nvidias_driver_write_it() {
        let config =
            gpu_config(json!({"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}}));
        assert_eq!(decode(&config), Ok(Params::Gpu(Some(Sharing::TimeSlicing(Interval::Long)))));
        let bare = json!({"apiVersion": API_VERSION, "kind": "GpuConfig"});
        assert_eq!(decode(&bare), Ok(Params::Gpu(None)));
    }

    #[test]
    fn mps_limits_are_read_with_their_units() {
        let config = gpu_config(json!({"strategy": "MPS", "mpsConfig": {
            "defaultActiveThreadPercentage": 50,
            "defaultPinnedDeviceMemoryLimit": "10Gi",
            "defaultPerDevicePinnedMemoryLimit": {"0": "5Gi"},
            "multiUser": true}}));
        let expected = MpsSettings {
            active_thread_percentage: Some(50),
            pinned_memory_limit: Some(Bytes(10 << 30)),
            per_device_pinned_memory_limit: vec![("0".to_owned(), Bytes(5 << 30))],
            multi_user: true,
        };
        assert_eq!(decode(&config), Ok(Params::Gpu(Some(Sharing::Mps(expected)))));
    }

    #[test]
    fn each_mistake_is_named_with_its_path() {
        let mig = |sharing: Value| json!({"apiVersion": API_VERSION, "kind": "MigDeviceConfig", "sharing": sharing});
        for (parameters, path, word) in [
            (json!("text"), "parameters", "object"),
            (json!({"apiVersion": "v2", "kind": "GpuConfig"}), "apiVersion", "v2"),
            (json!({"apiVersion": API_VERSION, "kind": "Gpu"}), "kind", "GpuConfig"),
            (gpu_config(json!({"strategy": "Half"})), "sharing.strategy", "MPS"),
            (gpu_config(json!({"strategy": "MPS", "mps": {}})), "sharing.mps", "unknown field"),
            (
                gpu_config(json!({"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "short"}})),
                "sharing.timeSlicingConfig.interval",
                "Short",
            ),
            (
                gpu_config(json!({"strategy": "TimeSlicing", "mpsConfig": {}})),
                "sharing.mpsConfig",
                "TimeSlicing",
            ),
            (
                gpu_config(json!({"strategy": "MPS", "timeSlicingConfig": {}})),
                "sharing.timeSlicingConfig",
                "MPS",
            ),
            (
                gpu_config(json!({"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 101}})),
                "sharing.mpsConfig.defaultActiveThreadPercentage",
                "101",
            ),
            (
                gpu_config(
                    json!({"strategy": "MPS", "mpsConfig": {"defaultPinnedDeviceMemoryLimit": "ten"}}),
                ),
                "sharing.mpsConfig.defaultPinnedDeviceMemoryLimit",
                "ten",
            ),
            (
                gpu_config(json!({"strategy": "MPS", "mpsConfig": {"defaultPinnedDeviceMemoryLimit": "0"}})),
                "sharing.mpsConfig.defaultPinnedDeviceMemoryLimit",
                "limit",
            ),
            (
                mig(json!({"strategy": "TimeSlicing", "timeSlicingConfig": {}})),
                "sharing.timeSlicingConfig",
                "unknown field",
            ),
        ] {
            let error = decode(&parameters).expect_err(&parameters.to_string());
            assert_eq!(error.path, path, "{parameters}: {error}");
            assert!(error.problem.contains(word), "{parameters}: {error}");
        }
    }

    #[test]
    fn a_limit_of_mps_below_1_mib_is_read_where_it_is_in_use_and_refused_where_it_is_new() {
        let of = |kind: &str, mps: Value| json!({"apiVersion": API_VERSION, "kind": kind, "sharing": {"strategy": "MPS", "mpsConfig": mps}});
        for kind in ["GpuConfig", "MigDeviceConfig"] {
            for (mps, words) in [
                (
                    json!({"defaultPinnedDeviceMemoryLimit": "2000"}),
                    "defaultPinnedDeviceMemoryLimit: 2000 bytes are less than 1 MiB; did you mean 2000Mi?",
                ),
                (
                    json!({"defaultPerDevicePinnedMemoryLimit": {"0": "10Gi", "1": 8000}}),
                    "defaultPerDevicePinnedMemoryLimit.1: 8000 bytes are less than 1 MiB; did you mean 8000Mi?",
                ),
                (
                    json!({"defaultPinnedDeviceMemoryLimit": "1048575"}),
                    "defaultPinnedDeviceMemoryLimit: 1048575 bytes are less than 1 MiB; did you mean 1Mi?",
                ),
            ] {
                let params = decode(&of(kind, mps)).expect("it may be a claim's that runs");
                let error = check_new(&params).unwrap_err().to_string();
                assert_eq!(error, format!("sharing.mpsConfig.{words}"));
            }
            let least = decode(&of(kind, json!({"defaultPinnedDeviceMemoryLimit": "1Mi"}))).unwrap();
            assert_eq!(check_new(&least), Ok(()));
        }
    }
}

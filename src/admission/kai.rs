//! KAI's annotations for parts of GPUs, with the rules by which KAI itself takes or refuses them (0.17, its
//! GPU request validator): what KAI refuses is refused, with the annotation's path; what it takes means the
//! same here, in exact MiB instead of hundredths of a GPU.

use serde_json::Value;

use super::review::Problem;
use super::share::COUNT_MAX;
use crate::model::quantity::Quantity;
use crate::params::Fraction;

const FRACTION: &str = "gpu-fraction";
const MEMORY: &str = "gpu-memory";
const DEVICES: &str = "gpu-fraction-num-devices";
const CONTAINER: &str = "gpu-fraction-container-name";
const MPS: &str = "mps";
const WHOLE_GPUS: &str = "nvidia.com/gpu";
/// The annotation by which kubectl knows a pod's main container.
const DEFAULT_CONTAINER: &str = "kubectl.kubernetes.io/default-container";
/// Containers that meshes and platforms put beside a pod's own: none of them uses a GPU.
const SIDECARS: [&str; 13] = [
    "cloud-sql-proxy",
    "cloudsql-proxy",
    "consul-dataplane",
    "daprd",
    "envoy",
    "envoy-sidecar",
    "istio-proxy",
    "kube-rbac-proxy",
    "kuma-sidecar",
    "linkerd-proxy",
    "oauth2-proxy",
    "queue-proxy",
    "vault-agent",
];
/// What the annotations are called that KAI reads an amount from, and what goes with it.
pub(super) const OF_A_SHARE: [&str; 5] = [FRACTION, MEMORY, DEVICES, CONTAINER, MPS];
/// A claim's amount ends where the API server's quantities do, at 2^63 - 1 bytes.
const MIB_MAX: u64 = i64::MAX as u64 >> 20;
const BILLION: u64 = 1_000_000_000;

/// What a pod's annotations ask for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WantedShare {
    pub amount: KaiAmount,
    pub count: u32,
    pub container: ContainerRef,
    /// Which of several containers that is, and why, if the pod does not name it for the share.
    pub chosen: Option<String>,
}

/// As `GpuShare` writes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum KaiAmount {
    /// A quantity in MiB: `2000Mi`.
    Memory(String),
    /// A decimal number: `0.25`.
    Fraction(String),
}

/// A container of the pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ContainerRef {
    /// `containers` or `initContainers`.
    pub list: &'static str,
    pub index: usize,
}

/// None: the pod asks for no part of a GPU.
pub(super) fn wanted(pod: &Value) -> Result<Option<WantedShare>, Vec<Problem>> {
    let annotation = |name: &str| pod["metadata"]["annotations"][name].as_str();
    let mut problems = Vec::new();
    let amount = match (annotation(FRACTION), annotation(MEMORY)) {
        (None, None) => {
            problems.extend(alone(annotation(DEVICES), annotation(MPS)));
            return if problems.is_empty() { Ok(None) } else { Err(problems) };
        }
        (Some(text), None) => fraction(text).map(KaiAmount::Fraction),
        (None, Some(text)) => memory(text).map(KaiAmount::Memory),
        (Some(_), Some(_)) => Err(problem(MEMORY, "does not go with gpu-fraction; write one of the two")),
    };
    problems.extend(whole_gpus(pod));
    let count = annotation(DEVICES).map_or(Ok(1), count);
    let container = container(pod, annotation(CONTAINER));
    match (amount, count, container) {
        (Ok(amount), Ok(count), Ok((container, chosen))) if problems.is_empty() => {
            Ok(Some(WantedShare { amount, count, container, chosen }))
        }
        (amount, count, container) => {
            problems.extend(amount.err());
            problems.extend(count.err());
            problems.extend(container.err());
            Err(problems)
        }
    }
}

fn problem(annotation: &str, words: impl Into<String>) -> Problem {
    Problem { field: format!("metadata.annotations[{annotation}]"), words: words.into() }
}

/// What means nothing without an amount.
fn alone(devices: Option<&str>, mps: Option<&str>) -> Vec<Problem> {
    let words = "has an effect only with gpu-fraction or gpu-memory; add one of them, or remove it";
    let devices = devices.map(|_| problem(DEVICES, words));
    let mps = mps.filter(|value| *value == "true").map(|_| problem(MPS, words));
    devices.into_iter().chain(mps).collect()
}

/// A decimal number, also in scientific notation, above 0 and below 1. As a decimal to the billionth, rounded
/// down, at least one: so do fractions that sum to 1 fit on one GPU.
fn fraction(text: &str) -> Result<String, Problem> {
    let bad = || {
        problem(
            FRACTION,
            format!(
                "{text:?} is not a valid fraction of a GPU; write a number above 0 and below 1, such as 0.25"
            ),
        )
    };
    let (number, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let exponent: i32 = exponent.parse().map_err(|_| bad())?;
    // KAI wants both: what Go reads as a float, and what is a quantity without a suffix.
    let float: f64 = text.parse().map_err(|_| bad())?;
    let scaled = exponent.checked_add(9).ok_or_else(bad)?;
    let billionths: Quantity = format!("{number}e{scaled}").parse().map_err(|_| bad())?;
    if !(float > 0.0 && float < 1.0) {
        return Err(bad());
    }
    // Below 1: not more than a billion, rounded up.
    let up = billionths.units_ceil().filter(|up| (1..=BILLION).contains(up)).ok_or_else(bad)?;
    let part = if billionths.is_whole() { up } else { up - 1 };
    let decimal = format!("0.{:09}", part.clamp(1, BILLION - 1)).trim_end_matches('0').to_owned();
    decimal.parse::<Fraction>().map_err(|_| bad())?;
    Ok(decimal)
}

/// Whole MiB without a unit.
fn memory(text: &str) -> Result<String, Problem> {
    match number(text) {
        Some(mib @ 1..=MIB_MAX) => Ok(format!("{mib}Mi")),
        Some(mib) if mib > MIB_MAX => Err(problem(MEMORY, format!("{text} MiB is more than any GPU has"))),
        _ => Err(problem(
            MEMORY,
            format!(
                "{text:?} is not a valid amount of memory; write whole MiB above 0 without a unit, such as 2000"
            ),
        )),
    }
}

fn count(text: &str) -> Result<u32, Problem> {
    match number(text).map(u32::try_from) {
        Some(Ok(count @ 1..=COUNT_MAX)) => Ok(count),
        Some(Ok(0)) | None => Err(problem(
            DEVICES,
            format!("{text:?} is not a valid number of GPUs; write a whole number above 0"),
        )),
        Some(_) => Err(problem(
            DEVICES,
            format!("{text} GPUs are more than a claim can have; write at most {COUNT_MAX}"),
        )),
    }
}

/// Digits and nothing else.
fn number(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().unwrap_or(u64::MAX))
}

fn all_containers(pod: &Value) -> impl Iterator<Item = (ContainerRef, &Value)> {
    ["containers", "initContainers"].into_iter().flat_map(move |list| {
        let containers = pod["spec"][list].as_array().into_iter().flatten().enumerate();
        containers.map(move |(index, container)| (ContainerRef { list, index }, container))
    })
}

/// Whole GPUs beside a part of one.
fn whole_gpus(pod: &Value) -> Option<Problem> {
    let (ContainerRef { list, index }, _) =
        all_containers(pod).find(|(_, container)| !container["resources"]["limits"][WHOLE_GPUS].is_null())?;
    Some(Problem {
        field: format!("spec.{list}[{index}].resources.limits[{WHOLE_GPUS}]"),
        words: "whole GPUs do not go with gpu-fraction or gpu-memory; remove the limit or the annotation"
            .to_owned(),
    })
}

/// The one that is named, regular or init. Else of the regular ones the pod's main one, as kubectl knows it, or the
/// first that is no sidecar; of several it is told which.
fn container(pod: &Value, named: Option<&str>) -> Result<(ContainerRef, Option<String>), Problem> {
    let Some(name) = named else { return main_container(pod) };
    let found = all_containers(pod).find(|(_, container)| container["name"] == name);
    found.map(|(place, _)| (place, None)).ok_or_else(|| {
        let names: Vec<&str> =
            all_containers(pod).filter_map(|(_, container)| container["name"].as_str()).collect();
        problem(
            CONTAINER,
            format!("the pod has no container {name:?}; its containers are {}", names.join(", ")),
        )
    })
}

fn main_container(pod: &Value) -> Result<(ContainerRef, Option<String>), Problem> {
    let regular: Vec<(ContainerRef, &str)> = all_containers(pod)
        .filter(|(place, _)| place.list == "containers")
        .map(|(place, container)| (place, container["name"].as_str().unwrap_or_default()))
        .collect();
    let said = pod["metadata"]["annotations"][DEFAULT_CONTAINER].as_str();
    let main = regular.iter().find(|(_, name)| Some(*name) == said);
    let first = || regular.iter().find(|(_, name)| !SIDECARS.contains(name)).or(regular.first());
    let (chosen, why) = match main {
        Some(main) => (Some(main), format!("as {DEFAULT_CONTAINER} says")),
        None => (first(), "the first that is no known sidecar".to_owned()),
    };
    let Some((place, name)) = chosen else {
        return Err(Problem {
            field: "spec.containers".to_owned(),
            words: "the pod has no container that could get the share".to_owned(),
        });
    };
    let words = format!(
        "metadata.annotations[{CONTAINER}]: not set, so container {name:?} gets the share, {why}; name another if that is \
         wrong"
    );
    Ok((place.clone(), (regular.len() > 1).then_some(words)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(annotations: Value) -> Value {
        json!({"metadata": {"annotations": annotations}, "spec": {
            "containers": [{"name": "main"}, {"name": "side"}], "initContainers": [{"name": "setup"}]}})
    }

    fn taken(annotations: Value) -> WantedShare {
        wanted(&pod(annotations.clone())).unwrap_or_else(|said| panic!("{annotations}: {said:?}")).unwrap()
    }

    fn refused(pod: &Value) -> Vec<String> {
        let problems = wanted(pod).expect_err(&pod.to_string());
        problems.into_iter().map(|problem| format!("{}: {}", problem.field, problem.words)).collect()
    }

    #[test]
    fn amounts_that_kai_takes() {
        for (text, decimal) in [
            ("0.2", "0.2"),
            ("0.25", "0.25"),
            (".5", "0.5"),
            ("+0.5", "0.5"),
            ("0.500", "0.5"),
            ("5e-1", "0.5"),
            ("2.5E-1", "0.25"),
            ("0.01e+1", "0.1"),
            ("0.333333333", "0.333333333"),
            // Finer than a billionth: rounded down, as the MiB are.
            ("0.3333333333", "0.333333333"),
            ("1.2e-10", "0.000000001"),
            ("0.9999999999", "0.999999999"),
        ] {
            assert_eq!(
                taken(json!({FRACTION: text})).amount,
                KaiAmount::Fraction(decimal.to_owned()),
                "{text}"
            );
        }
        for (text, quantity) in
            [("2000", "2000Mi"), ("1", "1Mi"), ("007", "7Mi"), ("8796093022207", "8796093022207Mi")]
        {
            assert_eq!(taken(json!({MEMORY: text})).amount, KaiAmount::Memory(quantity.to_owned()), "{text}");
        }
        for (text, count) in [("1", 1), ("8", 8), ("32", 32)] {
            assert_eq!(taken(json!({MEMORY: "1", DEVICES: text})).count, count);
        }
        assert_eq!(taken(json!({FRACTION: "0.5", DEVICES: "2", MPS: "true"})).count, 2);
    }

    #[test]
    fn amounts_that_kai_refuses() {
        for text in [
            "0",
            "0.0",
            "1",
            "1.0",
            "1.2",
            "-0.5",
            "-1",
            "NaN",
            "nan",
            "Inf",
            "-inf",
            "0x1p-1",
            "250m",
            "0.5Gi",
            "",
            " 0.5",
            "0.5 ",
            "0,5",
            "half",
            "1e",
            "1e-400",
            "1E",
            "5e-1x",
            "1_0e-2",
            "e-1",
            "0.5.0",
            "99999999999999999999999e-23",
            "1e-2147483648",
            "0.99999999999999999999",
        ] {
            let told = refused(&pod(json!({FRACTION: text})));
            assert_eq!(told.len(), 1, "{text}: {told:?}");
            assert!(told[0].starts_with("metadata.annotations[gpu-fraction]: "), "{text}: {told:?}");
        }
        for text in [
            "0",
            "-1",
            "+5",
            "1.5",
            "2000Mi",
            "2Gi",
            "",
            " 1",
            "1e3",
            "0x10",
            "8796093022208",
            "99999999999999999999999",
        ] {
            let told = refused(&pod(json!({MEMORY: text})));
            assert!(told[0].starts_with("metadata.annotations[gpu-memory]: "), "{text}: {told:?}");
        }
        for text in ["0", "-1", "1.2", "two", "", "33", "4294967297", "99999999999999999999999"] {
            let told = refused(&pod(json!({FRACTION: "0.5", DEVICES: text})));
            assert!(
                told[0].starts_with("metadata.annotations[gpu-fraction-num-devices]: "),
                "{text}: {told:?}"
            );
        }
    }

    #[test]
    fn combinations_that_kai_refuses() {
        let told = refused(&pod(json!({FRACTION: "0.5", MEMORY: "1"})));
        assert_eq!(
            told,
            ["metadata.annotations[gpu-memory]: does not go with gpu-fraction; write one of the two"]
        );
        for alone in [json!({DEVICES: "1"}), json!({MPS: "true"})] {
            assert!(refused(&pod(alone))[0].contains("has an effect only with gpu-fraction or gpu-memory"));
        }
        for (list, index) in [("containers", 1), ("initContainers", 0)] {
            // Even none of them: KAI asks whether the limit is there.
            for count in ["1", "0"] {
                let mut both = pod(json!({FRACTION: "0.5"}));
                both["spec"][list][index]["resources"] = json!({"limits": {WHOLE_GPUS: count}});
                let told = refused(&both);
                let start = format!("spec.{list}[{index}].resources.limits[nvidia.com/gpu]: ");
                assert!(told[0].starts_with(&start), "{told:?}");
            }
        }
        // All at once.
        let told = refused(&pod(json!({FRACTION: "2", DEVICES: "0", CONTAINER: "none"})));
        assert_eq!(told.len(), 3, "{told:?}");
    }

    #[test]
    fn of_several_containers_the_main_one_gets_the_share_and_a_warning_says_which() {
        let chosen = |containers: &[&str], annotations: Value| {
            let containers: Vec<Value> = containers.iter().map(|name| json!({"name": name})).collect();
            let mut all = json!({FRACTION: "0.5"});
            all.as_object_mut().unwrap().extend(annotations.as_object().unwrap().clone());
            let pod = json!({"metadata": {"annotations": all}, "spec": {"containers": containers}});
            let wanted = wanted(&pod).unwrap().unwrap();
            (wanted.container.index, wanted.chosen)
        };
        let main = |name: &str| json!({DEFAULT_CONTAINER: name});
        for (containers, annotations, index, words) in [
            (
                &["istio-proxy", "train"][..],
                json!({}),
                1,
                Some("container \"train\" gets the share, the first that"),
            ),
            (
                &["a", "b"],
                json!({}),
                0,
                Some("container \"a\" gets the share, the first that is no known sidecar;"),
            ),
            (
                &["a", "b"],
                main("b"),
                1,
                Some("container \"b\" gets the share, as kubectl.kubernetes.io/default-container"),
            ),
            (&["a", "b"], main("gone"), 0, Some("container \"a\"")),
            // Nothing but sidecars: one of them must be meant.
            (&["envoy", "istio-proxy"], json!({}), 0, Some("container \"envoy\"")),
            (&["envoy"], json!({}), 0, None),
            (&["a"], main("a"), 0, None),
            (&["a", "b"], json!({CONTAINER: "b"}), 1, None),
        ] {
            let (found, told) = chosen(containers, annotations.clone());
            assert_eq!(found, index, "{containers:?} {annotations}: {told:?}");
            assert_eq!(told.is_some(), words.is_some(), "{containers:?} {annotations}: {told:?}");
            assert!(told.iter().all(|told| told.contains(words.unwrap())), "{told:?}");
        }
    }

    #[test]
    fn the_container_is_the_first_or_the_one_that_is_named() {
        let place = |list, index| ContainerRef { list, index };
        assert_eq!(taken(json!({FRACTION: "0.5"})).container, place("containers", 0));
        let named = |name: &str| json!({FRACTION: "0.5", CONTAINER: name});
        assert_eq!(taken(named("side")).container, place("containers", 1));
        assert_eq!(taken(named("setup")).container, place("initContainers", 0));
        let told = refused(&pod(named("none")));
        assert!(told[0].ends_with("no container \"none\"; its containers are main, side, setup"), "{told:?}");
    }

    #[test]
    fn pods_that_ask_for_nothing_are_let_be() {
        for annotations in [json!({}), json!({CONTAINER: "none"}), json!({MPS: "false"}), Value::Null] {
            assert_eq!(wanted(&pod(annotations)), Ok(None));
        }
        assert_eq!(wanted(&json!({})), Ok(None));
        assert_eq!(wanted(&json!("text")), Ok(None));
    }
}

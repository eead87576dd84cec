//! Single words of users and administrators.

use tranche::allocate::Policy;
use tranche::cdi;
use tranche::cli;
use tranche::model::names::{DeviceName, NodeName};
use tranche::model::quantity::{Bytes, Quantity};
use tranche::params::Fraction;
use tranche::select::QualifiedName;
use tranche::sharing::GpuSelector;

use super::texts;
use crate::driver::{Form, Limits, Target};

const NUMBERS: &[&str] = &[
    "0.",
    ".",
    "+",
    "-",
    "e",
    "E",
    "e-",
    "n",
    "u",
    "m",
    "k",
    "M",
    "G",
    "T",
    "P",
    "E",
    "Ki",
    "Mi",
    "Gi",
    "Ti",
    "Pi",
    "Ei",
    "e18",
    "e-9",
    "e2147483647",
    "E-2147483648",
    "000000000000000000000",
    "99999999999999999999",
];

pub fn targets() -> Vec<Target> {
    vec![
        Target {
            name: "quantity",
            seeds: || texts(&["2000Mi", "1.5Gi", "100m", "1e3", "-1", "0", "8Ei", "1n", "0.0000000001"]),
            words: NUMBERS,
            form: Form::Text,
            limits: Limits::PARSER,
            run: quantity,
        },
        Target {
            name: "fraction",
            seeds: || texts(&["0.25", "1", "1.0", ".5", "0.000000001", "0.999999999"]),
            words: NUMBERS,
            form: Form::Text,
            limits: Limits::PARSER,
            run: fraction,
        },
        Target {
            name: "names",
            seeds: || {
                texts(&[
                    "pack",
                    "fragmentation",
                    "all",
                    "GPU-5f1c0f2e-8d0a-4d1a-9d59-1f2b3c4d5e6f",
                    "resource.kubernetes.io/pcieRoot",
                    "k8s.gpu.nvidia.com-claim_1b4e28ba-2fa1-11d2-883f-0016d3cca427.json",
                ])
            },
            words: &[
                "/", "../", "GPU-", "=", ",", "::", "[", "{", "}", "]", "trace", "off", ".json", "claim_",
            ],
            form: Form::Text,
            limits: Limits::PARSER,
            run: names,
        },
        Target {
            name: "log-filter",
            seeds: || texts(&["info,tranche::node=debug", "debug,[span{field=1}]=trace", "tranche[a]=off"]),
            words: &[
                "=", ",", "::", "[", "{", "}", "]", "trace", "off", "info", "field=", "(x*)*", "\u{2028}",
            ],
            form: Form::Text,
            // A filter may have patterns, which are compiled; only an administrator sets one.
            limits: Limits { length: 400, millis: 1000, bytes: 8 << 20, per_byte: 2000 },
            run: log_filter,
        },
        Target {
            name: "flags",
            seeds: || {
                texts(&[
                    "node\n--node-name\na\n--exclusive-gpus\n0,3\n--sweep-interval\n60s",
                    "mps\n--node-name\na",
                    "controller\n--webhook\ntrue\n--policy\npack",
                    "explain\nclaim/ml/a",
                    "plan\n--gpus\n8xh100\nclaim.yaml",
                    "simulate\n--policy\nspread",
                ])
            },
            words: &[
                "\n",
                "--",
                "=",
                "60s",
                "1h",
                "-1",
                "0.0.0.0:8080",
                "[::]:0",
                ",",
                "pod/",
                "claim/",
                "a/b",
                "8x",
            ],
            form: Form::Text,
            limits: Limits { length: 1 << 10, millis: 2000, bytes: 8 << 20, per_byte: 1000 },
            run: flags,
        },
    ]
}

fn quantity(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let Ok(quantity) = text.parse::<Quantity>() else { return };
    let _ = (quantity.units_ceil(), quantity.is_whole(), quantity == Quantity::from_units(1));
    let again = quantity.to_string().parse::<Quantity>();
    assert_eq!(again, Ok(quantity), "{text:?} was written as {quantity}");
}

fn fraction(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let Ok(fraction) = text.parse::<Fraction>() else { return };
    for total in [0, 1, 1 << 20, 80 << 30, u64::MAX] {
        assert!(fraction.of(Bytes(total)).0 <= total, "{text:?} of {total}");
    }
    assert!(fraction.percent().is_some(), "{text:?}");
}

fn names(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let _ = (text.parse::<Policy>(), text.parse::<GpuSelector>().map(|one| one.to_string()));
    let _ = (QualifiedName::of(&text, "gpu.nvidia.com"), QualifiedName::full(&text));
    if let Some(claim) = cdi::claim_of(&text) {
        assert_eq!(cdi::file_name(&claim), text, "a file's name is its claim's");
        let _ = cdi::id(&claim, &DeviceName::new(text.as_ref()), Some(&text));
    }
    let _ = NodeName::new(text.as_ref()).to_string();
}

fn log_filter(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let _ = tranche::ops::logs::check(text).map_err(|error| error.to_string());
}

/// A command line, one argument a line; a NUL ends arguments anywhere, so it is left out.
fn flags(input: &[u8]) {
    let text = String::from_utf8_lossy(input).replace('\0', "");
    let args = std::iter::once("tranche").chain(text.lines()).map(Into::into);
    let Ok(cli::Cli { log, command, .. }) = cli::parse(args) else { return };
    let _ = cli::settings::log(log.clone());
    match command {
        cli::Command::Node(args) => drop(cli::settings::log_and_node(log, *args)),
        cli::Command::Mps(args) => drop(cli::settings::log_and_mps(log, *args)),
        cli::Command::Controller(args) => drop(cli::settings::log_and_controller(log, *args)),
        _ => {}
    }
}

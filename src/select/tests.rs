use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::Device;
use proptest::prelude::*;
use serde::Deserialize;

use super::*;

const DEVICES: &str = include_str!("../../tests/data/select/devices.json");
const CASES: &str = include_str!("../../tests/data/select/cases.txt");

fn devices() -> BTreeMap<String, DeviceFacts> {
    #[derive(Deserialize)]
    struct Entry {
        driver: String,
        device: Device,
    }
    let all: BTreeMap<String, Entry> = serde_json::from_str(DEVICES).unwrap();
    all.into_iter().map(|(name, entry)| (name, DeviceFacts::of(&entry.driver, &entry.device))).collect()
}

/// Line number, device, what is expected, expression.
fn cases() -> impl Iterator<Item = (usize, &'static str, &'static str, &'static str)> {
    let lines = CASES.lines().enumerate().map(|(at, line)| (at + 1, line.trim()));
    lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#')).map(|(at, line)| {
        let (device, rest) = line.split_once(' ').unwrap();
        let (expected, expression) = rest.trim_start().split_once(' ').unwrap();
        (at, device, expected, expression.trim_start())
    })
}

fn outcome(expression: &str, device: &DeviceFacts) -> (String, Option<SelectError>) {
    match Selector::compile(expression).and_then(|selector| selector.matches(device)) {
        Ok(truth) => (truth.to_string(), None),
        Err(error) if matches!(error, SelectError::Failed { .. }) || error.is_of_cost() => {
            ("fails".to_owned(), Some(error))
        }
        Err(error) => ("refused".to_owned(), Some(error)),
    }
}

#[test]
fn every_case_comes_out_as_the_list_says() {
    let devices = devices();
    let mut wrong = Vec::new();
    for (line, device, expected, expression) in cases() {
        let (found, error) = outcome(expression, &devices[device]);
        if found != expected {
            wrong.push(format!("line {line}: {expression}\n  {found} where {expected} is due: {error:?}"));
        }
        if let Some(error) = error {
            assert!(error.to_string().contains(&format!("{expression:?}")), "line {line}: {error}");
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(cases().count() >= 40);
}

#[test]
fn an_answer_depends_on_nothing_but_what_is_read() {
    let devices = devices();
    for (line, _, _, expression) in cases() {
        let Ok(selector) = Selector::compile(expression) else { continue };
        let reads = selector.reads();
        for one in devices.values() {
            for other in devices.values().filter(|other| reads.values_read(one) == reads.values_read(other)) {
                assert_eq!(selector.matches(one), selector.matches(other), "line {line}: {expression}");
            }
        }
    }
    let reads = |text: &str| Selector::compile(text).unwrap().reads();
    let (h100, mut twin) = (&devices["h100"], devices["h100"].clone());
    let uuid = QualifiedName::of("uuid", "gpu.nvidia.com");
    twin.attributes = twin.attributes.with(uuid, AttributeValue::String("GPU-2".to_owned()));
    for (text, alike) in [
        ("device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'", true),
        ("cel.bind(gpu, device.attributes['gpu.nvidia.com'], gpu.type == 'gpu')", true),
        ("cel.bind(gpu, device.attributes['gpu.nvidia.com'], gpu.uuid == 'GPU-1')", false),
        ("'type' in device.attributes['gpu.nvidia.com']", true),
        ("has(device.attributes['gpu.nvidia.com'].uuid)", false),
        ("device.attributes['gpu.nvidia.com'].?uuid.optMap(u, true).hasValue()", false),
        ("device.capacity['gpu.nvidia.com'].?memory.hasValue()", true),
        ("device.attributes['gpu.nvidia.com'].exists(name, name == 'uuid')", false),
    ] {
        let reads = reads(text);
        assert_eq!(reads.values_read(h100) == reads.values_read(&twin), alike, "{text}");
    }
}

#[test]
fn a_refusal_says_what_is_wrong_and_where() {
    let device = &devices()["h100"];
    for (expression, words) in [
        (
            "device.attributes['gpu.nvidia.com'].nosuch == 1",
            "fails: the device has no attribute nosuch in the domain gpu.nvidia.com",
        ),
        ("device.driver", "it gives a string where true or false is expected"),
        ("device.driver ==\n== 'a'", "is not valid CEL, line 2, column 1"),
        ("device.driver == 'a", "is not valid CEL, line 1, column 18: unterminated string"),
        ("1 == 1 é", "is not valid CEL, line 1, column 8"),
        ("device.nosuch", "device has no field nosuch; it has driver, attributes, capacity"),
        ("device.driver.reverse() == 'gpu'", "cannot be evaluated here: there is no function reverse"),
        ("device.driver.contains('a', 'b')", "contains does not take that many arguments"),
        ("quantity('10GB').sign() == 1", "\"10GB\" is not a quantity"),
        ("device.driver.matches('(')", "the pattern \"(\": error: unclosed group"),
    ] {
        let (_, error) = outcome(expression, device);
        let found = error.unwrap().to_string();
        assert!(found.contains(words), "{found}\nshould say: {words}");
    }
}

#[test]
fn what_costs_too_much_is_given_up() {
    let device = &devices()["h100"];
    let long = format!("device.driver == '{}'", "x".repeat(TEXT_BYTES_MAX));
    assert!(matches!(Selector::compile(&long), Err(SelectError::TooLong(_))));
    for (what, text) in [
        ("brackets", format!("{}true{}", "(".repeat(3000), ")".repeat(3000))),
        ("brackets in brackets", format!("{}1{} == 1", "(0+".repeat(2000), ")".repeat(2000))),
        ("sums", format!("1{} > 0", "+1".repeat(4000))),
        ("negations", format!("{}true", "!".repeat(9000))),
        ("conditions", format!("{}true", "true ? true : ".repeat(700))),
        ("members", format!("device{}", ".a".repeat(4000))),
        ("lists", format!("{}{}", "[".repeat(4000), "]".repeat(4000))),
        ("both", format!("true && 1+{}1 == 1", "-".repeat(5000))),
    ] {
        assert!(matches!(Selector::compile(&text), Err(SelectError::TooDeep { .. })), "{what}");
    }
    let wide = vec!["device.driver == 'a'"; 400].join(" || ");
    assert_eq!(outcome(&wide, device).0, "false", "width is no depth");
    let lists = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    for deep in
        [format!("0{} == 97", "+1".repeat(97)), format!("{0} == {0}", lists(95)), "!".repeat(98) + "true"]
    {
        assert_eq!(outcome(&deep, device).0, "true", "{deep}");
    }
    let error = outcome(&format!("{wide} || 1"), device).1.unwrap().to_string();
    assert!(error.len() < 500, "told in short: {error}");
    let ten = "[0,1,2,3,4,5,6,7,8,9]";
    let nested = (0..7).fold("false".to_owned(), |inner, nth| format!("{ten}.exists(x{nth}, {inner})"));
    let doubling = (0..40).fold("size(v) == 1".to_owned(), |inner, _| format!("cel.bind(v, v + v, {inner})"));
    for text in [nested, format!("cel.bind(v, '{}', {doubling})", "x".repeat(64))] {
        let found = Selector::compile(&text).unwrap().matches(device);
        assert!(matches!(found, Err(SelectError::TooCostly { .. })), "{found:?}");
    }
}

/// Ten of the last, in a list, for so many levels; the last one is compared with itself.
fn nested(levels: usize) -> String {
    let ten = |of: &str| format!("[{}]", [of; 10].join(","));
    let name = |nth: usize| char::from(b'a' + nth as u8).to_string();
    let last = name(levels - 1);
    (0..levels).rev().fold(format!("{last} == {last}"), |body, nth| {
        let of = if nth == 0 { "1".to_owned() } else { name(nth - 1) };
        format!("[{}].all({}, {body})", ten(&of), name(nth))
    })
}

/// A text of 64 bytes doubled so many times.
fn doubled(times: usize, body: &str) -> String {
    let doubling = (0..times).fold(body.to_owned(), |inner, _| format!("cel.bind(v, v + v, {inner})"));
    format!("cel.bind(v, '{}', {doubling})", "x".repeat(64))
}

/// What the evaluation of a text has cost, in units, and what came of it.
fn cost(text: &str) -> (u64, Result<bool, SelectError>) {
    let (found, ticks) = Selector::compile(text).unwrap().look(&devices()["h100"]);
    (ticks / TICKS_PER_UNIT, found)
}

#[test]
fn each_element_that_is_compared_is_paid_for() {
    for levels in 1..6 {
        let (cost, found) = cost(&nested(levels));
        assert_eq!(found, Ok(true), "{levels} levels");
        assert!(cost >= 10_u64.pow(levels as u32) / 5, "{levels} levels cost {cost}");
    }
    for levels in [7, 9, 12] {
        let text = nested(levels);
        assert!(text.len() < 1000, "{}", text.len());
        let begun = std::time::Instant::now();
        let (cost, found) = cost(&text);
        assert!(matches!(found, Err(SelectError::TooCostly { .. })), "{levels} levels: {found:?}");
        assert!(cost <= COST_MAX + 10, "{levels} levels cost {cost}");
        // Seconds in a build without optimisation; unbounded, the deepest would take days.
        assert!(begun.elapsed().as_secs() < 120, "{levels} levels took {:?}", begun.elapsed());
    }
    let words = cost(&nested(12)).1.unwrap_err().to_string();
    assert!(words.contains("costs more than 2000000 on one device"), "{words}");
    // The same work by other doors.
    let ten = "[0,1,2,3,4,5,6,7,8,9]";
    let often = |body: &str| (0..4).fold(body.to_owned(), |all, nth| format!("{ten}.all(i{nth}, {all})"));
    let long = format!("[{}]", vec!["1"; 1000].join(","));
    for body in [
        "v in [w, w, v]".to_owned(),
        "[w, w, v].includes(v)".to_owned(),
        "!(v != v)".to_owned(),
        "optional.of(v) == optional.of(v)".to_owned(),
        "{w: 1, v: 2}[v] == 2".to_owned(),
        "(v + v).size() > 0".to_owned(),
        "v.all(e, true)".to_owned(),
    ] {
        let text = format!("cel.bind(w, [{long}, 2], cel.bind(v, [{long}, 1], {}))", often(&body));
        let text = text.replace("(v + v)", &format!("({long} + {long})"));
        let (_, found) = cost(&text.replace("v.all(e", &format!("{long}.all(e")));
        assert!(found.is_err_and(|error| error.is_of_cost()), "{body}");
    }
}

#[test]
fn texts_are_shared_and_what_is_made_is_counted() {
    // 64 KiB of text, a thousand times in a list: no copies.
    let list = format!("[{}].size() == 1000", vec!["v"; 1000].join(","));
    assert_eq!(cost(&doubled(10, &list)).1, Ok(true));
    // The sums themselves are copies: of 16 MiB, of which the API server, too, would have none.
    let found = cost(&doubled(18, &format!("size(v) > 0 && {list}"))).1;
    assert!(found.unwrap_err().is_of_cost());
    let often = |body: &str| {
        let ten = "[0,1,2,3,4,5,6,7,8,9]";
        (0..4).fold(body.to_owned(), |all, nth| format!("{ten}.all(i{nth}, {all})"))
    };
    for body in [
        "(v + 'a').size() > 0",
        "v.lowerAscii().size() > 0",
        "v.trim() == v",
        "v.contains('xy') || true",
        "isQuantity(v) || true",
        "isSemver(v) || true",
        "v.matches('y$') || true",
        "v.endsWith(v)",
        "v <= v",
        "v == v + ''",
    ] {
        let found = cost(&doubled(10, &often(body))).1;
        assert!(found.is_err_and(|error| error.is_of_cost()), "{body}");
    }
    // What fails tells of long texts in short.
    for body in ["int(v) == 1", "device.attributes[v].x", "semver(v).major() == 1", "{'a': 1}[v] == 1"] {
        let error = cost(&doubled(10, body)).1.unwrap_err().to_string();
        assert!(error.len() < 2000, "{body}: {} bytes", error.len());
    }
}

#[test]
fn a_list_that_swells_is_given_up() {
    let hundred = format!("[{}]", (0..100).map(|n| n.to_string()).collect::<Vec<_>>().join(","));
    let text = format!("{hundred}.map(a, {hundred}.map(b, [device,device,device,device])).size() > 0");
    assert_eq!(cost(&text).1, Ok(true));
    let nine = (0..40).fold("size(v) == 1".to_owned(), |inner, _| format!("cel.bind(v, v + v, {inner})"));
    let found = cost(&format!("cel.bind(v, {hundred}, {nine})")).1;
    assert!(found.is_err_and(|error| error.is_of_cost()));
    // In smaller steps: for its memory, before its cost would have ended it.
    let sums = vec!["size(v + [1]) > 0"; 25].join(" && ");
    let ten = (0..10).fold(sums, |inner, _| format!("cel.bind(v, v + v, {inner})"));
    let (cost, found) = cost(&format!("cel.bind(v, {hundred}, {ten})"));
    assert!(matches!(found, Err(SelectError::TooLarge { .. })), "{found:?}");
    assert!(cost < COST_MAX, "{cost}");
}

#[test]
fn a_pattern_costs_what_it_may_take() {
    let bits: String =
        (0..4000_u32).map(|n| if n.wrapping_mul(2_654_435_761) >> 13 & 1 == 0 { '0' } else { '1' }).collect();
    let (few, _) = cost(&format!("'{bits}'.matches('^01')"));
    let (many, _) = cost(&format!("'{bits}'.matches('[01]*1[01]{{400}}z')"));
    assert!(many > 20 * few, "{few} {many}");
    let big = "device.driver.matches('\\\\w\\\\w\\\\w') || ".repeat(200) + "true";
    let refused = Selector::compile(&big).unwrap_err().to_string();
    assert!(refused.contains("patterns are too large in all"), "{refused}");
}

/// What people write costs about what the API server says.
#[test]
fn what_is_usual_is_cheap() {
    for (text, most) in [
        ("device.driver == 'gpu.nvidia.com'", 6),
        ("device.attributes['gpu.nvidia.com'].productName.startsWith('NVIDIA H100')", 10),
        ("device.attributes['gpu.nvidia.com'].productName.matches('^NVIDIA H(100|200)')", 70),
        ("device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('40Gi')) >= 0", 12),
    ] {
        let (cost, found) = cost(text);
        assert!(found.is_ok() && cost <= most, "{text}: {cost}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Whatever is written: an answer or a refusal, never a panic.
    #[test]
    fn nothing_panics(text in "[-a-z0-9 .,:?!&|=<>+*/%'\"\\\\()\\[\\]{}`_é@]{0,60}") {
        let found = Selector::compile(&text).and_then(|selector| selector.matches(&DeviceFacts::default()));
        prop_assert!(found.is_ok() || found.is_err());
    }

    /// The same with whole words, which get further.
    #[test]
    fn nothing_panics_on_words(words in proptest::collection::vec(prop_oneof![
        Just("device"), Just("."), Just("attributes"), Just("['a.b']"), Just("[?'x']"), Just(".?"), Just("has("),
        Just("("), Just(")"), Just("=="), Just("&&"), Just("||"), Just("?"), Just(":"), Just("1"), Just("'t'"),
        Just("in"), Just("["), Just("]"), Just("{"), Just("}"), Just(","), Just("!"), Just("-"), Just("x"),
        Just(".exists(x, "), Just(".map(x, "), Just("cel.bind(x, "), Just("quantity("), Just(".orValue("),
        Just("9223372036854775808"), Just("0x"), Just("1e5"), Just("b'x'"), Just("r'\\'"), Just("'\\u12'"), Just("\"\"\"")
    ], 0..12)) {
        let found = Selector::compile(&words.concat()).and_then(|one| one.matches(&devices()["h100"]));
        prop_assert!(found.is_ok() || found.is_err());
    }
}

//! Inputs made of other inputs, as JSON: shapes that fit and contents that do not.

use fastrand::Rng;
use serde_json::{Map, Value, json};

use super::mutate::{self, Pool};

/// JSON made of JSON; now and then broken as text.
pub fn mutated(from: &[u8], pool: &Pool, length: usize, rng: &mut Rng) -> Vec<u8> {
    let Ok(mut value) = serde_json::from_slice::<Value>(from) else {
        return mutate::text(from, pool, length, rng);
    };
    for _ in 0..1 << rng.u32(0..4) {
        change(&mut value, pool, rng);
    }
    written(&value, pool, length, rng)
}

/// The text of a value; of eight, one is broken.
pub fn written(value: &Value, pool: &Pool, length: usize, rng: &mut Rng) -> Vec<u8> {
    let bytes = serde_json::to_vec(value).unwrap_or_default();
    if rng.u8(0..8) == 0 || bytes.len() > length { mutate::text(&bytes, pool, length, rng) } else { bytes }
}

/// Changes one place.
pub fn change(value: &mut Value, pool: &Pool, rng: &mut Rng) {
    let count = size(value);
    let mut at = rng.usize(0..count);
    // What is deep down is most of it, and what is near the top matters more.
    if rng.bool() {
        at = rng.usize(0..=at);
    }
    let Some(found) = nth(value, &mut at) else { return };
    match found {
        Value::Object(map) => of_object(map, pool, rng),
        Value::Array(list) => of_list(list, pool, rng),
        Value::String(text) if rng.u8(0..4) > 0 => {
            let other = mutate::text(text.as_bytes(), pool, 4 << 10, rng);
            *text = String::from_utf8_lossy(&other).into_owned();
        }
        other => *other = odd(pool, rng),
    }
}

fn of_object(map: &mut Map<String, Value>, pool: &Pool, rng: &mut Rng) {
    let key = rng.choice(map.keys()).cloned();
    match (rng.u8(0..6), key) {
        (0, Some(key)) => drop(map.remove(&key)),
        (1, Some(key)) => {
            let value = map.remove(&key).unwrap_or_default();
            map.insert(word(pool, rng), value);
        }
        (2, Some(key)) => drop(map.insert(key, odd(pool, rng))),
        (3, Some(key)) => drop(map.insert(key, part(pool, rng))),
        (4, _) => drop(map.insert(word(pool, rng), part(pool, rng))),
        _ => drop(map.insert(word(pool, rng), odd(pool, rng))),
    }
}

fn of_list(list: &mut Vec<Value>, pool: &Pool, rng: &mut Rng) {
    let at = rng.usize(0..=list.len());
    match rng.u8(0..5) {
        0 if at < list.len() => drop(list.remove(at)),
        1 if at < list.len() => {
            let copy = list[at].clone();
            let times = 1 << rng.u32(0..if size(&copy) < 100 { 8 } else { 3 });
            list.extend(std::iter::repeat_n(copy, times));
        }
        2 if at < list.len() => list.swap(0, at),
        3 => list.insert(at, part(pool, rng)),
        _ => list.insert(at, odd(pool, rng)),
    }
}

/// Any part of another input.
fn part(pool: &Pool, rng: &mut Rng) -> Value {
    let Ok(mut other) = serde_json::from_slice::<Value>(pool.pick(rng)) else { return odd(pool, rng) };
    let mut at = rng.usize(0..size(&other));
    nth(&mut other, &mut at).map(Value::take).unwrap_or_default()
}

fn word(pool: &Pool, rng: &mut Rng) -> String {
    String::from_utf8_lossy(pool.word(rng)).into_owned()
}

/// Values that trip readers.
fn odd(pool: &Pool, rng: &mut Rng) -> Value {
    match rng.u8(0..16) {
        0 => Value::Null,
        1 => rng.bool().into(),
        2 => (-1).into(),
        3 => u64::MAX.into(),
        4 => i64::MIN.into(),
        5 => {
            rng.choice([0_u64, 1, 31, 32, 33, 1 << 31, 1 << 32, 1 << 53, 1 << 63]).unwrap_or_default().into()
        }
        6 => rng.choice([0.5, -0.0, 1e308, 1e-308]).unwrap_or_default().into(),
        7 => json!({}),
        8 => json!([]),
        9 => word(pool, rng).repeat(1 << rng.u32(0..10)).into(),
        10 => (0..rng.u32(1..120)).fold(json!(1), |inner, _| json!([inner])),
        11 => (0..rng.u32(1..120)).fold(json!(1), |inner, _| json!({"a": inner})),
        12 => json!(vec![json!({"": 0}); 1 << rng.u32(0..8)]),
        _ => word(pool, rng).into(),
    }
}

fn size(value: &Value) -> usize {
    1 + match value {
        Value::Array(list) => list.iter().map(size).sum(),
        Value::Object(map) => map.values().map(size).sum(),
        _ => 0,
    }
}

/// The value that is so many steps from here.
fn nth<'a>(value: &'a mut Value, steps: &mut usize) -> Option<&'a mut Value> {
    if *steps == 0 {
        return Some(value);
    }
    *steps -= 1;
    match value {
        Value::Array(list) => list.iter_mut().find_map(|one| nth(one, steps)),
        Value::Object(map) => map.values_mut().find_map(|one| nth(one, steps)),
        _ => None,
    }
}

/// Leaves out whole parts, as long as the rest `stays` what it was.
pub fn smaller(input: &[u8], stays: &mut dyn FnMut(&[u8]) -> bool) -> Vec<u8> {
    let Ok(mut best) = serde_json::from_slice::<Value>(input) else { return mutate::smaller(input, stays) };
    let text = |value: &Value| serde_json::to_vec(value).unwrap_or_default();
    if !stays(&text(&best)) {
        return input.to_vec();
    }
    let mut at = 0;
    while at < size(&best) {
        let mut less = best.clone();
        match without(&mut less, at) && stays(&text(&less)) {
            true => best = less,
            false => at += 1,
        }
    }
    text(&best)
}

/// Takes away the value that is so many steps from here. False: it is the whole.
fn without(value: &mut Value, at: usize) -> bool {
    let mut left = at;
    let Some(found) = nth(value, &mut left).filter(|_| at > 0) else { return false };
    // Marked first: its parent is not at hand.
    *found = json!({GONE: GONE});
    sweep(value);
    true
}

const GONE: &str = "\u{0}gone";

fn sweep(value: &mut Value) {
    let is_gone = |value: &Value| value.get(GONE).is_some();
    match value {
        Value::Array(list) => {
            list.retain(|one| !is_gone(one));
            list.iter_mut().for_each(sweep);
        }
        Value::Object(map) => {
            map.retain(|_, one| !is_gone(one));
            map.values_mut().for_each(sweep);
        }
        _ => {}
    }
}

//! What it costs to find out which GPUs selectors choose, and that it can be done bit by bit.

use super::*;
use crate::select::{COST_MAX, TICKS_PER_UNIT};

/// So many GPUs, eight to a node, each with a UUID of its own.
fn fleet(gpus: u32) -> Index {
    let all: Vec<NodeSpec> = (0..gpus / 8)
        .map(|nth| tell(node(&format!("n{nth}"), 8, 10_000), &[[("type", "gpu")].as_slice(); 8]))
        .collect();
    index(&all)
}

fn uuid(text: &str) -> String {
    format!("device.attributes['gpu.nvidia.com'].uuid == '{text}'")
}

/// Nested loops over ten numbers each: about four units for the innermost step.
fn loops(levels: u32, body: &str) -> String {
    let ten = "[0,1,2,3,4,5,6,7,8,9]";
    (0..levels).fold(body.to_owned(), |inner, nth| format!("{ten}.all(i{nth}, {inner})"))
}

#[test]
fn work_stops_when_what_is_allowed_is_spent_and_goes_on_from_there() {
    let mut whole = fleet(800);
    let shape = selecting(&[&uuid("GPU-n77-gpu-3")]);
    assert_eq!(whole.study(&shape), Studied::Done);
    let (all, short) = whole.spent();
    assert!(!short);
    let mut index = fleet(800);
    let (mut looks, mut spent) = (0, 0);
    loop {
        index.allow(all / 10);
        looks += 1;
        let studied = index.study(&shape);
        let (cost, short) = index.spent();
        spent += cost;
        assert!(cost <= all / 10 + 2_000, "{cost} of {all}");
        match studied {
            Studied::Done => break,
            other => assert_eq!((other, short), (Studied::NotYet, true)),
        }
        // What was not looked at is not chosen, and nothing is known against it.
        let lists = &shape.wants[0].selectors;
        assert!(!index.chooses(lists, &"n99".into(), &DeviceName::whole(0)));
        assert!(index.may_choose(lists, &"n99".into(), &DeviceName::whole(0)));
    }
    assert!((9..=12).contains(&looks), "{looks}");
    assert!(spent <= all + all / 10, "{spent} of {all}: nothing is done twice");
    assert_eq!(put(&mut index, "a", shape, Policy::Pack), "n77/gpu-3");
}

/// 300 pods with distinct harmless selectors.
#[test]
fn many_selectors_cost_little_more_than_the_answers_and_are_known_afterwards() {
    const GPUS: u64 = 4_000;
    let mut index = fleet(GPUS as u32);
    let shapes: Vec<Shape> = (0..300)
        .map(|nth| selecting(&[IS_GPU, &format!("device.attributes['gpu.nvidia.com'].type != 'x{nth}'")]))
        .collect();
    let study = |index: &mut Index, shapes: &[Shape]| {
        index.allow(u64::MAX);
        shapes.iter().for_each(|shape| assert_eq!(index.study(shape), Studied::Done));
        index.spent().0
    };
    let first = study(&mut index, &shapes[..1]);
    let others = study(&mut index, &shapes[1..]);
    assert!(first >= 200 * GPUS, "GPUs are sorted: {first}");
    assert!(others / 299 <= 2 * GPUS + 20_000, "once: {} for each other", others / 299);
    assert_eq!(study(&mut index, &shapes), 0, "all of them are remembered");
    // New GPUs alone are looked at.
    index.insert_node(&tell(node("more", 8, 10_000), &[[("type", "gpu")].as_slice(); 8]));
    let more = study(&mut index, &shapes);
    assert!(more <= 300 * 20_000, "{more}");
    assert_eq!(put(&mut index, "a", shapes[7].clone(), Policy::Pack), "n0/gpu-0");
}

/// One claim with 8 requests of 32 selectors each, each of them one that the API server has.
#[test]
fn the_selectors_of_a_pod_together_have_a_limit() {
    let dear: Vec<String> = (0..32).map(|nth| loops(2, &format!("i0 != {}", 10 + nth))).collect();
    let dear: Vec<&str> = dear.iter().map(String::as_str).collect();
    let mut shape = selecting(&dear);
    for nth in 1..8 {
        let mut more = dear.clone();
        let own = loops(2, &format!("i0 != {}", 100 + nth));
        more.push(&own);
        shape.wants.extend(selecting(&more).wants);
    }
    let mut index = fleet(8);
    index.allow(u64::MAX);
    assert_eq!(index.study(&shape), Studied::Done);
    let cost = index.spent().0 / TICKS_PER_UNIT;
    assert!(cost > 8 * 32 * 400, "{cost}");
    let mut index = fleet(8);
    index.score_tables.choices.bound_pods(50_000);
    index.allow(u64::MAX);
    let Studied::Refused { want: None, words } = index.study(&shape) else { panic!("it is too dear") };
    assert!(words.contains("cost more than 60000 on 1 kind of GPU in all"), "{words}");
    let spent = index.spent().0 / TICKS_PER_UNIT;
    assert!(spent < cost * 3 / 4, "{spent} of {cost}");
    // A list that is too dear by itself, on many kinds of GPUs.
    let mut index = fleet(800);
    index.score_tables.choices.bound_pods(50_000);
    let each = format!("{} != 'x' || {}", "device.attributes['gpu.nvidia.com'].uuid", loops(4, "true"));
    let each = each.replace("!= 'x' ||", "== 'x' ||");
    let Studied::Refused { want: Some(0), words } = index.study(&selecting(&[&each])) else { panic!() };
    assert!(words.contains(" in all;"), "{words}");
}

/// Not even one GPU's selectors are looked at in one go, if they are many and dear.
#[test]
fn work_stops_between_the_selectors_of_a_gpu() {
    let dear: Vec<String> = (0..32).map(|nth| loops(3, &format!("i0 != {}", 10 + nth))).collect();
    let dear: Vec<&str> = dear.iter().map(String::as_str).collect();
    let shape = selecting(&dear);
    let mut index = fleet(8);
    let (mut looks, mut most) = (0, 0);
    loop {
        index.allow(20_000);
        looks += 1;
        let studied = index.study(&shape);
        most = most.max(index.spent().0);
        if studied == Studied::Done {
            break;
        }
    }
    assert!(looks >= 16 && most < 300_000, "{looks} looks, the dearest cost {most}");
    assert!(put(&mut index, "a", shape, Policy::Pack).starts_with("n0/"));
}

#[test]
fn a_selector_that_costs_too_much_is_refused_once_and_remembered() {
    let mut index = fleet(16);
    let dear = loops(7, "true");
    let mut shape = selecting(&[IS_GPU]);
    shape.wants.extend(selecting(&[IS_GPU, &dear]).wants);
    index.allow(1_000_000);
    let Studied::Refused { want: Some(1), words } = index.study(&shape) else { panic!("it is too dear") };
    assert!(words.contains("costs more than 2000000 on one device"), "{words}");
    let spent = index.spent().0 / TICKS_PER_UNIT;
    assert!((COST_MAX..COST_MAX + 20_000).contains(&spent), "once, not on each of 16 GPUs: {spent}");
    index.allow(1_000_000);
    assert!(matches!(index.study(&shape), Studied::Refused { .. }));
    assert_eq!(index.spent(), (0, false));
    let wrong = selecting(&["device.driver =="]);
    let Studied::Refused { want: Some(0), words } = index.study(&wrong) else { panic!("it is no CEL") };
    assert!(words.contains("is not valid CEL, line 1"), "{words}");
}

#[test]
fn what_is_kept_of_selectors_has_a_limit_and_light_ones_stay() {
    let mut index = fleet(16);
    let light = selecting(&[IS_GPU]);
    assert_eq!(index.study(&light), Studied::Done);
    for nth in 0..300 {
        let long = format!("'{}{nth}' != device.driver", "x".repeat(9_000));
        let shape = selecting(&vec![long.as_str(); 20]);
        index.allow(u64::MAX);
        assert_eq!(index.study(&shape), Studied::Done);
    }
    index.allow(u64::MAX);
    assert_eq!((index.study(&light), index.spent().0), (Studied::Done, 0), "a light one stays");
    assert!(index.score_tables.choices.weight() < 40 << 20, "{}", index.score_tables.choices.weight());
}

#[test]
fn patterns_of_a_request_have_a_limit_together() {
    let one = |nth: usize| {
        let pattern = "\\\\w\\\\w\\\\w";
        let terms: Vec<String> =
            (0..20).map(|at| format!("device.driver.matches('{pattern}{nth}x{at}')")).collect();
        terms.join(" || ") + " || true"
    };
    let all: Vec<String> = (0..6).map(one).collect();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    let mut index = fleet(8);
    assert_eq!(index.study(&selecting(&all[..2])), Studied::Done);
    let Studied::Refused { want: Some(0), words } = index.study(&selecting(&all)) else {
        panic!("too large")
    };
    assert!(words.contains("take too much memory in all, patterns most of it"), "{words}");
}

/// Another index with the same facts knows the answers, and works nothing out.
#[test]
fn an_index_beside_has_the_same_answers() {
    let mut index = fleet(16);
    let known = selecting(&[&uuid("GPU-n1-gpu-3")]);
    assert_eq!(index.study(&known), Studied::Done);
    let mut beside = index.beside();
    for nth in 0..2 {
        let nodes = [tell(node(&format!("n{nth}"), 8, 10_000), &[[("type", "gpu")].as_slice(); 8])];
        nodes.iter().for_each(|node| beside.insert_node(node));
    }
    assert_eq!((beside.study(&known), beside.spent().0), (Studied::Done, 0));
    assert_eq!(put(&mut beside, "a", known, Policy::Pack), "n1/gpu-3");
    assert_eq!(beside.study(&selecting(&[&uuid("GPU-n0-gpu-0")])), Studied::NotYet);
}

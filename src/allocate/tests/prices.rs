//! What decisions for several wants at once cost, who pays for them, and where they stop.

use super::*;

/// More wants of so many GPUs than there are places for, one claim each: as two of them fit on a GPU, and all have
/// another size, no search is short.
fn hard(gpus: u64, nth: u64) -> Shape {
    let want = |at: u64| Want {
        claim: at as u32,
        part: Part::Memory(Bytes::from_mib(35_000 + 10 * at)),
        ..Want::whole(1)
    };
    let wants = (0..=2 * gpus).map(want).collect();
    Shape { wants, cpu_milli: 1000 + nth, ..Shape::default() }
}

fn nodes(count: u32, gpus: u32) -> Index {
    let nodes: Vec<NodeSpec> = (0..count).map(|nth| node(&format!("n{nth}"), gpus, 80_000)).collect();
    index(&nodes)
}

/// What it cost, in ticks, and whether something was left undone.
fn cost_of(index: &mut Index, ticks: u64, pods: &[PodAsk]) -> (u64, bool, Option<Vec<Placement>>) {
    index.allow(ticks);
    let found = places(index, pods, Policy::Pack);
    let (spent, short) = index.spent();
    (spent, short, found)
}

/// A pod was charged for what another's shape costs on nodes that have changed, up to 64 of them.
#[test]
fn nobody_pays_for_the_searches_of_others() {
    let mut spent = Vec::new();
    for others in [false, true] {
        let mut index = nodes(200, 2);
        let small = PodAsk::from(mib(1_000));
        for _ in 0..3 {
            cost_of(&mut index, u64::MAX, std::slice::from_ref(&small));
            if others {
                cost_of(&mut index, u64::MAX, &[hard(2, 0).into()]);
            }
        }
        for nth in 0..140 {
            let place = Placement {
                node: format!("n{nth}").as_str().into(),
                gpus: Vec::new(),
                cpu_milli: 10,
                memory: Bytes(0),
                pods: 1,
            };
            index.apply(&PodUid::new(nth.to_string()), &place).unwrap();
            if nth % 20 == 0 {
                cost_of(&mut index, u64::MAX, std::slice::from_ref(&small));
            }
        }
        spent.push(cost_of(&mut index, u64::MAX, &[small]).0);
    }
    assert_eq!(spent[0], spent[1]);
}

#[test]
fn a_search_costs_more_the_more_constraints_it_looks_at() {
    let mut index = nodes(1, 4);
    let plain = hard(4, 0);
    let all: Vec<usize> = (0..plain.wants.len()).collect();
    let one = AttributeConstraint { rule: Rule::Same, attribute: name("none"), wants: all };
    let many = Shape { alike: vec![one; 40], ..plain.clone() };
    // No GPU has the attribute: the first want ends it, after as many constraints as there are.
    let first = cost_of(&mut index, u64::MAX, &[many.into()]).0;
    let free = cost_of(&mut index, u64::MAX, &[whole(9).into()]).0;
    assert!(first > free + 4 * 40, "{first} and {free}");
    let small = cost_of(&mut index, u64::MAX, &[hard(2, 0).into()]).0;
    assert!(small > free, "what cannot be served is looked for all the same");
    let wide = cost_of(&mut nodes(1, 8), u64::MAX, &[hard(8, 0).into()]);
    assert_eq!(wide.2, None);
    assert!(wide.0 > 2_000 * (8 * 5 + 40), "2,000 tries of 8 GPUs each: {}", wide.0);
}

#[test]
fn a_search_stops_at_the_node_where_nothing_is_left() {
    const NODES: u32 = 12;
    let pod = PodAsk::from(hard(4, 0));
    let (all, short, found) = cost_of(&mut nodes(NODES, 4), u64::MAX, std::slice::from_ref(&pod));
    assert_eq!((short, &found), (false, &None));
    let of_node = all / u64::from(NODES);
    let mut index = nodes(NODES, 4);
    let (spent, short, found) = cost_of(&mut index, 3 * of_node, std::slice::from_ref(&pod));
    assert!(short && found.is_none());
    assert!((3 * of_node..5 * of_node).contains(&spent), "{spent}, a node takes {of_node}");
    index.allow(of_node);
    let refused = decide(&mut index, std::slice::from_ref(&pod), Policy::Pack).unwrap_err();
    assert!(matches!(refused.shortage, Shortage::Unsearched { wants: 9 }), "{refused}");
    assert!(refused.to_string().contains("takes too long to try all ways to place 9 requests"), "{refused}");
    // Nothing of it stays: with enough it is what it was.
    assert_eq!(cost_of(&mut index, u64::MAX, &[pod]).0, all);
    // What changes meanwhile is paid for, node by node, too.
    let small = PodAsk::from(mib(1_000));
    let (_, short, found) = cost_of(&mut index, 1, &[small]);
    assert!(!short && found.is_some(), "one want is placed whatever is left");
}

#[test]
fn a_gang_stops_between_two_pods_and_leaves_everything_as_it_was() {
    let mut index = nodes(4, 2);
    let gang: Vec<PodAsk> = (0..6).map(|nth| Shape { cpu_milli: 1000 + nth, ..mib(30_000) }.into()).collect();
    assert!(cost_of(&mut index, u64::MAX, &gang).2.is_some());
    let (_, short, found) = cost_of(&mut index, 1, &gang);
    assert!(short && found.is_none());
    let refused = decide(&mut index, &gang, Policy::Pack).unwrap_err();
    assert_eq!((refused.gang, refused.shortage), ((1, 6), Shortage::Unsearched { wants: 1 }));
    assert!(index.nodes().flat_map(|node| node.gpus()).all(|gpu| gpu.memory().0 == gpu.memory().1));
    assert_eq!(cost_of(&mut index, u64::MAX, &gang).2.map(|all| all.len()), Some(6));
}

/// Each constraint of each shape had numbers of its own for all GPUs of the cluster.
#[test]
fn an_attribute_is_read_once_for_all_that_ask_for_it() {
    const NODES: u32 = 50;
    let node = |nth: u32| tell(node(&format!("n{nth}"), 1, 80_000), &[&[("productName", "H")]]);
    let mut index = index(&(0..NODES).map(node).collect::<Vec<_>>());
    let about = |attribute: &str| AttributeConstraint {
        rule: Rule::Different,
        attribute: name(attribute),
        wants: vec![0],
    };
    let shape = |attribute: &str, count: usize, nth: u64| Shape {
        alike: vec![about(attribute); count],
        cpu_milli: 1000 + nth,
        ..mib(1_000)
    };
    let cost = |index: &mut Index, shape: Shape| cost_of(index, u64::MAX, &[shape.into()]).0;
    let read = 50 * u64::from(NODES);
    let (first, second) = (cost(&mut index, shape("uuid", 1, 0)), cost(&mut index, shape("uuid", 1, 1)));
    assert!(first >= second + read, "{first} and {second}");
    let many = cost(&mut index, shape("uuid", 200, 2));
    assert!(many < second + 200 * read / 2, "{many} and {second}");
    // Where no GPU has it there is nothing to read, and nothing to keep.
    let weight = |index: &mut Index, shape: Shape| {
        let before = index.score_tables.kept().1;
        cost_of(index, u64::MAX, &[shape.into()]);
        index.score_tables.kept().1 - before
    };
    let (known, unknown) = (shape("productName", 1, 3), shape("none", 1, 4));
    let (with, without) = (weight(&mut index, known), weight(&mut index, unknown));
    assert!(with >= without + 4 * NODES as usize - 8, "{with} and {without} bytes");
    // New GPUs are read for all at once, and values stay what they were.
    index.insert_node(&node(NODES));
    let two = Shape { alike: vec![AttributeConstraint { rule: Rule::Same, ..about("uuid") }], ..whole(2) };
    assert_eq!(cost_of(&mut index, u64::MAX, &[two.into()]).2, None, "no two have one UUID");
}

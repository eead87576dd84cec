//! Scores that are kept: they are those of a fresh look, and a decision renews few of them.

use super::*;

const TEMPLATES: u64 = 64;

fn template(nth: u64) -> Shape {
    let gpus = if nth % 16 == 8 { 2 } else { 1 };
    let shape = if nth.is_multiple_of(8) { whole(gpus) } else { mib(2_000 * (nth % 8) + 10 * nth) };
    Shape { cpu_milli: 500 * (1 + nth % 16), memory: Bytes::from_mib(4_096), ..shape }
}

/// Pods of a few dozen templates that come and go.
struct Churn {
    index: Index,
    nodes: u32,
    policy: Policy,
    random: fastrand::Rng,
    seen: Vec<Shape>,
    live: Vec<(PodUid, Placement)>,
}

impl Churn {
    fn new(nodes: u32, policy: Policy) -> Self {
        let random = fastrand::Rng::with_seed(1);
        Self { index: cluster(nodes), nodes, policy, random, seen: Vec::new(), live: Vec::new() }
    }

    fn ask(&mut self) -> PodAsk {
        let shape = template(self.random.u64(..TEMPLATES));
        self.index.seen(&shape);
        self.seen.push(shape.clone());
        shape.into()
    }

    /// Was there a place?
    fn come(&mut self) -> bool {
        let pod = self.ask();
        let decision = decide(&mut self.index, &[pod], self.policy);
        let Ok(placement) = decision.map(|mut decision| decision.placements.remove(0)) else { return false };
        let uid = PodUid::new(self.seen.len().to_string());
        self.index.apply(&uid, &placement).unwrap();
        self.live.push((uid, placement));
        true
    }

    fn go(&mut self) {
        while !self.live.is_empty() && self.random.bool() {
            let (uid, _) = self.live.swap_remove(self.random.usize(..self.live.len()));
            self.index.remove(&uid).unwrap();
        }
    }

    /// An index that has never decided.
    fn fresh(&self) -> Index {
        let mut fresh = cluster(self.nodes);
        self.seen.iter().for_each(|shape| fresh.seen(shape));
        self.live.iter().for_each(|(uid, placement)| fresh.apply(uid, placement).unwrap());
        fresh
    }
}

fn cluster(nodes: u32) -> Index {
    let mut index = Index::new();
    (0..nodes).for_each(|nth| {
        index.insert_node(&node(&format!("n{nth}"), 2, 40_000 + u64::from(nth % 3) * 20_000))
    });
    index
}

#[test]
fn boards_that_are_brought_forward_say_what_a_fresh_look_says() {
    for policy in Policy::ALL {
        let mut churn = Churn::new(160, policy);
        while churn.come() {}
        for step in 0..600 {
            churn.go();
            churn.come();
            if step % 40 == 0 {
                let pod = [churn.ask()];
                let kept = decide(&mut churn.index, &pod, policy);
                assert_eq!(kept, decide(&mut churn.fresh(), &pod, policy), "{policy}, step {step}");
            }
        }
    }
}

/// Time is no test; what it is spent on is.
#[test]
fn a_decision_renews_few_scores() {
    const NODES: u32 = 600;
    let mut churn = Churn::new(NODES, Policy::Pack);
    while churn.come() {}
    let mut most = 0;
    for _ in 0..2_000 {
        churn.go();
        let before = churn.index.score_tables.scratch.rated;
        churn.come();
        most = most.max(churn.index.score_tables.scratch.rated - before);
    }
    assert!(most < 256, "{most} of {NODES} nodes were rated for one decision");
}

#[test]
fn a_refusal_says_the_same_whether_or_not_it_looks_at_each_gpu() {
    let mut churn = Churn::new(20, Policy::Spread);
    let mut refusals = 0;
    for _ in 0..2_000 {
        if churn.random.u8(..3) == 0 {
            churn.go();
        }
        churn.come();
        let pod = [churn.ask()];
        if let Err(refusal) = decide(&mut churn.index, &pod, churn.policy) {
            refusals += 1;
            let plain: Vec<_> =
                churn.index.nodes.all.iter().map(|node| node.as_ref().unwrap().plain).collect();
            churn.index.nodes.all.iter_mut().flatten().for_each(|node| node.plain = None);
            assert_eq!(decide(&mut churn.index, &pod, churn.policy), Err(refusal));
            churn
                .index
                .nodes
                .all
                .iter_mut()
                .flatten()
                .zip(plain)
                .for_each(|(node, plain)| node.plain = plain);
        }
    }
    assert!(refusals > 100, "{refusals}");
}

#[test]
fn a_node_in_the_place_of_another_has_a_score_of_its_own() {
    let mut index = index(&[node("a", 1, 10_000), node("b", 1, 10_000)]);
    assert_eq!(put(&mut index, "1", whole(1), Policy::Pack), "a/gpu-0");
    index.remove(&PodUid::new("1"));
    index.remove_node(&"a".into());
    index.insert_node(&node("c", 0, 0));
    assert_eq!(put(&mut index, "2", whole(1), Policy::Pack), "b/gpu-0");
}

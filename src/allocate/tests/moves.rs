//! The least moves that make room: by a table of cases, and against every set of pods on small clusters.

use super::super::moves::{
    Ground, MOVES_MAX, Mover, MovesFound, OfIndex, Proposal, SEARCH_TICKS, WaitingUnit, search,
};
use super::*;

/// Pods with their places: what each has, and what it asks.
#[derive(Default)]
struct Placed {
    index: Index,
    movers: Vec<Mover>,
    pods: Vec<(PlacementKey, PodAsk)>,
}

impl Placed {
    fn on(nodes: &[NodeSpec]) -> Self {
        Self { index: index(nodes), ..Self::default() }
    }

    /// A pod of this shape, on these GPUs of a node.
    fn add(&mut self, shape: Shape, node: &str, gpus: &[u32]) -> &mut Self {
        let open: Vec<DeviceName> = gpus.iter().map(|minor| DeviceName::whole(*minor)).collect();
        let views = self.index.nodes().find(|view| view.name().as_str() == node).unwrap();
        let shut: Vec<DeviceName> =
            views.gpus().map(|gpu| gpu.device().clone()).filter(|device| !open.contains(device)).collect();
        let name = node.into();
        shut.iter().for_each(|device| self.index.set_closed(&name, device, true).unwrap());
        let only = Nodes::Only([name.clone()].into());
        let ask = PodAsk { shape: shape.clone(), nodes: only };
        let place = decide(&mut self.index, &[ask], Policy::Pack).unwrap().placements.remove(0);
        shut.iter().for_each(|device| self.index.set_closed(&name, device, false).unwrap());
        self.put(shape, place);
        self
    }

    fn put(&mut self, shape: Shape, place: Placement) {
        let key = PlacementKey::Pod(PodUid::new(self.pods.len().to_string()));
        self.index.apply(key.clone(), &place).unwrap();
        self.pods.push((key, shape.into()));
        self.movers.push(Mover { has: place, several: false });
    }

    fn look(&self) -> String {
        let gpu = |gpu: GpuView<'_>| {
            format!("{} {} {} {}", gpu.device(), gpu.memory().1.mib_floor(), gpu.compute(), gpu.slots())
        };
        let node = |node: NodeView<'_>| {
            let gpus: Vec<String> = node.gpus().map(gpu).collect();
            format!("{} {:?} {:?} {:?} {gpus:?}", node.name(), node.cpu_milli(), node.memory(), node.pods())
        };
        self.index.nodes().map(node).collect::<Vec<_>>().join("\n")
    }

    fn search(&mut self, waiting: &WaitingUnit) -> MovesFound {
        let before = self.look();
        let mut ground = OfIndex::new(&mut self.index, Policy::Pack, &self.pods);
        let found = search(&mut ground, waiting, &self.movers, SEARCH_TICKS);
        assert_eq!(self.look(), before, "the index is as before");
        assert_eq!(audit(&self.index), vec![]);
        found
    }

    /// Which pods move where, and where what waits goes.
    fn told(&mut self, waiting: Shape) -> String {
        let waiting = WaitingUnit { asks: vec![waiting.into()], alone: false };
        match self.search(&waiting) {
            MovesFound::Moves(found) => {
                let moves = found.moves.iter().map(|(pod, place)| format!("{pod} to {}", spot(place)));
                let moves: Vec<String> = moves.collect();
                format!("{}; then {}", moves.join(", "), spot(&found.then[0]))
            }
            MovesFound::Nothing => "nothing".to_owned(),
            MovesFound::Spent => "spent".to_owned(),
        }
    }
}

#[test]
fn the_least_moves_are_found() {
    let two = || Placed::on(&[node("a", 2, 40_000), node("b", 2, 40_000)]);
    // One small pod keeps a whole GPU out.
    let mut one = two();
    one.add(mib(10_000), "a", &[0]).add(mib(39_000), "a", &[1]);
    one.add(mib(20_000), "b", &[0]).add(mib(39_000), "b", &[1]);
    assert_eq!(one.told(whole(1)), "0 to b/gpu-0; then a/gpu-0");

    // The one with the least MiB of those that do; two small ones are more than one that is larger.
    let mut least = two();
    least.add(mib(12_000), "a", &[0]).add(mib(15_000), "a", &[1]);
    least.add(mib(4_000), "b", &[0]).add(mib(4_001), "b", &[0]).add(mib(30_000), "b", &[1]);
    assert_eq!(least.told(mib(33_000)), "2 to b/gpu-1; then b/gpu-0");
    assert_eq!(least.told(mib(36_500)), "0 to a/gpu-1; then a/gpu-0");

    // Several GPUs of a node, several pods.
    let mut pair = two();
    pair.add(mib(5_000), "a", &[0]).add(mib(6_000), "a", &[1]);
    pair.add(mib(20_000), "b", &[0]).add(mib(20_000), "b", &[1]);
    assert_eq!(pair.told(whole(2)), "0 to b/gpu-0, 1 to b/gpu-0; then a/gpu-0+gpu-1");

    // Who has two GPUs makes room for who wants two, and needs two elsewhere.
    let mut both = Placed::on(&[node("a", 4, 40_000), node("b", 2, 40_000)]);
    both.add(whole(2), "a", &[0, 1]);
    assert_eq!(both.told(whole(4)), "0 to b/gpu-0+gpu-1; then a/gpu-0+gpu-1+gpu-2+gpu-3");
}

#[test]
fn there_are_moves_that_help_nobody() {
    // No room elsewhere.
    let mut full = Placed::on(&[node("a", 1, 40_000), node("b", 1, 40_000)]);
    full.add(mib(20_000), "a", &[0]).add(mib(30_000), "b", &[0]);
    assert_eq!(full.told(whole(1)), "nothing");
    // More would move than what waits gets.
    let mut dear = Placed::on(&[node("a", 1, 40_000), node("b", 1, 80_000)]);
    dear.add(mib(35_000), "a", &[0]).add(mib(71_000), "b", &[0]);
    dear.index.insert_node(&node("c", 1, 36_000));
    let on_a = |shape: Shape| PodAsk { shape, nodes: Nodes::Only(["a".into()].into()) };
    let waiting = WaitingUnit { asks: vec![on_a(mib(34_000))], alone: false };
    assert_eq!(dear.search(&waiting), MovesFound::Nothing, "35,000 MiB for the sake of 34,000");
    let waiting = WaitingUnit { asks: vec![on_a(mib(36_000))], alone: false };
    assert!(matches!(dear.search(&waiting), MovesFound::Moves(_)));
    // Too many would move.
    let mut many = Placed::on(&[node("a", 1, 40_000), node("b", 1, 80_000)]);
    for _ in 0..5 {
        many.add(mib(1_000), "a", &[0]);
    }
    many.add(mib(71_000), "b", &[0]);
    let waiting = WaitingUnit { asks: vec![on_a(mib(40_000))], alone: false };
    assert_eq!(many.search(&waiting), MovesFound::Nothing);
    many.index.remove(PlacementKey::Pod(PodUid::new("4")));
    (many.pods, many.movers) = (many.pods[..4].to_vec(), many.movers[..4].to_vec());
    assert!(matches!(many.search(&waiting), MovesFound::Moves(found) if found.moves.len() == MOVES_MAX));
}

#[test]
fn where_the_node_is_short_of_cpu_a_pod_leaves_for_that() {
    let hungry = |shape: Shape, cpu_milli: u64| Shape { cpu_milli, ..shape };
    let on_a = PodAsk { shape: hungry(whole(1), 30_000), nodes: Nodes::Only(["a".into()].into()) };
    let waiting = WaitingUnit { asks: vec![on_a], alone: false };
    for (cpu, moves) in [(20_000, true), (30_000, false)] {
        let mut busy = Placed::on(&[node("a", 2, 40_000), node("b", 2, 40_000)]);
        busy.add(hungry(mib(10_000), 40_000), "a", &[1]).add(hungry(mib(1_000), cpu), "b", &[0]);
        match busy.search(&waiting) {
            MovesFound::Moves(found) if moves => {
                assert_eq!((found.moves[0].0, spot(&found.then[0])), (0, "a/gpu-0".to_owned()));
            }
            found => assert_eq!((found, moves), (MovesFound::Nothing, false), "what leaves needs CPU, too"),
        }
    }
}

#[test]
fn a_pod_stays_where_its_nodes_leave_it_no_other_place() {
    let mut tied = Placed::on(&[node("a", 1, 40_000), node("b", 1, 40_000)]);
    tied.add(mib(10_000), "a", &[0]).add(mib(12_000), "b", &[0]);
    tied.pods[0].1.nodes = Nodes::Only(["a".into()].into());
    assert_eq!(tied.told(whole(1)), "1 to a/gpu-0; then b/gpu-0");
    tied.pods[1].1.nodes = Nodes::Only(["b".into()].into());
    assert_eq!(tied.told(whole(1)), "nothing");
}

#[test]
fn a_gang_goes_where_moves_make_room_for_the_pod_that_lacks_it() {
    let mut gang = Placed::on(&[node("a", 1, 40_000), node("b", 1, 40_000), node("c", 1, 40_000)]);
    gang.add(mib(10_000), "b", &[0]).add(mib(10_000), "c", &[0]);
    let waiting = WaitingUnit { asks: vec![whole(1).into(), whole(1).into()], alone: false };
    let MovesFound::Moves(found) = gang.search(&waiting) else { panic!("no moves") };
    let spots: Vec<String> = found.then.iter().map(spot).collect();
    assert_eq!((found.moves.len(), spots), (1, vec!["a/gpu-0".to_owned(), "b/gpu-0".to_owned()]));
    let waiting = WaitingUnit { asks: vec![whole(1).into(), whole(1).into(), whole(1).into()], alone: false };
    assert_eq!(gang.search(&waiting), MovesFound::Nothing);
}

/// The pod of two GPUs gets `gpu-0` and `gpu-1`. The other gets some of `gpu-2`, once one of its three pods has left.
#[test]
fn of_a_gang_pods_leave_gpus_that_only_another_of_its_pods_needs() {
    let mut gang = Placed::on(&[node("a", 3, 10_000), node("b", 3, 10_000)]);
    gang.add(mib(7_000), "a", &[0]).add(mib(7_000), "a", &[1]);
    gang.add(mib(3_000), "a", &[2]).add(mib(3_000), "a", &[2]).add(mib(3_000), "a", &[2]);
    let here = |shape: Shape| PodAsk { shape, nodes: Nodes::Only(["a".into()].into()) };
    let waiting = WaitingUnit { asks: vec![here(whole(2)), here(mib(3_000))], alone: false };
    let MovesFound::Moves(found) = gang.search(&waiting) else { panic!("no moves") };
    assert_eq!(moves_of(&found, &gang), (3, 17_000));
}

/// The least set of all, each tried as the search tries it: how many pods, and their MiB. `chains`: pods count as well that
/// leave no GPU which what waits gets, but make room for others that do.
fn brute(placed: &mut Placed, waiting: &PodAsk, chains: bool) -> Option<(usize, u64)> {
    let count = placed.movers.len();
    let mut best = None;
    for bits in 1_u32..1 << count {
        let set: Vec<usize> = (0..count).filter(|nth| bits >> nth & 1 == 1).collect();
        let node = placed.movers[set[0]].has.node.clone();
        let key = (set.len(), set.iter().map(|at| placed.movers[*at].mib()).sum::<u64>());
        let is_of_one_node = set.iter().all(|at| placed.movers[*at].has.node == node);
        if set.len() > MOVES_MAX || !is_of_one_node || best.is_some_and(|best| best <= key) {
            continue;
        }
        let mut ground = OfIndex::new(&mut placed.index, Policy::Pack, &placed.pods);
        set.iter().for_each(|at| ground.leave(*at));
        let mut taken = 0;
        let only = PodAsk { nodes: Nodes::Only([node].into()), ..waiting.clone() };
        if let Some(places) = ground.places(&[only]) {
            let gets: u64 = places[0].gpus.iter().map(|grant| grant.memory.mib_ceil()).sum();
            ground.take(&places, false);
            taken += 1;
            let mut order = set.clone();
            let size = |at: &usize| (placed.pods[*at].1.shape.gpus(), placed.movers[*at].mib());
            order.sort_by_key(|at| std::cmp::Reverse(size(at)));
            let all = order.iter().all(|at| {
                let found = ground.places(&[placed.pods[*at].1.clone()]);
                found.iter().for_each(|places| ground.take(places, false));
                taken += usize::from(found.is_some());
                found.is_some()
            });
            let is_of_those = |at: &usize| {
                let of = |grant: &GpuGrant| places[0].gpus.iter().any(|one| one.device == grant.device);
                placed.movers[*at].has.gpus.iter().any(of)
            };
            if all && key.1 <= gets && (chains || set.iter().all(is_of_those)) {
                best = Some(key);
            }
        }
        (0..taken).for_each(|_| ground.free());
        set.iter().for_each(|at| ground.come_back(*at));
    }
    best
}

fn moves_of(found: &Proposal, placed: &Placed) -> (usize, u64) {
    (found.moves.len(), found.moves.iter().map(|(at, _)| placed.movers[*at].mib()).sum())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, max_global_rejects: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn no_set_of_pods_does_with_less(
        sizes in prop::collection::vec((1_u64..9, 0_u64..3, 1_u64..20, 0_u32..10), 3..11),
        wanted in (2_u64..11, 1_u64..20, 1_u32..4),
        seed in any::<u64>(),
    ) {
        let mut placed = Placed::on(&[node("a", 3, 10_000), node("b", 2, 10_000), node("c", 1, 12_000)]);
        let mut random = fastrand::Rng::with_seed(seed);
        for (size, compute, cpu, whole_of) in sizes {
            let part = if whole_of == 0 { Part::Whole } else { Part::Memory(Bytes::from_mib(size * 1000)) };
            let compute = Percent::try_from(compute * 30).ok();
            let want = Want { part, compute, ..Want::whole(1) };
            let shape = Shape { cpu_milli: cpu * 1000, ..Shape::one(want) };
            let name = ["a", "b", "c"][random.usize(..3)];
            let ask = PodAsk { shape: shape.clone(), nodes: Nodes::Only([name.into()].into()) };
            let policy = if random.bool() { Policy::Spread } else { Policy::Pack };
            if let Ok(mut decision) = decide(&mut placed.index, &[ask], policy) {
                placed.put(shape, decision.placements.remove(0));
            }
        }
        let (size, cpu, gpus) = wanted;
        let part = if size == 10 { Part::Whole } else { Part::Memory(Bytes::from_mib(size * 1000)) };
        let waits: PodAsk =
            Shape { cpu_milli: cpu * 1000, ..Shape::one(Want { part, ..Want::whole(gpus) }) }.into();
        prop_assume!(decide(&mut placed.index, std::slice::from_ref(&waits), Policy::Pack).is_err());
        let found = placed.search(&WaitingUnit { asks: vec![waits.clone()], alone: false });
        let found = match &found {
            MovesFound::Moves(found) => Some(moves_of(found, &placed)),
            MovesFound::Nothing => None,
            MovesFound::Spent => return Err(TestCaseError::fail("spent")),
        };
        let or_none = |found: Option<(usize, u64)>| found.unwrap_or((usize::MAX, 0));
        let (least, plain) = (brute(&mut placed, &waits, true), brute(&mut placed, &waits, false));
        prop_assert!(or_none(least) <= or_none(found), "{:?} is less than {:?}", found, least);
        prop_assert!(or_none(found) <= or_none(plain), "{:?} does, and {:?} was found", plain, found);
    }
}

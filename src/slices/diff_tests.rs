use proptest::prelude::*;
use proptest::sample::Index;

use super::*;
use crate::model::names::PoolName;

const NODE: &str = "node-a";

fn owner() -> SliceOwner {
    SliceOwner { node: NodeName::new(NODE), node_uid: "node-uid".to_owned() }
}

/// One slice content per list of device numbers.
fn contents(slices: &[&[u32]]) -> Vec<SliceContent> {
    let device = |n: &u32| serde_json::from_value(serde_json::json!({"name": format!("gpu-{n}")})).unwrap();
    slices
        .iter()
        .map(|numbers| SliceContent {
            node: NodeName::new(NODE),
            pool: PoolName::new(NODE),
            devices: numbers.iter().map(device).collect(),
            counters: Vec::new(),
        })
        .collect()
}

/// A store that keeps slices as an API server does.
#[derive(Debug, Clone, Default)]
struct Store {
    slices: Vec<ResourceSlice>,
    clock: u64,
    known: i64,
    writes: usize,
}

impl Store {
    fn seen(&self) -> ExistingSlices {
        ExistingSlices { readable: self.slices.clone(), unreadable: Vec::new() }
    }

    fn diff(&self, contents: &[SliceContent]) -> WritePlan {
        let (owner, dropped) = (owner(), Dropped::default());
        let target = DesiredPool { contents, owner: &owner, dropped: &dropped, known_generation: self.known };
        diff(&target, &self.seen())
    }

    /// Carries out at most `most` steps of `change`; true if that was all of it.
    fn apply(&mut self, change: &WritePlan, most: usize) -> bool {
        let deletes = change.deletes.iter().map(Ok);
        let steps: Vec<_> = deletes.chain(change.writes.iter().map(Err)).collect();
        for step in steps.iter().take(most) {
            self.clock += 1;
            self.writes += 1;
            match step {
                Ok(gone) => self.slices.retain(|slice| slice.metadata.uid.as_deref() != Some(&gone.uid)),
                Err(write) => self.write(write),
            }
        }
        self.known = self.known.max(self.top());
        steps.len() <= most
    }

    fn write(&mut self, write: &Write) {
        let version = Some(self.clock.to_string());
        match write {
            Write::Create(slice) => {
                let mut slice = (**slice).clone();
                let prefix = slice.metadata.generate_name.clone().unwrap();
                slice.metadata.name = Some(format!("{prefix}{:05}", self.clock));
                slice.metadata.uid = Some(format!("uid-{}", self.clock));
                slice.metadata.resource_version = version;
                self.slices.push(slice);
            }
            Write::Update(slice) => {
                let stored = self.slices.iter_mut().find(|s| s.metadata.name == slice.metadata.name).unwrap();
                assert_eq!(stored.metadata.resource_version, slice.metadata.resource_version, "conflict");
                *stored = (**slice).clone();
                stored.metadata.resource_version = version;
            }
        }
    }

    fn top(&self) -> i64 {
        self.slices.iter().map(|slice| slice.spec.pool.generation).max().unwrap_or(0)
    }

    /// Device names per slice as an allocator sees the pool; `None` if it takes it for incomplete.
    fn pool(&self) -> Option<Vec<Vec<String>>> {
        let top = self.top();
        let mut slices: Vec<_> = self.slices.iter().filter(|s| s.spec.pool.generation == top).collect();
        slices.sort_by_key(|slice| slice.metadata.name.clone());
        let count = i64::try_from(slices.len()).unwrap();
        if slices.iter().any(|slice| slice.spec.pool.resource_slice_count != count) || slices.is_empty() {
            return None;
        }
        Some(slices.iter().map(|slice| names_of(slice.spec.devices.as_deref().unwrap_or_default())).collect())
    }

    fn publish(&mut self, contents: &[SliceContent]) -> WritePlan {
        let change = self.diff(contents);
        assert!(self.apply(&change, usize::MAX));
        change
    }
}

fn names_of(devices: &[k8s_openapi::api::resource::v1::Device]) -> Vec<String> {
    devices.iter().map(|device| device.name.clone()).collect()
}

fn wanted(contents: &[SliceContent]) -> Vec<Vec<String>> {
    contents.iter().map(|content| names_of(&content.devices)).collect()
}

#[test]
fn the_first_publication_creates_generation_one() {
    let mut store = Store::default();
    let change = store.publish(&contents(&[&[0, 1]]));
    assert!(change.missing);
    assert_eq!(change.generation, 1);
    let [Write::Create(slice)] = &change.writes[..] else { panic!("{change:?}") };
    assert_eq!(slice.metadata.generate_name.as_deref(), Some("00000-gpu.nvidia.com-node-a-"));
    let owner = &slice.metadata.owner_references.as_ref().unwrap()[0];
    assert_eq!((owner.kind.as_str(), owner.uid.as_str(), owner.controller), ("Node", "node-uid", Some(true)));
    assert!(store.diff(&contents(&[&[0, 1]])).is_empty());
}

#[test]
fn one_changed_slice_is_replaced_in_place() {
    let mut store = Store::default();
    store.publish(&contents(&[&[0], &[1]]));
    let change = store.publish(&contents(&[&[0], &[1, 2]]));
    assert_eq!((change.writes.len(), change.generation), (1, 1));
    assert_eq!(store.pool(), Some(wanted(&contents(&[&[0], &[1, 2]]))));
}

#[test]
fn two_changed_slices_take_a_new_generation() {
    let mut store = Store::default();
    store.publish(&contents(&[&[0], &[1]]));
    let change = store.publish(&contents(&[&[2], &[3]]));
    assert_eq!((change.writes.len(), change.generation), (2, 2));
}

#[test]
fn a_slice_less_goes_first_and_bumps_the_generation() {
    let mut store = Store::default();
    store.publish(&contents(&[&[0], &[1]]));
    let change = store.publish(&contents(&[&[0]]));
    assert_eq!((change.deletes.len(), change.writes.len(), change.generation), (1, 1, 2));
}

#[test]
fn a_wipe_is_followed_by_a_higher_generation() {
    let mut store = Store::default();
    store.publish(&contents(&[&[0]]));
    store.slices.clear();
    let change = store.publish(&contents(&[&[0]]));
    assert!(change.missing);
    assert_eq!(change.generation, 2);
}

#[test]
fn the_slice_of_another_driver_of_this_name_is_taken_over() {
    let mut store = Store::default();
    store.publish(&contents(&[&[1, 0]]));
    store.slices[0].metadata.name = Some("node-a-gpu.nvidia.com-x7k2p".to_owned());
    store.slices[0].spec.pool.generation = 7;
    let change = store.publish(&contents(&[&[0, 1]]));
    assert!(change.deletes.is_empty());
    assert!(matches!(&change.writes[..], [Write::Update(_)]), "{change:?}");
    assert_eq!(change.generation, 7);
}

#[test]
fn leftovers_go_without_touching_what_is_right() {
    let mut store = Store::default();
    store.publish(&contents(&[&[0]]));
    let good = store.slices[0].clone();
    let leftover = |name: &str, change: &dyn Fn(&mut ResourceSlice)| {
        let mut slice = good.clone();
        slice.metadata.name = Some(name.to_owned());
        slice.metadata.uid = Some(name.to_owned());
        change(&mut slice);
        slice
    };
    // A create whose answer was lost, an old generation, another pool.
    store.slices.push(leftover("00000-gpu.nvidia.com-node-a-zzzzz", &|_| ()));
    store.slices.push(leftover("old", &|slice| slice.spec.pool.generation = 0));
    store.slices.push(leftover("other", &|slice| slice.spec.pool.name = "elsewhere".to_owned()));
    let change = store.publish(&contents(&[&[0]]));
    assert_eq!((change.deletes.len(), change.writes.len(), change.generation), (3, 0, 1));
    assert_eq!(store.slices, [good]);
}

#[test]
fn an_unreadable_slice_goes() {
    let mut store = Store::default();
    store.publish(&contents(&[&[0]]));
    let odd = Obsolete { name: "odd".to_owned(), uid: "u".to_owned(), resource_version: "1".to_owned() };
    let seen = ExistingSlices { readable: store.slices.clone(), unreadable: vec![odd.clone()] };
    let (owner, dropped, contents) = (owner(), Dropped::default(), contents(&[&[0]]));
    let target = DesiredPool { contents: &contents, owner: &owner, dropped: &dropped, known_generation: 1 };
    let change = diff(&target, &seen);
    assert_eq!((change.deletes, change.writes.len()), (vec![odd], 0));
}

#[test]
fn an_edit_by_hand_is_undone() {
    let mut store = Store::default();
    store.publish(&contents(&[&[0]]));
    store.slices[0].spec.devices.as_mut().unwrap()[0].binds_to_node = Some(true);
    let change = store.publish(&contents(&[&[0]]));
    assert_eq!((change.writes.len(), change.generation, change.missing), (1, 1, false));
    assert_eq!(store.slices[0].spec.devices.as_ref().unwrap()[0].binds_to_node, None);
}

/// What a store may go through.
#[derive(Debug, Clone)]
enum Deed {
    /// Publish these, and stop after so many writes.
    Publish(Vec<Vec<u32>>, usize),
    /// Someone deletes one slice.
    Delete(Index),
    Wipe,
    /// Someone edits one slice's devices, or generation.
    Edit(Index),
    Raise(Index, i64),
    /// Our process starts anew: it knows no generation any more.
    Restart,
}

fn deed() -> impl Strategy<Value = Deed> {
    let slices = proptest::collection::vec(proptest::collection::vec(0..6_u32, 0..4), 1..4);
    prop_oneof![
        4 => (slices, prop_oneof![0..4_usize, Just(usize::MAX)])
            .prop_map(|(slices, most)| Deed::Publish(slices, most)),
        1 => any::<Index>().prop_map(Deed::Delete),
        1 => Just(Deed::Wipe),
        1 => any::<Index>().prop_map(Deed::Edit),
        1 => (any::<Index>(), 0..20_i64).prop_map(|(index, generation)| Deed::Raise(index, generation)),
        1 => Just(Deed::Restart),
    ]
}

fn sliced(slices: &[Vec<u32>]) -> Vec<SliceContent> {
    contents(&slices.iter().map(Vec::as_slice).collect::<Vec<_>>())
}

impl Store {
    /// Does it, and says which contents an allocator may see afterwards besides what it saw before.
    fn suffer(&mut self, deed: &Deed) {
        let one =
            |index: &Index, slices: &[ResourceSlice]| (!slices.is_empty()).then(|| index.index(slices.len()));
        match deed {
            Deed::Publish(slices, most) => {
                let change = self.diff(&sliced(slices));
                self.apply(&change, *most);
            }
            Deed::Delete(index) => _ = one(index, &self.slices).map(|at| self.slices.remove(at)),
            Deed::Wipe => self.slices.clear(),
            Deed::Edit(index) => {
                if let Some(at) = one(index, &self.slices) {
                    self.slices[at].spec.devices = None;
                }
            }
            Deed::Raise(index, generation) => {
                if let Some(at) = one(index, &self.slices) {
                    self.slices[at].spec.pool.generation += generation;
                }
            }
            Deed::Restart => self.known = self.top(),
        }
    }
}

proptest! {
    /// Whatever happened before, one diff carried out leads to the target, and a second one is empty.
    #[test]
    fn a_diff_leads_to_the_target_from_anywhere(
        past in proptest::collection::vec(deed(), 0..12),
        target in proptest::collection::vec(proptest::collection::vec(0..6_u32, 0..4), 1..4),
    ) {
        let mut store = Store::default();
        for deed in &past {
            store.suffer(deed);
        }
        let target = sliced(&target);
        let change = store.publish(&target);
        prop_assert_eq!(store.pool(), Some(wanted(&target)), "after {:?}", change);
        prop_assert_eq!(store.top(), change.generation);
        prop_assert!(store.diff(&target).is_empty());
    }

    /// The pool's generation never goes back, at no step, whatever happens.
    #[test]
    fn the_generation_never_goes_back(past in proptest::collection::vec(deed(), 0..20)) {
        let mut store = Store::default();
        for deed in &past {
            let (before, known) = (store.top(), store.known);
            store.suffer(deed);
            if let Deed::Publish(_, most) = deed {
                prop_assert!(store.top() >= before || *most < usize::MAX, "{} after {}", store.top(), before);
                if *most == usize::MAX {
                    prop_assert!(store.top() >= known);
                }
            }
        }
    }

    /// A crash after any number of writes never lets an allocator see a mixture of two contents.
    #[test]
    fn half_a_change_is_never_a_whole_pool(
        old in proptest::collection::vec(proptest::collection::vec(0..6_u32, 0..4), 1..4),
        new in proptest::collection::vec(proptest::collection::vec(0..6_u32, 0..4), 1..4),
        steps in 0..8_usize,
    ) {
        let (old, new) = (sliced(&old), sliced(&new));
        let mut store = Store::default();
        store.publish(&old);
        let change = store.diff(&new);
        store.apply(&change, steps);
        let pool = store.pool();
        prop_assert!(
            pool.is_none() || pool == Some(wanted(&old)) || pool == Some(wanted(&new)),
            "{:?} on the way from {:?} to {:?}", pool, wanted(&old), wanted(&new)
        );
    }
}

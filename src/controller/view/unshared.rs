//! Devices that no shares can be placed on: what keeps shares off them, and which of them selectors choose.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use k8s_openapi::api::resource::v1::Device;

use crate::model::names::DRIVER;
use crate::select::{DeviceFacts, Reads, Selector};

/// The attribute `type` of MIG devices.
pub(super) const TYPE_OF_MIG: &str = "mig";
/// To read of a device what selectors look at, in ticks.
const LOOK_TICKS: u64 = 200;
/// What one look at all devices may cost, in ticks: a tenth of a round.
const LOOKS_TICKS_MAX: u64 = 10_000_000;
/// So many answers are kept, and so many bytes of the selectors that they are for: tenants write these.
const ANSWERS_MAX: usize = 256;
const ANSWERS_BYTES_MAX: usize = 4 << 20;

/// What keeps shares off a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause {
    Mig,
    WithoutMemory,
    Whole,
}

/// One device that no shares can be placed on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnsharedDevice {
    cause: Cause,
    facts: Arc<DeviceFacts>,
}

impl UnsharedDevice {
    /// `like`: facts of some device that was read before, as for [`super::node::slice`].
    pub fn of(device: &Device, like: &mut Arc<DeviceFacts>) -> Self {
        let attribute = |name: &str| device.attributes.as_ref().and_then(|all| all.get(name));
        let is_mig = attribute("type").and_then(|kind| kind.string.as_deref()) == Some(TYPE_OF_MIG);
        let has_memory = attribute("totalMemoryMiB").is_some()
            || device.capacity.as_ref().is_some_and(|all| all.contains_key("memory"));
        let cause = match (is_mig, has_memory) {
            (true, _) => Cause::Mig,
            (false, false) => Cause::WithoutMemory,
            (false, true) => Cause::Whole,
        };
        let mut facts = DeviceFacts::of(DRIVER, device);
        facts.share(like);
        *like = Arc::new(facts);
        Self { cause, facts: Arc::clone(like) }
    }
}

/// How many devices, by what keeps shares off them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Unshared {
    mig: usize,
    without_memory: usize,
    whole: usize,
}

impl Unshared {
    fn count(&mut self, cause: Cause) {
        *match cause {
            Cause::Mig => &mut self.mig,
            Cause::WithoutMemory => &mut self.without_memory,
            Cause::Whole => &mut self.whole,
        } += 1;
    }

    pub fn is_none(self) -> bool {
        self == Self::default()
    }
}

/// By cause: `2 MIG devices, 1 GPU whose memory is not known`.
impl fmt::Display for Unshared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let causes = [
            (self.mig, "MIG device", ""),
            (self.without_memory, "GPU", " whose memory is not known"),
            (
                self.whole,
                "GPU",
                " kept from sharing (sharing.exclusiveGPUs, mps.enabled=false, or no MPS on it)",
            ),
        ];
        let told = causes.into_iter().filter(|(count, ..)| *count > 0);
        for (nth, (count, what, why)) in told.enumerate() {
            let (comma, plural) = (if nth > 0 { ", " } else { "" }, if count == 1 { "" } else { "s" });
            write!(f, "{comma}{count} {what}{plural}{why}")?;
        }
        Ok(())
    }
}

/// Lists of selectors: a device is meant if all of one list choose it.
pub type SelectorLists = BTreeSet<Arc<[String]>>;

/// Those of all slices.
#[derive(Debug, Default)]
pub struct UnsharedDevices {
    /// By the slices' names.
    slices: BTreeMap<String, Vec<UnsharedDevice>>,
    /// What lists of selectors choose of them; forgotten when they are others.
    answers: BTreeMap<SelectorLists, Unshared>,
    /// Of the selectors in `answers`.
    bytes: usize,
}

impl UnsharedDevices {
    /// A slice has these now.
    pub fn set(&mut self, slice: &str, devices: Vec<UnsharedDevice>) {
        if self.slices.get(slice).map_or(&[][..], Vec::as_slice) == devices {
            return;
        }
        self.forget();
        match devices.is_empty() {
            true => self.slices.remove(slice),
            false => self.slices.insert(slice.to_owned(), devices),
        };
    }

    /// Which devices these selectors choose, and what it cost to find out, in ticks. One that fails on a device, or that is
    /// no CEL, does not choose it. None: it would have cost more than a look may.
    pub fn chosen(&mut self, lists: &SelectorLists) -> (Option<Unshared>, u64) {
        if self.slices.is_empty() {
            return (Some(Unshared::default()), 0);
        }
        if let Some(known) = self.answers.get(lists) {
            return (Some(*known), 0);
        }
        let mut looks = CountedLooks { ticks: 0 };
        let found = looks.at(self.slices.values().flatten(), lists);
        if let Some(found) = found {
            let bytes: usize = lists.iter().flat_map(|list| list.iter()).map(String::len).sum();
            if self.answers.len() >= ANSWERS_MAX || self.bytes.saturating_add(bytes) > ANSWERS_BYTES_MAX {
                self.forget();
            }
            self.bytes = self.bytes.saturating_add(bytes);
            self.answers.insert(lists.clone(), found);
        }
        (found, looks.ticks)
    }

    fn forget(&mut self) {
        self.answers.clear();
        self.bytes = 0;
    }
}

/// Looks at devices, and what they have cost.
struct CountedLooks {
    ticks: u64,
}

impl CountedLooks {
    fn at<'a>(
        &mut self,
        devices: impl Iterator<Item = &'a UnsharedDevice>,
        lists: &SelectorLists,
    ) -> Option<Unshared> {
        let mut compiled = Vec::new();
        for texts in lists {
            compiled.extend(self.compile(texts)?);
        }
        let reads = compiled.iter().flatten().fold(Reads::default(), |all, one| all.with(&one.reads()));
        let (mut found, mut known) = (Unshared::default(), BTreeMap::new());
        for device in devices {
            self.pay(LOOK_TICKS)?;
            let values = reads.values_read(&device.facts);
            let is_chosen = match known.get(&values) {
                Some(chosen) => *chosen,
                None => {
                    let chosen = self.choose(&compiled, &device.facts)?;
                    known.insert(values, chosen);
                    chosen
                }
            };
            if is_chosen {
                found.count(device.cause);
            }
        }
        Some(found)
    }

    /// An empty row: one of them is no CEL, so that the list chooses nothing.
    fn compile(&mut self, texts: &[String]) -> Option<Option<Vec<Selector>>> {
        let mut selectors = Vec::new();
        for text in texts {
            self.pay(Selector::cost_of_compiling(text))?;
            let Ok(selector) = Selector::compile(text) else { return Some(None) };
            self.pay(selector.cost_of_patterns())?;
            selectors.push(selector);
        }
        Some(Some(selectors))
    }

    fn choose(&mut self, lists: &[Vec<Selector>], facts: &DeviceFacts) -> Option<bool> {
        for list in lists {
            let mut all = true;
            for selector in list {
                let (found, ticks) = selector.look_within(facts, LOOKS_TICKS_MAX.saturating_sub(self.ticks));
                self.pay(ticks)?;
                all = found?.unwrap_or(false);
                if !all {
                    break;
                }
            }
            if all {
                return Some(true);
            }
        }
        Some(false)
    }

    /// None: it is more than a look may cost.
    fn pay(&mut self, ticks: u64) -> Option<()> {
        self.ticks = self.ticks.saturating_add(ticks);
        (self.ticks <= LOOKS_TICKS_MAX).then_some(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn device(number: usize, product: &str) -> UnsharedDevice {
        let device = json!({"name": format!("gpu-{number}"), "attributes": {
            "type": {"string": "gpu"}, "productName": {"string": product}, "uuid": {"string": format!("GPU-{number}")}},
            "capacity": {"memory": {"value": "80Gi"}}});
        UnsharedDevice::of(&serde_json::from_value(device).unwrap(), &mut Arc::default())
    }

    fn lists(texts: &[&str]) -> SelectorLists {
        [texts.iter().map(|text| (*text).to_owned()).collect()].into()
    }

    fn count(devices: &mut UnsharedDevices, texts: &[&str]) -> Option<usize> {
        devices.chosen(&lists(texts)).0.map(|found| found.whole)
    }

    const T4: &str = "device.attributes['gpu.nvidia.com'].productName == 'Tesla T4'";

    #[test]
    fn what_is_chosen_is_found_out_once_until_the_devices_are_others() {
        let mut all = UnsharedDevices::default();
        assert_eq!(all.chosen(&lists(&[T4])), (Some(Unshared::default()), 0), "there is nothing to look at");
        all.set("a", vec![device(0, "Tesla T4"), device(1, "NVIDIA GB10")]);
        all.set("b", vec![device(2, "Tesla T4")]);
        assert_eq!(count(&mut all, &[T4]), Some(2));
        assert_eq!(all.chosen(&lists(&[T4])).1, 0, "it is known");
        assert_eq!(count(&mut all, &[]), Some(3));
        assert_eq!(count(&mut all, &[T4, "device.attributes['gpu.nvidia.com'].uuid == 'GPU-2'"]), Some(1));
        for nothing in ["no CEL(", "device.attributes['gpu.nvidia.com'].none == 1"] {
            assert_eq!(count(&mut all, &[nothing]), Some(0), "{nothing}");
        }
        all.set("b", vec![device(2, "Tesla T4")]);
        assert_eq!(all.chosen(&lists(&[T4])).1, 0, "nothing has changed");
        all.set("b", Vec::new());
        assert_eq!(count(&mut all, &[T4]), Some(1));
    }

    /// 256 answers for 200 KB of selectors each would be 50 MB, and stay when the claims have gone.
    #[test]
    fn answers_for_long_selectors_do_not_add_up() {
        let mut all = UnsharedDevices::default();
        all.set("a", vec![device(0, "Tesla T4")]);
        for number in 0..200 {
            let one = |nth: usize| format!("'{}' != '{number} {nth}'", "x".repeat(9_000));
            let long: Vec<String> = (0..10).map(one).collect();
            assert_eq!(count(&mut all, &long.iter().map(String::as_str).collect::<Vec<_>>()), Some(1));
            let kept: usize =
                all.answers.keys().flatten().flat_map(|list| list.iter()).map(String::len).sum();
            assert!(all.bytes == kept && kept <= ANSWERS_BYTES_MAX, "{kept} after {number}");
        }
        assert!(all.answers.len() > 10, "{}", all.answers.len());
    }

    #[test]
    fn a_look_costs_no_more_than_it_may_and_many_alike_cost_little() {
        let mut all = UnsharedDevices::default();
        all.set("a", (0..4_000).map(|number| device(number, "Tesla T4")).collect());
        let (found, ticks) = all.chosen(&lists(&[T4]));
        assert_eq!(found.map(|found| found.whole), Some(4_000));
        assert!(ticks < 4_000 * LOOK_TICKS + 50_000, "{ticks}");
        let dear = "[1, 2, 3, 4, 5, 6, 7, 8].all(a, [1, 2, 3, 4, 5, 6, 7, 8].all(b, \
                    device.attributes['gpu.nvidia.com'].uuid != string(a * b)))";
        let (found, ticks) = all.chosen(&lists(&[dear]));
        assert_eq!(found, None);
        assert!(ticks < 2 * LOOKS_TICKS_MAX, "{ticks}");
        assert_eq!(all.answers.len(), 1, "half an answer is none");
    }
}

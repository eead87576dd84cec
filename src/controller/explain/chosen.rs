//! Which devices of the cluster a class and a request's selectors choose. Each device is looked at once, and what all of it
//! may cost is bounded, since whoever may create a claim writes the selectors.

use std::collections::BTreeMap;

use super::listing::{ListedDevice, Listing};
use super::nodes::cut;
use crate::controller::view::GpuRef;
use crate::model::names::DRIVER;
use crate::select::{
    BY_TOTAL_MEMORY, COST_MAX, DeviceFacts, SelectError, Selector, TICKS_PER_UNIT, is_by_memory_capacity,
};

/// Of all selectors of a claim on all devices, in ticks: twenty evaluations that cost the most, or some hundred thousand as
/// people write them.
const TICKS_MAX: u64 = 20 * COST_MAX * TICKS_PER_UNIT;
const TOO_COSTLY: &str = "not looked at: the claim's selectors cost too much";

/// How a device looks to a class and selectors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum DeviceMatch {
    /// Of another class.
    Other,
    NotSelected,
    Failed(String),
    Chosen,
}

/// All devices of the cluster, as a choice sees them.
pub(super) struct Chosen {
    /// The class's selectors name our driver.
    is_ours: bool,
    /// The request's own, with whether any device of the class matches it.
    selectors: Vec<(String, bool)>,
    seen: BTreeMap<GpuRef, DeviceMatch>,
    /// None is chosen, but one would be if its capacity `memory` were all memory that it has.
    by_total: bool,
}

/// What evaluations have cost.
#[derive(Debug, Default)]
pub(super) struct Spent(u64);

impl Chosen {
    /// # Errors
    /// A selector is no CEL, or none that can be evaluated here: its words, and whether it is the class's.
    pub fn of(
        listing: &Listing,
        class: &[String],
        own: &[String],
        spent: &mut Spent,
    ) -> Result<Self, (SelectError, bool)> {
        let compiled = |texts: &[String]| -> Result<Vec<Selector>, SelectError> {
            texts.iter().map(|text| Selector::compile(text)).collect()
        };
        let class = compiled(class).map_err(|error| (error, true))?;
        let own = compiled(own).map_err(|error| (error, false))?;
        let mut chosen = Self {
            is_ours: class.iter().any(|selector| selector.text().contains(DRIVER)),
            selectors: own.iter().map(|selector| (selector.text().to_owned(), false)).collect(),
            seen: BTreeMap::new(),
            by_total: false,
        };
        for node in listing.pools() {
            for (name, device) in listing.devices(node) {
                let seen = chosen.look(&class, &own, &device, spent);
                chosen.by_total |=
                    seen == DeviceMatch::NotSelected && would_be_by_total(&own, &device.facts, spent);
                chosen.seen.insert(GpuRef::new(node, &name), seen);
            }
        }
        Ok(chosen)
    }

    fn look(
        &mut self,
        class: &[Selector],
        own: &[Selector],
        device: &ListedDevice,
        spent: &mut Spent,
    ) -> DeviceMatch {
        for selector in class {
            match spent.on(selector, &device.facts) {
                Ok(true) => {}
                Ok(false) => return DeviceMatch::Other,
                Err(words) => return DeviceMatch::Failed(words),
            }
        }
        // All of them, so that one that matches nothing is found.
        let mut seen = DeviceMatch::Chosen;
        for (selector, (_, ever)) in own.iter().zip(&mut self.selectors) {
            match spent.on(selector, &device.facts) {
                Ok(true) => *ever = true,
                Ok(false) if seen == DeviceMatch::Chosen => seen = DeviceMatch::NotSelected,
                // After one that is false kube-scheduler looks at no other.
                Err(words) if seen == DeviceMatch::Chosen => seen = DeviceMatch::Failed(words),
                Ok(false) | Err(_) => {}
            }
        }
        seen
    }

    /// None of our devices is of its class, and the class does not speak of our driver either.
    pub fn is_foreign(&self) -> bool {
        !self.is_ours && self.seen.values().all(|seen| *seen == DeviceMatch::Other)
    }

    pub fn seen(&self, gpu: &GpuRef) -> &DeviceMatch {
        self.seen.get(gpu).unwrap_or(&DeviceMatch::Other)
    }

    /// Why no device of the cluster is chosen, whatever is free; none: one is.
    pub fn why_none(&self, class: &str) -> Option<String> {
        if self.seen.values().any(|seen| *seen == DeviceMatch::Chosen) {
            return None;
        }
        let of_class = self.seen.values().filter(|seen| **seen != DeviceMatch::Other).count();
        let failed = self.seen.values().find_map(|seen| match seen {
            DeviceMatch::Failed(words) => Some(words.clone()),
            DeviceMatch::Other | DeviceMatch::NotSelected | DeviceMatch::Chosen => None,
        });
        Some(match (of_class, failed) {
            (0, _) => format!("no device of class {class} is published in the cluster"),
            (_, Some(failed)) => failed,
            (all, None) => format!(
                "no device matches selector {}; class {class} has {all} device{} in the cluster{}",
                self.culprit(),
                if all == 1 { "" } else { "s" },
                if self.by_total { format!("; {BY_TOTAL_MEMORY}") } else { String::new() }
            ),
        })
    }

    /// The selector that no device matches, or all of them if only together they match none.
    fn culprit(&self) -> String {
        match self.selectors.iter().find(|(_, ever)| !ever) {
            Some((text, _)) => cut(text),
            None => self.words(),
        }
    }

    /// All selectors of the request.
    pub fn words(&self) -> String {
        let texts: Vec<&str> = self.selectors.iter().map(|(text, _)| text.as_str()).collect();
        cut(&texts.join(" && "))
    }
}

/// The selectors read the capacity `memory`, and would choose the device if that were all memory that it has.
fn would_be_by_total(own: &[Selector], facts: &DeviceFacts, spent: &mut Spent) -> bool {
    if !own.iter().any(|selector| is_by_memory_capacity(selector.text())) {
        return false;
    }
    let Some(total) = facts.by_total_memory() else { return false };
    own.iter().all(|selector| spent.on(selector, &total).unwrap_or(false))
}

impl Spent {
    pub fn on(&mut self, selector: &Selector, facts: &DeviceFacts) -> Result<bool, String> {
        if self.0 > TICKS_MAX {
            return Err(TOO_COSTLY.to_owned());
        }
        let (found, ticks) = selector.look(facts);
        self.0 = self.0.saturating_add(ticks);
        found.map_err(|error| error.to_string())
    }
}

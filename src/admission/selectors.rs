//! What can be known of a claim's selectors before there is a device: how long they are, and what those cost that are
//! dear whatever the device. What shows on devices only, the controller tells.

use super::messages;
use super::review::Problem;
use crate::model::names::DRIVER;
use crate::select::{CLAIM_BYTES_MAX, COST_MAX, DeviceFacts, Selector, TICKS_PER_UNIT};

/// Of one claim, in units: one selector that costs more than any may, and what leads to it.
pub const REVIEW_UNITS_MAX: u64 = COST_MAX + COST_MAX / 10;

/// What may be spent on a claim's selectors, and what was, in units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SelectorBudget {
    most: u64,
    spent: u64,
    is_short: bool,
}

impl SelectorBudget {
    /// At most [`REVIEW_UNITS_MAX`].
    pub fn of(units: u64) -> Self {
        Self { most: units.min(REVIEW_UNITS_MAX) * TICKS_PER_UNIT, spent: 0, is_short: false }
    }

    /// Units.
    pub fn spent(&self) -> u64 {
        self.spent.div_ceil(TICKS_PER_UNIT)
    }

    /// A selector was left untried, or not to its end.
    pub fn is_short(&self) -> bool {
        self.is_short
    }

    fn left(&self) -> u64 {
        self.most.saturating_sub(self.spent)
    }

    /// False: so much is not there.
    fn pay(&mut self, ticks: u64) -> bool {
        let enough = ticks <= self.left();
        match enough {
            true => self.spent = self.spent.saturating_add(ticks),
            false => self.is_short = true,
        }
        enough
    }
}

/// Of the selectors of a claim's requests for shares. `at`: where these requests stand; of each selector where it stands,
/// and its CEL.
pub(super) fn problems<'a>(
    at: &str,
    selectors: impl Iterator<Item = (String, &'a str)>,
    budget: &mut SelectorBudget,
) -> Vec<Problem> {
    let selectors: Vec<(String, &str)> = selectors.collect();
    let bytes = selectors.iter().fold(0_usize, |sum, (_, text)| sum.saturating_add(text.len()));
    if bytes > CLAIM_BYTES_MAX {
        return vec![Problem { field: at.to_owned(), words: messages::selectors(bytes) }];
    }
    // Every GPU of ours looks like this where nothing is asked of it.
    let device = DeviceFacts { driver: DRIVER.to_owned(), ..DeviceFacts::default() };
    let mut found = Vec::new();
    for (field, text) in selectors {
        if !budget.pay(Selector::cost_of_compiling(text)) {
            break;
        }
        // The API server tells of what is no CEL, and the controller of what it does not know.
        let Ok(selector) = Selector::compile(text) else { continue };
        // They are compiled by now.
        budget.spent = budget.spent.saturating_add(selector.cost_of_patterns());
        let (answer, cost) = selector.look_within(&device, budget.left());
        budget.spent = budget.spent.saturating_add(cost);
        match answer {
            Some(Err(error)) if error.is_of_cost() => found.push(Problem { field, words: error.to_string() }),
            Some(_) => {}
            None => {
                budget.is_short = true;
                break;
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(selectors: &[&str]) -> Vec<String> {
        told_within(selectors, u64::MAX).0
    }

    /// And whether the budget was too short.
    fn told_within(selectors: &[&str], units: u64) -> (Vec<String>, bool) {
        let named = selectors.iter().enumerate().map(|(at, text)| (format!("s[{at}]"), *text));
        let mut budget = SelectorBudget::of(units);
        let all = problems("requests", named, &mut budget);
        let ours = units.min(REVIEW_UNITS_MAX);
        // The last step that is paid for may go beyond.
        assert!(budget.spent() <= ours + ours / 100 + 10, "{} of {ours}", budget.spent());
        (all.into_iter().map(|one| format!("{}: {}", one.field, one.words)).collect(), budget.is_short())
    }

    fn dear(levels: u8) -> String {
        let ten = "[0,1,2,3,4,5,6,7,8,9]";
        (0..levels).fold("false".to_owned(), |inner, nth| format!("{ten}.exists(x{nth}, {inner})"))
    }

    #[test]
    fn what_is_too_long_or_too_dear_on_any_device_is_told_with_its_number() {
        let usual = "device.attributes['gpu.nvidia.com'].productName.startsWith('NVIDIA')";
        assert_eq!(told(&[usual, "device.driver ==", "true"]), [""; 0]);
        let dear = dear(8);
        let found = told(&["true", &dear, "true", &dear]);
        assert_eq!(found.len(), 1, "after that no more is looked at: {found:?}");
        assert!(found[0].starts_with("s[1]: ") && found[0].contains("costs more than 2000000"), "{found:?}");
        let long = format!("'{}' == device.driver", "x".repeat(10_000));
        let found = told(&[long.as_str(); 7]);
        assert!(found[0].starts_with("requests: ") && found[0].contains("70133 bytes"), "{found:?}");
        assert_eq!(told(&[long.as_str(); 6]), [""; 0]);
    }

    #[test]
    fn what_a_budget_does_not_reach_for_is_left_untried_and_refused_for_nothing() {
        let (dear, cheap) = (dear(8), "device.driver == 'gpu.nvidia.com'");
        // Too dear on any device, which the budget is too small to find out.
        assert_eq!(told_within(&[&dear, cheap], 100_000), (vec![], true));
        assert_eq!(told_within(&[cheap, "false"], 100_000), (vec![], false));
        assert_eq!(told_within(&[cheap], 0), (vec![], true));
        assert_eq!(told_within(&[], 0), (vec![], false), "there is nothing to try");
        // Each selector counts, not only the dear ones.
        let many: Vec<&str> = vec![cheap; 1_000];
        assert_eq!(told_within(&many, 10_000), (vec![], true));
        // What is too long is found without trying.
        let long = format!("'{}' == device.driver", "x".repeat(10_000));
        assert_eq!(told_within(&[long.as_str(); 7], 0).0.len(), 1);
    }
}

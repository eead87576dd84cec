//! What can be known of a claim's selectors before there is a device: how long they are, and what those cost that are
//! dear whatever the device. What shows on devices only, the controller tells.

use super::messages;
use super::review::Problem;
use crate::model::names::DRIVER;
use crate::select::{CLAIM_BYTES_MAX, COST_MAX, DeviceFacts, Selector, TICKS_PER_UNIT};

/// Of one claim; one selector may come on top. So what a request to the webhook costs is bounded.
const LOOK_COST_MAX: u64 = COST_MAX;

/// Of the selectors of a claim's requests for shares. `at`: where these requests stand; of each selector where it stands,
/// and its CEL.
pub(super) fn problems<'a>(at: &str, selectors: impl Iterator<Item = (String, &'a str)>) -> Vec<Problem> {
    let selectors: Vec<(String, &str)> = selectors.collect();
    let bytes = selectors.iter().fold(0_usize, |sum, (_, text)| sum.saturating_add(text.len()));
    if bytes > CLAIM_BYTES_MAX {
        return vec![Problem { field: at.to_owned(), words: messages::selectors(bytes) }];
    }
    // Every GPU of ours looks like this where nothing is asked of it.
    let device = DeviceFacts { driver: DRIVER.to_owned(), ..DeviceFacts::default() };
    let (mut spent, mut found) = (0_u64, Vec::new());
    for (field, text) in selectors {
        if spent / TICKS_PER_UNIT > LOOK_COST_MAX {
            break;
        }
        spent = spent.saturating_add(Selector::cost_of_compiling(text));
        // The API server tells of what is no CEL, and the controller of what it does not know.
        let Ok(selector) = Selector::compile(text) else { continue };
        let (answer, cost) = selector.look(&device);
        spent = spent.saturating_add(cost).saturating_add(selector.cost_of_patterns());
        if let Err(error) = answer
            && error.is_of_cost()
        {
            found.push(Problem { field, words: error.to_string() });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(selectors: &[&str]) -> Vec<String> {
        let named = selectors.iter().enumerate().map(|(at, text)| (format!("s[{at}]"), *text));
        let all = problems("requests", named);
        all.into_iter().map(|one| format!("{}: {}", one.field, one.words)).collect()
    }

    #[test]
    fn what_is_too_long_or_too_dear_on_any_device_is_told_with_its_number() {
        let usual = "device.attributes['gpu.nvidia.com'].productName.startsWith('NVIDIA')";
        assert_eq!(told(&[usual, "device.driver ==", "true"]), [""; 0]);
        let ten = "[0,1,2,3,4,5,6,7,8,9]";
        let dear = (0..8).fold("false".to_owned(), |inner, nth| format!("{ten}.exists(x{nth}, {inner})"));
        let found = told(&["true", &dear, "true", &dear]);
        assert_eq!(found.len(), 1, "after that no more is looked at: {found:?}");
        assert!(found[0].starts_with("s[1]: ") && found[0].contains("costs more than 2000000"), "{found:?}");
        let long = format!("'{}' == device.driver", "x".repeat(10_000));
        let found = told(&[long.as_str(); 7]);
        assert!(found[0].starts_with("requests: ") && found[0].contains("70133 bytes"), "{found:?}");
        assert_eq!(told(&[long.as_str(); 6]), [""; 0]);
    }
}

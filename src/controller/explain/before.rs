//! What goes before a claim: places that are kept for others, and units whose turn comes first.

use jiff::Timestamp;

use crate::controller::core::Core;
use crate::controller::recorder::KEPT_FOR;
use crate::controller::view::Claim;

/// So many claims that something is kept for are named.
const KEPT_MAX: usize = 5;

/// What is kept for other claims, and until when: it stands on them. Who may write a claim can write that, too.
pub(super) fn kept(core: &Core, own: &Claim, at: Timestamp) -> Vec<String> {
    let one = |claim: &Claim| {
        let text = claim.waiting.as_deref()?.strip_prefix(KEPT_FOR)?;
        let text = text.get(text.find("until ")?..)?.split(';').next()?.lines().next()?;
        let (until, _) = text.strip_prefix("until ")?.split_once(": ")?;
        let until: Timestamp = until.parse().ok()?;
        (until > at).then(|| format!("claim {}/{} {text}", claim.namespace(), claim.name()))
    };
    let waits = |claim: &&Claim| claim.waiting.is_some() && claim.allocation.is_none();
    let others = core.view.claims().filter(waits).filter(|claim| claim.key != own.key);
    others.filter_map(one).take(KEPT_MAX).collect()
}

pub(super) fn goes_first(before: usize) -> Option<String> {
    match before {
        0 => None,
        1 => Some("1 pod or gang gets its share first, by priority and age".to_owned()),
        more => Some(format!("{more} pods or gangs get their shares first, by priority and age")),
    }
}

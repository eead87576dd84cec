//! E21: how many clients a GPU takes.

use anyhow::{Result, bail};
use serde_json::json;

use crate::protocol::{MPS_MAX_CLIENTS, Reply, Request};
use crate::stage::Stage;
use crate::table::{Finding, Verdict};

/// More than any driver takes.
const MOST: usize = 72;
/// What `tranche` counts with.
const COUNTED: usize = 48;

/// E21
pub fn exhausted(stage: &mut Stage) -> Result<Vec<Finding>> {
    stage.serve(stage.limits)?;
    let mut tenants = Vec::new();
    let mut refusal = None;
    while tenants.len() < MOST && refusal.is_none() {
        let mut tenant = stage.tenant(&format!("e21-{}", tenants.len()), stage.limits)?;
        match tenant.try_ask(Request::Open)? {
            Ok(Reply::Opened(_)) => tenants.push(tenant),
            Ok(Reply::Failed(failure)) => refusal = Some((failure.code, failure.to_string())),
            Ok(other) => return tenant.unexpected(&other),
            Err(silence) => refusal = Some((0, silence.to_string())),
        }
    }
    let count = tenants.len();
    if let (0, Some((_, words))) = (count, &refusal) {
        bail!("not even one: {words}");
    }
    // Together, or each end is waited for alone.
    tenants.iter_mut().for_each(crate::tenant::Tenant::let_go);
    drop(tenants);
    let mut after = stage.tenant("e21-after", stage.limits)?;
    let again = after.open().is_ok();
    let (code, words) = refusal.unwrap_or((0, format!("none of {MOST} was refused")));
    let seen = format!(
        "{count} clients; then {words}; {}",
        if again { "once they have gone a new one opens" } else { "no new one opens once they have gone" }
    );
    let expected = format!("at least {COUNTED}, then {MPS_MAX_CLIENTS}; a new one opens afterwards");
    let known = code == MPS_MAX_CLIENTS || count == MOST;
    let verdict = Verdict::as_expected_if(count >= COUNTED && known && again);
    Ok(vec![Finding::new("", expected, seen, verdict).with(json!({"clients": count, "code": code}))])
}

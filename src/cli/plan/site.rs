//! The node that the plan is for: its name, its GPUs, and who holds some of them already.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::PlanArgs;
use crate::cli::manifest::Manifest;
use crate::cli::reading::{cause, parse, read, typed, unreadable};
use crate::cli::state::{NodeState, RecordedClaim};
use crate::cli::{UsageError, inspect};
use crate::inventory::Inventory;
use crate::ledger;
use crate::model::names::{DeviceName, NodeName};
use crate::sharing::SharingPolicy;
use crate::slices::{self, Offer, Offered};

/// See the module's text.
pub struct NodeSite {
    pub node: NodeName,
    pub inventory: Inventory,
    pub held: Vec<RecordedClaim>,
    /// How each board is offered.
    pub offered: BTreeMap<DeviceName, Offered>,
    /// What had to be assumed.
    pub notes: Vec<String>,
}

/// Gathers what was given, and asks the running plugin for the rest.
pub fn find(args: &PlanArgs, manifest: &Manifest) -> anyhow::Result<NodeSite> {
    let mut notes = Vec::new();
    let (mut state, knows_claims) = match &args.gpus {
        Some(path) => from_file(path)?,
        None => (inspect::state(&args.place)?, true),
    };
    if let Some(folder) = &args.ledger {
        state.claims = records(folder)?;
    } else if !knows_claims {
        notes.push(
            "Claims that already hold devices are not counted: give --ledger to count them.".to_owned(),
        );
    }
    let named = args.node.clone().unwrap_or(state.node.name);
    let node = match (named.is_empty(), manifest.pool()) {
        (false, _) => named,
        (true, Some(pool)) => {
            notes.push(format!(
                "The node is assumed to be {pool}, which the allocation names: give --node for another one."
            ));
            pool
        }
        (true, None) => "<not given>".to_owned(),
    };
    let mut offered = state.slices.offered;
    if let (true, Inventory::Found(gpus)) = (offered.is_empty(), &state.inventory) {
        offered = slices::offered(gpus, Offer::Shares(&SharingPolicy::default()));
    }
    Ok(NodeSite { node: NodeName::new(node), inventory: state.inventory, held: state.claims, offered, notes })
}

/// A whole state, the inventory of one, or the GPUs alone. True: it tells of claims, too.
fn from_file(path: &Path) -> Result<(NodeState, bool), UsageError> {
    let name = path.display().to_string();
    let value = parse(&read(path)?, &name)?;
    if value.get("inventory").is_some() {
        let knows_claims = value.get("claims").is_some();
        return Ok((of_node(&value, &name)?, knows_claims));
    }
    let has = |field: &str| value.get(field).is_some();
    let inventory = if has("gpus") {
        Inventory::Found(of_node(&value, &name)?)
    } else if has("Found") || has("Unavailable") || value == "Unknown" {
        of_node(&value, &name)?
    } else {
        return Err(UsageError(format!(
            "{name} does not list a node's GPUs: it has neither inventory nor gpus; use what tranche inspect \
             -o json prints"
        )));
    };
    Ok((NodeState { inventory, ..NodeState::default() }, false))
}

fn of_node<T: DeserializeOwned>(value: &Value, name: &str) -> Result<T, UsageError> {
    typed(value).map_err(|words| {
        UsageError(format!(
            "{name} does not list a node's GPUs: {words}; use what tranche inspect -o json prints"
        ))
    })
}

/// Every record in the folder, or in its subfolder `ledger` if it is the plugin's state folder.
fn records(folder: &Path) -> Result<Vec<RecordedClaim>, UsageError> {
    let below = folder.join("ledger");
    let folder = if below.is_dir() { &below } else { folder };
    let unreadable = |error: std::io::Error| {
        UsageError(format!("cannot read the ledger {}: {}", folder.display(), cause(&error)))
    };
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        if path.extension().is_some_and(|ending| ending == "rec") {
            paths.push(path);
        }
    }
    paths.sort();
    paths.iter().map(|path| record(path)).collect()
}

fn record(path: &Path) -> Result<RecordedClaim, UsageError> {
    let bytes = fs::read(path).map_err(|error| unreadable(&path.display().to_string(), &error))?;
    let record = ledger::decode(&bytes)
        .map_err(|damage| UsageError(format!("the ledger record {} is damaged: {damage}", path.display())))?
        .record;
    Ok(RecordedClaim { phase: format!("{:?}", record.phase), intent: record.intent })
}

//! What GPUs can be cut into, by model: a file with what NVML tells of each MIG profile.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::rows::{BadTrace, Row, rows};
use crate::model::gpu::{MigCapacity, Placement};
use crate::model::mig::MigProfile;
use crate::model::quantity::Bytes;

/// No board has more memory slices.
const SLICES_MAX: u32 = 128;
/// Nor more profiles.
const PROFILES_MAX: usize = 64;

#[derive(Debug, Default)]
pub struct Profiles(BTreeMap<String, Arc<[MigProfile]>>);

impl Profiles {
    /// Reads the file.
    ///
    /// # Errors
    /// The first mistake, with file, line and field.
    pub fn read(file: &str, text: &str) -> Result<Self, BadTrace> {
        let columns = ["model", "profile", "compute_slices", "memory_mib", "memory_slices", "fit", "starts"];
        let mut models: BTreeMap<String, Vec<MigProfile>> = BTreeMap::new();
        for row in rows(file, text, columns)? {
            let of_model = models.entry(row.text(0)?.to_owned()).or_default();
            let profile = profile(&row, of_model)?;
            of_model.push(profile);
        }
        Ok(Self(models.into_iter().map(|(model, profiles)| (model, profiles.into())).collect()))
    }

    /// None: a GPU of that model cannot be cut.
    pub fn of(&self, model: &str) -> Option<Arc<[MigProfile]>> {
        self.0.get(model).cloned()
    }
}

fn profile(row: &Row<'_, 7>, others: &[MigProfile]) -> Result<MigProfile, BadTrace> {
    let name = row.text(1)?;
    if others.iter().any(|other| other.name == name) {
        return Err(row.bad(1, format!("{name} is in an earlier line of this model, too")));
    }
    if others.len() >= PROFILES_MAX {
        return Err(row.bad(1, format!("more than {PROFILES_MAX} profiles of one model")));
    }
    let at_least_one = |column: usize| match row.number(column)? {
        0 => Err(row.bad(column, "0 is not valid: write 1 or more".to_owned())),
        number => Ok(number),
    };
    let size = at_least_one(4)?;
    let start = |text: &str| {
        let start: Option<u32> = text.trim().parse().ok();
        let within = start.filter(|start| start.saturating_add(size) <= SLICES_MAX);
        within.map(|start| Placement { start, size }).ok_or_else(|| {
            let words = format!(
                "{text:?} is not a memory slice at which it may begin: write whole numbers with | between \
                 them, and none that with memory_slices is above {SLICES_MAX}"
            );
            row.bad(6, words)
        })
    };
    Ok(MigProfile {
        // Profiles are told apart by their lines here.
        id: u32::try_from(others.len()).unwrap_or(u32::MAX),
        name: name.to_owned(),
        slices: at_least_one(2)?,
        most: at_least_one(5)?,
        capacity: MigCapacity { memory: Bytes::from_mib(row.number(3)?), ..MigCapacity::default() },
        placements: row.text(6)?.split('|').map(start).collect::<Result<_, _>>()?,
    })
}

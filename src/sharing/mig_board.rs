//! What a board in MIG mode says of itself to the controller, as attributes: the profiles that it can be cut into, and the
//! instances on it that were made for no claim. API servers without counters (KEP-4815) keep attributes too.

use crate::model::gpu::{MigCapacity, Placement};
use crate::model::mig::{MigPlace, MigProfile};
use crate::model::quantity::Bytes;

/// The value of the attribute `type` of a board that is cut into MIG devices: no class of whole GPUs matches it.
pub const MIG_PARENT: &str = "mig-parent";
/// The name of a profile's attribute; NVML's id of the profile follows.
pub const MIG_PROFILE: &str = "migProfile";
/// The attribute with instances that were made for no claim.
pub const MIG_INSTANCES: &str = "migInstances";
/// The attribute with places at which an instance could not be ended, or could not be made lately.
pub const MIG_AVOIDED: &str = "migAvoided";

/// Instances in one text, and placements in another: no board has more.
const MOST: usize = 32;

/// What a board can be cut into, and the instances on it that were made for no claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigBoard {
    /// By id. Of each: name, compute slices, how many fit, memory, multiprocessors, placements of one size.
    pub profiles: Vec<MigProfile>,
    pub foreign: Vec<MigPlace>,
    /// Where an instance could not be ended, or could not be made lately.
    pub avoided: Vec<MigPlace>,
}

impl MigBoard {
    /// Only what an amount may be served by: profiles whose name has no suffix (`+me`), with placements of one size.
    pub fn new(profiles: &[MigProfile], foreign: &[MigPlace]) -> Self {
        let mut profiles: Vec<MigProfile> = profiles.iter().filter_map(plain).collect();
        profiles.sort_by_key(|profile| profile.id);
        profiles.dedup_by_key(|profile| profile.id);
        Self { profiles, foreign: foreign.to_vec(), avoided: Vec::new() }
    }

    /// The same, with places that are to be avoided.
    #[must_use]
    pub fn avoiding(self, avoided: Vec<MigPlace>) -> Self {
        Self { avoided, ..self }
    }

    /// Where nothing is to be made: instances that were made for no claim, and places to be avoided.
    pub fn taken(&self) -> Vec<MigPlace> {
        let avoided = self.avoided.iter().filter(|place| !self.foreign.contains(place));
        self.foreign.iter().chain(avoided).copied().collect()
    }

    /// Names and values of the attributes, in the order of their names. None if a value has more than `most` bytes, so
    /// that nobody cuts the board by half of what there is to know of it; or if there is no profile. Of places to be avoided
    /// as many are told as there is room for: who goes there learns it again.
    pub fn attributes(&self, most: usize) -> Option<Vec<(String, String)>> {
        let profiles =
            self.profiles.iter().map(|one| (format!("{MIG_PROFILE}{}", one.id), profile_text(one)));
        let instances = self.foreign.iter().map(|at| place_text(*at)).collect::<Vec<_>>().join(" ");
        let instances = (!instances.is_empty()).then(|| (MIG_INSTANCES.to_owned(), instances));
        let mut avoided = String::new();
        for text in self.avoided.iter().take(MOST).map(|at| place_text(*at)) {
            let space = if avoided.is_empty() { "" } else { " " };
            if avoided.len() + space.len() + text.len() <= most {
                avoided = avoided + space + &text;
            }
        }
        let avoided = (!avoided.is_empty()).then(|| (MIG_AVOIDED.to_owned(), avoided));
        let mut all: Vec<_> = profiles.chain(instances).chain(avoided).collect();
        all.sort();
        (!self.profiles.is_empty() && all.iter().all(|(_, text)| text.len() <= most)).then_some(all)
    }

    /// Reads what [`Self::attributes`] says; other attributes do not matter. None if there is no profile, or a text is not
    /// understood: then nothing is known for certain of what is free.
    pub fn read<'a>(attributes: impl IntoIterator<Item = (&'a str, &'a str)>) -> Option<Self> {
        let mut board = Self { profiles: Vec::new(), foreign: Vec::new(), avoided: Vec::new() };
        let places = |text: &str| text.split(' ').take(MOST + 1).map(read_place).collect::<Option<Vec<_>>>();
        for (name, text) in attributes {
            if name == MIG_INSTANCES {
                board.foreign = places(text)?;
            } else if name == MIG_AVOIDED {
                board.avoided = places(text)?;
            } else if let Some(id) = name.strip_prefix(MIG_PROFILE) {
                board.profiles.push(read_profile(id.parse().ok()?, text)?);
            }
        }
        board.profiles.sort_by_key(|profile| profile.id);
        let few = |all: &[MigPlace]| all.len() <= MOST;
        let sane = !board.profiles.is_empty() && board.profiles.len() <= MOST;
        let sane = sane && few(&board.foreign) && few(&board.avoided);
        sane.then_some(board)
    }
}

fn plain(profile: &MigProfile) -> Option<MigProfile> {
    let size = profile.placements.first()?.size;
    let usable = profile.is_plain()
        && profile.placements.len() <= MOST
        && profile.placements.iter().all(|one| one.size == size);
    let MigCapacity { memory, multiprocessors, .. } = profile.capacity;
    let memory = Bytes::from_mib(memory.mib_floor());
    let capacity = MigCapacity { memory, multiprocessors, ..MigCapacity::default() };
    usable.then(|| MigProfile { capacity, ..profile.clone() })
}

/// `1g.10gb 1/7 9856 16 1@0,1,2,3,4,5,6`: name, compute slices of one and how many fit, MiB, multiprocessors, memory slices
/// and where they may begin.
fn profile_text(profile: &MigProfile) -> String {
    let MigProfile { name, slices, most, capacity, placements, .. } = profile;
    let size = placements.first().map_or(0, |one| one.size);
    let starts: Vec<_> = placements.iter().map(|one| one.start.to_string()).collect();
    let (mib, multiprocessors) = (capacity.memory.mib_floor(), capacity.multiprocessors);
    format!("{name} {slices}/{most} {mib} {multiprocessors} {size}@{}", starts.join(","))
}

fn read_profile(id: u32, text: &str) -> Option<MigProfile> {
    let words: Vec<&str> = text.split(' ').take(6).collect();
    let [name, counts, mib, multiprocessors, places] = words[..] else { return None };
    let (slices, most) = counts.split_once('/')?;
    let (size, starts) = places.split_once('@')?;
    let size = size.parse().ok()?;
    let starts: Vec<u32> =
        starts.split(',').take(MOST + 1).map(|start| start.parse().ok()).collect::<Option<_>>()?;
    let mib: u64 = mib.parse().ok()?;
    let sane = !name.is_empty() && starts.len() <= MOST && (1..1 << 40).contains(&mib);
    sane.then_some(MigProfile {
        id,
        name: name.to_owned(),
        slices: slices.parse().ok()?,
        most: most.parse().ok()?,
        capacity: MigCapacity {
            memory: Bytes::from_mib(mib),
            multiprocessors: multiprocessors.parse().ok()?,
            ..MigCapacity::default()
        },
        placements: starts.into_iter().map(|start| Placement { start, size }).collect(),
    })
}

/// `19:1@4`: the profile's id, memory slices, where they begin.
fn place_text(MigPlace { profile_id, placement }: MigPlace) -> String {
    format!("{profile_id}:{}@{}", placement.size, placement.start)
}

fn read_place(text: &str) -> Option<MigPlace> {
    let (profile, at) = text.split_once(':')?;
    let (size, start) = at.split_once('@')?;
    let placement = Placement { start: start.parse().ok()?, size: size.parse().ok()? };
    Some(MigPlace { profile_id: profile.parse().ok()?, placement })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(id: u32, name: &str, slices: u32, most: u32, mib: u64, at: &[u32], size: u32) -> MigProfile {
        MigProfile {
            id,
            name: name.into(),
            slices,
            most,
            capacity: MigCapacity {
                memory: Bytes::from_mib(mib),
                multiprocessors: 16 * slices,
                ..MigCapacity::default()
            },
            placements: at.iter().map(|start| Placement { start: *start, size }).collect(),
        }
    }

    fn board() -> MigBoard {
        let profiles = [
            profile(19, "1g.10gb", 1, 7, 9856, &[0, 1, 2, 3, 4, 5, 6], 1),
            profile(20, "1g.10gb+me", 1, 1, 9856, &[0, 1], 1),
            profile(9, "3g.40gb", 3, 2, 40192, &[0, 4], 4),
        ];
        let at = |profile_id, start, size| MigPlace { profile_id, placement: Placement { start, size } };
        MigBoard::new(&profiles, &[at(19, 3, 1), at(9, 4, 4)])
    }

    fn read(attributes: &[(String, String)]) -> Option<MigBoard> {
        MigBoard::read(attributes.iter().map(|(name, text)| (name.as_str(), text.as_str())))
    }

    #[test]
    fn what_a_board_says_of_itself_is_read_back() {
        let said = board().attributes(64).unwrap();
        let expected = [
            ("migInstances", "19:1@3 9:4@4"),
            ("migProfile19", "1g.10gb 1/7 9856 16 1@0,1,2,3,4,5,6"),
            ("migProfile9", "3g.40gb 3/2 40192 48 4@0,4"),
        ];
        assert_eq!(said, expected.map(|(name, text)| (name.to_owned(), text.to_owned())));
        assert_eq!(read(&said), Some(board()));
        let others = [("uuid", "GPU-1"), ("productName", "migProfile")];
        let said = said.iter().map(|(name, text)| (name.as_str(), text.as_str()));
        assert_eq!(MigBoard::read(said.chain(others)), Some(board()));
    }

    #[test]
    fn places_to_be_avoided_are_no_instances_and_told_as_far_as_there_is_room() {
        let at = |start| MigPlace { profile_id: 19, placement: Placement { start, size: 1 } };
        let avoiding = board().avoiding(vec![at(3), at(5)]);
        let said = avoiding.attributes(64).unwrap();
        assert_eq!(said[0], ("migAvoided".to_owned(), "19:1@3 19:1@5".to_owned()));
        assert_eq!(read(&said), Some(avoiding.clone()));
        let board = board();
        assert_eq!(avoiding.taken(), [board.foreign[0], board.foreign[1], at(5)], "each once");
        let many = board.avoiding((0..30).map(at).collect());
        let read = read(&many.attributes(64).unwrap()).unwrap();
        assert_eq!((read.avoided.len(), &read.foreign), (9, &many.foreign));
    }

    #[test]
    fn a_board_that_cannot_say_all_of_it_says_nothing() {
        assert_eq!(board().attributes(30), None);
        assert_eq!(MigBoard::new(&[], &[]).attributes(64), None);
    }

    #[test]
    fn nothing_is_guessed_of_what_is_not_understood() {
        let good = "1g.10gb 1/7 9856 16 1@0,1";
        assert!(MigBoard::read([("migProfile19", good)]).is_some());
        for text in [
            "",
            "1g.10gb",
            "1g.10gb 1 9856 16 1@0",
            "1g.10gb 1/7 x 16 1@0",
            "1g.10gb 1/7 0 16 1@0",
            "1g.10gb 1/7 9856 16 1@",
            "1g.10gb 1/7 9856 16 1@0 more",
            "1g.10gb 1/7 18446744073709551615 16 1@0",
        ] {
            assert_eq!(MigBoard::read([("migProfile19", text)]), None, "{text:?}");
        }
        let long = format!("1g.10gb 1/7 9856 16 1@{}", vec!["0"; 40].join(","));
        for (name, text) in [
            ("migProfileX", good),
            ("migProfile", good),
            ("migProfile19", long.as_str()),
            ("migInstances", "19"),
            ("migInstances", ""),
            ("migInstances", "19:1@x"),
            ("migAvoided", "19"),
        ] {
            assert_eq!(MigBoard::read([("migProfile9", good), (name, text)]), None, "{name} {text:?}");
        }
    }
}

//! The ledger on disk: one record file per claim in one folder, and an index of the records in memory.
//!
//! A caller that changes a record holds the lanes of the record's GPUs ([`Held`] is the proof). Each lane file
//! carries a number that grows with every change. A number that differs from the remembered one shows that another
//! process changed a record, and the index is read again. A damaged record stops the start: it is never overwritten.
//!
//! Nobody reads or writes a file with the index locked: on a slow disk whoever only wants to know what the index says would
//! wait for it, the watchdog's looks among them.

mod readings;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use thiserror::Error;
use tokio::sync::watch;

use self::readings::{ReadingEnd, Readings};
use super::lanes::Held;
use crate::host::{Durability, FileLock, Host, LockError, durable};
use crate::ledger::{self, Damage, Intent, Mark, Phase, Record, RecordKey, Standing, Step};
use crate::model::claim::PodRef;
use crate::model::names::{BootId, ClaimUid, DeviceUuid};
use crate::model::share::{MpsGroup, MpsLimits};

const SUFFIX: &str = ".rec";

#[derive(Debug, Error)]
pub enum StoreError {
    #[error("cannot {verb} {path}")]
    Io { verb: &'static str, path: PathBuf, source: io::Error },
    #[error(
        "the ledger record {path} is damaged. It says which GPU a claim holds, so it is left as it is: restore \
         it, or, if no pod on this node uses that claim any more, move it away and start again"
    )]
    Damaged { path: PathBuf, source: Damage },
    #[error(
        "the ledger record {path} is that of claim {key}, whose record has another name; it is left as it is: \
         move it away and start again"
    )]
    Foreign { path: PathBuf, key: RecordKey },
    #[error("claim UID {:?} cannot be a file name", .0.to_string())]
    Name(RecordKey),
    #[error("a record cannot be written as JSON")]
    Encode(#[from] serde_json::Error),
    #[error("claim {0} has no record to mark")]
    NoRecord(RecordKey),
    #[error("the lanes of claim {0} are not held")]
    NoLane(RecordKey),
    #[error(
        "too many records changed while the ledger in {0} was read, so what was read is not used; is its disk slow? It is \
         read again"
    )]
    Changing(PathBuf),
    #[error(transparent)]
    Lane(#[from] LockError),
}

/// Who uses an MPS group: whether its boards are for MPS alone, and those whose lanes its claims take.
pub struct MpsUsers {
    pub exclusive: bool,
    pub lanes: Vec<DeviceUuid>,
}

/// See the module's text.
pub struct Store {
    folder: PathBuf,
    host: Arc<dyn Host>,
    index: Mutex<Index>,
    /// Counts changes of the index.
    changes: watch::Sender<u64>,
}

#[derive(Default)]
struct Index {
    records: BTreeMap<RecordKey, Stored>,
    /// Number of each lane when the index was last known to be true; none for a lane that was busy then.
    lane_numbers: LaneNumbers,
    readings: Readings,
}

#[derive(Clone)]
struct Stored {
    record: Record,
    /// Where the next mark goes.
    len: usize,
}

impl Index {
    /// A record is so now; none: it is no more.
    fn set(&mut self, key: RecordKey, stored: Option<Stored>) {
        self.readings.note_change(&key);
        match stored {
            Some(stored) => drop(self.records.insert(key, stored)),
            None => drop(self.records.remove(&key)),
        }
    }

    /// The records are these now, but for some that stay as they are.
    fn take_over(&mut self, mut found: BTreeMap<RecordKey, Stored>, except: &BTreeSet<RecordKey>) {
        for key in except {
            match self.records.remove(key) {
                Some(stored) => drop(found.insert(key.clone(), stored)),
                None => drop(found.remove(key)),
            }
        }
        self.records = found;
    }
}

impl Store {
    /// Opens the ledger in `folder` (created if absent). Fails on the first damaged record.
    pub fn open(folder: PathBuf, lanes: &Path, host: Arc<dyn Host>) -> Result<Self, StoreError> {
        fs::create_dir_all(&folder).map_err(io_error("create", &folder))?;
        // Held while the records are read, so that none of theirs changes under its number.
        let (at_rest, lane_numbers) = lanes_at_rest(lanes)?;
        let records = read_all(&folder)?;
        drop(at_rest);
        let changes = watch::Sender::new(0);
        let index = Index { records, lane_numbers, readings: Readings::default() };
        Ok(Self { folder, host, index: Mutex::new(index), changes })
    }

    /// Clears what was left half written longer than `age` ago.
    pub fn remove_temporaries(&self, age: Duration) -> io::Result<usize> {
        durable::remove_temporaries(&self.folder, age, |name| name.ends_with(SUFFIX))
    }

    /// Reads the index again if another process changed something in these lanes.
    pub fn refresh(&self, held: &Held) -> Result<(), StoreError> {
        let mut changed = Vec::new();
        for (gpu, lock) in held.locks() {
            let number = Some(lane_number(lock, gpu)?);
            if *self.index().lane_numbers.get(gpu).unwrap_or(&Some(0)) != number {
                changed.push((gpu.clone(), number));
            }
        }
        if !changed.is_empty() {
            // Fails first, believes afterwards: who asks again must not be given the old index.
            self.take_over()?.lane_numbers.extend(changed);
        }
        Ok(())
    }

    /// Reads all records again, whoever changed them. What is under way elsewhere is seen half done, and
    /// read again by whoever takes its lanes.
    pub fn read_again(&self) -> Result<(), StoreError> {
        self.take_over().map(drop)
    }

    /// Reads all records, and takes them over: the index is as new as the disk was when this began, or newer.
    fn take_over(&self) -> Result<MutexGuard<'_, Index>, StoreError> {
        let reading = self.index().readings.begin();
        let found = read_all(&self.folder);
        let mut index = self.index();
        let found = found.inspect_err(|_| index.readings.give_up(reading))?;
        match index.readings.end(reading) {
            ReadingEnd::TakeOver { except } => {
                index.take_over(found, &except);
                self.tell_of_change();
            }
            ReadingEnd::Overtaken => {}
            ReadingEnd::Void => return Err(StoreError::Changing(self.folder.clone())),
        }
        Ok(index)
    }

    /// A claim's own record, straight from the disk: valid without a lane for finding out which lanes to take.
    pub fn read(&self, claim: &ClaimUid) -> Result<Option<Record>, StoreError> {
        Ok(read_one(&self.path(&RecordKey::Claim(claim.clone()))?)?.map(|stored| stored.record))
    }

    /// A record as the index has it. Call with its lanes held and refreshed.
    pub fn get(&self, key: &RecordKey) -> Option<Record> {
        self.index().records.get(key).map(|stored| stored.record.clone())
    }

    /// All records, for the sweeper, metrics and `inspect`.
    pub fn all(&self) -> Vec<Record> {
        self.index().records.values().map(|stored| stored.record.clone()).collect()
    }

    /// Intents of all claims, in whatever phase, for the watchdog.
    pub fn intents(&self) -> Vec<Intent> {
        self.index().records.values().map(|stored| stored.record.intent.clone()).collect()
    }

    /// A number that grows with every change of what [`Store::all`] gives, whoever made it. What another
    /// process does is seen when its lanes are taken or all is read again.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// How many records are in which phase: applying, ready, releasing.
    pub fn phases(&self) -> [usize; 3] {
        let mut counts = [0; 3];
        for stored in self.index().records.values() {
            counts[match stored.record.phase {
                Phase::Applying(_) => 0,
                Phase::Ready => 1,
                Phase::Releasing => 2,
            }] += 1;
        }
        counts
    }

    /// Intents of all claims that hold something on these boards.
    pub fn held_on(&self, gpus: &[DeviceUuid]) -> Vec<Intent> {
        let index = self.index();
        let records = index.records.values().map(|stored| &stored.record.intent);
        records.filter(|intent| intent.devices.iter().any(|d| gpus.contains(&d.gpu))).cloned().collect()
    }

    /// The MPS groups of the claims of this boot that are in such a phase.
    pub fn mps_groups(&self, boot: &BootId, of: impl Fn(&Phase) -> bool) -> BTreeMap<MpsGroup, MpsUsers> {
        let mut groups = BTreeMap::new();
        let index = self.index();
        let records = index.records.values().map(|stored| &stored.record);
        for record in records.filter(|record| record.intent.boot == *boot && of(&record.phase)) {
            for step in &record.intent.steps {
                if let Step::Mps { group, exclusive, .. } = step {
                    let fresh = || MpsUsers { exclusive: *exclusive, lanes: Vec::new() };
                    groups.entry(group.clone()).or_insert_with(fresh).lanes.extend(record.gpus());
                }
            }
        }
        groups
    }

    /// What the records of this boot, but for one, need of a group's MPS daemon. Those that are being
    /// released need nothing.
    pub fn mps_needs(&self, group: &MpsGroup, except: Option<&RecordKey>, boot: &BootId) -> Vec<MpsLimits> {
        let index = self.index();
        let others = index.records.iter().filter(|(key, stored)| {
            let record = &stored.record;
            Some(*key) != except && record.intent.boot == *boot && record.phase != Phase::Releasing
        });
        let steps = others.flat_map(|(_, stored)| &stored.record.intent.steps);
        let needs = steps.filter_map(|step| match step {
            Step::Mps { group: other, needs, .. } if other == group => Some(needs.clone()),
            _ => None,
        });
        needs.collect()
    }

    /// Writes a claim's intent, durably, in place of whatever record it had.
    pub fn begin(&self, held: &Held, intent: &Intent) -> Result<(), StoreError> {
        let key = intent.key();
        let name = file_name(&key)?;
        let bytes = ledger::encode_intent(intent)?;
        self.bump(held, &key, &intent.gpus())?;
        let path = self.folder.join(&name);
        let written = self
            .host
            .write(&self.folder, &name, &bytes, Durability::PowerLoss)
            .map_err(io_error("write", &path));
        let record = Record { intent: intent.clone(), phase: Phase::Applying(0) };
        let stored = Stored { record, len: bytes.len() };
        // What failed may have happened all the same: then the disk says what the index has to say.
        let stored = if written.is_ok() { Some(stored) } else { read_one(&path).unwrap_or(Some(stored)) };
        self.index().set(key, stored);
        self.tell_of_change();
        written
    }

    /// Writes a record anew, durably and in one go, with other pods. Its phase stays.
    pub fn set_pods(&self, held: &Held, key: &RecordKey, pods: Vec<PodRef>) -> Result<(), StoreError> {
        let record = self.get(key).ok_or_else(|| StoreError::NoRecord(key.clone()))?;
        self.replace(held, Intent { pods, ..record.intent }, record.phase)
    }

    /// Writes a record anew, durably and in one go: what is known now, and how far it got.
    pub fn replace(&self, held: &Held, intent: Intent, phase: Phase) -> Result<(), StoreError> {
        let key = &intent.key();
        let name = file_name(key)?;
        let mut bytes = ledger::encode_intent(&intent)?;
        bytes.extend(phase.mark().map(ledger::encode_mark).transpose()?.unwrap_or_default());
        self.bump(held, key, &intent.gpus())?;
        let path = self.folder.join(&name);
        let written = self
            .host
            .write(&self.folder, &name, &bytes, Durability::PowerLoss)
            .map_err(io_error("write", &path));
        // As in `begin`: the disk says what the index has to say.
        let stored = match written {
            Ok(()) => Some(Stored { record: Record { intent, phase }, len: bytes.len() }),
            Err(_) => read_one(&path).ok().flatten(),
        };
        if stored.is_some() {
            self.index().set(key.clone(), stored);
        }
        self.tell_of_change();
        written
    }

    /// Appends a mark to a record.
    ///
    /// Not flushed to the disk: after a power failure the boot is another one, and what the mark told of is
    /// gone with the old boot.
    pub fn mark(&self, held: &Held, key: &RecordKey, mark: Mark) -> Result<(), StoreError> {
        let path = self.path(key)?;
        let bytes = ledger::encode_mark(mark)?;
        // Other marks follow a `begin` under the same lanes, which has told of the change already.
        if mark == Mark::Releasing {
            self.bump(held, key, &self.get(key).map(|record| record.gpus()).unwrap_or_default())?;
        }
        let no_record = || StoreError::NoRecord(key.clone());
        let before = self.index().records.get(key).cloned().ok_or_else(no_record)?;
        if !held.covers(&before.record.gpus()) {
            return Err(StoreError::NoLane(key.clone()));
        }
        self.host.append_at(&path, before.len as u64, &bytes).map_err(io_error("append to", &path))?;
        let phase = match mark {
            Mark::Applied(step) => Phase::Applying(step + 1),
            Mark::Ready => Phase::Ready,
            Mark::Releasing => Phase::Releasing,
        };
        let record = Record { phase, ..before.record };
        self.index().set(key.clone(), Some(Stored { record, len: before.len + bytes.len() }));
        self.tell_of_change();
        Ok(())
    }

    /// Gives what a claim owes, but for its container edits, a record apart, so that the claim itself has none and can be
    /// prepared anew. A crash in between leaves both: what is undone twice does no harm. Returns that record's key.
    pub fn set_aside(&self, held: &Held, claim: &ClaimUid) -> Result<Option<RecordKey>, StoreError> {
        let own = RecordKey::Claim(claim.clone());
        let Some(record) = self.get(&own) else { return Ok(None) };
        let mut intent = record.intent;
        intent.steps.retain(|step| !matches!(step, Step::WriteCdi { .. }));
        intent.standing = Standing::Owed(self.free_number(claim));
        self.begin(held, &intent)?;
        self.mark(held, &intent.key(), Mark::Releasing)?;
        self.end(held, &own)?;
        Ok(Some(intent.key()))
    }

    fn free_number(&self, claim: &ClaimUid) -> u32 {
        let index = self.index();
        let is_free = |number: &u32| {
            !index.records.contains_key(&RecordKey::Owed { claim: claim.clone(), number: *number })
        };
        (0..).find(is_free).unwrap_or(u32::MAX)
    }

    /// Removes a record: the last act of a release.
    pub fn end(&self, held: &Held, key: &RecordKey) -> Result<(), StoreError> {
        let path = self.path(key)?;
        let gpus = self.get(key).map(|record| record.gpus()).unwrap_or_default();
        if !held.covers(&gpus) {
            return Err(StoreError::NoLane(key.clone()));
        }
        // A process that is not told of the release refuses the GPU: no reason to keep it from ending.
        let told = self.bump(held, key, &gpus);
        self.host.remove(&path).map_err(io_error("remove", &path))?;
        self.index().set(key.clone(), None);
        self.tell_of_change();
        told
    }

    /// Tells other processes that something in these lanes changes.
    fn bump(&self, held: &Held, key: &RecordKey, gpus: &[DeviceUuid]) -> Result<(), StoreError> {
        if !held.covers(gpus) {
            return Err(StoreError::NoLane(key.clone()));
        }
        for (gpu, lock) in held.locks().filter(|(gpu, _)| gpus.contains(gpu)) {
            let number = lane_number(lock, gpu)?.wrapping_add(1);
            lock.set_number(number).map_err(io_error("write the lane of", Path::new(gpu.as_str())))?;
            self.index().lane_numbers.insert(gpu.clone(), Some(number));
        }
        Ok(())
    }

    fn tell_of_change(&self) {
        self.changes.send_modify(|count| *count = count.wrapping_add(1));
    }

    fn path(&self, key: &RecordKey) -> Result<PathBuf, StoreError> {
        Ok(self.folder.join(file_name(key)?))
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        // No change of the index can panic halfway.
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn file_name(key: &RecordKey) -> Result<String, StoreError> {
    let name = key.to_string();
    // A claim's UID must not be taken for the name of what another claim owes.
    match ClaimUid::new(&*name).is_well_formed() && RecordKey::of_name(&name) == *key {
        true => Ok(format!("{key}{SUFFIX}")),
        false => Err(StoreError::Name(key.clone())),
    }
}

fn lane_number(lock: &FileLock, gpu: &DeviceUuid) -> Result<u64, StoreError> {
    lock.number().map_err(io_error("read the lane of", Path::new(gpu.as_str())))
}

type LaneNumbers = HashMap<DeviceUuid, Option<u64>>;

/// Takes the lanes that nobody holds, and notes the number of each.
fn lanes_at_rest(lanes: &Path) -> Result<(Vec<FileLock>, LaneNumbers), StoreError> {
    let (mut at_rest, mut lane_numbers) = (Vec::new(), HashMap::new());
    for name in durable::names(lanes).map_err(io_error("list", lanes))? {
        let Some(gpu) = name.strip_suffix(".lane").map(DeviceUuid::new) else { continue };
        let lock = FileLock::try_acquire(&lanes.join(&name))?;
        let number = lock.as_ref().map(|lock| lane_number(lock, &gpu)).transpose()?;
        lane_numbers.insert(gpu, number);
        at_rest.extend(lock);
    }
    Ok((at_rest, lane_numbers))
}

fn read_all(folder: &Path) -> Result<BTreeMap<RecordKey, Stored>, StoreError> {
    let mut records = BTreeMap::new();
    for name in durable::names(folder).map_err(io_error("list", folder))? {
        if name.starts_with(durable::TEMP_PREFIX) || !name.ends_with(SUFFIX) {
            continue;
        }
        // A record that went away since the listing was released by another process.
        let path = folder.join(&name);
        if let Some(stored) = read_one(&path)? {
            let key = stored.record.intent.key();
            if file_name(&key)? != name {
                return Err(StoreError::Foreign { path, key });
            }
            records.insert(key, stored);
        }
    }
    Ok(records)
}

fn read_one(path: &Path) -> Result<Option<Stored>, StoreError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io_error("read", path)(error)),
    };
    let decoded =
        ledger::decode(&bytes).map_err(|source| StoreError::Damaged { path: path.to_owned(), source })?;
    Ok(Some(Stored { record: decoded.record, len: decoded.valid_len }))
}

fn io_error(verb: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| StoreError::Io { verb, path, source }
}

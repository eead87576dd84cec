//! Decides who owns a process, and which questions must be answered before that is known.
//!
//! A missing answer proves nothing. A process is foreign only if every source that could name its owner was asked
//! after the process was first seen, and has answered: the API server for the pods of every claim on the device, the
//! ledger for claims that another instance of the plugin prepared, the supervisor for its servers. The pods that the
//! ledger names are not foreign either, whatever the API server says of their claim.
//!
//! A process that hides which pod it is of ([`ProcessOwner::Hidden`]) is foreign: no answer about pods could name it. Or it
//! would be on nobody's account.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use super::accounts::Roster;
use super::shares::WatchedDevice;
use super::table::KnownProcess;
use crate::host::cgroup::ProcessOwner;
use crate::model::claim::{ClaimRef, PodRef};
use crate::model::names::{ClaimUid, DeviceUuid, PodUid};
use crate::model::process::ProcessKey;
use crate::model::time::Moment;

/// Between two questions of one kind, or about one claim.
const ASK_EVERY: Duration = Duration::from_secs(1);

/// Between two questions about a claim of several pods, of which some may have gone.
const ASK_AGAIN: Duration = Duration::from_secs(60);

/// The owner of a process, as the watchdog treats it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProcessStanding {
    /// A pod of a claim that shares the device.
    Claim,
    /// Not watched: the claim that has the device alone, an MPS server, an administrator, this plugin.
    Exempt,
    /// No claim on the device, as all sources confirm.
    Foreign,
    /// Not known yet.
    Unknown,
}

/// The state of a question that is asked repeatedly.
#[derive(Debug, Default)]
pub(super) struct QuestionState {
    /// When the question was put that was answered last.
    answered: Option<Moment>,
    last: Option<Moment>,
    under_way: bool,
    wanted: bool,
}

impl QuestionState {
    /// True if the answer tells of everything that there was at that time.
    pub fn covers(&self, since: Moment) -> bool {
        self.answered.is_some_and(|answered| answered >= since)
    }

    /// True if the question is to be asked now: it is wanted, not being asked, and was not asked just before.
    pub fn is_due(&self, now: Moment) -> bool {
        let soon = self.last.is_some_and(|last| now < last + ASK_EVERY);
        self.wanted && !self.under_way && !soon
    }

    /// Returns true if the question is to be asked now, and takes it for asked.
    pub fn take_turn(&mut self, now: Moment) -> bool {
        let is_due = self.is_due(now);
        if is_due {
            *self = Self { answered: self.answered, last: Some(now), under_way: true, wanted: false };
        }
        is_due
    }

    /// The question was asked since that time, or is being asked.
    pub fn was_asked(&self, since: Moment) -> bool {
        self.last.is_some_and(|last| self.under_way || last >= since)
    }

    pub fn answered(&mut self, as_of: Option<Moment>) {
        self.under_way = false;
        self.answered = self.answered.max(as_of);
    }
}

/// What the API server says of a claim's users.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ClaimUsers {
    pub pods: Vec<PodRef>,
    /// Others than pods may use it too, so that no pod is known not to.
    pub others: bool,
}

/// What the supervisor says of its own processes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Servers {
    /// With the claim that they serve, where it is one alone.
    pub processes: BTreeMap<ProcessKey, Option<ClaimUid>>,
    /// The pods that they, and the daemons, run in.
    pub pods: BTreeSet<PodUid>,
}

#[derive(Debug, Default)]
struct ClaimKnowledge {
    question: QuestionState,
    users: ClaimUsers,
    /// Pods that the ledger names.
    recorded: Vec<PodRef>,
}

/// All answers that were given about the claims that are watched, and the questions that are open.
#[derive(Debug, Default)]
pub(super) struct Knowledge {
    claims: HashMap<ClaimUid, ClaimKnowledge>,
    ledger: QuestionState,
    servers_question: QuestionState,
    servers: Servers,
    own_pod: Option<PodUid>,
    /// When pods, and processes of the host, were first seen.
    first_seen: HashMap<PodOrProcess, Moment>,
    /// Some process was found in a pod: the names of control groups are understood here.
    pods_are_seen: bool,
    /// By device; none: what is known has changed since.
    rosters: BTreeMap<DeviceUuid, Roster>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum PodOrProcess {
    Pod(PodUid),
    Process(ProcessKey),
}

/// Who is to be asked now.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Questions {
    pub claims: Vec<ClaimRef>,
    pub ledger: bool,
    pub servers: bool,
}

impl Knowledge {
    pub fn new(own_pod: Option<PodUid>) -> Self {
        Self { own_pod, ..Self::default() }
    }

    /// Forgets what concerns nobody any more.
    pub fn keep<'a>(&mut self, claims: impl Iterator<Item = &'a ClaimRef>) {
        self.rosters.clear();
        let mut before = std::mem::take(&mut self.claims);
        for claim in claims {
            let known = before.remove(&claim.uid).unwrap_or_default();
            self.claims.entry(claim.uid.clone()).or_insert(known);
        }
    }

    /// Takes over the pods that the ledger names, by claim.
    pub fn record(&mut self, mut pods: HashMap<ClaimUid, Vec<PodRef>>) {
        for (claim, known) in &mut self.claims {
            known.recorded = pods.remove(claim).unwrap_or_default();
        }
    }

    /// Notes who is there now. That may make known of some claim a pod that was not: its device is that pod's as long as
    /// it runs, whatever the API server says of the claim.
    pub fn note_processes<'a>(&mut self, processes: impl Iterator<Item = &'a KnownProcess>, now: Moment) {
        let mut before = std::mem::take(&mut self.first_seen);
        for known in processes {
            let subjects =
                [Some(PodOrProcess::Process(known.process)), pod(known).cloned().map(PodOrProcess::Pod)];
            self.pods_are_seen |= subjects[1].is_some();
            for subject in subjects.into_iter().flatten() {
                let first = before.remove(&subject).unwrap_or(now);
                self.first_seen.entry(subject).or_insert(first);
            }
        }
        for known in self.claims.values_mut() {
            for pod in &known.recorded {
                let is_user = known.users.pods.iter().any(|user| user.uid == pod.uid);
                if !is_user && self.first_seen.contains_key(&PodOrProcess::Pod(pod.uid.clone())) {
                    known.users.pods.push(pod.clone());
                    self.rosters.clear();
                }
            }
        }
    }

    /// On whose account the processes of the device's pods are.
    pub fn roster(&mut self, gpu: &DeviceUuid, device: &WatchedDevice, slots_per_share: u32) -> &Roster {
        if !self.rosters.contains_key(gpu) {
            let roster = Roster::new(device, self, slots_per_share);
            self.rosters.insert(gpu.clone(), roster);
        }
        self.rosters.entry(gpu.clone()).or_default()
    }

    /// Returns the owner of the process. Questions that must be answered first are marked as wanted.
    pub fn owner(&mut self, device: &WatchedDevice, known: &KnownProcess) -> ProcessStanding {
        // As long as the supervisor does not name it: whom it serves is to be known, and it came after the last answer.
        let may_be_server = pod(known).is_some_and(|pod| self.servers.pods.contains(pod));
        if may_be_server && !device.groups.is_empty() && !self.is_server(known) {
            self.servers_question.wanted = true;
        }
        if let Some(owner) = self.belongs(device, known) {
            return owner;
        }
        // Of a device that one claim has, the host's own processes (an X server, say) are the administrator's.
        if device.is_alone() && known.owner == ProcessOwner::Host {
            return ProcessStanding::Exempt;
        }
        let seen = self.first_seen.get(&PodOrProcess::Process(known.process)).copied().unwrap_or(Moment::MAX);
        let subject = pod(known).cloned().map(PodOrProcess::Pod);
        let since = subject.and_then(|subject| self.first_seen.get(&subject).copied()).unwrap_or(seen);
        let mut sure = known.believed && (self.pods_are_seen || known.owner == ProcessOwner::Hidden);
        sure &= want(&mut self.ledger, since);
        if !device.groups.is_empty() {
            sure &= want(&mut self.servers_question, seen);
        }
        if let ProcessOwner::Pod { .. } = known.owner {
            for claim in device.claims() {
                let claim = self.claims.entry(claim.uid.clone()).or_default();
                sure &= want(&mut claim.question, since) & !claim.users.others;
            }
        }
        if sure { ProcessStanding::Foreign } else { ProcessStanding::Unknown }
    }

    fn belongs(&self, device: &WatchedDevice, known: &KnownProcess) -> Option<ProcessStanding> {
        let is_us = known.process.pid == std::process::id();
        if is_us || self.is_server(known) {
            return Some(ProcessStanding::Exempt);
        }
        let pod = pod(known)?;
        let has = |claim: &ClaimRef| self.pods(&claim.uid).iter().any(|user| user.uid == *pod);
        if known.believed && device.shares.iter().any(|(claim, _)| has(claim)) {
            return Some(ProcessStanding::Claim);
        }
        let ours = self.own_pod.as_ref() == Some(pod) || self.servers.pods.contains(pod);
        (ours || device.alone.iter().chain(&device.admins).any(has)).then_some(ProcessStanding::Exempt)
    }

    /// The pods that may use a claim, as far as they are known.
    pub fn pods(&self, claim: &ClaimUid) -> &[PodRef] {
        self.claims.get(claim).map_or(&[], |known| &known.users.pods)
    }

    /// The pods that may use a claim, for people: as long as the API server was not asked, those that the ledger names.
    pub fn named_pods(&self, claim: &ClaimUid) -> &[PodRef] {
        let Some(known) = self.claims.get(claim) else { return &[] };
        let is_told = known.question.answered.is_some() || !known.users.pods.is_empty();
        if is_told { &known.users.pods } else { &known.recorded }
    }

    /// True if the process is an MPS server of ours.
    pub fn is_server(&self, known: &KnownProcess) -> bool {
        self.servers.processes.contains_key(&known.process)
    }

    /// The one claim that the process serves, if it is an MPS server of ours that serves one.
    pub fn served_claim(&self, known: &KnownProcess) -> Option<&ClaimUid> {
        self.servers.processes.get(&known.process)?.as_ref()
    }

    /// Returns the questions to ask now: none twice within a second, none that is still unanswered.
    pub fn questions<'a>(
        &mut self,
        devices: impl Iterator<Item = &'a WatchedDevice>,
        now: Moment,
    ) -> Questions {
        let mut question = BTreeMap::new();
        let claims = devices.flat_map(|device| device.claims().map(|claim| (device.is_alone(), claim)));
        for (alone, claim) in claims {
            let known = self.claims.entry(claim.uid.clone()).or_default();
            // Whoever reads the metrics wants to know the pods before their first process. That of a whole GPU the
            // ledger names, unless several have used the claim.
            let named = alone && known.recorded.len() < 2;
            known.question.wanted |= !named && known.question.answered.is_none();
            let stale = known.question.answered.is_some_and(|answered| now >= answered + ASK_AGAIN);
            known.question.wanted |= stale && known.users.pods.len().max(known.recorded.len()) > 1;
            if known.question.take_turn(now) {
                question.insert(claim.uid.clone(), claim.clone());
            }
        }
        let claims = question.into_values().collect();
        let (ledger, servers) = (self.ledger.take_turn(now), self.servers_question.take_turn(now));
        Questions { claims, ledger, servers }
    }

    /// The API server's answer about a claim; none: it said nothing that could be relied on.
    pub fn users_answered(&mut self, claim: &ClaimUid, asked: Moment, users: Option<ClaimUsers>) {
        let Some(known) = self.claims.get_mut(claim) else { return };
        known.question.answered(users.is_some().then_some(asked));
        let Some(mut users) = users else { return };
        let now: HashSet<PodUid> = users.pods.iter().map(|pod| pod.uid.clone()).collect();
        // A pod that was deleted may still be ending: it stays the claim's until its processes are gone.
        let ending = std::mem::take(&mut known.users.pods).into_iter().filter(|pod| {
            !now.contains(&pod.uid) && self.first_seen.contains_key(&PodOrProcess::Pod(pod.uid.clone()))
        });
        users.pods.extend(ending);
        known.users = users;
        self.rosters.clear();
    }

    /// All records were read again, or could not be.
    pub fn ledger_answered(&mut self, asked: Moment, read: bool) {
        self.ledger.answered(read.then_some(asked));
    }

    /// The supervisor's answer; none: it said nothing.
    pub fn servers_answered(&mut self, asked: Moment, servers: Option<Servers>) {
        self.servers_question.answered(servers.is_some().then_some(asked));
        if let Some(servers) = servers {
            self.pods_are_seen |= !servers.pods.is_empty();
            self.servers = servers;
        }
    }
}

/// True if an answer covers that time; if not, the question is wanted.
pub(super) fn want(question: &mut QuestionState, since: Moment) -> bool {
    let covers = question.covers(since);
    question.wanted |= !covers;
    covers
}

fn pod(known: &KnownProcess) -> Option<&PodUid> {
    match &known.owner {
        ProcessOwner::Pod { pod, .. } => Some(pod),
        ProcessOwner::Host | ProcessOwner::Hidden => None,
    }
}

#[cfg(test)]
mod tests;

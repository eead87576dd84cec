//! Finds claims that use more than their grant, and decides what is done about them: each look at the GPUs is folded into
//! verdicts. The time is an argument.
//!
//! | seen | verdict |
//! |---|---|
//! | over the grant in two looks in a row | [`Verdict::Over`], once until it is [`Verdict::Recovered`] |
//! | more processes than the claim has client slots, twice in a row | [`Verdict::Crowded`] |
//! | over grant and grace, twice in a row | [`Verdict::End`] for as many processes as must go until it fits |
//! | a process of no claim on a shared board, twice in a row | [`Verdict::Foreign`], and [`Verdict::End`] |
//! | a process of a claim that goes around the claim's own MPS daemon, twice in a row | [`Verdict::AroundMps`], and [`Verdict::End`] |
//!
//! A single look may fall between an allocation and the release that belongs to it, so a state counts after two looks in
//! a row. The return to the grant counts after two looks as well, so that a claim at its limit is not reported endlessly.
//!
//! **Which process is ended.** A process that alone uses more than its part of the claim (grant / declared processes) broke
//! the declaration: the largest such process is ended first, so that as few as possible are ended. If each process keeps to
//! its part, there are too many of them: the newest is ended first, because the older ones were within the grant.
//!
//! **How.** A client of an MPS server is first terminated by the daemon (`terminate_client`), because SIGKILL during a
//! kernel ends the other clients, too; then it is killed, because a terminated client keeps its memory until its process
//! ends. If the daemon does not answer, a process that still holds memory two looks later is killed all the same. A kill that
//! fails ([`Watch::end_failed`]) is ordered again at the next look, then less and less often.
//!
//! **How soon.** A process that alone holds more than its part passed MPS's own limit, which no allocation within the
//! rules does ([`Watch::is_urgent`]): the look that confirms it need not wait for its turn.

mod ending;
mod episode;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use self::ending::EndAttempt;
use self::episode::{Episode, EpisodeChange};
use super::usage::{Usage, usage};
use crate::model::names::{ClaimUid, DeviceUuid, PodUid};
use crate::model::process::{ProcessKey, ProcessPod};
use crate::model::quantity::Bytes;
use crate::model::time::Moment;

/// Looks in a row after which a state is believed.
const BELIEVED: u32 = 2;

/// What follows from being over the grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WatchPolicy {
    /// False: verdicts for people only, never [`Verdict::End`].
    pub terminate: bool,
    /// Over the grant by more than this, a process is ended.
    pub grace: Bytes,
}

/// A process on a board.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedProcess {
    pub process: ProcessKey,
    /// None: the driver cannot tell.
    pub used: Option<Bytes>,
    pub access: ProcessAccess,
    pub pod: ProcessPod,
}

/// How a process works on a board.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessAccess {
    /// As a client of an MPS server that can be asked to end it.
    Client,
    /// Around the MPS daemon that its claim has for itself.
    AroundMps,
    /// Otherwise, or it is not known how.
    Other,
}

/// What one claim was granted of the board.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimGrant {
    pub claim: ClaimUid,
    /// None: its memory is not counted.
    pub memory: Option<Bytes>,
    /// What one process may have.
    pub part: Option<Bytes>,
    /// Client processes that its slots are for.
    pub processes: u32,
    /// Pods that may use it, as far as they are known.
    pub pods: Vec<PodUid>,
}

/// Claims whose use is counted together, because a pod has all of them, and their processes. One claim, as a
/// rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    pub claims: Vec<ClaimGrant>,
    pub processes: Vec<ObservedProcess>,
}

/// What one look found on a board. A board that did not answer has none; what is believed of it stays.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoardLook {
    pub gpu: DeviceUuid,
    /// All claims of the board, those without processes too.
    pub accounts: Vec<Account>,
    /// Processes that are known to belong to no claim.
    pub foreign: Vec<ObservedProcess>,
}

/// The claims on one GPU whose use is counted together; no claims: processes of no claim.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct AccountId {
    pub gpu: DeviceUuid,
    /// Sorted.
    pub claims: Vec<ClaimUid>,
}

/// An account in figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Numbers {
    pub limit: Bytes,
    pub used: Bytes,
    /// The most that was seen.
    pub peak: Bytes,
    pub processes: usize,
    /// How many of them the driver tells no memory of.
    pub uncounted: usize,
}

/// What follows from a look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    Over {
        account_id: AccountId,
        numbers: Numbers,
    },
    Crowded {
        account_id: AccountId,
        processes: usize,
        allowed: u32,
    },
    /// It is over, after this time.
    Recovered {
        account_id: AccountId,
        from: Trouble,
        numbers: Numbers,
        lasted: Duration,
    },
    Foreign {
        gpu: DeviceUuid,
        seen: ObservedProcess,
    },
    /// A process of these claims works around their MPS daemon.
    AroundMps {
        account_id: AccountId,
        seen: ObservedProcess,
    },
    /// A process is to be ended. Without claims: it is foreign.
    End {
        account_id: AccountId,
        seen: ObservedProcess,
        how: EndMethod,
        reason: EndReason,
    },
}

/// Why a process is ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndReason {
    /// For these figures of its account.
    OverGrant(Numbers),
    AroundMps,
    Foreign,
}

/// What was wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    Memory,
    Processes,
}

/// How a process is to be ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndMethod {
    /// Terminated by the MPS daemon, then killed.
    Terminate,
    Kill,
}

/// The state of all shared GPUs from one look to the next.
#[derive(Debug, Default)]
pub struct Watch {
    boards: BTreeMap<DeviceUuid, BoardState>,
}

#[derive(Debug, Default)]
struct BoardState {
    accounts: BTreeMap<Vec<ClaimUid>, AccountState>,
    foreign: BTreeMap<ProcessKey, Episode>,
    around_mps: BTreeMap<ProcessKey, Episode>,
    ending: BTreeMap<ProcessKey, EndAttempt>,
    peaks: BTreeMap<(ClaimUid, Option<PodUid>), Bytes>,
}

#[derive(Debug, Default)]
struct AccountState {
    over: Episode,
    crowded: Episode,
    /// Looks in a row in which what is not being ended was over grant and grace.
    beyond: u32,
    /// This was the first of them, and one process alone was beyond its part and the grace.
    is_urgent: bool,
    peak: Bytes,
}

impl Watch {
    /// Forgets boards that are not shared any more.
    pub fn keep(&mut self, shared: &BTreeSet<DeviceUuid>) {
        self.boards.retain(|gpu, _| shared.contains(gpu));
    }

    /// A process was to be ended so by [`Verdict::End`], and could not be.
    pub fn end_failed(&mut self, gpu: &DeviceUuid, process: ProcessKey, how: EndMethod) {
        if let Some(attempt) = self.boards.get_mut(gpu).and_then(|board| board.ending.get_mut(&process)) {
            attempt.fail(how);
        }
    }

    /// True if the last look found a process that is to be ended if the next one confirms it, and that alone holds more
    /// than its part of the claim and the grace.
    pub fn is_urgent(&self) -> bool {
        self.boards.values().any(|board| board.accounts.values().any(|account| account.is_urgent))
    }

    /// Takes in a look between two regular ones, which counts for what was urgent alone: others are judged by looks
    /// as far apart as ever, whatever one claim does.
    pub fn confirm(&mut self, policy: &WatchPolicy, now: Moment, looks: &[BoardLook]) -> Vec<Verdict> {
        let mut verdicts = Vec::new();
        let urgent = self.take_urgent();
        for look in looks {
            let Some(board) = self.boards.get_mut(&look.gpu) else { continue };
            let mut fold = Fold { policy, now, gpu: &look.gpu, verdicts: &mut verdicts };
            for account in &look.accounts {
                let claims = names(account);
                let Some(state) = board.accounts.get_mut(&claims) else { continue };
                if urgent.contains(&(look.gpu.clone(), claims.clone())) {
                    state.confirm(account, &claims, &mut fold, &mut board.ending);
                }
            }
        }
        verdicts
    }

    /// What was urgent; it is no more, also on a board that does not answer.
    fn take_urgent(&mut self) -> BTreeSet<(DeviceUuid, Vec<ClaimUid>)> {
        let mut urgent = BTreeSet::new();
        for (gpu, board) in &mut self.boards {
            for (claims, account) in &mut board.accounts {
                if std::mem::take(&mut account.is_urgent) {
                    urgent.insert((gpu.clone(), claims.clone()));
                }
            }
        }
        urgent
    }

    /// Takes one regular look in.
    pub fn fold(
        &mut self,
        policy: &WatchPolicy,
        now: Moment,
        looks: &[BoardLook],
    ) -> (Vec<Verdict>, Vec<Usage>) {
        self.take_urgent();
        let (mut verdicts, mut rows) = (Vec::new(), Vec::new());
        for look in looks {
            let board = self.boards.entry(look.gpu.clone()).or_default();
            let mut fold = Fold { policy, now, gpu: &look.gpu, verdicts: &mut verdicts };
            board.fold(look, &mut fold);
            rows.extend(usage(look, &mut board.peaks));
        }
        (verdicts, rows)
    }
}

/// What every step of a fold needs.
struct Fold<'a> {
    policy: &'a WatchPolicy,
    now: Moment,
    gpu: &'a DeviceUuid,
    verdicts: &'a mut Vec<Verdict>,
}

/// On whose account, and why, a process is ended.
#[derive(Clone, Copy)]
struct EndCause<'a> {
    claims: &'a [ClaimUid],
    reason: EndReason,
}

impl Fold<'_> {
    fn account_id(&self, claims: &[ClaimUid]) -> AccountId {
        AccountId { gpu: self.gpu.clone(), claims: claims.to_vec() }
    }

    fn end(&mut self, cause: EndCause<'_>, seen: &ObservedProcess, how: EndMethod) {
        let (account_id, reason) = (self.account_id(cause.claims), cause.reason);
        self.verdicts.push(Verdict::End { account_id, seen: seen.clone(), how, reason });
    }

    /// Takes in processes that may not be on the board as they are: each is told once it was seen so twice in a row, and
    /// then ended. `before` and the result are what was seen of them.
    fn unwanted<'a>(
        &mut self,
        before: &mut BTreeMap<ProcessKey, Episode>,
        all: impl Iterator<Item = &'a ObservedProcess>,
        cause: EndCause<'_>,
        endings: &mut BTreeMap<ProcessKey, EndAttempt>,
        ending: &mut BTreeMap<ProcessKey, EndAttempt>,
    ) -> BTreeMap<ProcessKey, Episode> {
        let mut episodes = BTreeMap::new();
        for seen in all {
            let mut episode = before.remove(&seen.process).unwrap_or_default();
            if episode.look(true, self.now) == EpisodeChange::Began {
                let (account_id, seen) = (self.account_id(cause.claims), seen.clone());
                self.verdicts.push(match cause.reason {
                    EndReason::Foreign => Verdict::Foreign { gpu: account_id.gpu, seen },
                    EndReason::AroundMps | EndReason::OverGrant(_) => Verdict::AroundMps { account_id, seen },
                });
            }
            if self.policy.terminate && episode.is_on() {
                ending.insert(seen.process, escalate(endings.remove(&seen.process), cause, seen, self));
            }
            episodes.insert(seen.process, episode);
        }
        episodes
    }
}

impl BoardState {
    fn fold(&mut self, look: &BoardLook, fold: &mut Fold<'_>) {
        let mut states = BTreeMap::new();
        let (mut ending, mut around_mps) = (BTreeMap::new(), BTreeMap::new());
        for account in &look.accounts {
            let claims = names(account);
            let mut state = self.take_state(&claims);
            let mut endings = self.take_endings(&account.processes);
            let around = account.processes.iter().filter(|seen| seen.access == ProcessAccess::AroundMps);
            let cause = EndCause { claims: &claims, reason: EndReason::AroundMps };
            let seen = fold.unwanted(&mut self.around_mps, around, cause, &mut endings, &mut ending);
            around_mps.extend(seen);
            state.fold(account, &claims, endings, fold, &mut ending);
            states.insert(claims, state);
        }
        let mut endings = self.take_endings(&look.foreign);
        let cause = EndCause { claims: &[], reason: EndReason::Foreign };
        let foreign = look.foreign.iter();
        self.foreign = fold.unwanted(&mut self.foreign, foreign, cause, &mut endings, &mut ending);
        self.around_mps = around_mps;
        self.accounts = states;
        self.ending = ending;
    }

    /// The state of these claims; if they are counted with others than before, that of one of them.
    fn take_state(&mut self, claims: &[ClaimUid]) -> AccountState {
        let same = |key: &&Vec<ClaimUid>| key.as_slice() == claims;
        let akin = |key: &&Vec<ClaimUid>| key.iter().any(|claim| claims.contains(claim));
        let key = self.accounts.keys().find(same).or_else(|| self.accounts.keys().find(akin)).cloned();
        key.and_then(|key| self.accounts.remove(&key)).unwrap_or_default()
    }

    fn take_endings(&mut self, processes: &[ObservedProcess]) -> BTreeMap<ProcessKey, EndAttempt> {
        let taken = processes.iter().filter_map(|seen| self.ending.remove_entry(&seen.process));
        taken.collect()
    }
}

/// Tells a process to end that is still there: at first, then more firmly.
fn escalate(
    before: Option<EndAttempt>,
    cause: EndCause<'_>,
    seen: &ObservedProcess,
    fold: &mut Fold<'_>,
) -> EndAttempt {
    let Some(mut attempt) = before else {
        let how = if seen.access == ProcessAccess::Client { EndMethod::Terminate } else { EndMethod::Kill };
        fold.end(cause, seen, how);
        return EndAttempt::new(how);
    };
    if let Some(how) = attempt.look() {
        fold.end(cause, seen, how);
    }
    attempt
}

impl AccountState {
    fn fold(
        &mut self,
        account: &Account,
        claims: &[ClaimUid],
        mut endings: BTreeMap<ProcessKey, EndAttempt>,
        fold: &mut Fold<'_>,
        ending: &mut BTreeMap<ProcessKey, EndAttempt>,
    ) {
        let used = sum(&account.processes);
        self.peak = self.peak.max(used);
        self.count(account, claims, fold);
        // Not counted, so never over.
        let Some(limit) = limit(account) else { return };
        self.measure(account, claims, limit, fold);
        if !fold.policy.terminate {
            return;
        }
        let cause = EndCause { claims, reason: EndReason::OverGrant(self.numbers(account, limit, used)) };
        let mut staying = Vec::new();
        for seen in &account.processes {
            if ending.contains_key(&seen.process) {
                continue;
            }
            // Back within the grant: what could not be ended may live.
            match endings.remove(&seen.process).filter(|_| used > limit && holds(seen)) {
                Some(told) => {
                    let told = escalate(Some(told), cause, seen, fold);
                    ending.insert(seen.process, told);
                }
                None => staying.push(seen),
            }
        }
        self.judge(account, limit, cause, staying, fold, ending);
    }

    /// The same where only the state that was urgent counts.
    fn confirm(
        &mut self,
        account: &Account,
        claims: &[ClaimUid],
        fold: &mut Fold<'_>,
        ending: &mut BTreeMap<ProcessKey, EndAttempt>,
    ) {
        let Some(limit) = limit(account) else { return };
        let used = sum(&account.processes);
        self.peak = self.peak.max(used);
        self.measure(account, claims, limit, fold);
        let cause = EndCause { claims, reason: EndReason::OverGrant(self.numbers(account, limit, used)) };
        let staying = account.processes.iter().filter(|seen| !ending.contains_key(&seen.process)).collect();
        self.judge(account, limit, cause, staying, fold, ending);
    }

    /// Ends as many of those that are not being ended as must go, once they were beyond twice in a row.
    fn judge(
        &mut self,
        account: &Account,
        limit: Bytes,
        cause: EndCause<'_>,
        mut staying: Vec<&ObservedProcess>,
        fold: &mut Fold<'_>,
        ending: &mut BTreeMap<ProcessKey, EndAttempt>,
    ) {
        let parts = staying.iter().map(|seen| seen.used.unwrap_or_default().0);
        let mut left = parts.fold(0_u64, u64::saturating_add);
        let far = left > limit.0.saturating_add(fold.policy.grace.0);
        self.beyond = if far { self.beyond + 1 } else { 0 };
        let part = part(account);
        if self.beyond < BELIEVED {
            let most = part.0.saturating_add(fold.policy.grace.0);
            self.is_urgent = far && staying.iter().any(|seen| seen.used.unwrap_or_default().0 > most);
            return;
        }
        self.beyond = 0;
        order(&mut staying, part);
        for seen in staying {
            if left <= limit.0 {
                break;
            }
            left = left.saturating_sub(seen.used.unwrap_or_default().0);
            ending.insert(seen.process, escalate(None, cause, seen, fold));
        }
    }

    fn measure(&mut self, account: &Account, claims: &[ClaimUid], limit: Bytes, fold: &mut Fold<'_>) {
        let used = sum(&account.processes);
        let numbers = self.numbers(account, limit, used);
        let account_id = || AccountId { gpu: fold.gpu.clone(), claims: claims.to_vec() };
        match self.over.look(used > limit, fold.now) {
            EpisodeChange::None => {}
            EpisodeChange::Began => fold.verdicts.push(Verdict::Over { account_id: account_id(), numbers }),
            EpisodeChange::Ended { lasted } => {
                let from = Trouble::Memory;
                fold.verdicts.push(Verdict::Recovered { account_id: account_id(), from, numbers, lasted });
            }
        }
    }

    fn count(&mut self, account: &Account, claims: &[ClaimUid], fold: &mut Fold<'_>) {
        let allowed = account.claims.iter().fold(0_u32, |sum, claim| sum.saturating_add(claim.processes));
        let processes = account.processes.len();
        let crowded = u32::try_from(processes).unwrap_or(u32::MAX) > allowed;
        let account_id = || AccountId { gpu: fold.gpu.clone(), claims: claims.to_vec() };
        match self.crowded.look(crowded, fold.now) {
            EpisodeChange::None => {}
            EpisodeChange::Began => {
                fold.verdicts.push(Verdict::Crowded { account_id: account_id(), processes, allowed });
            }
            EpisodeChange::Ended { lasted } => {
                let (limit, used) = (limit(account).unwrap_or_default(), sum(&account.processes));
                let numbers = self.numbers(account, limit, used);
                let from = Trouble::Processes;
                fold.verdicts.push(Verdict::Recovered { account_id: account_id(), from, numbers, lasted });
            }
        }
    }

    fn numbers(&self, account: &Account, limit: Bytes, used: Bytes) -> Numbers {
        let uncounted = account.processes.iter().filter(|seen| seen.used.is_none()).count();
        Numbers { limit, used, peak: self.peak, processes: account.processes.len(), uncounted }
    }
}

/// True unless it is known that the process holds nothing any more.
fn holds(seen: &ObservedProcess) -> bool {
    seen.used != Some(Bytes(0))
}

fn names(account: &Account) -> Vec<ClaimUid> {
    let mut claims: Vec<_> = account.claims.iter().map(|granted| granted.claim.clone()).collect();
    claims.sort();
    claims
}

/// What the claims may have together; none if one of them is not counted.
fn limit(account: &Account) -> Option<Bytes> {
    account.claims.iter().try_fold(Bytes(0), |sum, claim| Some(Bytes(sum.0.saturating_add(claim.memory?.0))))
}

/// What one process may have: of several claims, the largest part.
fn part(account: &Account) -> Bytes {
    account.claims.iter().filter_map(|claim| claim.part).max().unwrap_or_default()
}

fn sum(processes: &[ObservedProcess]) -> Bytes {
    Bytes(processes.iter().fold(0, |sum, seen| sum.saturating_add(seen.used.unwrap_or_default().0)))
}

/// First who goes first: see the module's text. Who holds nothing that is known goes last.
fn order(processes: &mut [&ObservedProcess], part: Bytes) {
    processes.sort_by_key(|seen| {
        let used = seen.used.unwrap_or_default();
        let size = if used > part { used.0 } else { 0 };
        let rank = u8::from(used.0 > 0);
        std::cmp::Reverse((rank, size, seen.process.started, seen.process.pid))
    });
}

#[cfg(test)]
mod tests;

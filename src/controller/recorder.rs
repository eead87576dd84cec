//! What people are told, and where: events on the pod and the claim, a text on the claim, lines for the log.
//! Nothing is said twice in a row, and no pod has more than one event of a kind in a minute.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;

use crate::allocate::Shortage;
use crate::cluster::events::{EventSubject, Note, Severity};
use crate::controller::Moment;
use crate::controller::gang::Obstacle;
use crate::controller::view::{Claim, Pod};
use crate::model::claim::{ClaimRef, PodRef};
use crate::model::names::{NodeName, PodUid};

/// Between two events of one kind for one pod: why it waits, where it was placed, what was taken back.
const TELL_EVERY: Duration = Duration::from_secs(60);
/// The kind of event that tells of a place.
const PLACED: &str = "GpuSharePlaced";
/// With this begins what a pod is told that a place is kept for.
pub const KEPT_FOR: &str = "kept for it";
/// Texts on claims are kept short: they are read in a column.
const TEXT_BYTES_MAX: usize = 400;

#[derive(Debug, Default)]
pub struct EventRecorder {
    said: BTreeMap<PodUid, PodNotice>,
    placed: BTreeMap<PodUid, Placed>,
    moved: BTreeMap<PodUid, Moved>,
    notes: Vec<Note>,
    troubles: Vec<String>,
    /// The time of day at moment 0.
    zero: Timestamp,
}

#[derive(Debug)]
struct PodNotice {
    /// Empty: it had its place since.
    words: String,
    at: Moment,
    reason: Reason,
    /// There was something new to say, too soon.
    has_news: bool,
}

/// When a pod was last told of its place.
#[derive(Debug)]
struct Placed {
    at: Moment,
    /// It has another since, which it is told of when that stands for long enough.
    news: Option<(EventSubject, String)>,
}

/// When a pod was last told that an allocation was taken back, and how often that happened since.
#[derive(Debug)]
struct Moved {
    at: Moment,
    untold: u32,
}

/// Why a pod waits, as a metric label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    Memory,
    Compute,
    Slots,
    Gpus,
    Candidates,
    /// Its claim cannot be placed as it is.
    Claim,
    /// Something that waits for longer goes first.
    Reserved,
    /// Not all pods of its gang are there.
    Gang,
    /// Its scheduler did not bind it.
    Scheduler,
    /// Its namespace may not have more.
    Bound,
}

impl Reason {
    pub const ALL: [Self; 10] = [
        Self::Memory,
        Self::Compute,
        Self::Slots,
        Self::Gpus,
        Self::Candidates,
        Self::Claim,
        Self::Reserved,
        Self::Gang,
        Self::Scheduler,
        Self::Bound,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Compute => "compute",
            Self::Slots => "slots",
            Self::Gpus => "gpus",
            Self::Candidates => "candidates",
            Self::Claim => "claim",
            Self::Reserved => "reserved",
            Self::Gang => "gang",
            Self::Scheduler => "scheduler",
            Self::Bound => "namespace-bound",
        }
    }

    /// What it lacks is room.
    pub fn is_for_room(self) -> bool {
        match self {
            Self::Memory | Self::Compute | Self::Slots | Self::Gpus => true,
            // GPUs may be closed for the sake of those who have them.
            Self::Candidates | Self::Reserved => true,
            Self::Claim | Self::Gang | Self::Scheduler | Self::Bound => false,
        }
    }

    pub fn of(shortage: &Shortage) -> Self {
        match shortage {
            Shortage::Candidates { .. } | Shortage::NoMig { .. } => Self::Candidates,
            Shortage::Memory { .. } | Shortage::Whole { .. } | Shortage::Mig(_) => Self::Memory,
            Shortage::Compute { .. } => Self::Compute,
            Shortage::Slots { .. } => Self::Slots,
            Shortage::Gpus { .. } | Shortage::Together { .. } | Shortage::Unsearched { .. } => Self::Gpus,
        }
    }
}

impl EventRecorder {
    /// `zero`: the time of day at moment 0.
    pub fn begins(&mut self, zero: Timestamp) {
        self.zero = zero;
    }

    /// The time of day, to the second. None: after all that a calendar has.
    pub fn time_of(&self, moment: Moment) -> Option<Timestamp> {
        let seconds = self.zero.as_second().checked_add(i64::try_from(moment.as_secs()).ok()?)?;
        Timestamp::from_second(seconds).ok()
    }

    /// Why a pod waits. True if it was said: the claims may carry it, too.
    pub fn waiting(&mut self, pod: &Pod, reason: Reason, words: &str, now: Moment) -> bool {
        let uid = &pod.at.uid;
        self.has_no_place(uid);
        if let Some(said) = self.said.get_mut(uid) {
            said.reason = reason;
            said.has_news = said.words != words && now < said.at + TELL_EVERY;
            if said.words == words || said.has_news {
                return false;
            }
        }
        self.said
            .insert(uid.clone(), PodNotice { words: words.to_owned(), at: now, reason, has_news: false });
        self.note(subject(pod), Severity::Warning, "WaitingForGpuShare", words.to_owned());
        true
    }

    /// It has its place. Where it has had another within a minute, it is told once that is over.
    pub fn placed(&mut self, pod: &Pod, words: String, now: Moment) {
        let uid = &pod.at.uid;
        if let Some(said) = self.said.get_mut(uid) {
            (said.words, said.has_news) = (String::new(), false);
        }
        match self.placed.get_mut(uid) {
            Some(placed) if now < placed.at + TELL_EVERY => placed.news = Some((subject(pod), words)),
            _ => {
                self.placed.insert(uid.clone(), Placed { at: now, news: None });
                self.note(subject(pod), Severity::Normal, PLACED, words);
            }
        }
    }

    fn has_no_place(&mut self, pod: &PodUid) {
        if let Some(placed) = self.placed.get_mut(pod) {
            placed.news = None;
        }
    }

    /// Pods of lower priority end for it.
    pub fn preempts(&mut self, pod: &Pod, words: String) {
        self.note(subject(pod), Severity::Normal, "Preempting", words);
    }

    /// It ends for a pod of higher priority.
    pub fn preempted(&mut self, pod: &PodRef, words: String) {
        let PodRef { namespace, name, uid } = pod.clone();
        let subject = EventSubject::Pod { namespace, name, uid: uid.to_string() };
        self.note(subject, Severity::Warning, "Preempted", words);
    }

    /// The scheduler, or somebody else, took the allocation back.
    pub fn taken_back(&mut self, pod: &Pod, node: &NodeName, now: Moment) {
        let words = format!(
            "the allocation on node {node} was taken back by the scheduler: the pod cannot run there now; another \
             node is looked for"
        );
        self.note_moved(pod, words, now);
    }

    /// An allocation of ours was taken back by us.
    pub fn moved(&mut self, pod: &Pod, node: &NodeName, why: &str, now: Moment) {
        let words = format!("the allocation on node {node} is taken back: {why}; another node is looked for");
        self.note_moved(pod, words, now);
    }

    /// The allocation of a pod is taken back for an older pod of its group.
    pub fn gave_way(&mut self, pod: &Pod, now: Moment) {
        let words = "the allocation is taken back: an older pod of its group waits for the same, and their scheduler tries the \
                     oldest first, and no other before that one is bound";
        self.note_moved(pod, words.to_owned(), now);
    }

    fn note_moved(&mut self, pod: &Pod, mut words: String, now: Moment) {
        self.has_no_place(&pod.at.uid);
        let untold = match self.moved.get_mut(&pod.at.uid) {
            Some(moved) if now < moved.at + TELL_EVERY => {
                moved.untold = moved.untold.saturating_add(1);
                return;
            }
            known => known.map_or(0, |moved| moved.untold),
        };
        if untold > 0 {
            words.push_str(&format!(" (the same happened {untold} times more since this was last told)"));
        }
        self.moved.insert(pod.at.uid.clone(), Moved { at: now, untold: 0 });
        self.note(subject(pod), Severity::Warning, "GpuShareMoved", words);
    }

    /// The API server will not have the allocation. Nobody can look at a claim that is only planned.
    pub fn not_taken<'a>(
        &mut self,
        claim: &Claim,
        pods: impl Iterator<Item = &'a Pod>,
        words: &str,
        now: Moment,
    ) {
        let Some(at) = claim.version() else {
            let words = format!("its claim cannot be created: {words}");
            for pod in pods {
                self.waiting(pod, Reason::Claim, &words, now);
            }
            return;
        };
        let subject = EventSubject::Claim(at.claim.clone());
        self.note(subject, Severity::Warning, "AllocationRefused", words.to_owned());
    }

    pub fn about(&mut self, claim: &ClaimRef, words: &str) {
        let subject = EventSubject::Claim(claim.clone());
        self.note(subject, Severity::Warning, "WaitingForGpuShare", words.to_owned());
    }

    /// For the log.
    pub fn trouble(&mut self, words: String) {
        self.troubles.push(words);
    }

    /// Tells pods of their places that can be told by now. The pods that can be told why they wait; each is named once.
    pub fn due(&mut self, now: Moment) -> Vec<PodUid> {
        for placed in self.placed.values_mut().filter(|placed| placed.at + TELL_EVERY <= now) {
            if let Some((subject, message)) = placed.news.take() {
                placed.at = now;
                self.notes.push(Note { subject, severity: Severity::Normal, reason: PLACED, message });
            }
        }
        let due = self.said.iter_mut().filter(|(_, said)| said.has_news && said.at + TELL_EVERY <= now);
        due.map(|(pod, said)| {
            said.has_news = false;
            pod.clone()
        })
        .collect()
    }

    /// When somebody can be told something new.
    pub fn next(&self, now: Moment) -> Option<Moment> {
        let waiting = self.said.values().filter(|said| said.has_news).map(|said| said.at);
        let placed = self.placed.values().filter(|placed| placed.news.is_some()).map(|placed| placed.at);
        waiting.chain(placed).map(|at| at + TELL_EVERY).filter(|due| *due > now).min()
    }

    pub fn forget(&mut self, pod: &PodUid) {
        self.said.remove(pod);
        self.placed.remove(pod);
        self.moved.remove(pod);
    }

    /// How many pods wait for each reason, of those that are still waiting.
    pub fn reasons(&self, waiting: impl Fn(&PodUid) -> bool) -> BTreeMap<Reason, usize> {
        let mut counts: BTreeMap<Reason, usize> = Reason::ALL.into_iter().map(|reason| (reason, 0)).collect();
        for said in self.said.iter().filter(|(pod, _)| waiting(pod)).map(|(_, said)| said) {
            *counts.entry(said.reason).or_default() += 1;
        }
        counts
    }

    /// Why each pod waits, or waited until it had its place.
    pub fn each_reason(&self) -> impl Iterator<Item = (&PodUid, Reason)> {
        self.said.iter().map(|(pod, said)| (pod, said.reason))
    }

    pub fn take(&mut self) -> (Vec<Note>, Vec<String>) {
        (std::mem::take(&mut self.notes), std::mem::take(&mut self.troubles))
    }

    fn note(&mut self, subject: EventSubject, severity: Severity, reason: &'static str, message: String) {
        self.notes.push(Note { subject, severity, reason, message });
    }
}

fn subject(pod: &Pod) -> EventSubject {
    EventSubject::Pod {
        namespace: pod.at.namespace.clone(),
        name: pod.at.name.clone(),
        uid: pod.at.uid.to_string(),
    }
}

/// Why a gang is not placed yet. `size` is a number, or a word for it.
pub fn gathering(name: &str, there: usize, size: &str) -> String {
    format!(
        "the gang {name} has {there} of {size} pods ready; its pods are placed together once all are there"
    )
}

/// Why no pod of a gang may start. `group`: its PodGroup, where it names one.
pub fn obstacle_words(group: &str, obstacle: &Obstacle) -> String {
    match obstacle {
        Obstacle::NoGroup { scheduler } => format!(
            "scheduler {scheduler} puts its pods into PodGroups and has put this pod into none yet; its share is chosen \
             once the pod names its PodGroup; is {scheduler} running?"
        ),
        Obstacle::NoObject { scheduler } => format!(
            "PodGroup {group}, which the pod names, does not exist yet; its share is chosen once {scheduler} has made it"
        ),
        Obstacle::NotListed { api } => format!(
            "nobody knows how many pods of PodGroup {group} start together: podgroups.{api} cannot be listed; is that \
             API well, and may tranche-controller list it?"
        ),
        Obstacle::Refused { words } => {
            format!(
                "PodGroup {group} is kept out by its queue ({words}); its shares are chosen once it is let in"
            )
        }
    }
}

/// As a claim carries it.
pub fn short(words: &str) -> String {
    let most = words.floor_char_boundary(TEXT_BYTES_MAX.min(words.len()));
    words[..most].to_owned()
}

//! The controller end to end: a thousand pods, each with a claim for a part of a GPU, on a hundred hollow nodes and a
//! real API server and scheduler. Placed by the controller and, for comparison, by kube-scheduler itself; and the same
//! writes with nobody deciding, which tells what the machine takes.

mod audit;
mod made;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use futures::{StreamExt, TryStreamExt, stream};
use http::Request;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim};
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams};
use serde_json::Value;
use tokio::time::sleep;

use audit::{Answered, Audit};
use made::{
    Binder, CLAIMS, LOOK, MAKERS, Pacing, SHARE_GIB, by_controller, by_scheduler, made_and, make, name,
};
use tranche::cluster::KubeCluster;
use tranche::cluster::allocation::ClaimVersion;
use tranche::model::claim::ClaimRef;
use tranche::model::names::{DRIVER, HOLD_LABEL};
use tranche::model::quantity::Quantity;

use crate::api::PATIENCE;
use crate::figures::{Report, Samples, rounded};
use crate::hollow::{GPUS, Hollow};
use crate::plugin::{Process, start_controller};

const NODES: usize = 100;
/// Waves of the controller, and of the scheduler by itself, where all come at once: equal ones swing by a half.
const WAVES: (usize, usize) = (5, 3);
/// Of claims that wait until it is made.
const LATE_CLASS: &str = "late.bench.tranche.dev";
/// Of the controller's lease and holds.
const SYSTEM: &str = "bench-controller";

/// Files and programs that this part needs.
pub struct Paths {
    pub tranche: PathBuf,
    pub kubeconfig: PathBuf,
    pub work: PathBuf,
    /// The API server's audit log.
    pub audit: PathBuf,
}

/// A wave that comes while the controller runs: how it is asked for, how many GPUs are kept for shares from the
/// beginning (those of whole nodes), and what it is called.
#[derive(Clone, Copy)]
struct Coming {
    asked: Pacing,
    kept: usize,
    told: (&'static str, &'static str),
}

const FRESH: Coming = Coming {
    asked: Pacing::AtOnce,
    kept: 0,
    told: ("controller: they all come at once, to a cluster that was made a moment ago", "fresh_"),
};
const AT_ONCE: Coming =
    Coming { asked: Pacing::AtOnce, kept: 0, told: ("controller: they all come at once", "") };
const KEPT: (&str, &str) = ("controller: they all come at once, and GPUs are kept for shares", "kept_");
const PACED: Coming = Coming { asked: Pacing::Paced, kept: 0, told: ("controller: 32 at a time", "paced_") };
const UNBOUND: Coming = Coming {
    asked: Pacing::Paced,
    kept: 0,
    told: ("controller: 32 at a time, and nobody binds the pods", "unbound_"),
};

/// A wave that begins.
struct Start {
    begun: Instant,
    /// Of the API server so far.
    api_cpu: Duration,
    audit: Audit,
}

/// A wave that has ended.
struct Done {
    begun: Instant,
    asked: Pacing,
    /// When each claim was asked for.
    made: Vec<Instant>,
    answered: Answered,
    /// Of the API server.
    api_cpu: Duration,
    controller: Option<Used>,
}

/// Of a controller: processor time, and resident memory in MiB.
#[derive(Clone, Copy)]
struct Used {
    cpu: Duration,
    mib: f64,
}

/// What came of one wave.
struct Wave {
    what: &'static str,
    /// Names of its figures begin so.
    key: &'static str,
    /// From the first request, or from the controller's start, to the last allocation and to the last binding.
    allocated: Duration,
    /// The same of the fastest and the slowest of its kind, if it is the middle one of several.
    range: Option<(Duration, Duration)>,
    bound: Option<Duration>,
    /// From the first allocation to the last: GPUs have settled by then.
    flowing: Duration,
    /// From the first request for a claim to the last, where they come while the wave runs.
    asked: Option<Duration>,
    /// From the request for each claim to its allocation.
    each: Samples,
    touched: usize,
    over: usize,
    api_cpu: Duration,
    controller: Option<Used>,
}

/// # Errors
/// Besides what fails: a claim is not allocated in time, or a GPU is granted beyond what it has.
pub async fn measure(place: &Paths, client: &Client, report: &mut Report) -> Result<()> {
    made::fresh(client, SYSTEM).await?;
    let hollow = Hollow::make(client, NODES).await?;
    let crowd = Crowd { place, client, hollow: &hollow };
    let fresh = crowd
        .coming("bench-fresh", FRESH, Binder::KubeScheduler)
        .await
        .context("claims that come to a cluster that was made a moment ago")?;
    // Each of ours beside the scheduler's own: the API server works the slower the longer it has run.
    let (mut coming, mut kept, mut native) = (Vec::new(), Vec::new(), Vec::new());
    for nth in 0..WAVES.0 {
        // The API server looks twice at what comes to a namespace whose name was just given up.
        let wave = crowd.coming(&format!("bench-coming-{nth}"), AT_ONCE, Binder::KubeScheduler).await;
        coming.push(wave.context("claims that come while the controller runs")?);
        if nth < WAVES.1 {
            let all = Coming { kept: hollow.gpus.len(), told: KEPT, ..AT_ONCE };
            let wave = crowd.coming(&format!("bench-kept-{nth}"), all, Binder::KubeScheduler).await;
            kept.push(wave.context("claims that come where GPUs are kept for shares")?);
            let wave = crowd.native(&format!("bench-native-{nth}"), false).await;
            native.push(wave.context("claims that kube-scheduler places")?);
        }
    }
    let (coming, kept, native) = (middle(coming)?, middle(kept)?, middle(native)?);
    let (waiting, _) =
        crowd.waiting(Binder::KubeScheduler).await.context("claims that wait for the controller")?;
    let late = crowd.native("bench-late", true).await.context("claims that wait for kube-scheduler")?;
    let (alone, allocations) =
        crowd.waiting(Binder::Nobody).await.context("claims of pods that nobody binds")?;
    let paced = crowd
        .coming("bench-paced", PACED, Binder::KubeScheduler)
        .await
        .context("claims that come one after the other")?;
    let ceiling = crowd.ceiling(&allocations).await.context("claims that are allocated as they come")?;
    let unbound = crowd
        .coming("bench-unbound", UNBOUND, Binder::Nobody)
        .await
        .context("claims that come while the controller runs, of pods that nobody binds")?;
    let bare = crowd.bare(&allocations).await.context("the same writes with nobody deciding")?;
    let ideal = crowd.ideal()?;
    hollow.end().await?;
    made::drop_namespace(client, SYSTEM).await?;
    tell(report, &[fresh, coming, kept, native, waiting, late, paced, ceiling, unbound, alone, bare], ideal);
    Ok(())
}

struct Crowd<'a> {
    place: &'a Paths,
    client: &'a Client,
    hollow: &'a Hollow,
}

impl Crowd<'_> {
    /// The controller runs, and a thousand come.
    async fn coming(&self, namespace: &str, how: Coming, binder: Binder) -> Result<Wave> {
        let Coming { asked, kept, told } = how;
        let keep = ["--always-hold".to_owned(), "h100".to_owned()];
        let controller = self.controller(namespace, if kept == 0 { &[] } else { &keep })?;
        until_it_leads(&controller, kept).await.with_context(|| controller.last_words())?;
        made::open(self.client, namespace).await?;
        let before = controller.cpu()?;
        let start = self.begin(namespace).await?;
        let made = make(self.client, namespace, &by_controller(), binder, asked).await?;
        let answered = start.audit.until_done(binder).await.with_context(|| controller.last_words())?;
        let used = Used { cpu: controller.cpu()? - before, mib: controller.memory_mib()?.0 };
        let api_cpu = self.api_cpu().await? - start.api_cpu;
        let done = Done { begun: start.begun, asked, made, answered, api_cpu, controller: Some(used) };
        let wave = self.wave(told, namespace, done).await?;
        controller.stop().await?;
        self.clear(namespace).await?;
        Ok(wave)
    }

    /// A thousand wait, the scheduler, if it is to bind them, has tried each in vain, and the controller starts. With
    /// what each claim was given.
    async fn waiting(&self, binder: Binder) -> Result<(Wave, Vec<AllocationResult>)> {
        let (namespace, told) = match binder {
            Binder::KubeScheduler => {
                ("bench-waiting", ("controller: they are there when it starts", "backlog_"))
            }
            Binder::Nobody => {
                ("bench-alone", ("controller: they are there, and nobody binds the pods", "alone_"))
            }
        };
        made::open(self.client, namespace).await?;
        make(self.client, namespace, &by_controller(), binder, Pacing::Paced).await?;
        if binder == Binder::KubeScheduler {
            made::until_tried(self.client, namespace).await?;
        }
        let start = self.begin(namespace).await?;
        let controller = self.controller(namespace, &[])?;
        let answered = start.audit.until_done(binder).await.with_context(|| controller.last_words())?;
        let used = Used { cpu: controller.cpu()?, mib: controller.memory_mib()?.0 };
        let api_cpu = self.api_cpu().await? - start.api_cpu;
        let (asked, made) = (Pacing::AtOnce, vec![start.begun; CLAIMS]);
        let done = Done { begun: start.begun, asked, made, answered, api_cpu, controller: Some(used) };
        let wave = self.wave(told, namespace, done).await?;
        let claims = self.claims(namespace).await?.into_iter();
        let allocations = claims.filter_map(|claim| claim.status?.allocation).collect();
        controller.stop().await?;
        self.clear(namespace).await?;
        Ok((wave, allocations))
    }

    /// No controller: who asks for a pod gives its claim, at once, an allocation that was decided before. What the
    /// machine gives with nobody deciding; no bound in the strict sense, since who writes the allocation asks for
    /// nothing else meanwhile.
    async fn ceiling(&self, allocations: &[AllocationResult]) -> Result<Wave> {
        let namespace = "bench-ceiling";
        made::open(self.client, namespace).await?;
        let cluster = KubeCluster::with_client(self.client.clone());
        let allocate = |nth: usize, claim: ResourceClaim| {
            let (cluster, allocation) = (&cluster, allocations.get(nth));
            async move {
                let allocation = allocation.context("no allocation was decided for it")?;
                cluster.set_allocation(&version(&claim), Some(allocation)).await?;
                anyhow::Ok(())
            }
        };
        let start = self.begin(namespace).await?;
        let (devices, binder) = (by_controller(), Binder::KubeScheduler);
        let made = made_and(self.client, namespace, &devices, binder, Pacing::Paced, allocate).await?;
        let answered = start.audit.until_done(binder).await?;
        let api_cpu = self.api_cpu().await? - start.api_cpu;
        let done =
            Done { begun: start.begun, asked: Pacing::Paced, made, answered, api_cpu, controller: None };
        let told = ("no controller: 32 at a time, each allocated by who asks for it", "ceiling_");
        let wave = self.wave(told, namespace, done).await?;
        self.clear(namespace).await?;
        Ok(wave)
    }

    /// No controller and no scheduler: each claim is given an allocation that was decided before.
    async fn bare(&self, allocations: &[AllocationResult]) -> Result<Wave> {
        let namespace = "bench-bare";
        made::open(self.client, namespace).await?;
        make(self.client, namespace, &by_controller(), Binder::Nobody, Pacing::Paced).await?;
        let claims = self.claims(namespace).await?;
        let cluster = KubeCluster::with_client(self.client.clone());
        let start = self.begin(namespace).await?;
        let writes = claims.iter().zip(allocations).map(|(claim, allocation)| {
            let cluster = &cluster;
            async move {
                cluster.set_allocation(&version(claim), Some(allocation)).await?;
                anyhow::Ok(())
            }
        });
        stream::iter(writes).buffer_unordered(MAKERS).try_collect::<Vec<()>>().await?;
        let answered = start.audit.until_done(Binder::Nobody).await?;
        let api_cpu = self.api_cpu().await? - start.api_cpu;
        let (asked, made) = (Pacing::AtOnce, vec![start.begun; CLAIMS]);
        let done = Done { begun: start.begun, asked, made, answered, api_cpu, controller: None };
        let wave = self.wave(("the same writes, decided before", "bare_"), namespace, done).await?;
        self.clear(namespace).await?;
        Ok(wave)
    }

    /// No controller: the scheduler's own sharing (KEP-5075). They come, or they wait, each tried in vain, for a class
    /// that is made then.
    async fn native(&self, namespace: &str, waits: bool) -> Result<Wave> {
        let (class, told) = match waits {
            false => (DRIVER, ("kube-scheduler by itself: they all come at once", "native_")),
            true => (
                LATE_CLASS,
                ("kube-scheduler by itself: they are there when their class comes", "native_backlog_"),
            ),
        };
        made::open(self.client, namespace).await?;
        made::drop_class(self.client, LATE_CLASS).await?;
        let mut start = self.begin(namespace).await?;
        let (devices, binder) = (by_scheduler(class), Binder::KubeScheduler);
        let how = if waits { Pacing::Paced } else { Pacing::AtOnce };
        let mut made = make(self.client, namespace, &devices, binder, how).await?;
        let asked = Pacing::AtOnce;
        if waits {
            made::until_tried(self.client, namespace).await?;
            start = self.begin(namespace).await?;
            made.fill(start.begun);
            made::copy_class(self.client, DRIVER, LATE_CLASS).await?;
        }
        let answered = start.audit.until_done(Binder::KubeScheduler).await?;
        let api_cpu = self.api_cpu().await? - start.api_cpu;
        let done = Done { begun: start.begun, asked, made, answered, api_cpu, controller: None };
        let wave = self.wave(told, namespace, done).await?;
        self.clear(namespace).await?;
        made::drop_class(self.client, LATE_CLASS).await?;
        Ok(wave)
    }

    async fn begin(&self, namespace: &str) -> Result<Start> {
        let api_cpu = self.api_cpu().await?;
        let audit = Audit::begin(&self.place.audit, namespace)?;
        Ok(Start { begun: Instant::now(), api_cpu, audit })
    }

    fn controller(&self, folder: &str, more: &[String]) -> Result<Process> {
        let folder = self.place.work.join(folder);
        std::fs::create_dir_all(&folder)?;
        start_controller(&self.place.tranche, &self.place.kubeconfig, &folder, SYSTEM, more)
    }

    /// Processor time of the API server so far, by its own word.
    async fn api_cpu(&self) -> Result<Duration> {
        let metrics = self.client.request_text(Request::get("/metrics").body(Vec::new())?).await?;
        let line = metrics.lines().find_map(|line| line.strip_prefix("process_cpu_seconds_total "));
        Ok(Duration::from_secs_f64(line.context("the API server does not tell its processor time")?.parse()?))
    }

    /// By name, as they were made.
    async fn claims(&self, namespace: &str) -> Result<Vec<ResourceClaim>> {
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), namespace);
        Ok(api.list(&ListParams::default()).await?.items)
    }

    async fn wave(
        &self,
        (what, key): (&'static str, &'static str),
        namespace: &str,
        done: Done,
    ) -> Result<Wave> {
        let last = |seen: &HashMap<String, Instant>| seen.values().max().map(|last| *last - done.begun);
        let mut each = Samples::default();
        for (nth, made) in done.made.iter().enumerate() {
            each.push(*done.answered.allocated.get(&name(nth)).context("a claim is gone")? - *made);
        }
        let (touched, over) = self.count(namespace).await?;
        let allocated = last(&done.answered.allocated).context("nothing is allocated")?;
        eprintln!("-- {what}: {:.1} claims/s, {touched} GPUs", per_second(allocated));
        if over > 0 {
            bail!("{over} GPUs are granted beyond what they have");
        }
        let bound = last(&done.answered.bound);
        let first = done.answered.allocated.values().min().map(|first| *first - done.begun);
        let flowing = allocated - first.unwrap_or_default();
        let last_asked = done.made.iter().max().map(|last| *last - done.begun);
        let asked = last_asked.filter(|_| done.asked == Pacing::Paced);
        let (api_cpu, controller) = (done.api_cpu, done.controller);
        let range = None;
        Ok(Wave {
            what,
            key,
            allocated,
            range,
            bound,
            flowing,
            asked,
            each,
            touched,
            over,
            api_cpu,
            controller,
        })
    }

    /// GPUs that have a share, and those of which more is granted than they have.
    async fn count(&self, namespace: &str) -> Result<(usize, usize)> {
        let claims = self.claims(namespace).await?;
        let placed = claims.iter().filter(|claim| made::results(claim).next().is_some()).count();
        if placed != CLAIMS {
            bail!("{placed} of {CLAIMS} claims have a GPU");
        }
        let results = claims.iter().flat_map(made::results);
        let mut granted: BTreeMap<(String, String), (u64, u64)> = BTreeMap::new();
        for result in results {
            // Without an amount it has the whole GPU.
            let amount = |name: &str, all: u64| -> Result<u64> {
                let text = result.consumed_capacity.as_ref().and_then(|all| all.get(name));
                let Some(text) = text else { return Ok(all) };
                text.0.parse::<Quantity>()?.units_ceil().context("a negative amount")
            };
            let at = (result.pool.clone(), result.device.clone());
            let gpu = self.hollow.gpus.get(&at).with_context(|| format!("{at:?} was never published"))?;
            let (memory, slots) = (amount("memory", gpu.memory.0)?, amount("shares", gpu.slots.into())?);
            let sum = granted.entry(at).or_default();
            *sum = (sum.0 + memory, sum.1 + slots);
        }
        let over = granted.iter().filter(|(at, (memory, slots))| {
            let gpu = &self.hollow.gpus[*at];
            *memory > gpu.memory.0 || *slots > u64::from(gpu.slots)
        });
        Ok((granted.len(), over.count()))
    }

    /// The fewest GPUs on which all of them fit.
    fn ideal(&self) -> Result<usize> {
        let gpu = self.hollow.gpus.values().next().context("no GPUs")?;
        let fit = (gpu.memory.0 / (SHARE_GIB << 30)).min(gpu.slots.into());
        Ok(CLAIMS.div_ceil(usize::try_from(fit)?))
    }

    /// Until nothing is allocated any more.
    async fn clear(&self, namespace: &str) -> Result<()> {
        let (now, all) = (DeleteParams::default().grace_period(0), ListParams::default());
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        pods.delete_collection(&now, &all).await?;
        made::until_gone(&pods, all.clone(), "the pods").await?;
        let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), namespace);
        claims.delete_collection(&DeleteParams::default(), &all).await?;
        made::until_gone(&claims, all, "the claims").await?;
        let holds: Api<ResourceClaim> = Api::namespaced(self.client.clone(), SYSTEM);
        let ours = ListParams::default().labels(HOLD_LABEL);
        holds.delete_collection(&DeleteParams::default(), &ours).await?;
        made::until_gone(&holds, ours, "the controller's holds").await?;
        made::drop_namespace(self.client, namespace).await
    }
}

/// The one in the middle of an odd number of equal ones.
fn middle(mut waves: Vec<Wave>) -> Result<Wave> {
    waves.sort_by_key(|wave| wave.allocated);
    let (first, last) = waves.first().zip(waves.last()).context("no wave")?;
    let range = Some((first.allocated, last.allocated));
    let mut wave = waves.swap_remove(waves.len() / 2);
    wave.range = range;
    Ok(wave)
}

/// The wave's row of the table.
fn row(wave: &Wave, ideal: usize) -> Vec<String> {
    let target = match wave.controller {
        Some(_) => format!("200; GPUs {}", ideal * 105 / 100),
        None => String::new(),
    };
    let shown = |figure: f64| rounded(figure).to_string();
    let rate = |took: Duration| format!("{:.1}", per_second(took));
    let controller = wave.controller.as_ref();
    vec![
        wave.what.to_owned(),
        wave.asked.map(rate).unwrap_or_default(),
        match wave.range {
            None => rate(wave.allocated),
            Some((fastest, slowest)) => {
                format!("{} ({} to {})", rate(wave.allocated), rate(slowest), rate(fastest))
            }
        },
        rate(wave.flowing),
        format!("{:.2}", wave.allocated.as_secs_f64()),
        format!("{:.0}", wave.each.p50()),
        format!("{:.0}", wave.each.p99()),
        wave.bound.map(rate).unwrap_or_default(),
        wave.touched.to_string(),
        ideal.to_string(),
        wave.over.to_string(),
        shown(wave.api_cpu.as_secs_f64()),
        controller.map(|used| shown(used.cpu.as_secs_f64())).unwrap_or_default(),
        controller.map(|used| format!("{:.1}", used.mib)).unwrap_or_default(),
        target,
    ]
}

/// The wave's figures, for comparisons.
fn figures(report: &mut Report, wave: &Wave) {
    let mut figure = |name: &str, value: f64| report.figure(&format!("{}{name}", wave.key), value);
    figure("claims_per_s", per_second(wave.allocated));
    if let Some((fastest, slowest)) = wave.range {
        figure("claims_per_s_most", per_second(fastest));
        figure("claims_per_s_least", per_second(slowest));
    }
    figure("claims_per_s_from_the_first", per_second(wave.flowing));
    figure("claim_allocated_p99_ms", wave.each.p99());
    figure("gpus_touched", wave.touched as f64);
    figure("overcommitted", wave.over as f64);
    figure("api_server_cpu_s", wave.api_cpu.as_secs_f64());
    if let Some(asked) = wave.asked {
        figure("asked_per_s", per_second(asked));
    }
    if let Some(bound) = wave.bound {
        figure("bound_per_s", per_second(bound));
    }
    if let Some(Used { cpu, mib }) = &wave.controller {
        figure("controller_cpu_s", cpu.as_secs_f64());
        figure("controller_rss_mib", *mib);
    }
}

fn tell(report: &mut Report, waves: &[Wave], ideal: usize) {
    let rows: Vec<Vec<String>> = waves.iter().map(|wave| row(wave, ideal)).collect();
    waves.iter().for_each(|wave| figures(report, wave));
    report.figure("gpus_ideal", ideal as f64);
    let what = format!("{CLAIMS} pods, each with a claim of {SHARE_GIB} GiB");
    let head = [
        &*what,
        "asked for/s",
        "claims/s",
        "from the first on",
        "all allocated, s",
        "p50 of each, ms",
        "p99",
        "pods bound/s",
        "GPUs touched",
        "ideal",
        "over-committed",
        "API server's CPU, s",
        "controller's",
        "its memory, MiB",
        "target",
    ];
    report.table_of(&head, &rows);
    report.note(format!(
        "{NODES} hollow nodes with {GPUS} H100s each; API server, etcd, scheduler, controller-manager and the one who \
         makes claims and pods share the machine. Time runs from the first request, or from the start of the \
         controller's process, to the API server's answer to the write that allocates the last claim, by its audit \
         log; what each GPU's hold settles is \
         in it, and is not from the first allocation on. At once: all {CLAIMS} claims are asked for at the same moment, \
         and each pod as soon as its claim is there; the row is the middle one of {} waves, the slowest and the fastest \
         beside it, of {} where GPUs are kept for shares (`--always-hold`, all of them) and of the scheduler's own. {MAKERS} at a time: no faster than they are answered; there the row \
         without a controller tells what the machine gives when nobody decides: whoever asks allocates, too, before it \
         asks for the next. The scheduler binds every pod, but for those of a scheduler that is not there. The writes that were \
         decided before are an allocation for each claim, {MAKERS} claims at once. The claims are protected as they are \
         made (deploy/since-1.36).",
        WAVES.0, WAVES.1
    ));
}

fn per_second(took: Duration) -> f64 {
    CLAIMS as f64 / took.as_secs_f64()
}

fn version(claim: &ResourceClaim) -> ClaimVersion {
    let meta = &claim.metadata;
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let claim = ClaimRef {
        namespace: text(&meta.namespace),
        name: text(&meta.name),
        uid: text(&meta.uid).as_str().into(),
    };
    ClaimVersion { claim, resource_version: text(&meta.resource_version) }
}

/// It has the lease, has read everything, and holds so many GPUs.
async fn until_it_leads(controller: &Process, kept: usize) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let state = controller.state().await.unwrap_or_default();
        let state: Value = state
            .split_once("\r\n\r\n")
            .map(|(_, body)| serde_json::from_str(body))
            .transpose()?
            .unwrap_or_default();
        let state = &state["controller"];
        let phases = state["holds"].as_object().into_iter().flatten();
        let held = phases.filter(|(_, phase)| *phase == "held" || *phase == "idle").count();
        if state["leading"] == true && state["complete"] == true && held >= kept {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("the controller does not lead: {state}");
        }
        sleep(LOOK).await;
    }
}

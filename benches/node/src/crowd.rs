//! The controller end to end: a thousand pods, each with a claim for a part of a GPU, on a hundred hollow nodes and a
//! real API server and scheduler. First placed by the controller, then, for comparison, by kube-scheduler itself.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use serde_json::{Value, json};
use tokio::time::sleep;

use tranche::model::names::{DRIVER, HOLD_LABEL, SHARED_CLASS};
use tranche::model::quantity::Quantity;

use crate::api::{self, PATIENCE, Seen};
use crate::figures::{Report, Samples, rounded};
use crate::hollow::{GPUS, Hollow};
use crate::plugin::{Process, start_controller};

const NODES: usize = 100;
const CLAIMS: usize = 1_000;
const SHARE_GIB: u64 = 10;
/// Requests under way at once while claims and pods are made.
const MAKERS: usize = 32;
/// Of the controller's lease and holds.
const SYSTEM: &str = "bench-controller";
const LOOK: Duration = Duration::from_millis(100);
/// The longest wait for all claims of a wave.
const WAVE: Duration = Duration::from_secs(180);

/// Where things lie that the part needs.
pub struct Place {
    pub tranche: PathBuf,
    pub kubeconfig: PathBuf,
    pub work: PathBuf,
}

/// What came of one wave.
struct Wave {
    what: &'static str,
    /// Names of its figures begin so.
    key: &'static str,
    /// From the first request, or from the controller's start, to the last allocation and to the last binding.
    allocated: Duration,
    bound: Duration,
    /// From the request for each claim to its allocation.
    each: Samples,
    touched: usize,
    over: usize,
    /// Of the controller: processor time, and resident memory in MiB.
    took: Option<(Duration, f64)>,
}

/// # Errors
/// Besides what fails: a claim is not allocated in time, or a GPU is granted beyond what it has.
pub async fn measure(place: &Place, client: &Client, report: &mut Report) -> Result<()> {
    fresh(client, SYSTEM).await?;
    let hollow = Hollow::make(client, NODES).await?;
    let crowd = Crowd { place, client, hollow: &hollow };
    let coming = crowd.coming().await.context("claims that come while the controller runs")?;
    let waiting = crowd.waiting().await.context("claims that are there when the controller starts")?;
    let native = crowd.native().await.context("claims that kube-scheduler places")?;
    let ideal = crowd.ideal()?;
    hollow.end().await?;
    drop_namespace(client, SYSTEM).await?;
    tell(report, &[coming, waiting, native], ideal);
    Ok(())
}

struct Crowd<'a> {
    place: &'a Place,
    client: &'a Client,
    hollow: &'a Hollow,
}

impl Crowd<'_> {
    /// The controller runs, and a thousand come at once.
    async fn coming(&self) -> Result<Wave> {
        let controller = self.controller("coming")?;
        until_it_leads(&controller).await.with_context(|| controller.last_words())?;
        let namespace = "bench-coming";
        let watch = Watch::start(self.client, namespace).await?;
        let before = controller.cpu()?;
        let begun = Instant::now();
        let made = make(self.client, namespace, &by_controller()).await?;
        let seen = watch.until_bound().await.with_context(|| controller.last_words())?;
        let took = Some((controller.cpu()? - before, controller.memory_mib()?.0));
        let what = "controller: they come while it runs";
        let wave = self.wave((what, ""), (namespace, begun), (&made, &seen), took).await?;
        controller.stop().await?;
        self.clear(namespace, &watch).await?;
        Ok(wave)
    }

    /// A thousand wait, the scheduler has tried each in vain, and the controller starts.
    async fn waiting(&self) -> Result<Wave> {
        let namespace = "bench-waiting";
        let watch = Watch::start(self.client, namespace).await?;
        make(self.client, namespace, &by_controller()).await?;
        let all = |tried: &HashMap<String, Instant>| tried.len() == CLAIMS;
        watch.tried.until_within(WAVE, "pods that cannot be scheduled", all).await?;
        let begun = Instant::now();
        let controller = self.controller("waiting")?;
        let made = vec![begun; CLAIMS];
        let seen = watch.until_bound().await.with_context(|| controller.last_words())?;
        let took = Some((controller.cpu()?, controller.memory_mib()?.0));
        let what = "controller: they are there when it starts";
        let wave = self.wave((what, "backlog_"), (namespace, begun), (&made, &seen), took).await?;
        controller.stop().await?;
        self.clear(namespace, &watch).await?;
        Ok(wave)
    }

    /// No controller: the scheduler's own sharing (KEP-5075).
    async fn native(&self) -> Result<Wave> {
        let namespace = "bench-native";
        let watch = Watch::start(self.client, namespace).await?;
        let begun = Instant::now();
        let made = make(self.client, namespace, &by_scheduler()).await?;
        let seen = watch.until_bound().await?;
        let wave = self
            .wave(("kube-scheduler by itself", "native_"), (namespace, begun), (&made, &seen), None)
            .await?;
        self.clear(namespace, &watch).await?;
        Ok(wave)
    }

    fn controller(&self, folder: &str) -> Result<Process> {
        let folder = self.place.work.join(folder);
        std::fs::create_dir_all(&folder)?;
        start_controller(&self.place.tranche, &self.place.kubeconfig, &folder, SYSTEM)
    }

    async fn wave(
        &self,
        (what, key): (&'static str, &'static str),
        (namespace, begun): (&str, Instant),
        (made, seen): (&[Instant], &Seens),
        took: Option<(Duration, f64)>,
    ) -> Result<Wave> {
        let last = |seen: &HashMap<String, Instant>| seen.values().max().map(|last| *last - begun);
        let mut each = Samples::default();
        for (nth, made) in made.iter().enumerate() {
            each.push(*seen.allocated.get(&name(nth)).context("a claim is gone")? - *made);
        }
        let (touched, over) = self.count(namespace).await?;
        let allocated = last(&seen.allocated).context("nothing is allocated")?;
        let bound = last(&seen.bound).context("nothing is bound")?;
        eprintln!("-- {what}: {:.1} claims/s, {touched} GPUs", per_second(allocated));
        if over > 0 {
            bail!("{over} GPUs are granted beyond what they have");
        }
        Ok(Wave { what, key, allocated, bound, each, touched, over, took })
    }

    /// GPUs that have a share, and those of which more is granted than they have.
    async fn count(&self, namespace: &str) -> Result<(usize, usize)> {
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), namespace);
        let claims = api.list(&ListParams::default()).await?.items;
        let results = claims.iter().flat_map(results);
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
    async fn clear(&self, namespace: &str, watch: &Watch) -> Result<()> {
        let now = DeleteParams::default().grace_period(0);
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        pods.delete_collection(&now, &ListParams::default()).await?;
        watch.bound.until_within(WAVE, "the pods' end", HashMap::is_empty).await?;
        let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), namespace);
        claims.delete_collection(&DeleteParams::default(), &ListParams::default()).await?;
        watch.allocated.until_within(WAVE, "the claims' end", HashMap::is_empty).await?;
        let holds: Api<ResourceClaim> = Api::namespaced(self.client.clone(), SYSTEM);
        let ours = ListParams::default().labels(HOLD_LABEL);
        holds.delete_collection(&DeleteParams::default(), &ours).await?;
        let deadline = Instant::now() + PATIENCE;
        while !holds.list(&ours).await?.items.is_empty() {
            if Instant::now() > deadline {
                bail!("the controller's holds do not go");
            }
            sleep(LOOK).await;
        }
        drop_namespace(self.client, namespace).await
    }
}

fn tell(report: &mut Report, waves: &[Wave], ideal: usize) {
    let mut rows = Vec::new();
    for wave in waves {
        let Wave { what, key, allocated, bound, each, touched, over, took } = wave;
        let target = if took.is_some() { format!("200, GPUs {}", ideal * 105 / 100) } else { String::new() };
        let shown = |figure: f64| rounded(figure).to_string();
        rows.push(vec![
            (*what).to_owned(),
            format!("{:.1}", per_second(*allocated)),
            format!("{:.2}", allocated.as_secs_f64()),
            format!("{:.0}", each.p50()),
            format!("{:.0}", each.p99()),
            format!("{:.1}", per_second(*bound)),
            touched.to_string(),
            ideal.to_string(),
            over.to_string(),
            took.map(|(cpu, _)| shown(cpu.as_secs_f64())).unwrap_or_default(),
            took.map(|(_, mib)| format!("{mib:.1}")).unwrap_or_default(),
            target,
        ]);
        report.figure(&format!("{key}claims_per_s"), per_second(*allocated));
        report.figure(&format!("{key}claim_allocated_p99_ms"), each.p99());
        report.figure(&format!("{key}bound_per_s"), per_second(*bound));
        report.figure(&format!("{key}gpus_touched"), *touched as f64);
        report.figure(&format!("{key}overcommitted"), *over as f64);
        if let Some((cpu, mib)) = took {
            report.figure(&format!("{key}controller_cpu_s"), cpu.as_secs_f64());
            report.figure(&format!("{key}controller_rss_mib"), *mib);
        }
    }
    report.figure("gpus_ideal", ideal as f64);
    let what = format!("{CLAIMS} pods, each with a claim of {SHARE_GIB} GiB");
    let head = [
        &*what,
        "claims/s",
        "all allocated, s",
        "p50 of each, ms",
        "p99",
        "pods bound/s",
        "GPUs touched",
        "ideal",
        "over-committed",
        "controller's CPU, s",
        "its memory, MiB",
        "target",
    ];
    report.table_of(&head, &rows);
    report.note(format!(
        "{NODES} hollow nodes with {GPUS} H100s each; API server, etcd, scheduler, controller-manager and the one who \
         makes claims and pods ({MAKERS} requests at once) share the machine. Time runs from the first request, or \
         from the start of the controller's process, to the allocation of the last claim, as a watch sees it; it \
         includes the 2 s that each GPU's hold settles. The scheduler binds every pod."
    ));
}

fn per_second(took: Duration) -> f64 {
    CLAIMS as f64 / took.as_secs_f64()
}

/// What has become of a wave's objects, each by name.
struct Watch {
    allocated: Seen,
    tried: Seen,
    bound: Seen,
}

struct Seens {
    allocated: HashMap<String, Instant>,
    bound: HashMap<String, Instant>,
}

impl Watch {
    /// In a namespace that is made for it.
    async fn start(client: &Client, namespace: &str) -> Result<Self> {
        fresh(client, namespace).await?;
        api::until_account(client, namespace).await?;
        let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), namespace);
        let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
        let allocated = |claim: &ResourceClaim| claim.status.as_ref().is_some_and(|s| s.allocation.is_some());
        let bound = |pod: &Pod| pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
        Ok(Self {
            allocated: Seen::start(claims, "", allocated).await?,
            tried: Seen::start(pods.clone(), "", tried).await?,
            bound: Seen::start(pods, "", bound).await?,
        })
    }

    /// Until every claim is allocated and every pod is bound.
    async fn until_bound(&self) -> Result<Seens> {
        let all = |seen: &HashMap<String, Instant>| seen.len() == CLAIMS;
        let allocated = self.allocated.until_within(WAVE, "all claims allocated", all).await?;
        let bound = self.bound.until_within(WAVE, "all pods bound", all).await?;
        Ok(Seens { allocated, bound })
    }
}

/// The scheduler has tried the pod in vain.
fn tried(pod: &Pod) -> bool {
    let mut conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.any(|one| one.type_ == "PodScheduled" && one.status == "False")
}

/// The claims and their pods; when each claim was asked for.
async fn make(client: &Client, namespace: &str, devices: &Value) -> Result<Vec<Instant>> {
    let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), namespace);
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let all = (0..CLAIMS).map(|nth| {
        let (claims, pods, name) = (claims.clone(), pods.clone(), name(nth));
        let claim = json!({"metadata": {"name": name}, "spec": {"devices": devices}});
        async move {
            let begun = Instant::now();
            claims.create(&PostParams::default(), &serde_json::from_value(claim)?).await?;
            pods.create(&PostParams::default(), &serde_json::from_value(pod(&name))?).await?;
            anyhow::Ok(begun)
        }
    });
    stream::iter(all).buffered(MAKERS).try_collect().await
}

fn name(nth: usize) -> String {
    format!("c-{nth:04}")
}

fn pod(name: &str) -> Value {
    let resources = json!({"requests": {"cpu": "100m", "memory": "128Mi"}, "claims": [{"name": "gpu"}]});
    let container = json!({"name": "main", "image": "docker.io/local/busybox:1", "resources": resources});
    json!({"metadata": {"name": name}, "spec": {
        "containers": [container], "resourceClaims": [{"name": "gpu", "resourceClaimName": name}]}})
}

/// spec.devices for the controller.
fn by_controller() -> Value {
    let parameters = json!({
        "apiVersion": "tranche.dev/v1alpha1", "kind": "GpuShare", "memory": format!("{SHARE_GIB}Gi")});
    json!({
        "requests": [{"name": "gpu", "exactly": {"deviceClassName": SHARED_CLASS}}],
        "config": [{"requests": ["gpu"], "opaque": {"driver": DRIVER, "parameters": parameters}}],
    })
}

/// The same for the scheduler.
fn by_scheduler() -> Value {
    let capacity = json!({"requests": {"memory": format!("{SHARE_GIB}Gi")}});
    json!({"requests": [{"name": "gpu", "exactly": {"deviceClassName": DRIVER, "capacity": capacity}}]})
}

fn results(claim: &ResourceClaim) -> impl Iterator<Item = &DeviceRequestAllocationResult> {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
    devices.into_iter().flat_map(|devices| devices.results.iter().flatten())
}

/// It has the lease, and has read everything.
async fn until_it_leads(controller: &Process) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let state = controller.ask("/state").await.unwrap_or_default();
        let state: Value = state
            .split_once("\r\n\r\n")
            .map(|(_, body)| serde_json::from_str(body))
            .transpose()?
            .unwrap_or_default();
        if state["controller"]["leading"] == true && state["controller"]["complete"] == true {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("the controller does not lead: {state}");
        }
        sleep(LOOK).await;
    }
}

/// An empty namespace: what an earlier run has left of it goes first.
async fn fresh(client: &Client, name: &str) -> Result<()> {
    let api = Api::<Namespace>::all(client.clone());
    let deadline = Instant::now() + PATIENCE;
    while let Some(old) = api.get_opt(name).await? {
        if old.metadata.deletion_timestamp.is_none() {
            api.delete(name, &DeleteParams::default()).await?;
        }
        if Instant::now() > deadline {
            bail!("namespace {name} does not go");
        }
        sleep(LOOK).await;
    }
    let object = serde_json::from_value(json!({"metadata": {"name": name}}))?;
    api.create(&PostParams::default(), &object).await?;
    Ok(())
}

/// Nothing waits for its end.
async fn drop_namespace(client: &Client, name: &str) -> Result<()> {
    Api::<Namespace>::all(client.clone()).delete(name, &DeleteParams::default()).await?;
    Ok(())
}

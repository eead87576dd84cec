//! A disk that is slow, or stands still: the ledger is being read, and the node goes on.

use std::fs;
use std::future::Future;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use tokio::task::{JoinHandle, spawn_blocking};
use tranche::node::store::StoreError;

use crate::site::{Claim, PluginRun, Site, uuid};

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

async fn soon<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.unwrap_or_else(|_| panic!("{what}: still waiting"))
}

/// A plugin that reads its ledger again, and stands still at the record of `middle` on gpu-1. Records of names before it are
/// read.
struct SlowReading {
    plugin: Arc<PluginRun>,
    reading: JoinHandle<Result<(), StoreError>>,
    /// What the record says, and where the reading waits for it.
    bytes: Vec<u8>,
    gate: fs::File,
}

impl SlowReading {
    async fn new(site: &Site, plugin: Arc<PluginRun>) -> Self {
        let middle = Claim::new("middle", &["gpu-1"]);
        site.api.put(&middle);
        plugin.prepared(&middle, "middle").await;
        let path = site.path("ledger/uid-middle.rec");
        let bytes = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        mkfifo(&path, Mode::S_IRWXU).unwrap();
        let reader = plugin.clone();
        let reading = spawn_blocking(move || reader.preparer.executor.store.read_again());
        let gate = at_gate(path.clone()).await;
        // Whoever comes later finds the record in its place.
        let whole = site.path("ledger/uid-middle.new");
        fs::write(&whole, &bytes).unwrap();
        fs::rename(whole, path).unwrap();
        Self { plugin, reading, bytes, gate }
    }

    /// Lets the reading go on, until it has ended.
    async fn goes_on(mut self) {
        self.gate.write_all(&self.bytes).unwrap();
        drop(self.gate);
        soon("the reading", self.reading).await.unwrap().unwrap();
    }
}

/// Returns when somebody reads the FIFO.
async fn at_gate(path: PathBuf) -> fs::File {
    let open = move || fs::File::options().write(true).open(path).unwrap();
    soon("the record is read", spawn_blocking(open)).await.unwrap()
}

/// The claims in the index.
async fn known(plugin: &Arc<PluginRun>) -> Vec<String> {
    let plugin = plugin.clone();
    let intents = spawn_blocking(move || plugin.preparer.executor.store.intents());
    let mut names: Vec<_> =
        soon("the index", intents).await.unwrap().into_iter().map(|intent| intent.claim.name).collect();
    names.sort();
    names
}

/// Two claims for gpu-0, with names before that of the record at which the reading stands still.
fn claims(site: &Site) -> [Claim; 2] {
    let claims = ["a", "b"].map(|name| Claim::new(name, &["gpu-0"]));
    claims.iter().for_each(|claim| site.api.put(claim));
    claims
}

#[tokio::test]
async fn while_the_ledger_is_read_claims_come_and_go_and_what_they_changed_stays() {
    let site = Site::new();
    let plugin = Arc::new(site.start_plugin());
    let [first, second] = claims(&site);
    plugin.prepared(&first, "before").await;
    let slow = SlowReading::new(&site, plugin.clone()).await;
    assert_eq!(known(&plugin).await, ["a", "middle"], "whoever looks waits for no disk");
    soon("a release", plugin.unprepare(&first)).await.unwrap();
    soon("a claim", plugin.prepared(&second, "meanwhile")).await;
    slow.goes_on().await;
    // The first was read before it was released, the second came after the folder was listed.
    assert_eq!(known(&plugin).await, ["b", "middle"]);
    plugin.unprepare(&second).await.unwrap();
    assert_eq!(known(&plugin).await, ["middle"]);
    site.check("afterwards");
}

#[tokio::test]
async fn a_claim_that_becomes_ready_while_the_ledger_is_read_stays_ready() {
    let site = Site::new();
    let plugin = Arc::new(site.start_plugin());
    let claim = Claim::new("a", &["gpu-0"]).interval("Long");
    site.api.put(&claim);
    // The driver's tool waits there.
    let tool = site.path(&format!("driver/gpus/{}.gate", uuid(0)));
    mkfifo(&tool, Mode::S_IRWXU).unwrap();
    let (its, asked) = (plugin.clone(), claim.clone());
    let preparing = tokio::spawn(async move { its.prepared(&asked, "meanwhile").await });
    let mut gate = at_gate(tool.clone()).await;
    fs::remove_file(tool).unwrap();
    let slow = SlowReading::new(&site, plugin.clone()).await;
    gate.write_all(b"go\n").unwrap();
    drop(gate);
    soon("it is prepared", preparing).await.unwrap();
    slow.goes_on().await;
    assert_eq!(plugin.preparer.executor.store.phases(), [0, 2, 0], "both are ready");
    plugin.unprepare(&claim).await.unwrap();
    assert_eq!(known(&plugin).await, ["middle"]);
    site.check("afterwards");
}

/// A rolling update: what the other process did since the slow reading began was read for the claim that came next.
#[tokio::test]
async fn a_slow_reading_that_ends_late_brings_back_nothing_that_a_later_one_knew_to_be_over() {
    let site = Site::new();
    let (old, new) = (site.start_plugin(), Arc::new(site.start_plugin()));
    let [first, second] = claims(&site);
    new.prepared(&first, "before").await;
    let slow = SlowReading::new(&site, new.clone()).await;
    soon("the other process releases it", old.unprepare(&first)).await.unwrap();
    soon("the GPU is free", new.prepared(&second, "by the new")).await;
    assert_eq!(known(&new).await, ["b", "middle"]);
    let plugin = slow.plugin.clone();
    slow.goes_on().await;
    assert_eq!(known(&plugin).await, ["b", "middle"], "what it had read of the first was over");
    soon("what the other process does later is read", old.unprepare(&second)).await.unwrap();
    plugin.preparer.executor.store.read_again().unwrap();
    assert_eq!(known(&plugin).await, ["middle"]);
}

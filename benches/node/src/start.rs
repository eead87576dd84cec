//! From the process's start to its registration and to its slices; and what it takes while nobody asks.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use kube::Client;
use tokio::time::sleep;

use crate::api;
use crate::calls::Socket;
use crate::fake_kubelet::FakeKubelet;
use crate::figures::{Report, Samples};
use crate::plugin::Setting;

const STARTS: usize = 12;
const SETTLE: Duration = Duration::from_secs(60);
const IDLE: Duration = Duration::from_secs(60);

/// Starts with an empty ledger and without slices, again and again.
pub async fn measure(setting: &Setting, client: &Client, report: &mut Report) -> Result<()> {
    let gpus = setting.gpus("start", &["--profile", "h100", "--count", "8"]).await?;
    let slices = api::watch_slices(client).await?;
    let (mut registered, mut published) = (Samples::default(), Samples::default());
    for number in 0..STARTS {
        api::delete_slices(client, &slices).await?;
        let folder = setting.folder(&format!("s{number}"))?;
        let kubelet = FakeKubelet::start(&folder);
        let begun = Instant::now();
        let plugin = setting.start(&folder, &gpus, &[])?;
        let register = async {
            Socket::registered(&kubelet).await?;
            anyhow::Ok(begun.elapsed())
        };
        let publish = slices.until("slices", |seen| !seen.is_empty());
        let (register, seen) = tokio::try_join!(register, publish).with_context(|| plugin.last_words())?;
        registered.push(register);
        published.extend(seen.values().map(|seen| *seen - begun).min());
        plugin.stop().await?;
    }
    report.samples("start to registered (kubelet looks every 5 ms)", &registered, "100", "p50 627");
    report.samples("start to slices seen in a watch", &published, "200", "p50 1064");
    report.figure("start_to_registered_ms", registered.p50());
    report.figure("start_to_slices_ms", published.p50());
    Ok(())
}

/// Eight GPUs, no claims, kubelet's health stream open.
pub async fn idle(setting: &Setting, client: &Client, report: &mut Report) -> Result<()> {
    let gpus = setting.gpus("idle", &["--profile", "h100", "--count", "8"]).await?;
    let slices = api::watch_slices(client).await?;
    let folder = setting.folder("i")?;
    let kubelet = FakeKubelet::start(&folder);
    let plugin = setting.start(&folder, &gpus, &[])?;
    let socket = Socket::registered(&kubelet).await?;
    socket.watch_health().await?;
    slices.until("slices", |seen| !seen.is_empty()).await?;
    sleep(SETTLE).await;
    let spent = || anyhow::Ok([plugin.cpu()?, plugin.cpu_of("nvml-events")?]);
    let (before, begun) = (spent()?, Instant::now());
    sleep(IDLE).await;
    let minutes = begun.elapsed().as_secs_f64() / 60.0;
    let after = spent()?;
    let [cpu, waiting] = std::array::from_fn(|i| (after[i] - before[i]).as_secs_f64() / minutes);
    let (resident, anonymous) = plugin.memory_mib()?;
    report.single("idle: resident memory, MiB", resident, "15", "53.8");
    report.single("idle: anonymous memory, MiB", anonymous, "5", "12.5");
    report.single("idle: processor time a minute, s", cpu, "0.02", "0.02");
    report.single("  of it the wait for events inside the simulated NVML, s", waiting, "", "");
    report.single("idle: threads", plugin.threads()? as f64, "", "13");
    report.figure("idle_rss_mib", resident);
    report.figure("idle_anon_mib", anonymous);
    report.figure("idle_cpu_s_per_min", cpu);
    report.figure("idle_cpu_in_nvml_wait_s_per_min", waiting);
    plugin.stop().await
}

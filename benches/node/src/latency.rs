//! Prepare and unprepare through the socket: one at a time, beside live claims, many at once, and of MIG devices that are made.

use std::time::Duration;

use anyhow::Result;
use futures::future::try_join_all;
use kube::Client;

use tranche::kubelet::pb::dra::Claim;

use crate::api::{self, Access};
use crate::bench::{Bench, Start};
use crate::figures::{Report, Samples};
use crate::plugin::Setting;

const GPUS: usize = 16;
const ALONE: usize = 300;
const WARM_UP: usize = 30;
const BESIDE_LIVE: usize = 100;
/// Live claims, what NVIDIA's driver took with as many, and the figure's name.
const LIVE: [(usize, &str); 3] = [(1, "p50 8.7"), (100, "p50 73 (50), 199 (200)"), (500, "p50 661")];
/// At once, how often, whether MIG devices (there are not that many boards), and the peer's figure.
const WAVES: [(usize, usize, bool, &str); 3] =
    [(8, 25, false, "p50 323, wave 720"), (32, 10, true, ""), (100, 5, true, "")];

/// MIG devices that are made one after the other, each on another GPU than the one before.
const MADE: usize = 320;
/// The end of the names of the places where they are made.
const MADE_AT: &str = "-mig-1g10gb-19-0";
/// Devices of a GPU that is given whole or cut: itself, and each place on it.
const DEVICES_OF_CUT: usize = 26;

/// Everything of this file, into the report.
pub async fn measure(setting: &Setting, client: &Client, report: &mut Report) -> Result<()> {
    let gpus = setting.gpus("whole", &["--profile", "h100", "--count", "16"]).await?;
    let start = Start { folder: "l16", gpus: &gpus, devices: GPUS, more: Vec::new() };
    let bench = Bench::start(setting, client, start).await?;
    bench.alone(report).await?;
    bench.beside_live(report).await?;
    bench.waves(report, false).await?;
    bench.plugin.stop().await?;

    let cut: Vec<String> = (0..GPUS).map(|gpu| format!("{gpu}={}", ["1g.10gb"; 7].join(","))).collect();
    let mut arguments = vec!["--profile", "h100", "--count", "16"];
    arguments.extend(cut.iter().flat_map(|cut| ["--mig", cut]));
    let gpus = setting.gpus("mig", &arguments).await?;
    let start = Start { folder: "l112", gpus: &gpus, devices: GPUS * 7, more: Vec::new() };
    let bench = Bench::start(setting, client, start).await?;
    bench.waves(report, true).await?;
    bench.plugin.stop().await?;
    made(setting, client, report).await
}

/// MIG devices that are made for their claims. NVML takes no time for it here: on real boards it may take seconds.
async fn made(setting: &Setting, client: &Client, report: &mut Report) -> Result<()> {
    let gpus = setting.gpus("cut", &["--profile", "h100", "--count", "16"]).await?;
    let more = vec!["--mig-on-demand=all".to_owned(), "--mig-keep=1h".to_owned()];
    let start = Start { folder: "lc", gpus: &gpus, devices: GPUS * DEVICES_OF_CUT, more };
    let bench = Bench::start(setting, client, start).await?;
    let places: Vec<String> = bench.devices.iter().filter(|name| name.ends_with(MADE_AT)).cloned().collect();
    let devices = places.iter().cycle().take(GPUS + MADE).cloned().collect();
    let claims = api::claims(client, "made", devices, Access::Exclusive).await?;
    let (first, claims) = claims.split_at(GPUS);
    let first = bench.one_at_a_time(first).await?;
    let took = bench.one_at_a_time(claims).await?;
    bench.plugin.stop().await?;
    report.samples("prepare of a MIG device that is made (NVML without delay)", &took.prepare, "", "");
    report.samples("  GET of the same claim by itself", &took.get, "", "");
    report.samples("  file synced, renamed, folder synced", &took.synced, "", "");
    report.samples("  the first of each GPU (MIG switched on)", &first.prepare, "", "");
    report.samples("unprepare of a MIG device that was made", &took.unprepare, "", "");
    report.figure("mig_prepare_p50_ms", took.prepare.p50());
    report.figure("mig_prepare_p99_ms", took.prepare.p99());
    report.figure("mig_prepare_first_p50_ms", first.prepare.p50());
    report.figure("mig_unprepare_p50_ms", took.unprepare.p50());
    Ok(())
}

impl Bench<'_> {
    async fn alone(&self, report: &mut Report) -> Result<()> {
        let claims = self.claims("alone", WARM_UP + ALONE, Access::Exclusive).await?;
        let (warm_up, claims) = claims.split_at(WARM_UP);
        self.one_at_a_time(warm_up).await?;
        let took = self.one_at_a_time(claims).await?;
        let bare = took.prepare.less(&took.get);
        report.samples("prepare, one at a time", &took.prepare, "", "p50 6.2, p99 10.8");
        report.samples("  GET of the same claim by itself", &took.get, "", "");
        report.samples("  prepare less GET", &bare, "p50 1.2, p99 2", "");
        report.samples("  file synced, renamed, folder synced", &took.synced, "", "");
        report.samples("unprepare, one at a time", &took.unprepare, "", "p50 1.8, p99 5.2");
        report.figure("prepare_p50_ms", took.prepare.p50());
        report.figure("prepare_p99_ms", took.prepare.p99());
        report.figure("claim_get_p50_ms", took.get.p50());
        report.figure("claim_get_p99_ms", took.get.p99());
        report.figure("prepare_less_get_p50_ms", bare.p50());
        report.figure("prepare_less_get_p99_ms", bare.p99());
        report.figure("disk_sync_p50_ms", took.synced.p50());
        report.figure("unprepare_p50_ms", took.unprepare.p50());
        report.figure("unprepare_p99_ms", took.unprepare.p99());
        Ok(())
    }

    async fn beside_live(&self, report: &mut Report) -> Result<()> {
        let mut live = 0;
        for (count, peer) in LIVE {
            let more = self.claims(&format!("live{count}"), count - live, Access::Admin).await?;
            for some in more.chunks(GPUS) {
                self.socket.prepare_all(some).await?;
            }
            live = count;
            let claims = self.claims(&format!("beside{count}"), BESIDE_LIVE, Access::Exclusive).await?;
            let took = self.one_at_a_time(&claims).await?;
            report.samples(&format!("prepare, {count} live claims **"), &took.prepare, "the same", peer);
            report.samples("  prepare less GET", &took.prepare.less(&took.get), "", "");
            report.samples("  file synced, renamed, folder synced", &took.synced, "", "");
            report
                .figure(&format!("prepare_{count}_live_less_get_p50_ms"), took.prepare.less(&took.get).p50());
            report.samples(&format!("unprepare, {count} live claims **"), &took.unprepare, "", "");
            report.figure(&format!("prepare_{count}_live_p50_ms"), took.prepare.p50());
            report.figure(&format!("unprepare_{count}_live_p50_ms"), took.unprepare.p50());
        }
        Ok(())
    }

    async fn waves(&self, report: &mut Report, of_mig: bool) -> Result<()> {
        for (count, times, mig, peer) in WAVES {
            if mig != of_mig {
                continue;
            }
            let claims = self.claims(&format!("wave{count}"), count, Access::Exclusive).await?;
            // The first wave warms up.
            self.wave(&claims).await?;
            let (mut each, mut slowest, mut released) =
                (Samples::default(), Samples::default(), Samples::default());
            let mut gets = Samples::default();
            for _ in 0..times {
                gets.extend(try_join_all(claims.iter().map(|claim| self.get(claim))).await?);
                let (prepared, unprepared) = self.wave(&claims).await?;
                slowest.extend(prepared.iter().max().copied());
                each.extend(prepared);
                released.extend(unprepared);
            }
            let of = if mig { " (MIG)" } else { "" };
            let target = if count == 8 { "p50 10" } else { "no time-out" };
            report.samples(&format!("prepare, {count} at once{of}"), &each, target, peer);
            report.samples("  GETs alone, as many at once", &gets, "", "");
            report.samples("  the slowest of each wave", &slowest, "", "");
            report.samples(&format!("unprepare, {count} at once{of}"), &released, "", "");
            report.figure(&format!("claim_get_{count}_at_once_p50_ms"), gets.p50());
            report.figure(&format!("prepare_{count}_at_once_p50_ms"), each.p50());
            report.figure(&format!("prepare_{count}_at_once_max_ms"), each.max());
        }
        Ok(())
    }

    async fn wave(&self, claims: &[Claim]) -> Result<(Vec<Duration>, Vec<Duration>)> {
        Ok((self.socket.prepare_all(claims).await?, self.socket.unprepare_all(claims).await?))
    }
}

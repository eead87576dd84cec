//! Prepare of a share through the socket: with a daemon that is yet to be started, with one that serves, and with
//! one whose limits must change. The daemons are NVIDIA's own, kept by `tranche mps`.

use std::path::Path;

use anyhow::Result;
use kube::Client;

use crate::api::Access;
use crate::bench::{Bench, Start, Took};
use crate::figures::{Report, Samples};
use crate::plugin::{Process, Setting};

const GPUS: usize = 16;
const WARM: usize = 300;
const WARM_UP: usize = 30;
const OTHERS: usize = 50;
const SMALL: Access = Access::Share { mib: 4000, percent: 10 };
const LARGE: Access = Access::Share { mib: 8000, percent: 20 };

/// Everything of this file, into the report.
pub async fn measure(setting: &Setting, client: &Client, report: &mut Report) -> Result<()> {
    let gpus = setting.gpus("shared", &["--profile", "h100", "--count", "16"]).await?;
    let (bench, mps) = start(setting, client, "s", &gpus, &[]).await?;
    cold(&bench, report).await?;
    warm(&bench, report).await?;
    bench.plugin.stop().await?;
    mps.stop().await
}

/// The keeper of the daemons, with an empty folder, and the plugin.
pub async fn start<'a>(
    setting: &Setting,
    client: &'a Client,
    folder: &str,
    gpus: &Path,
    more: &[String],
) -> Result<(Bench<'a>, Process)> {
    let daemons = setting.folder(&format!("{folder}m"))?;
    let mps = setting.start_mps(&daemons, gpus).await?;
    let mut arguments = vec![format!("--mps-dir={}", daemons.display())];
    arguments.extend_from_slice(more);
    let start = Start { folder, gpus, devices: GPUS, more: arguments };
    Ok((Bench::start(setting, client, start).await?, mps))
}

/// The first share of each GPU: its mode is set, its daemon started, the limits set and read back.
async fn cold(bench: &Bench<'_>, report: &mut Report) -> Result<()> {
    let claims = bench.claims("cold", GPUS, SMALL).await?;
    let mut took = Samples::default();
    for claim in &claims {
        took.push(bench.socket.prepare(claim).await?);
    }
    bench.socket.unprepare_all(&claims).await?;
    report.samples("prepare of a share, cold (mode set, daemon started)", &took, "max 1000", "");
    report.figure("share_cold_ms", took.p50());
    report.figure("share_cold_max_ms", took.max());
    Ok(())
}

async fn warm(bench: &Bench<'_>, report: &mut Report) -> Result<()> {
    let resting = bench.claims_on_first("resting", OTHERS, SMALL).await?;
    let resting = bench.one_at_a_time(&resting).await?;
    // Another one of the same size lives on the GPU from here on.
    let live = bench.claims_on_first("live-share", 1, SMALL).await?;
    bench.socket.prepare_all(&live).await?;
    let claims = bench.claims_on_first("warm", WARM_UP + WARM, SMALL).await?;
    let (warm_up, claims) = claims.split_at(WARM_UP);
    bench.one_at_a_time(warm_up).await?;
    let took = bench.one_at_a_time(claims).await?;
    let larger = bench.claims_on_first("larger", OTHERS, LARGE).await?;
    let larger = bench.one_at_a_time(&larger).await?;
    bench.socket.unprepare_all(&live).await?;

    let bare = took.prepare.less(&took.get);
    report.samples("prepare of a share, warm", &took.prepare, "p99 5", "");
    report.samples("  GET of the same claim by itself", &took.get, "", "");
    report.samples("  prepare less GET", &bare, "", "");
    report.samples("  file synced, renamed, folder synced", &took.synced, "", "");
    report.samples("unprepare of a share, warm", &took.unprepare, "", "");
    tell(report, "the daemon's limits change", &larger);
    tell(report, "the daemon rests", &resting);
    report.figure("share_warm_p50_ms", took.prepare.p50());
    report.figure("share_warm_p99_ms", took.prepare.p99());
    report.figure("share_warm_less_get_p50_ms", bare.p50());
    report.figure("share_warm_less_get_p99_ms", bare.p99());
    report.figure("share_unprepare_p50_ms", took.unprepare.p50());
    report.figure("share_unprepare_p99_ms", took.unprepare.p99());
    report.figure("share_other_size_p50_ms", larger.prepare.p50());
    report.figure("share_resting_p50_ms", resting.prepare.p50());
    Ok(())
}

fn tell(report: &mut Report, how: &str, took: &Took) {
    report.samples(&format!("prepare of a share, {how}"), &took.prepare, "", "");
    report.samples(&format!("unprepare of a share, {how}"), &took.unprepare, "", "");
}

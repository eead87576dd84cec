//! Evicts the pods of a proposal, one after another, and waits for what waits. The controller, which knows of the same
//! proposal, keeps the places meanwhile.

use std::io::{IsTerminal, Write, stderr, stdin};
use std::time::{Duration, Instant};

use super::super::reach::for_people;
use super::super::table::plain;
use super::super::{EXIT_REFUSED, UsageError};
use super::draw::name;
use super::{LOOK_EVERY, RebalanceArgs, RebalanceReport};
use crate::cluster::eviction::Eviction;
use crate::cluster::{CallError, KubeCluster};
use crate::controller::moves::{Move, Proposed};
use crate::controller::view::movable::OwnerKind;
use crate::model::claim::PodRef;

/// What became of one step.
enum MoveResult {
    Done,
    /// Why not.
    Undone(String),
}

/// Does what is proposed; 0, or 3 if something was left undone.
///
/// # Errors
/// Nobody can be asked and `--yes` is missing ([`UsageError`]), or the API server does not answer.
pub async fn apply(
    cluster: &KubeCluster,
    report: &RebalanceReport,
    args: &RebalanceArgs,
    timeout: Duration,
) -> anyhow::Result<u8> {
    let count: usize = report.proposed().map(|(_, found)| found.moves.len()).sum();
    if !args.yes && !agreed(count)? {
        say("nothing was done");
        return Ok(EXIT_REFUSED);
    }
    let mut undone = 0;
    for (waits, found) in report.proposed() {
        if let MoveResult::Undone(why) = serve(cluster, found, &waits.pods, timeout).await? {
            say(&format!("{} is not served: {why}", name(waits)));
            undone += 1;
        }
    }
    Ok(if undone == 0 { 0 } else { EXIT_REFUSED })
}

fn agreed(count: usize) -> anyhow::Result<bool> {
    if !stdin().is_terminal() {
        anyhow::bail!(UsageError(
            "--apply asks before it evicts, and nobody can answer; give --yes".to_owned()
        ));
    }
    let pods = if count == 1 { "1 pod".to_owned() } else { format!("{count} pods") };
    write!(stderr(), "Evict {pods}? [y/N] ")?;
    let mut answer = String::new();
    stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

/// Progress, beside the answer.
fn say(words: &str) {
    // Who reads it may have gone.
    let _ = writeln!(stderr(), "{}", plain(words));
}

async fn serve(
    cluster: &KubeCluster,
    found: &Proposed,
    waits: &[PodRef],
    timeout: Duration,
) -> anyhow::Result<MoveResult> {
    for one in &found.moves {
        if let MoveResult::Undone(why) = evict(cluster, one, timeout).await? {
            return Ok(MoveResult::Undone(why));
        }
    }
    for pod in waits {
        let until = Instant::now() + timeout;
        let node = loop {
            match cluster.pod_named(&pod.namespace, &pod.name).await {
                Ok(object) => {
                    let node = object.spec.and_then(|spec| spec.node_name).filter(|node| !node.is_empty());
                    if let Some(node) = node {
                        break node;
                    }
                }
                Err(CallError::NotFound { .. }) => {
                    return Ok(MoveResult::Undone(format!("pod {} is gone", pod.name)));
                }
                Err(error) => return Err(for_people(error)),
            }
            if Instant::now() >= until {
                let words = format!("pod {} still waits after {} s", pod.name, timeout.as_secs());
                return Ok(MoveResult::Undone(words));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        };
        say(&format!("{}/{} has its place on node {node}", pod.namespace, pod.name));
    }
    Ok(MoveResult::Done)
}

/// Evicts a pod, and waits until it has ended.
async fn evict(cluster: &KubeCluster, one: &Move, timeout: Duration) -> anyhow::Result<MoveResult> {
    let Move { pod, owner, .. } = one;
    let shown = format!("{}/{}", pod.namespace, pod.name);
    if owner.kind == OwnerKind::Job {
        let why = cluster.why_job_gives_up(&pod.namespace, &owner.name, &owner.uid).await;
        if let Some(why) = why.map_err(for_people)? {
            return Ok(MoveResult::Undone(format!("{shown} is not evicted: {why}")));
        }
    }
    match cluster.evict_pod(pod).await.map_err(for_people)? {
        Eviction::Evicted => say(&format!("{shown} is evicted")),
        Eviction::Gone => {}
        Eviction::Protected(words) => {
            return Ok(MoveResult::Undone(format!("{shown} is not evicted: {words}")));
        }
    }
    let until = Instant::now() + timeout;
    loop {
        match cluster.pod_named(&pod.namespace, &pod.name).await {
            Ok(object) if object.metadata.uid.as_deref() == Some(pod.uid.as_str()) => {}
            Ok(_) | Err(CallError::NotFound { .. }) => break,
            Err(error) => return Err(for_people(error)),
        }
        if Instant::now() >= until {
            return Ok(MoveResult::Undone(format!("{shown} has not ended after {} s", timeout.as_secs())));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    say(&format!("{shown} has ended"));
    Ok(MoveResult::Done)
}

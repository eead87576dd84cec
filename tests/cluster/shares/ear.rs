//! A daemon hears one asker at a time, whoever it is. A tenant that does not let it go takes nothing from others.

use serde_json::json;

use super::{Board, LIMITS, asking, cluster, limits, of_gpu, share};
use crate::manifests::{as_nobody, claim, user_of};
use crate::rig::wait_until;
use crate::test_cluster::PATIENCE;

const ASK: &str =
    "echo get_default_active_thread_percentage | timeout 10 nvidia-cuda-mps-control 2>&1 || true";

/// A session that stays open, its standard input being a pipe that somebody holds. Anew if it was turned away.
const SESSION: &str = "mkdir -p /tmp; kill $(cat /tmp/session) 2>/dev/null; rm -f /tmp/say; mkfifo /tmp/say
    nvidia-cuda-mps-control </tmp/say >/dev/null 2>&1 &
    echo $! >/tmp/session
    sleep 600 >/tmp/say 2>/dev/null </dev/null &
    timeout 5 sh -c 'echo get_server_list >/tmp/say' || true";

#[tokio::test]
#[ignore = "needs a rig"]
async fn a_tenant_that_keeps_the_daemons_ear_takes_nothing_from_its_neighbour() {
    let test = "a_tenant_that_keeps_the_daemons_ear_takes_nothing_from_its_neighbour";
    let Some(cluster) = cluster(test).await else { return };
    let board = Board::first(&cluster).await;
    board.tenant(&cluster, "neighbour", "2000Mi", 25).await;
    cluster.create(claim("talker", json!({"requests": [of_gpu(&board.uuid, share("500Mi", 10))]}))).await;
    cluster.create(user_of("talker", "talker")).await;
    let before = board.standing(&cluster, &["neighbour", "talker"]).await;
    let kept = || async {
        cluster.exec("talker", "main", SESSION);
        cluster.exec("neighbour", "main", ASK).contains("Cannot send command").then_some(())
    };
    wait_until("the daemon to hear nobody else", PATIENCE, kept).await;
    // A share that needs other limits does not begin before they are in force, and says why.
    cluster.create(claim("more", json!({"requests": [of_gpu(&board.uuid, share("3000Mi", 40))]}))).await;
    cluster.create(as_nobody(user_of("more", "more"))).await;
    cluster.wait_refused("more", &["is nvidia-cuda-mps-control open in a pod of this GPU"]).await;
    let during = board.daemon(&cluster).await.expect("the daemon is known");
    assert_eq!(during["phase"]["Serving"]["pid"].as_u64(), before.daemon.map(u64::from), "{during}");
    assert_eq!(board.door(&cluster), before.door, "the neighbour's next processes come in");
    cluster.exec("talker", "main", "kill $(cat /tmp/session)");
    cluster.wait_ready("more").await;
    let after = board.standing(&cluster, &["neighbour", "talker"]).await;
    assert_eq!((after.daemon, &after.door, &after.lives), (before.daemon, &before.door, &before.lives));
    assert_eq!(after.limits, limits("2G", "40.0"));
    assert_eq!(cluster.exec("neighbour", "main", &asking("nvidia-cuda-mps-control", &[LIMITS[1]])), "40.0\n");
    cluster.end().await;
}

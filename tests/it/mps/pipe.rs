//! The folder of the daemon that tenants see: what they can do with the names in it.

use super::*;

/// What the script says, run by a user in a container that has the folder as a share's containers have it.
fn tenant(folder: &Folder, uid: u32, script: &str) -> String {
    let within = r#"mount --make-rprivate / && mount --bind "$1" "$1" && mount -o remount,bind,ro,nosuid,nodev,noexec "$1" &&
        cd "$1" && shift && exec "$@""#;
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", within, "sh"])
        .arg(folder.client())
        .args(["setpriv", "--clear-groups", "--reuid", &uid.to_string(), "timeout", "20", "sh", "-c", script])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// As much as no pipe holds, in no form that the daemon knows: its own reader of `log` ends at the first wrong byte,
/// and once the pipe is full whoever writes there stands still, the daemon too (seen with 550.163.01).
const FLOOD: &str = "timeout 2 sh -c 'head -c 200000 /dev/zero >log' 2>&1; echo wrote";

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn what_a_tenant_writes_into_the_log_stops_neither_the_daemon_nor_his_neighbours() {
    for uid in [1000, 0] {
        let node = TestNode::in_the_open();
        let (supervisor, gpu) = (node.supervisor(), group(&["GPU-1"]));
        let before = supervisor.keep(&gpu, true, &limits(&[2000], 25)).await.unwrap();
        assert_eq!(tenant(&node.folder(&gpu), uid, FLOOD), "wrote\n");
        let after = supervisor.keep(&gpu, true, &limits(&[4000], 50)).await.unwrap();
        assert_eq!((pid(&after), after.deaths), (pid(&before), 0), "user {uid}");
        assert!(node.clients_find_it(&gpu));
        // What the neighbours and the daemon say there nobody else is told, and nothing keeps them from saying it.
        assert_eq!(tenant(&node.folder(&gpu), uid, "timeout 2 cat log; echo read"), "read\n");
        assert_eq!(tenant(&node.folder(&gpu), 2000, "echo x >log && echo wrote"), "wrote\n");
    }
}

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn a_tenant_sees_the_socket_and_nothing_else_of_the_daemon() {
    let node = TestNode::in_the_open();
    let (supervisor, gpu) = (node.supervisor(), group(&["GPU-1"]));
    supervisor.keep(&gpu, true, &limits(&[2000], 25)).await.unwrap();
    let look = "for name in $(ls -A); do stat -c '%n %F' $name; done; readlink log; touch new 2>/dev/null || echo no";
    for uid in [1000, 0] {
        assert_eq!(
            tenant(&node.folder(&gpu), uid, look),
            "control socket\nlog symbolic link\n/dev/null\nno\n",
            "user {uid}"
        );
    }
    // The daemon's own names lie beside the folder, not in it.
    let own = node.folder(&gpu).pipe();
    for name in ["control_privileged", "control_lock", "log", "nvidia-cuda-mps-control.pid"] {
        assert!(own.join(name).exists(), "{name}");
    }
}

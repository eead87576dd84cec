//! The memory that tenants share: full of bytes or files, left behind, or of the version before.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;

use nix::mount::{MsFlags, mount};

use super::*;

/// A program of a user in a container whose /dev/shm is the GPU's; ended with the test.
struct Tenant(Child);

impl Drop for Tenant {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Tenant {
    /// Runs the script, and stays.
    fn start(folder: &Folder, uid: u32, script: &str) -> Self {
        let within = r#"mount --make-rprivate / && mount --bind "$1" /dev/shm && shift && exec "$@""#;
        let mut child = Command::new("unshare")
            .args(["--mount", "sh", "-c", within, "sh"])
            .arg(folder.shm())
            .args(["setpriv", "--clear-groups", "--reuid", &uid.to_string(), "sh", "-c"])
            .arg(format!("cd /dev/shm; {script}; echo done; exec sleep 600"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut said = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap();
        let tenant = Self(child);
        assert_eq!(said, "done\n", "{script}");
        tenant
    }
}

fn names(folder: &Folder) -> Vec<String> {
    let entries = fs::read_dir(folder.shm()).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name != "cuda_injection_path_shm");
    names.sort();
    names
}

fn is_full(state: &DaemonState) -> bool {
    state.shm.expect("it is bounded").is_full()
}

/// 4 MiB and 256 files.
fn node() -> TestNode {
    let mut node = TestNode::new();
    (node.mounts, node.bounds) = (DaemonMounts::Own, Bounds { size: Some(Bytes::from_mib(4)), files: 256 });
    node
}

const BYTES: &str = "head -c 100M /dev/zero >fill";
const FILES: &str = "i=0; while [ $i -lt 1000 ]; do true >f$i || break; i=$((i+1)); done";

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn a_tenant_who_fills_the_memory_stops_nobody_and_what_is_left_goes_after_him() {
    for fill in [BYTES, FILES] {
        let node = node();
        let (supervisor, gpu) = (node.supervisor(), group(&["GPU-1"]));
        let serving = supervisor.keep(&gpu, true, &limits(&[2000], 25)).await.unwrap();
        let folder = node.folder(&gpu);
        let _neighbour = Tenant::start(&folder, 2000, "echo x >mine");
        let attacker = Tenant::start(&folder, 1000, fill);
        assert!(fs::write(folder.shm().join("more"), vec![0; 1 << 16]).is_err(), "it is full");
        let full = checked_until(&supervisor, is_full).await;
        assert!(is_serving(&full) && node.clients_find_it(&gpu), "{full:?}");
        let most = full.shm.unwrap().most.expect("whose it is");
        assert_eq!(most.uid, 1000, "{most:?}");

        // Another claim comes with other limits, `tranche mps` is replaced, the daemon dies.
        let more = supervisor.keep(&gpu, true, &limits(&[5000], 50)).await.unwrap();
        assert_eq!((pid(&more), more.memory_answers), (pid(&serving), vec!["4G".to_owned()]));
        let next = node.supervisor();
        next.adopt().await.unwrap();
        assert_eq!(pid(&only(&next)), pid(&serving));
        assert!(is_serving(&only(&next)) && node.record(&gpu).exists());
        kill(pid(&serving), "KILL");
        wait_until_gone(pid(&serving));
        let back = checked_until(&next, |state| is_serving(state) && state.deaths == 1).await;
        assert!(node.clients_find_it(&gpu) && is_full(&back), "{back:?}");

        drop(attacker);
        checked_until(&next, |state| !is_full(state)).await;
        assert_eq!(names(&folder), ["mine"], "the neighbour's stays");
    }
}

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn files_that_somebody_still_has_stay_in_a_full_memory() {
    let node = node();
    let (supervisor, gpu) = (node.supervisor(), group(&["GPU-1"]));
    supervisor.keep(&gpu, true, &limits(&[2000], 25)).await.unwrap();
    let folder = node.folder(&gpu);
    // Of a user who is gone, but open in another's program; and of one who runs as several users.
    drop(Tenant::start(&folder, 1000, "echo x >open; chmod 666 open"));
    let _reader = Tenant::start(&folder, 2000, "exec 9<open; echo x >mine");
    drop(Tenant::start(&folder, 3000, &format!("mkdir -p a/b; echo x >a/b/c; {BYTES}")));
    supervisor.check().await;
    assert!(!is_full(&only(&supervisor)), "{:?}", only(&supervisor));
    assert_eq!(names(&folder), ["mine", "open"]);
}

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn the_next_tenant_finds_nothing_of_the_last_one() {
    let node = node();
    let (supervisor, gpu) = (node.supervisor(), group(&["GPU-1"]));
    let first = pid(&supervisor.keep(&gpu, true, &limits(&[2000], 25)).await.unwrap());
    let folder = node.folder(&gpu);
    let leave = "mkdir -p a/b/c && echo secret >a/b/c/d && echo secret >e && chmod -R 777 .; true";
    drop(Tenant::start(&folder, 1000, leave));
    assert_eq!(names(&folder), ["a", "e"]);
    supervisor.rest(&gpu).await.unwrap();
    assert_eq!(names(&folder), [""; 0]);
    let next = supervisor.keep(&gpu, true, &limits(&[2000], 25)).await.unwrap();
    assert_eq!(pid(&next), first, "the daemon stayed warm");

    // The supervisor ends between its note and what follows, and one who is left writes on.
    supervisor.rest(&gpu).await.unwrap();
    drop(Tenant::start(&folder, 1000, leave));
    let later = node.supervisor();
    later.adopt().await.unwrap();
    assert_eq!(names(&folder), [""; 0]);
    drop(Tenant::start(&folder, 1000, leave));
    let again = node.supervisor();
    again.adopt().await.unwrap();
    assert_eq!(pid(&again.keep(&gpu, true, &limits(&[2000], 25)).await.unwrap()), first);
    assert_eq!(names(&folder), [""; 0]);
}

/// Libcuda maps that file in every process that shares the memory, the MPS server's included, whoever made it.
#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn no_tenant_says_what_the_others_load() {
    let node = node();
    let (supervisor, gpu) = (node.supervisor(), group(&["GPU-1"]));
    supervisor.keep(&gpu, true, &limits(&[2000], 25)).await.unwrap();
    let folder = node.folder(&gpu);
    let name = "cuda_injection_path_shm";
    let tries =
        format!("rmdir {name}; mv {name} x; rm -rf {name}; echo x >{name}; head -c 1024 /dev/zero >{name}");
    let _tenant = Tenant::start(&folder, 1000, &format!("{tries}; true"));
    let meta = fs::symlink_metadata(folder.shm().join(name)).unwrap();
    assert!(meta.is_dir() && meta.uid() == 0, "{meta:?}");
    // Root in a container can, for as long as a look is away; nothing there is ever run.
    let _root = Tenant::start(&folder, 0, &format!("rmdir {name}; echo x >{name}; chmod 700 ."));
    supervisor.check().await;
    let meta = fs::symlink_metadata(folder.shm().join(name)).unwrap();
    assert!(meta.is_dir(), "{meta:?}");
    assert_eq!(fs::metadata(folder.shm()).unwrap().permissions().mode() & 0o7777, 0o1777);
    fs::copy("/bin/true", folder.shm().join("true")).unwrap();
    let run = Command::new(folder.shm().join("true")).status().unwrap_err();
    assert_eq!(run.kind(), std::io::ErrorKind::PermissionDenied, "nothing there can be run");
}

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn a_keep_that_fails_again_and_again_does_not_put_off_the_end() {
    let mut node = TestNode::new();
    node.keep_warm = Duration::from_millis(300);
    let (supervisor, gpu) = (node.supervisor(), group(&["GPU-1"]));
    let first = pid(&supervisor.keep(&gpu, false, &limits(&[2000], 25)).await.unwrap());
    supervisor.rest(&gpu).await.unwrap();
    node.boards.broken(true);
    keep_in_vain_until_it_goes(&supervisor, &gpu, first).await;
}

async fn keep_in_vain_until_it_goes(supervisor: &Supervisor<Boards>, gpu: &MpsGroup, daemon: u32) {
    let deadline = Instant::now() + DEADLINE;
    while Process::of(daemon).is_some() {
        assert!(supervisor.keep(gpu, true, &limits(&[2000], 25)).await.is_err());
        supervisor.check().await;
        assert!(Instant::now() < deadline, "nobody needs it, and it stays");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// As the version before left it: one file system, and the record in it.
fn old_folder(node: &TestNode, gpu: &MpsGroup, wish: serde_json::Value) -> u32 {
    let folder = node.folder(gpu);
    fs::create_dir_all(folder.path()).unwrap();
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(Some("tmpfs"), folder.path(), Some("tmpfs"), flags, Some("size=64m,mode=0755")).unwrap();
    for (path, mode) in
        [(folder.pipe(), 0o711), (folder.log(), 0o755), (folder.shm(), 0o1777), (folder.client(), 0o755)]
    {
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }
    let started = Command::new(&node.control)
        .arg("-d")
        .env("CUDA_MPS_PIPE_DIRECTORY", folder.pipe())
        .env("CUDA_MPS_LOG_DIRECTORY", folder.log())
        .status()
        .unwrap();
    assert!(started.success());
    let deadline = Instant::now() + DEADLINE;
    let daemon = loop {
        if let Some(daemon) = Process::daemon_of(&folder) {
            break daemon;
        }
        assert!(Instant::now() < deadline, "the daemon comes up");
    };
    let record = serde_json::json!({"format": 1, "group": gpu, "wish": wish, "boards_taken": true,
        "daemon": {"pid": daemon.pid, "started": daemon.started}, "deaths": 3});
    fs::write(folder.path().join("state.json"), record.to_string()).unwrap();
    daemon.pid
}

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn an_upgrade_finds_the_shares_of_the_version_before_and_disturbs_none() {
    let (node, gpu) = (node(), group(&["GPU-1"]));
    let serve = serde_json::json!({"Serve": {"exclusive": true, "limits": limits(&[2000], 25)}});
    let first = old_folder(&node, &gpu, serve);
    let folder = node.folder(&gpu);
    let _tenant = Tenant::start(&folder, 1000, "echo x >mine");
    let device = fs::metadata(folder.path()).unwrap().dev();
    for restart in 0..2 {
        let supervisor = node.supervisor();
        supervisor.adopt().await.unwrap();
        let state = only(&supervisor);
        assert_eq!((pid(&state), state.deaths), (first, 3), "start {restart}");
        assert!(is_serving(&state) && node.clients_find_it(&gpu) && node.record(&gpu).exists());
        assert!(!folder.path().join("state.json").exists());
        let more = supervisor.keep(&gpu, true, &limits(&[3000 + restart], 25)).await.unwrap();
        assert_eq!(pid(&more), first);
        assert_eq!(fs::metadata(folder.shm()).unwrap().dev(), device, "what containers have stays theirs");
        assert_eq!(names(&folder), ["mine"]);
    }
    // Made anew once nobody has it.
    let supervisor = node.supervisor();
    supervisor.adopt().await.unwrap();
    supervisor.rest(&gpu).await.unwrap();
    assert!(Process::of(first).is_none() && !node.record(&gpu).exists());
    supervisor.keep(&gpu, true, &limits(&[2000], 25)).await.unwrap();
    assert_ne!(fs::metadata(folder.shm()).unwrap().dev(), fs::metadata(folder.path()).unwrap().dev());
    assert_eq!(names(&folder), [""; 0]);
}

#[tokio::test]
#[ignore = "needs NVIDIA's MPS control daemon"]
async fn a_daemon_of_the_version_before_that_rests_goes_at_the_upgrade() {
    let (node, gpu) = (node(), group(&["GPU-1"]));
    let first = old_folder(&node, &gpu, serde_json::json!("Rest"));
    let supervisor = node.supervisor();
    supervisor.adopt().await.unwrap();
    assert_eq!(supervisor.states(), []);
    assert!(
        Process::of(first).is_none() && !node.folder(&gpu).path().exists() && !node.record(&gpu).exists()
    );
}

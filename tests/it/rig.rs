//! The rig's own words, where no cluster is needed for them. Starts `hack/rig/rig` in a folder of the test's own.

use std::path::Path;
use std::process::Command;

#[test]
#[ignore = "needs root: hack/test-unit.sh"]
fn a_rig_that_would_run_out_of_inotify_instances_says_what_to_do_and_starts_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    let mut rig = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("hack/rig/rig"));
    rig.arg("up").env("RIG_NAME", "inotify").env("RIG_DIR", &state).env("RIG_NODES", "2");
    let out = rig.env("RIG_INOTIFY_LIMIT", "20").output().unwrap();
    let words = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{words}");
    assert!(words.contains("of the 20 inotify instances that one user may have are in use"), "{words}");
    assert!(words.contains("takes about 29 more"), "{words}");
    assert!(words.trim_end().ends_with("sysctl -w fs.inotify.max_user_instances=1024"), "{words}");
    assert!(!state.join("logs").exists() && !state.join("keeper").exists(), "something was started");
}

//! The rig as tests see it: its verbs, clients for its API server, and waiting with a deadline.

use std::cell::RefCell;
use std::future::Future;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use kube::config::{KubeConfigOptions, Kubeconfig};

const ORDER: &str =
    "hack/test-cluster.sh runs deploy's tests on the bare rig, then hack/stage.sh, then the rest";

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A rig that is up, for as long as this value lives taken by one test.
pub struct Rig {
    name: String,
    at_end: RefCell<Vec<Vec<String>>>,
    _alone: MutexGuard<'static, ()>,
}

/// The repository's root, where relative paths given to verbs begin.
pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

impl Rig {
    /// The rig that TRANCHE_RIG names; without one the test fails.
    fn of_env(test: &str) -> Self {
        let name = std::env::var("TRANCHE_RIG").ok().filter(|name| !name.is_empty());
        let name = name.unwrap_or_else(|| {
            panic!("{test} needs a rig: hack/test-cluster.sh {test}, or TRANCHE_RIG=<its name>")
        });
        // A test that failed while it had the rig has cleaned up all the same.
        let alone = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        Self { name, at_end: RefCell::default(), _alone: alone }
    }

    /// A rig without the driver on it: what a test installs itself must not meet another.
    pub fn bare(test: &str) -> Self {
        let rig = Self::of_env(test);
        assert!(!rig.has_driver(), "{test} needs a bare rig, and the driver is staged on this one; {ORDER}");
        rig
    }

    /// A rig with the driver on it.
    pub fn staged(test: &str) -> Self {
        let rig = Self::of_env(test);
        assert!(rig.has_driver(), "{test} needs the driver on the rig; {ORDER}");
        rig
    }

    fn has_driver(&self) -> bool {
        let what = ["-n", "tranche-system", "get", "daemonset", "tranche-node", "--ignore-not-found"];
        self.kubectl(&[&what[..], &["-o", "jsonpath={..volumes[*].name}"]].concat()).contains("fake-nvml")
    }

    /// `rig VERB ...`, its standard output. An exit status other than 0 ends the test.
    pub fn run(&self, verb: &[&str]) -> String {
        self.attempt(verb).unwrap_or_else(|said| panic!("rig {} failed:\n{said}", verb.join(" ")))
    }

    /// The same for a verb that may fail: Err has both outputs.
    pub fn attempt(&self, verb: &[&str]) -> Result<String, String> {
        self.outputs(verb).map(|(said, _)| said)
    }

    /// What kubectl prints beside its answer: the API server's warnings. A failure ends the test.
    pub fn warnings(&self, args: &[&str]) -> String {
        let outputs = self.attempt_beside(&[&["kubectl"], args].concat());
        outputs.unwrap_or_else(|said| panic!("kubectl {} failed:\n{said}", args.join(" ")))
    }

    /// What a verb prints on its standard error; Err has both outputs of one that failed.
    pub fn attempt_beside(&self, verb: &[&str]) -> Result<String, String> {
        self.outputs(verb).map(|(_, beside)| beside)
    }

    /// Both outputs of a verb; Err has them with its exit status.
    fn outputs(&self, verb: &[&str]) -> Result<(String, String), String> {
        let out = Command::new("timeout")
            .args(["--kill-after=5", "200"])
            .arg(root().join("hack/rig/rig"))
            .args(verb)
            .current_dir(root())
            .env("RIG_NAME", &self.name)
            .stdin(Stdio::null())
            .output()
            .expect("timeout and hack/rig/rig can be run");
        let said = String::from_utf8_lossy(&out.stdout).into_owned();
        let beside = String::from_utf8_lossy(&out.stderr).into_owned();
        match out.status.success() {
            true => Ok((said, beside)),
            false => Err(format!("{}\n{said}{beside}", out.status)),
        }
    }

    pub fn kubectl(&self, args: &[&str]) -> String {
        self.run(&[&["kubectl"], args].concat())
    }

    pub fn helm(&self, args: &[&str]) -> Result<String, String> {
        self.attempt(&[&["helm"], args].concat())
    }

    /// A verb to run when the test ends, last one first, whatever became of the test.
    pub fn on_end(&self, verb: &[&str]) {
        self.at_end.borrow_mut().push(verb.iter().map(|word| (*word).to_owned()).collect());
    }

    /// As the administrator.
    pub async fn client(&self) -> kube::Client {
        self.client_of(self.kubeconfig()).await
    }

    /// As whoever the token says.
    pub async fn client_with_token(&self, token: &str) -> kube::Client {
        let mut config = self.kubeconfig();
        let user = config.auth_infos[0].auth_info.as_mut().expect("the rig's kubeconfig names a user");
        user.token = Some(token.to_owned().into());
        self.client_of(config).await
    }

    fn kubeconfig(&self) -> Kubeconfig {
        Kubeconfig::read_from(self.run(&["kubeconfig"]).trim()).expect("the rig has a kubeconfig")
    }

    async fn client_of(&self, kubeconfig: Kubeconfig) -> kube::Client {
        // Two providers are linked into tests, so one has to be chosen. Err: it is chosen already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let config = kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
            .await
            .expect("the rig's kubeconfig is whole");
        kube::Client::try_from(config).expect("a client can be made from it")
    }
}

impl Rig {
    /// The driver's own words, which go with its pods when the rig is put back as it was.
    fn print_logs(&self) {
        let ours = ["-n", "tranche-system", "logs", "-l", "app.kubernetes.io/name=tranche"];
        let how = ["--all-containers", "--prefix", "--tail=2000", "--max-log-requests=20"];
        let verb = [&["kubectl"], &ours[..], &how[..]].concat();
        let (Ok(said) | Err(said)) = self.attempt(&verb);
        println!("what the driver said before the test failed:\n{said}");
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.print_logs();
        }
        for verb in self.at_end.take().into_iter().rev() {
            let verb: Vec<&str> = verb.iter().map(String::as_str).collect();
            if let Err(said) = self.attempt(&verb) {
                println!("cleaning up: rig {} failed:\n{said}", verb.join(" "));
            }
        }
    }
}

/// Says why the test cannot be tried on this rig; hack/test-cluster.sh then counts it as skipped.
pub fn skipped(why: &str) {
    println!("SKIPPED: {why}");
}

/// Deadlines are written for a machine that does nothing else. Beside other rigs, on two busy processors, all takes
/// longer: a deadline tells what stands still from what goes on, and benches tell how fast it goes.
pub const SLOWER: u32 = 3;

/// Asks until there is an answer; ends the test when there is none within `limit`, times [`SLOWER`]. Between two questions passes a
/// twentieth of the time that it has taken so far, since each question costs the API server something.
pub async fn wait_until<T, F>(what: &str, limit: Duration, mut ask: impl FnMut() -> F) -> T
where
    F: Future<Output = Option<T>>,
{
    let (begin, limit) = (Instant::now(), limit * SLOWER);
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        let waited = begin.elapsed();
        assert!(waited < limit, "waited {limit:?} in vain for {what}");
        tokio::time::sleep((waited / 20).clamp(Duration::from_millis(50), Duration::from_secs(1))).await;
    }
}

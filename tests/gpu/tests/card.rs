//! Whole runs of the program on a simulated card: which settings of it are changed, and whether they are put
//! back. The simulated NVML writes down every call. There is no CUDA: each experiment fails at its daemon.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const SET: &str = "nvmlDeviceSetComputeMode";
const DEFAULT: u32 = 0;
const PROHIBITED: u32 = 2;
const EXCLUSIVE_PROCESS: u32 = 3;
const LIMIT: Duration = Duration::from_secs(60);

/// A machine with one simulated GPU and a driver of which only the names are there.
struct Machine {
    folder: tempfile::TempDir,
    found: u32,
}

impl Machine {
    /// `control`: what the MPS control program does, as a shell script.
    fn new(found: u32, control: &str) -> Self {
        let machine = Self { folder: tempfile::tempdir().unwrap(), found };
        for folder in ["node", "root/usr/lib64", "root/usr/bin"] {
            fs::create_dir_all(machine.path(folder)).unwrap();
        }
        machine.control(&serde_json::json!({}));
        fs::write(machine.path("root/usr/lib64/libcuda.so.1"), "").unwrap();
        let program = machine.path("root/usr/bin/nvidia-cuda-mps-control");
        fs::write(&program, format!("#!/bin/sh\n{control}\n")).unwrap();
        fs::set_permissions(program, fs::Permissions::from_mode(0o755)).unwrap();
        machine
    }

    /// Further fields of the simulated GPU.
    fn control(&self, gpu: &serde_json::Value) {
        let mut gpu = gpu.clone();
        gpu["compute_mode"] = self.found.into();
        let control = serde_json::json!({"profile": "h100", "log_calls": true, "gpus": {"0": gpu}});
        fs::write(self.path("node/control.json"), control.to_string()).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let library =
            std::env::var_os("TRANCHE_FAKE_NVML").expect("TRANCHE_FAKE_NVML: the fake NVML library");
        assert!(Path::new(&library).is_file(), "{library:?} is not there: build hack/fake-nvml");
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-check"));
        command.args(arguments).arg("--nvml").arg(library);
        command.arg("--driver-root").arg(self.path("root")).arg("--state").arg(self.path("state"));
        command.env("FAKE_NVML_DIR", self.path("node"));
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut child = self.command(arguments);
        let child = child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // Its output is short: no pipe fills up.
        wait_ended(child)
    }

    /// Starts it, waits until the first experiment runs, and sends the signal.
    fn cut_off(&self, arguments: &[&str], signal: Signal) {
        let mut child = self.command(arguments);
        let mut child = child.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let (send, lines) = channel();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        std::thread::spawn(move || {
            stderr.lines().map_while(Result::ok).for_each(|line| drop(send.send(line)));
        });
        while !lines.recv_timeout(LIMIT).unwrap().starts_with("== E1 ") {}
        // The mode is set by then, if it is set at all.
        self.wait_for_daemon();
        kill(Pid::from_raw(child.id().try_into().unwrap()), signal).unwrap();
        wait_ended(child);
    }

    /// Until a daemon is being started.
    fn wait_for_daemon(&self) {
        let begin = Instant::now();
        while !self.path("node/daemon-starts").exists() {
            assert!(begin.elapsed() < LIMIT, "no daemon was started");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Names of all calls of NVML that were made.
    fn calls(&self) -> Vec<String> {
        let log = fs::read_to_string(self.path("node/calls.log")).unwrap();
        log.lines().map(|line| line.split(' ').nth(2).unwrap().to_owned()).collect()
    }

    fn sets(&self) -> usize {
        self.calls().iter().filter(|name| *name == SET).count()
    }

    /// The card's mode now: as it was found unless the state of the simulation says otherwise.
    fn mode(&self) -> u32 {
        let state = fs::read_to_string(self.path("node/state.json")).unwrap_or_else(|_| "{}".to_owned());
        let state: serde_json::Value = serde_json::from_str(&state).unwrap();
        let set = state.pointer("/gpus/0/compute_mode/value").and_then(serde_json::Value::as_u64);
        set.map_or(self.found, |mode| mode.try_into().unwrap())
    }

    fn assert_untouched(&self) {
        for name in self.calls() {
            let reads = name.starts_with("nvmlDeviceGet") || name.starts_with("nvmlSystemGet");
            assert!(reads || ["nvmlInit_v2", "nvmlShutdown", "nvmlErrorString"].contains(&&*name), "{name}");
        }
        assert_eq!(self.mode(), self.found);
    }
}

fn wait_ended(mut child: Child) -> Output {
    let begin = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begin.elapsed() > LIMIT {
            child.kill().unwrap();
            panic!("it did not end within {LIMIT:?}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

const FAILS: &str = "echo 'no daemon here'; exit 1";
/// Long enough for a signal.
const HANGS: &str = "touch \"$(dirname \"$0\")/../../../node/daemon-starts\"; sleep 2; exit 1";

#[test]
#[ignore = "needs root and TRANCHE_FAKE_NVML: hack/test-unit.sh"]
fn as_found_no_setting_of_the_card_is_changed_in_any_mode() {
    for (mode, name) in
        [(DEFAULT, "DEFAULT"), (EXCLUSIVE_PROCESS, "EXCLUSIVE_PROCESS"), (PROHIBITED, "PROHIBITED")]
    {
        let machine = Machine::new(mode, FAILS);
        let output = machine.run(&["run", "--tranche", "/nowhere/tranche"]);
        assert!(output.status.success(), "{}", text(&output));
        assert!(text(&output).contains(&format!("| {name}, as found |")), "{}", text(&output));
        let reason = if mode == PROHIBITED { "is in PROHIBITED mode" } else { "no daemon here" };
        assert!(text(&output).contains(reason), "{}", text(&output));
        machine.assert_untouched();
    }
}

#[test]
#[ignore = "needs root and TRANCHE_FAKE_NVML: hack/test-unit.sh"]
fn as_found_a_card_in_mig_mode_and_one_that_is_held_are_left_alone_and_the_rows_say_why() {
    let machine = Machine::new(EXCLUSIVE_PROCESS, FAILS);
    machine.control(&serde_json::json!({"processes": [{"pid": 1, "used_mib": 300}]}));
    let output = machine.run(&["run", "E1", "--require-gpu"]);
    assert!(!output.status.success());
    assert!(text(&output).contains("EXCLUSIVE_PROCESS mode and held by PID 1 ("), "{}", text(&output));
    machine.assert_untouched();

    let machine = Machine::new(DEFAULT, FAILS);
    machine.control(&serde_json::json!({"mig": {"instances": []}}));
    let output = machine.run(&["run", "E1"]);
    assert!(text(&output).contains("not run: the card is in MIG mode"), "{}", text(&output));
    machine.assert_untouched();
}

#[test]
#[ignore = "needs root and TRANCHE_FAKE_NVML: hack/test-unit.sh"]
fn as_found_a_signal_and_a_kill_leave_the_card_alone() {
    for signal in [Signal::SIGINT, Signal::SIGKILL] {
        let machine = Machine::new(DEFAULT, HANGS);
        machine.cut_off(&["run", "E1", "E2"], signal);
        machine.assert_untouched();
    }
}

#[test]
#[ignore = "needs root and TRANCHE_FAKE_NVML: hack/test-unit.sh"]
fn with_permission_the_mode_is_set_and_put_back() {
    for mode in [DEFAULT, PROHIBITED] {
        let machine = Machine::new(mode, FAILS);
        let output = machine.run(&["run", "E1", "--may-set-compute-mode"]);
        assert!(output.status.success(), "{}", text(&output));
        assert_eq!((machine.sets(), machine.mode()), (2, mode), "{}", text(&output));
    }
}

#[test]
#[ignore = "needs root and TRANCHE_FAKE_NVML: hack/test-unit.sh"]
fn a_mode_that_a_killed_run_left_is_put_back_by_restore_and_by_no_run_as_found() {
    let machine = Machine::new(DEFAULT, HANGS);
    machine.cut_off(&["run", "E1", "E2", "--may-set-compute-mode"], Signal::SIGKILL);
    assert_eq!(machine.mode(), EXCLUSIVE_PROCESS);
    let sets = machine.sets();
    let output = machine.run(&["run", "E1"]);
    assert!(!output.status.success() && text(&output).contains("`gpu-check restore`"), "{}", text(&output));
    assert_eq!((machine.sets(), machine.mode()), (sets, EXCLUSIVE_PROCESS));
    let output = machine.run(&["restore"]);
    assert!(output.status.success() && text(&output).contains("it is in DEFAULT again"), "{}", text(&output));
    assert_eq!((machine.sets(), machine.mode()), (sets + 1, DEFAULT));
}

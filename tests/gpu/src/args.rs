//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::limits;
use crate::mounts::Shm;

/// Tries on a real GPU whether the limits of a share hold.
#[derive(Debug, Parser)]
#[command(name = "gpu-check", version)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// The experiments: what each does, needs, and when it passes. Needs no GPU.
    List,
    /// Runs experiments. Without a GPU it says what it would have done, and succeeds.
    Run(Box<Run>),
    /// Puts back what a run that was cut off has left: the compute mode, a daemon.
    Restore(Restore),
    /// A tenant: this program once more.
    #[command(hide = true)]
    Guest {
        #[arg(long)]
        library: PathBuf,
    },
    /// Another program, in a mount namespace with this /dev/shm.
    #[command(hide = true)]
    Within {
        #[arg(long)]
        shm: Shm,
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
}

/// That the compute mode may be set. Only this module makes one: for `run --may-set-compute-mode`, and for
/// `restore`, which puts a mode back.
#[derive(Debug)]
pub struct ModePermission(());

/// Where the driver is, and where the check keeps its files.
#[derive(Debug, Clone, Args)]
pub struct Installation {
    /// Where NVIDIA's driver is installed.
    #[arg(long, default_value = "/")]
    pub driver_root: PathBuf,
    /// nvidia-cuda-mps-control [default: below the driver root].
    #[arg(long)]
    pub mps_control: Option<PathBuf>,
    /// libnvidia-ml.so.1 [default: below the driver root].
    #[arg(long)]
    pub nvml: Option<PathBuf>,
    /// For daemons, logs and the compute mode that is to be put back.
    #[arg(long, default_value = "/run/tranche-gpu-check")]
    pub state: PathBuf,
}

/// Without mounts of the daemon's own: tenants here are in no container and use the machine's /dev/shm.
const TRANCHE_ARGS: &str = "mps --mps-dir {folder} --driver-root {root} --mps-mounts none --ops-address 127.0.0.1:0 --ops-socket off";

#[derive(Debug, Args)]
pub struct Restore {
    #[command(flatten)]
    pub place: Installation,
}

impl Restore {
    pub fn mode_permission(&self) -> ModePermission {
        ModePermission(())
    }
}

#[derive(Debug, Args)]
pub struct Run {
    /// Which experiments, e.g. E1 E9 [default: all].
    pub experiments: Vec<String>,
    /// Change no setting of the card: ask what can be asked in the compute mode it has [default].
    #[arg(long, conflicts_with = "may_set_compute_mode")]
    pub as_found: bool,
    /// Set the GPU's compute mode as the experiments need it, and put it back at the end.
    #[arg(long)]
    pub may_set_compute_mode: bool,
    /// Memory of the share that is tried.
    #[arg(long, default_value = "2000Mi", value_parser = limits::mib)]
    pub memory: u64,
    /// Its percentage of the multiprocessors.
    #[arg(long, default_value = "25", value_parser = limits::percent)]
    pub compute: u8,
    /// Index or UUID [default: the first that is in no MIG mode].
    #[arg(long)]
    pub gpu: Option<String>,
    /// Write the results here, too, with all their numbers.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write the table here, too.
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
    /// Fail where there is no GPU, or none that can be used.
    #[arg(long)]
    pub require_gpu: bool,
    /// Fewer percentages and shorter measurements.
    #[arg(long)]
    pub quick: bool,
    /// The driver's program: with --may-set-compute-mode its `tranche mps` makes the environment, and E23 can
    /// be run. As found it is not started, since it sets compute modes.
    #[arg(long, value_name = "PATH")]
    pub tranche: Option<PathBuf>,
    /// How it is started; {folder} is its folder, {root} the driver root.
    #[arg(long, default_value = TRANCHE_ARGS, requires = "tranche")]
    pub tranche_args: String,
    #[command(flatten)]
    pub place: Installation,
}

impl Run {
    /// None: the card stays as it was found.
    pub fn mode_permission(&self) -> Option<ModePermission> {
        self.may_set_compute_mode.then_some(ModePermission(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(arguments: &[&str]) -> Result<Run, clap::Error> {
        let cli = Cli::try_parse_from(["gpu-check", "run"].iter().chain(arguments))?;
        match cli.command {
            Command::Run(run) => Ok(*run),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_share_has_sensible_numbers_unless_others_are_given() {
        let plain = run(&[]).unwrap();
        assert_eq!((plain.memory, plain.compute, plain.experiments.len()), (2000, 25, 0));
        let other = run(&["E1", "E2", "--memory", "4Gi", "--compute", "50"]).unwrap();
        assert_eq!((other.memory, other.compute, other.experiments.len()), (4096, 50, 2));
    }

    #[test]
    fn the_mode_may_be_set_only_by_those_who_say_so() {
        assert!(run(&[]).unwrap().mode_permission().is_none());
        assert!(run(&["--as-found"]).unwrap().mode_permission().is_none());
        assert!(run(&["--may-set-compute-mode"]).unwrap().mode_permission().is_some());
        for both in [["--as-found", "--may-set-compute-mode"], ["--may-set-compute-mode", "--as-found"]] {
            let words = run(&both).unwrap_err().to_string();
            assert!(words.contains("cannot be used with"), "{words}");
        }
    }

    #[test]
    fn bad_numbers_are_refused_with_words() {
        for (arguments, word) in [
            (["--memory", "2000"], "2000Mi"),
            (["--compute", "0"], "1 to 100"),
            (["--memory", "1Mi"], "512Mi"),
        ] {
            let words = run(&arguments).unwrap_err().to_string();
            assert!(words.contains(word), "{words}");
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}

//! `fake-nvml`: writes and shows the description of a simulated node.

mod args;
mod edit;
mod files;
mod show;
mod smi;

use std::path::Path;
use std::process::ExitCode;

use args::Args;

const HELP: &str = "\
fake-nvml [--dir DIR] COMMAND    (DIR: FAKE_NVML_DIR, or /run/fake-nvml)

  init --profile P [--count N] [--driver V] [--seed S] [--mig GPU=INSTANCES]...
  set-mig GPU off|on|INSTANCES              MIG of one board
      INSTANCES: PROFILE[@START][/SLICES+...],...    2g.20gb/1+1: with two compute instances of a slice each
  reset GPU                                 MIG instances end, a pending MIG mode comes into force
  lose GPU | recover GPU                    falls off the bus | is back
  xid GPU CODE [--gi N] [--ci N]            a critical Xid event
  event GPU KIND [VALUE] [--gi N] [--ci N]  any event: ecc-double, mig-config, recovery-action, ...
  process add GPU PID [MIB] [--kind compute|mps|server|graphics] [--gi N] [--ci N]
                            [--cgroup PATH] [--sm-util N] [--only-if-alive]
  process remove GPU PID
  fault CALL|'*' RETURN|none [--gpu N] [--times N] [--after N] [--delay-ms N]
                            [--done]: once the work is done
  missing NAME...                           these functions are not found
  set GPU KEY=VALUE...                      any field of a board, VALUE in JSON
  driver VERSION | driver unload | driver load
  log on|off                                calls.log
  clear                                     no faults, nothing missing, nothing lost
  show                                      the node as a table
  strip-symbols IN OUT NAME...              a copy of the library without these names
  install DIR [--lib FILE] [--driver V]     the library as DIR/libnvidia-ml.so.1, with the names of that version only
  smi FILE                                  this program as an nvidia-smi that knows the node in containers, too

Called as nvidia-smi it knows: compute-policy -i UUID --set-timeslice 0..3, -L, and --version.

Profiles: t4 a30 a100-40gb a100-80gb h100 h200 b200 rtx-pro-6000 l40s
";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(words) => {
            eprintln!("fake-nvml: {words}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    let mut words = std::env::args();
    let called = words.next().unwrap_or_default();
    let mut args = Args::new(words);
    if Path::new(&called).file_name().is_some_and(|name| name == "nvidia-smi") {
        return smi::run(&fake_nvml::node::dir(), args);
    }
    let dir = args.option("--dir")?.map_or_else(fake_nvml::node::dir, Into::into);
    let command = args.word("a command")?;
    match command.as_str() {
        "help" | "--help" | "-h" => {
            print!("{HELP}");
            Ok(())
        }
        "show" => show::show(&dir, args),
        "strip-symbols" => files::strip(args),
        "install" => files::install(args),
        "smi" => files::smi(&dir, args),
        "reset" => edit::reset(&dir, args),
        _ => edit::edit(&dir, &command, args),
    }
}

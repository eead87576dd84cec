//! The experiments: what each does, what it needs, when it passes; and what it does when it runs.

mod bypass;
mod compute;
mod cost;
mod faults;
mod memory;
mod orders;
mod python;
mod slots;
mod watch;

use anyhow::{Result, bail};

use crate::signals;
use crate::stage::Stage;
use crate::table::Finding;

pub struct Experiment {
    pub id: &'static str,
    pub title: &'static str,
    pub does: &'static str,
    pub needs: &'static str,
    pub passes: &'static str,
    pub run: fn(&mut Stage) -> Result<Vec<Finding>>,
}

const MPS: &str = "root, MPS, Volta or newer";
const EACH: &str = "no process holds more than its limit + max(64 MiB, 1 %)";

pub const ALL: [Experiment; 20] = [
    Experiment {
        id: "E1",
        title: "ceiling of linear memory",
        does: "allocate in steps of 16 MiB until refused; record ceiling, error, and whether the process goes on",
        needs: MPS,
        passes: "ceiling ≤ limit + max(64 MiB, 1 %), the ordinary out-of-memory error, the process lives",
        run: memory::ceiling,
    },
    Experiment {
        id: "E2",
        title: "four processes of one claim",
        does: "have four processes do E1 at once: each with all of the share, then each with a quarter (maxProcesses: 4)",
        needs: MPS,
        passes: "with maxProcesses the sum is ≤ the share; without, MPS gives each its limit (the watchdog's part)",
        run: memory::four_processes,
    },
    Experiment {
        id: "E3",
        title: "stream-ordered memory",
        does: "do E1 from the default pool and from a pool of the process's own; then free and trim",
        needs: MPS,
        passes: EACH,
        run: memory::pools,
    },
    Experiment {
        id: "E4",
        title: "virtual memory management",
        does: "do E1 with created and mapped chunks; export them to a second process, let go, take again",
        needs: MPS,
        passes: "no process gets more than its limit, the two together not more than twice",
        run: memory::chunks,
    },
    Experiment {
        id: "E7",
        title: "PyTorch",
        does: "grow a list of tensors until refused: caching allocator, expandable segments, no caching",
        needs: "python3 with torch, MPS",
        passes: "torch sees out of memory at the limit and goes on",
        run: python::tensors,
    },
    Experiment {
        id: "E9",
        title: "going round MPS",
        does: "start processes without the pipe variable, and with an empty pipe folder; in DEFAULT and in EXCLUSIVE_PROCESS mode; with MPS busy and idle",
        needs: MPS,
        passes: "in EXCLUSIVE_PROCESS mode no process gets the GPU without MPS",
        run: bypass::around,
    },
    Experiment {
        id: "E10",
        title: "a client's own, higher limit",
        does: "start clients with limit variables raised, by number and by UUID, and removed",
        needs: MPS,
        passes: "the daemon's limits hold",
        run: bypass::raised,
    },
    Experiment {
        id: "E11",
        title: "a limit for a GPU that is not visible",
        does: "start clients whose limit variable names a GPU that they do not see",
        needs: MPS,
        passes: "the daemon's limit holds",
        run: bypass::invisible,
    },
    Experiment {
        id: "E12",
        title: "rounding of percentages",
        does: "read how many multiprocessors a client is told of at 1 % to 100 %",
        needs: MPS,
        passes: "even numbers, rounded down, at least 2: what tranche counts with",
        run: compute::rounding,
    },
    Experiment {
        id: "E13",
        title: "which multiprocessors run",
        does: "have a kernel record the multiprocessor of each block: one tenant, then two at once",
        needs: MPS,
        passes: "distinct multiprocessors ≤ those granted",
        run: compute::whereabouts,
    },
    Experiment {
        id: "E15",
        title: "compute of four processes",
        does: "measure the throughput of one process without a cap, one with the share's, four with it",
        needs: MPS,
        passes: "one process stays at its share; four are expected to get four times that (MPS limits processes)",
        run: compute::four_processes,
    },
    Experiment {
        id: "E16",
        title: "orders to the daemon from a tenant",
        does: "give control commands through the tenant's folder as root, as nobody, as root of a user namespace",
        needs: MPS,
        passes: "no order changes a limit, ends a neighbour or the daemon",
        run: orders::given,
    },
    Experiment {
        id: "E19",
        title: "end of a tenant in mid-kernel",
        does: "SIGKILL a tenant while its kernel runs; then the same after terminate_client",
        needs: MPS,
        passes: "the neighbour goes on and a new client starts",
        run: faults::killed,
    },
    Experiment {
        id: "E20",
        title: "write to a foreign address",
        does: "write to an illegal address in one tenant; record who dies and how long it takes until the GPU serves again",
        needs: MPS,
        passes: "the GPU serves again within 30 s once all clients have gone (that they all die is MPS's nature)",
        run: faults::stray,
    },
    Experiment {
        id: "E21",
        title: "client slots",
        does: "open clients until refused",
        needs: "MPS, some 10 GiB of host memory",
        passes: "at least the 48 that tranche counts with; refusals are told as such",
        run: slots::exhausted,
    },
    Experiment {
        id: "E22",
        title: "death of the daemon",
        does: "SIGKILL the daemon under live clients, start again, check that limits are in force before any client",
        needs: MPS,
        passes: "a new client has the limits; without the daemon no client gets the GPU",
        run: faults::daemon_dies,
    },
    Experiment {
        id: "E23",
        title: "restart of the supervisor",
        does: "restart `tranche mps` under live clients",
        needs: "MPS, --tranche PATH",
        passes: "no client is disturbed, no limit lost",
        run: faults::supervisor_restarts,
    },
    Experiment {
        id: "E25",
        title: "what NVML lists",
        does: "start a bare process, an MPS client, a client in a PID namespace; record which list, which PID, how many bytes",
        needs: "MPS, unshare",
        passes: "every process appears by its host PID with its bytes in at least one list",
        run: watch::lists,
    },
    Experiment {
        id: "E26",
        title: "reaction of a watchdog",
        does: "let two processes pass their claim's sum, slowly and fast; NVML looked at every 200 ms, terminate_client after two looks; cost of a look with 1, 10 and 40 clients",
        needs: MPS,
        passes: "below the sum again within 1 s of the first look over it",
        run: watch::reaction,
    },
    Experiment {
        id: "E28",
        title: "what the layers cost",
        does: "time launches, small allocations and arithmetic, bare and as the only share; matrix products where there is PyTorch",
        needs: MPS,
        passes: "throughput within 2 % of bare",
        run: cost::layers,
    },
];

/// Those that are named, in the table's order; all if none is.
pub fn chosen(ids: &[String]) -> Result<Vec<&'static Experiment>> {
    for id in ids {
        if !ALL.iter().any(|one| one.id.eq_ignore_ascii_case(id)) {
            let known: Vec<_> = ALL.iter().map(|one| one.id).collect();
            bail!("there is no experiment {id}; there are {}", known.join(", "));
        }
    }
    let wanted = |one: &&Experiment| ids.is_empty() || ids.iter().any(|id| one.id.eq_ignore_ascii_case(id));
    Ok(ALL.iter().filter(wanted).collect())
}

/// What goes wrong in one part is that part's row; the other parts go on. A signal ends them all.
fn part(name: &str, found: Result<Finding>) -> Result<Finding> {
    signals::go_on()?;
    Ok(found.unwrap_or_else(|error| Finding::not_run(name, format!("{error:#}"))))
}

/// Whole MiB, for people.
fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes / crate::limits::MIB)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_experiment_says_what_it_is() {
        for one in &ALL {
            assert!(one.id.starts_with('E') && one.id[1..].parse::<u8>().is_ok(), "{}", one.id);
            for text in [one.title, one.does, one.needs, one.passes] {
                assert!(!text.is_empty() && !text.contains('|'), "{}: {text}", one.id);
            }
        }
        let ids: std::collections::BTreeSet<_> = ALL.iter().map(|one| one.id).collect();
        assert_eq!(ids.len(), ALL.len());
    }

    #[test]
    fn experiments_are_chosen_by_name_in_any_case() {
        let ids = |names: &[&str]| -> Vec<&str> {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            chosen(&names).unwrap().iter().map(|one| one.id).collect()
        };
        assert_eq!(ids(&["e9", "E1"]), ["E1", "E9"]);
        assert_eq!(ids(&[]).len(), ALL.len());
        let words = chosen(&["E5".to_owned()]).err().unwrap().to_string();
        assert!(words.contains("no experiment E5") && words.contains("E28"), "{words}");
    }

    #[test]
    fn the_readme_names_every_experiment() {
        let readme = include_str!("../../README.md");
        for one in &ALL {
            assert!(readme.contains(&format!("| {} |", one.id)), "{} is missing in README.md", one.id);
        }
    }
}

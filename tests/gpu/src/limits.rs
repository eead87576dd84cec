//! A share's numbers and what follows from them: the daemon's commands, the client's variables, what is
//! within them, and how many multiprocessors a percentage comes to.

use std::path::Path;

use anyhow::{Context, Result, bail};

pub const MIB: u64 = 1 << 20;

/// What every client process of a share gets. None: not limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// MiB
    pub memory: Option<u64>,
    /// Percent
    pub compute: Option<u8>,
}

impl Limits {
    /// What a daemon is set to before a client may come. 0 takes a limit away.
    pub fn commands(self) -> [String; 2] {
        let memory = self.memory.map_or_else(|| "0".to_owned(), |mib| format!("{mib}M"));
        [
            format!("set_default_device_pinned_mem_limit 0 {memory}"),
            format!("set_default_active_thread_percentage {}", self.compute.unwrap_or(100)),
        ]
    }

    /// The variables of a client process, as CDI puts them into its container; the folder is what stands at
    /// `/run/nvidia-mps` there.
    pub fn env(self, client: &Path) -> Vec<(String, String)> {
        let mut env = vec![(PIPE.to_owned(), client.display().to_string())];
        env.extend(self.memory.map(|mib| (MEMORY.to_owned(), format!("0={mib}M"))));
        env.extend(self.compute.map(|percent| (COMPUTE.to_owned(), percent.to_string())));
        env
    }

    pub fn words(self) -> String {
        let memory = self.memory.map_or_else(|| "no memory limit".to_owned(), |mib| format!("{mib} MiB"));
        let compute =
            self.compute.map_or_else(|| "no compute limit".to_owned(), |percent| format!("{percent} %"));
        format!("{memory}, {compute}")
    }
}

pub const PIPE: &str = "CUDA_MPS_PIPE_DIRECTORY";
pub const MEMORY: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";
pub const COMPUTE: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";

/// By how much a limit may be passed and is still said to hold: 64 MiB or 1 %, whichever is more.
pub fn tolerance(mib: u64) -> u64 {
    (mib / 100).max(64)
}

pub fn within(bytes: u64, mib: u64) -> bool {
    bytes <= (mib + tolerance(mib)) * MIB
}

/// Not so little that something else must be wrong: half of the limit. A context takes its part of it.
pub fn usable(bytes: u64, mib: u64) -> bool {
    bytes >= mib * MIB / 2
}

/// Multiprocessors that a percentage comes to, as published for MPS: rounded down to an even number, and at
/// least two. What is odd of all of them is given at 100 %.
pub fn expected_multiprocessors(all: u32, percent: u8) -> u32 {
    if percent >= 100 {
        return all;
    }
    let exact = all * u32::from(percent) / 100;
    (exact - exact % 2).max(2).min(all)
}

/// `2000Mi` or `2Gi`, in MiB.
pub fn mib(text: &str) -> Result<u64> {
    let number = |unit| text.strip_suffix(unit).map(str::parse::<u64>);
    let mib = match (number("Mi"), number("Gi")) {
        (Some(mib), _) => mib.ok(),
        (_, Some(gib)) => gib.ok().and_then(|gib| gib.checked_mul(1024)),
        _ => None,
    };
    match mib.with_context(|| format!("{text:?} is no amount; write 2000Mi or 2Gi"))? {
        small @ 0..512 => bail!("{small} MiB is too little for a CUDA context; give at least 512Mi"),
        mib => Ok(mib),
    }
}

pub fn percent(text: &str) -> Result<u8> {
    match text.parse() {
        Ok(percent @ 1..=100) => Ok(percent),
        _ => bail!("{text:?} is no percentage; write 1 to 100"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_and_a_client_get_the_same_numbers() {
        let limits = Limits { memory: Some(2000), compute: Some(25) };
        let commands =
            ["set_default_device_pinned_mem_limit 0 2000M", "set_default_active_thread_percentage 25"];
        assert_eq!(limits.commands(), commands);
        let env = limits.env(Path::new("/client"));
        let pairs: Vec<_> = env.iter().map(|(name, value)| format!("{name}={value}")).collect();
        assert_eq!(
            pairs,
            [
                "CUDA_MPS_PIPE_DIRECTORY=/client",
                "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2000M",
                "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25"
            ]
        );
        assert_eq!(Limits::default().env(Path::new("/client")).len(), 1);
        assert_eq!(Limits::default().commands()[0], "set_default_device_pinned_mem_limit 0 0");
    }

    /// Published for a GPU of 188: 50 % → 94, 25 % → 46, 75 % → 140.
    #[test]
    fn percentages_come_to_even_numbers_rounded_down() {
        for (all, percent, expected) in
            [(188, 50, 94), (188, 25, 46), (188, 75, 140), (132, 25, 32), (132, 1, 2), (132, 100, 132)]
        {
            assert_eq!(expected_multiprocessors(all, percent), expected, "{percent} % of {all}");
        }
    }

    #[test]
    fn for_every_gpu_and_percentage_the_rounding_loses_less_than_a_pair_and_never_gives_more() {
        for all in 2..=200 {
            let mut last = 0;
            for percent in 1..=100_u8 {
                let got = expected_multiprocessors(all, percent);
                assert!(got >= last && got <= all && got >= 2, "{percent} % of {all} is {got}");
                assert!(got == 2 || got * 100 <= all * u32::from(percent), "{percent} % of {all} is {got}");
                assert!((got + 2) * 100 > all * u32::from(percent), "{percent} % of {all} is {got}");
                last = got;
            }
        }
    }

    #[test]
    fn a_limit_holds_up_to_the_tolerance() {
        assert_eq!((tolerance(2000), tolerance(20_000)), (64, 200));
        assert!(within(2064 * MIB, 2000) && !within(2064 * MIB + 1, 2000));
        assert!(usable(1000 * MIB, 2000) && !usable(999 * MIB, 2000));
        assert!(within(20_200 * MIB, 20_000) && !within(20_201 * MIB, 20_000));
    }

    #[test]
    fn amounts_and_percentages_are_read_strictly() {
        assert_eq!((mib("2000Mi").unwrap(), mib("2Gi").unwrap()), (2000, 2048));
        for bad in ["2000", "2000M", "-1Mi", "1.5Gi", "", "0Mi", "100Mi", "99999999999999999999Gi"] {
            assert!(mib(bad).is_err(), "{bad}");
        }
        assert_eq!(percent("25").unwrap(), 25);
        for bad in ["0", "101", "-1", "25%", ""] {
            assert!(percent(bad).unwrap_err().to_string().contains("1 to 100"), "{bad}");
        }
    }
}

//! Memory that the process has freed, given back to the kernel.
#![allow(unsafe_code)]

/// Gives back the pages that the allocator keeps for later. It keeps all below the topmost block in use, so
/// that what the start or a burst of claims took for a moment stays with the process for good. Takes well
/// under a millisecond; blocks other allocations meanwhile.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim(3) takes no pointer, is safe to call from any thread, and touches free memory only.
    unsafe {
        nix::libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn anonymous_kib() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    #[test]
    fn memory_below_a_block_in_use_is_given_back() {
        let mut blocks: Vec<Vec<u8>> = (0..2048).map(|_| vec![1; 32 * 1024]).collect();
        let topmost = blocks.pop();
        drop(blocks);
        give_back();
        let without = anonymous_kib();
        let blocks: Vec<Vec<u8>> = (0..2048).map(|_| vec![1; 32 * 1024]).collect();
        assert!(anonymous_kib() > without + 32 * 1024, "64 MiB in use are seen");
        drop(blocks);
        give_back();
        assert!(anonymous_kib() < without + 32 * 1024, "and seen no more");
        drop(topmost);
    }
}

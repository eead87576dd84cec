//! Facts about a GPU that the kernel knows and NVML does not: PCI root and NUMA node.

use std::fs;
use std::path::Path;

use crate::model::gpu::Pci;

/// The place of the board with that bus id (`0000:1a:00.0`). Facts that sysfs does not tell are `None`.
pub fn place(sys_root: &Path, bus_id: &str) -> Pci {
    let device = sys_root.join("bus/pci/devices").join(bus_id);
    Pci { bus_id: bus_id.to_owned(), root: pci_root(&device), numa_node: numa_node(&device) }
}

/// `pci0000:15`: the first part of the device's real path that is a PCI root.
fn pci_root(device: &Path) -> Option<String> {
    let real = fs::canonicalize(device).ok()?;
    let root =
        real.components().filter_map(|part| part.as_os_str().to_str()).find(|part| is_pci_root(part))?;
    Some(root.to_owned())
}

fn is_pci_root(part: &str) -> bool {
    let Some((domain, bus)) = part.strip_prefix("pci").and_then(|rest| rest.split_once(':')) else {
        return false;
    };
    let hex = |text: &str| text.bytes().all(|b| b.is_ascii_hexdigit());
    (4..=8).contains(&domain.len()) && hex(domain) && bus.len() == 2 && hex(bus)
}

/// The kernel writes -1 where there is no NUMA.
fn numa_node(device: &Path) -> Option<u32> {
    fs::read_to_string(device.join("numa_node")).ok()?.trim().parse().ok()
}

/// `0000:1a:00.0` out of NVML's `00000000:1A:00.0`; `None` for what is no bus id.
pub fn bus_id(nvml: &str) -> Option<String> {
    let (domain, rest) = nvml.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (device, function) = rest.split_once('.')?;
    let hex = |text: &str, max: usize| match text.len() <= max && text.bytes().all(|b| b.is_ascii_hexdigit())
    {
        true => u32::from_str_radix(text, 16).ok(),
        false => None,
    };
    let (domain, bus) = (hex(domain, 8)?, hex(bus, 2)?);
    Some(format!("{domain:04x}:{bus:02x}:{:02x}.{:x}", hex(device, 2)?, hex(function, 1)?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn bus_ids_are_written_as_the_kernel_writes_them() {
        assert_eq!(bus_id("00000000:1A:00.0").as_deref(), Some("0000:1a:00.0"));
        assert_eq!(bus_id("0000:1b:00.0").as_deref(), Some("0000:1b:00.0"));
        assert_eq!(bus_id("00010000:CA:1F.7").as_deref(), Some("10000:ca:1f.7"));
        for nonsense in
            ["", ":", "::.", "1A:00.0", "0000:1a:00", "0000:1a:../..", "0000:1a:00.0/..", "0000:+a:00.0"]
        {
            assert_eq!(bus_id(nonsense), None, "{nonsense:?}");
        }
    }

    #[test]
    fn root_and_numa_node_come_from_the_real_path() {
        let sys = tempfile::tempdir().unwrap();
        let real = sys.path().join("devices/pci0000:15/0000:15:01.0/0000:1a:00.0");
        fs::create_dir_all(&real).unwrap();
        fs::create_dir_all(sys.path().join("bus/pci/devices")).unwrap();
        symlink(&real, sys.path().join("bus/pci/devices/0000:1a:00.0")).unwrap();
        let unknown = place(sys.path(), "0000:1a:00.0");
        assert_eq!((unknown.root.as_deref(), unknown.numa_node), (Some("pci0000:15"), None));
        fs::write(real.join("numa_node"), "1\n").unwrap();
        assert_eq!(place(sys.path(), "0000:1a:00.0").numa_node, Some(1));
        fs::write(real.join("numa_node"), "-1\n").unwrap();
        assert_eq!(place(sys.path(), "0000:1a:00.0").numa_node, None);
        assert_eq!(place(sys.path(), "0000:ff:00.0").root, None);
    }
}

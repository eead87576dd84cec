//! CDI files of ours, read by the implementation of the CDI specification that runtimes in Rust use:
//! its schema, its version rules, and the container that its edits make.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use container_device_interface::cache::{new_cache, with_auto_refresh};
use container_device_interface::spec::read_spec;
use container_device_interface::{schema, spec_dirs};
use tranche::cdi::{self, CdiDevice, CdiNodes};
use tranche::host::driver_root::{DriverRoot, DriverRootCache, check};
use tranche::model::names::{ClaimUid, DeviceName};

fn goldens() -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/cdi");
    let mut found: Vec<PathBuf> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    found.sort();
    assert!(found.len() >= 5, "golden CDI files are missing: {found:?}");
    found
}

#[test]
fn every_golden_file_is_valid_cdi() {
    for path in goldens() {
        schema::validate_builtin(&fs::read(&path).unwrap())
            .unwrap_or_else(|e| panic!("{}: {e:#}", path.display()));
        let spec = read_spec(&path, 0).unwrap_or_else(|e| panic!("{}: {e:#}", path.display()));
        assert_eq!((spec.get_vendor().as_str(), spec.get_class().as_str()), ("k8s.gpu.nvidia.com", "claim"));
        assert!(!spec.get_devices().is_empty());
    }
}

/// Golden files would pass that validation too easily if it took anything.
#[test]
fn the_validator_refuses_a_damaged_file() {
    let text = fs::read_to_string(&goldens()[0]).unwrap();
    for (what, damaged) in [
        ("a version too low", text.replace("\"cdiVersion\": \"0.5.0\"", "\"cdiVersion\": \"0.4.0\"")),
        ("an unknown field", text.replacen("\"env\"", "\"environment\"", 1)),
        ("no kind", text.replace("\"kind\"", "\"sort\"")),
    ] {
        assert_ne!(damaged, text, "{what}: nothing was damaged");
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("damaged.json");
        fs::write(&path, damaged).unwrap();
        assert!(read_spec(&path, 0).is_err(), "{what} was accepted");
    }
}

/// A driver root of a fresh node: two libraries, a program, and a kernel that tells device numbers.
fn driver_root() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let put = |place: &str, content: &[u8]| {
        let path = dir.path().join(place);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    };
    let mut elf = vec![0; 64];
    elf[..5].copy_from_slice(b"\x7fELF\x02");
    elf[18] = 62;
    put("usr/lib64/libcuda.so.550.163.01", &elf);
    put("usr/lib64/libnvidia-ml.so.550.163.01", &elf);
    put("usr/bin/nvidia-smi", b"x");
    put("proc/devices", b"Character devices:\n195 nvidia\n511 nvidia-uvm\n");
    dir
}

/// What a container has when it uses one of a claim's two GPUs.
#[test]
fn a_container_gets_the_request_it_uses_and_no_other() {
    let dir = driver_root();
    let mut root = DriverRoot::new(dir.path(), dir.path().to_str().unwrap());
    root.dev.proc = dir.path().join("proc");
    let gpus = [CdiNodes::Whole { minor: 0 }, CdiNodes::Whole { minor: 1 }];
    let driver = DriverRootCache::new(root).files(Some("550.163.01"), &gpus).unwrap();
    let device = |minor: u32| CdiDevice {
        name: DeviceName::whole(minor),
        share_id: None,
        nodes: CdiNodes::Whole { minor },
        env: vec![("WHICH".to_owned(), minor.to_string())],
        mounts: Vec::new(),
    };
    let file = cdi::render(&ClaimUid::from("1d-claim"), &[device(0), device(1)], &driver).unwrap();
    check(&file.paths).unwrap();

    let specs = tempfile::tempdir().unwrap();
    fs::write(specs.path().join(&file.file_name), &file.content).unwrap();
    let with_dirs = spec_dirs::with_spec_dirs(&[specs.path().to_str().unwrap()]);
    let cache = new_cache(vec![with_dirs, with_auto_refresh(true)]);
    let mut container = Default::default();
    cache.lock().unwrap().inject_devices(Some(&mut container), vec![file.ids[1].clone()]).unwrap();
    let container = serde_json::to_value(&container).unwrap();

    let texts = |list: &serde_json::Value, key: &str| -> BTreeSet<String> {
        list.as_array().unwrap().iter().map(|item| item[key].as_str().unwrap().to_owned()).collect()
    };
    let nodes = texts(&container["linux"]["devices"], "path");
    let expected = ["/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia1", "/dev/nvidiactl"];
    assert_eq!(nodes, expected.map(str::to_owned).into());
    let env: Vec<&str> =
        container["process"]["env"].as_array().unwrap().iter().map(|e| e.as_str().unwrap()).collect();
    assert!(env.contains(&"NVIDIA_VISIBLE_DEVICES=void") && env.contains(&"WHICH=1"), "{env:?}");
    assert!(!env.contains(&"WHICH=0"), "{env:?}");

    let mounts: BTreeMap<&str, &str> = container["mounts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|mount| (mount["destination"].as_str().unwrap(), mount["source"].as_str().unwrap_or_default()))
        .collect();
    let cuda = dir.path().join("usr/lib64/libcuda.so.550.163.01");
    for place in
        ["/usr/lib/x86_64-linux-gnu/libcuda.so.1", "/usr/lib64/libcuda.so.1", "/usr/lib64/libcuda.so"]
    {
        assert_eq!(mounts.get(place).copied(), cuda.to_str(), "{place} in {mounts:?}");
    }
    assert!(mounts.contains_key("/usr/bin/nvidia-smi"));
}

/// A directory with NVIDIA's real user-space driver.
const REAL_ROOT: &str = "TRANCHE_TEST_DRIVER_ROOT";

#[test]
#[ignore = "needs NVIDIA's user-space driver"]
fn a_real_driver_root() {
    let dir = std::env::var_os(REAL_ROOT);
    let dir = PathBuf::from(
        dir.unwrap_or_else(|| panic!("set {REAL_ROOT} to what hack/rig/rig build-driver prints")),
    );
    let host = dir.to_str().unwrap().to_owned();
    let cache = DriverRootCache::new(DriverRoot::new(&dir, &host));
    let gpu = CdiNodes::Whole { minor: 0 };
    let driver = cache.files(None, &[gpu]).unwrap();
    let device =
        CdiDevice { name: DeviceName::whole(0), share_id: None, nodes: gpu, env: vec![], mounts: vec![] };
    let file = cdi::render(&ClaimUid::from("1d-claim"), &[device], &driver).unwrap();
    check(&file.paths).unwrap();
    schema::validate_builtin(file.content.as_bytes()).unwrap();
    println!("{}", file.content);
    for library in &driver.root.libraries {
        println!("{} {:?}", library.file.container, library.aliases);
    }
    let names: Vec<&str> =
        driver.root.libraries.iter().filter_map(|l| l.file.container.rsplit('/').next()).collect();
    for stem in ["libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler", "libnvidia-nvvm"] {
        let name = format!("{stem}.so.{}", driver.root.version);
        assert!(names.contains(&name.as_str()), "{name} not in {names:?}");
    }
    assert!(driver.root.binaries.iter().any(|binary| binary.container == "/usr/bin/nvidia-smi"));
}

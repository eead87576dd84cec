//! The tool as `nvidia-smi`: on a node, and where nothing of the node can be seen.

use std::process::{Command, Output};

use crate::rig::Rig;

const NODE: &str = r#"{"profile":"h100","count":2,"driver_version":"550.163.01","host_seed":"node-a"}"#;

/// `nvidia-smi WORDS` as `fake-nvml smi` makes it, with its node in this folder.
fn smi(rig: &Rig, folder: &str, words: &[&str]) -> Output {
    let program = rig.dir.join("nvidia-smi");
    if !program.exists() {
        rig.cli(&["smi", &program.to_string_lossy()]);
    }
    Command::new(program).args(words).env("FAKE_NVML_DIR", rig.dir.join(folder)).output().expect("started")
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn it_names_the_boards_of_its_node() {
    let rig = Rig::new(NODE);
    let listed = text(&smi(&rig, ".", &["-L"]));
    let nvml = rig.nvml();
    let uuid = |index| nvml.device_by_index(index).and_then(|gpu| gpu.uuid()).expect("a UUID");
    let line = |index| format!("GPU {index}: NVIDIA H100 80GB HBM3 (UUID: {})\n", uuid(index));
    assert_eq!(listed, line(0) + &line(1));
}

#[test]
fn it_tells_versions_without_the_node() {
    let rig = Rig::new(NODE);
    let wanted = "NVIDIA-SMI version  : 550.163.01\nNVML version        : 550.163\n\
                  DRIVER version      : 550.163.01\nCUDA Version        : 12.4\n";
    for folder in [".", "not-there"] {
        assert_eq!(text(&smi(&rig, folder, &["--version"])), wanted, "{folder}");
    }
}

#[test]
fn a_node_whose_driver_is_not_loaded_is_not_hidden_by_what_it_carries() {
    let rig = Rig::new(NODE);
    text(&smi(&rig, ".", &["-L"]));
    rig.cli(&["driver", "unload"]);
    let output = smi(&rig, ".", &["-L"]);
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && words.contains("driver is not loaded"), "{words}");
}

#[test]
fn what_a_program_carries_is_replaced_and_no_other_end_of_a_file_is_taken_for_it() {
    use fake_nvml::carried::{read, with};
    let file = std::env::temp_dir().join(format!("fake-nvml-carried-{}", std::process::id()));
    let once = with(b"program".to_vec(), "one");
    let twice = with(once.clone(), "another");
    assert!(twice.starts_with(b"programanother"));
    let mut lies = twice.clone();
    let length = lies.len() - 16;
    lies[length..length + 8].copy_from_slice(&u64::MAX.to_le_bytes());
    let cases: [(&[u8], Option<&str>); 5] =
        [(&once, Some("one")), (&twice, Some("another")), (&lies, None), (b"program", None), (b"", None)];
    for (bytes, text) in cases {
        std::fs::write(&file, bytes).expect("written");
        assert_eq!(read(&file).as_deref(), text);
    }
    with(lies, "no overflow");
    std::fs::remove_file(&file).expect("removed");
}

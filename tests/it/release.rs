//! The parts of a release (hack/release.sh), made of small inputs in a folder of the test's own: what is in them, and
//! which version is refused. The whole of it is made by hand, since it builds the program twice.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

fn script(name: &str) -> Command {
    let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("hack").join(name));
    command.current_dir(env!("CARGO_MANIFEST_DIR"));
    command
}

fn said(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

/// What a command prints.
fn run(command: &mut Command) -> String {
    let out = command.output().unwrap();
    assert!(out.status.success(), "{command:?}: {}", said(&out));
    String::from_utf8(out.stdout).unwrap()
}

fn sha256(file: &Path) -> String {
    Sha256::digest(fs::read(file).unwrap()).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn yaml(text: &str) -> Value {
    serde_saphyr::from_str(text).unwrap_or_else(|error| panic!("not YAML: {error}\n{text}"))
}

#[test]
fn notes_are_those_of_one_version() {
    let folder = tempfile::tempdir().unwrap();
    let changelog = folder.path().join("CHANGELOG.md");
    let text = "# Changes\n\n## 0.2.0 (unreleased)\n- newer\n\n## 0.1.1\n\n- this\n\n### Renamed\n| a | b |\n\n\
                ## 0.1.10\n- alike\n\n## 0.1.0 (2026-11-26)\n\n";
    fs::write(&changelog, text).unwrap();
    let notes = |version: &str| script("release/notes.sh").arg(version).arg(&changelog).output().unwrap();
    let told = |version| String::from_utf8(notes(version).stdout).unwrap();
    assert_eq!(told("0.1.1"), "- this\n\n### Renamed\n| a | b |\n");
    assert_eq!(told("0.2.0"), "- newer\n");
    for (version, words) in [
        ("0.3.0", "CHANGELOG.md has no version 0.3.0; it has: 0.2.0, 0.1.1, 0.1.10, 0.1.0"),
        ("0.1", "CHANGELOG.md has no version 0.1;"),
        ("0.1.0", "CHANGELOG.md says nothing of version 0.1.0"),
    ] {
        let out = notes(version);
        assert!(!out.status.success() && said(&out).contains(words), "{version}: {}", said(&out));
        assert!(out.stdout.is_empty(), "{version}");
    }
}

#[test]
fn a_version_that_the_changelog_lacks_is_refused_before_anything_is_built() {
    for (version, words) in [("77.0.0", "CHANGELOG.md has no version 77.0.0"), ("v1", "v1 is no version")] {
        let out = script("release.sh").arg(version).output().unwrap();
        assert!(!out.status.success() && said(&out).contains(words), "{version}: {}", said(&out));
        assert!(out.stdout.is_empty(), "{version}: it began");
    }
}

/// The archive of a plugin that is a small script.
fn plugin(folder: &TempDir, arch: &str) -> PathBuf {
    let program = folder.path().join(format!("program-{arch}"));
    fs::write(&program, format!("#!/bin/sh\necho {arch}\n")).unwrap();
    run(script("release/plugin.sh").args(["1.2.3", arch]).arg(&program).arg(folder.path())).trim().into()
}

#[test]
fn the_krew_manifest_names_each_archive_and_its_sum() {
    let folder = tempfile::tempdir().unwrap();
    let archives = ["amd64", "arm64"].map(|arch| plugin(&folder, arch));
    let mut krew = script("release/krew.sh");
    krew.args(["1.2.3", "https://example.invalid/down&load/", "https://example.invalid"]).args(&archives);
    let manifest = yaml(&run(&mut krew));
    assert_eq!(
        (manifest["kind"].as_str(), manifest["metadata"]["name"].as_str()),
        (Some("Plugin"), Some("tranche"))
    );
    assert_eq!(manifest["spec"]["version"], "v1.2.3");
    // As krew's own index asks.
    assert!(manifest["spec"]["shortDescription"].as_str().is_some_and(|text| text.len() <= 50));
    let platforms = manifest["spec"]["platforms"].as_array().unwrap();
    assert_eq!(platforms.len(), 2);
    for ((platform, archive), arch) in platforms.iter().zip(&archives).zip(["amd64", "arm64"]) {
        assert_eq!(platform["selector"]["matchLabels"]["arch"], arch);
        assert_eq!(platform["sha256"], sha256(archive).as_str());
        let name = format!("kubectl-tranche-1.2.3-linux-{arch}.tar.gz");
        assert_eq!(platform["uri"], format!("https://example.invalid/down&load/{name}").as_str());
        assert_eq!(archive, &folder.path().join(name));
        let unpacked = tempfile::tempdir().unwrap();
        run(Command::new("tar").arg("-xzf").arg(archive).arg("-C").arg(unpacked.path()));
        for file in platform["files"].as_array().unwrap() {
            assert!(unpacked.path().join(file["from"].as_str().unwrap()).exists(), "{file}");
        }
        let bin = unpacked.path().join(platform["bin"].as_str().unwrap());
        assert_eq!(run(&mut Command::new(bin)).trim(), arch);
    }
}

/// What `kubectl __complete tranche top ''` runs: kubectl_complete-tranche from the PATH, with the words behind the plugin's
/// name.
#[test]
fn an_unpacked_archive_on_the_path_completes_words_for_kubectl() {
    let (folder, unpacked) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut pack = script("release/plugin.sh");
    // The program itself, unoptimised, would take a minute to pack.
    let program = folder.path().join("program");
    fs::write(&program, format!("#!/bin/sh\nexec {} \"$@\"\n", env!("CARGO_BIN_EXE_tranche"))).unwrap();
    let archive = run(pack.args(["1.2.3", "amd64"]).arg(&program).arg(folder.path()));
    run(Command::new("tar").args(["-xzf", archive.trim()]).arg("-C").arg(unpacked.path()));
    let path = format!("{}:{}", unpacked.path().display(), std::env::var("PATH").unwrap());
    let mut names: Vec<_> =
        fs::read_dir(unpacked.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["LICENSE", "kubectl-tranche", "kubectl_complete-tranche"]);
    let complete = |words: &[&str]| {
        let mut complete = Command::new(unpacked.path().join("kubectl_complete-tranche"));
        run(complete.args(words).env("PATH", &path))
    };
    let flags = complete(&["top", "--as"]);
    assert!(flags.starts_with("--as\t") && flags.ends_with(":4\n"), "{flags}");
    assert!(complete(&["top", "-o", ""]).starts_with("map\t"));
    assert!(complete(&["ex"]).starts_with("explain\t"));
}

#[test]
fn the_same_program_gives_the_same_archive() {
    let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    assert_eq!(sha256(&plugin(&one, "amd64")), sha256(&plugin(&other, "amd64")));
}

#[test]
#[ignore = "needs helm: hack/test-unit.sh"]
fn the_packed_chart_has_the_version_and_installs_the_image_of_it() {
    let helm = std::env::var_os("HELM").expect("HELM names what hack/rig/rig build-helm prints");
    let folder = tempfile::tempdir().unwrap();
    let mut pack = script("release/chart.sh");
    pack.args(["1.2.3-rc.1", "registry.example/team/tranche"]).arg(folder.path()).env("HELM", &helm);
    let chart = run(&mut pack).trim().to_owned();
    assert_eq!(chart, folder.path().join("tranche-1.2.3-rc.1.tgz").to_string_lossy());
    let told = yaml(&run(Command::new(&helm).args(["show", "chart", &chart])));
    assert_eq!((&told["version"], &told["appVersion"]), (&"1.2.3-rc.1".into(), &"1.2.3-rc.1".into()));
    let manifests =
        run(Command::new(&helm).args(["template", "tranche", &chart, "--kube-version", "1.37.0"]));
    let images: Vec<_> = manifests.lines().filter_map(|line| line.trim().strip_prefix("image: ")).collect();
    assert!(!images.is_empty());
    for image in images {
        assert_eq!(image.trim_matches('"'), "registry.example/team/tranche:1.2.3-rc.1");
    }
}

#[test]
#[ignore = "needs jq: hack/test-unit.sh"]
fn images_of_two_architectures_stand_under_one_index() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("root");
    fs::create_dir(&root).unwrap();
    let name = "registry.example/tranche:1.2.3";
    let images = ["arm64", "amd64"].map(|arch| {
        fs::write(root.join("program"), arch).unwrap();
        let image = folder.path().join(format!("{arch}.tar"));
        run(script("image/oci.sh").arg(&root).arg(name).arg(&image).args(["--arch", arch]));
        image
    });
    let all = folder.path().join("all.tar");
    run(script("image/index.sh").arg(name).arg(&all).args(&images));
    let layout = folder.path().join("layout");
    fs::create_dir(&layout).unwrap();
    run(Command::new("tar").arg("-xf").arg(&all).arg("-C").arg(&layout));

    let read = |path: &Path| serde_json::from_slice::<Value>(&fs::read(path).unwrap()).unwrap();
    // A blob by what a manifest says of it.
    let blob = |descriptor: &Value| {
        let digest = descriptor["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
        let path = layout.join("blobs/sha256").join(digest);
        assert_eq!(sha256(&path), digest);
        assert_eq!(descriptor["size"], fs::metadata(&path).unwrap().len());
        path
    };
    let top = read(&layout.join("index.json"));
    let [index] = &top["manifests"].as_array().unwrap()[..] else { panic!("{top}") };
    assert_eq!(index["annotations"]["io.containerd.image.name"], name);
    let index = read(&blob(index));
    let manifests = index["manifests"].as_array().unwrap();
    assert_eq!(manifests.len(), 2);
    for (descriptor, arch) in manifests.iter().zip(["amd64", "arm64"]) {
        assert_eq!(descriptor["platform"]["architecture"], arch);
        let manifest = read(&blob(descriptor));
        assert_eq!(read(&blob(&manifest["config"]))["architecture"], arch);
        manifest["layers"].as_array().unwrap().iter().for_each(|layer| drop(blob(layer)));
    }

    let out = script("image/index.sh").arg(name).arg(&all).args([&images[0], &images[0]]).output().unwrap();
    assert!(!out.status.success() && said(&out).contains("two images are for arm64"), "{}", said(&out));
}

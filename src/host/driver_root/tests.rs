//! Scans of synthetic driver roots, each laid out as a packaging lays it out.

use std::fs::{self, File, FileTimes};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, SystemTime};

use super::*;
use crate::cdi::{Arch, Library};

const VERSION: &str = "550.163.01";
const USUAL: &str = "usr/lib64";
const DEBIAN: &str = "usr/lib/x86_64-linux-gnu/nvidia/current";

/// The first bytes of a shared library: class (1: 32 bit, 2: 64 bit) and machine.
fn elf(class: u8, machine: u8) -> Vec<u8> {
    let mut bytes = vec![0; 64];
    bytes[..5].copy_from_slice(&[0x7f, b'E', b'L', b'F', class]);
    bytes[18] = machine;
    bytes
}

fn put(root: &Path, place: &str, content: impl AsRef<[u8]>) {
    let path = root.join(place);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

fn link(root: &Path, place: &str, target: &str) {
    let path = root.join(place);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    symlink(target, path).unwrap();
}

fn put_library(root: &Path, directory: &str, stem: &str, soname: Option<&str>) {
    put(root, &format!("{directory}/{stem}.so.{VERSION}"), elf(2, 62));
    if let Some(soname) = soname {
        link(root, &format!("{directory}/{soname}"), &format!("{stem}.so.{VERSION}"));
        link(root, &format!("{directory}/{stem}.so"), soname);
    }
}

fn put_libraries(root: &Path, directory: &str) {
    put_library(root, directory, "libcuda", Some("libcuda.so.1"));
    put_library(root, directory, "libnvidia-ml", Some("libnvidia-ml.so.1"));
    put_library(root, directory, "libnvidia-rtcore", None);
}

/// As NVIDIA's installer and RHEL's packages have it.
fn usual() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    put_libraries(dir.path(), USUAL);
    put(dir.path(), "usr/bin/nvidia-smi", "x");
    dir
}

/// As Debian has it: variants below `nvidia/`, led to by absolute links through /etc/alternatives.
fn debian() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    put_libraries(dir.path(), DEBIAN);
    put(dir.path(), &format!("{DEBIAN}/nvoptix.bin"), "x");
    put(dir.path(), "usr/lib/nvidia/current/nvidia-smi", "x");
    link(dir.path(), "usr/bin/nvidia-smi", "/etc/alternatives/nvidia-smi");
    link(dir.path(), "etc/alternatives/nvidia-smi", "/usr/lib/nvidia/current/nvidia-smi");
    link(dir.path(), "usr/lib/x86_64-linux-gnu/libcuda.so.1", "/etc/alternatives/libcuda");
    link(dir.path(), "etc/alternatives/libcuda", &format!("/{DEBIAN}/libcuda.so.1"));
    dir
}

fn root(dir: &tempfile::TempDir, outside: &str) -> DriverRoot {
    DriverRoot::new(dir.path(), outside)
}

fn scanned(dir: &tempfile::TempDir) -> RootFiles {
    scan(&root(dir, "/run/nvidia/driver"), None).unwrap()
}

fn names(files: &RootFiles) -> Vec<&str> {
    files.libraries.iter().map(|library| library.file.container.rsplit('/').next().unwrap()).collect()
}

fn named<'a>(files: &'a RootFiles, name: &str) -> &'a Library {
    files.libraries.iter().find(|library| library.file.container.ends_with(name)).unwrap()
}

fn all_libraries() -> Vec<String> {
    ["libcuda", "libnvidia-ml", "libnvidia-rtcore"].iter().map(|s| format!("{s}.so.{VERSION}")).collect()
}

#[test]
fn the_usual_layout() {
    let files = scanned(&usual());
    assert_eq!((files.version.as_str(), files.arch), (VERSION, Arch::X86_64));
    assert_eq!(names(&files), all_libraries());
    let cuda = named(&files, "libcuda.so.550.163.01");
    assert_eq!(cuda.aliases, ["libcuda.so", "libcuda.so.1"]);
    assert_eq!(cuda.file.container, "/usr/lib64/libcuda.so.550.163.01");
    assert_eq!(cuda.file.host.host, "/run/nvidia/driver/usr/lib64/libcuda.so.550.163.01");
    assert_eq!(files.binaries[0].container, "/usr/bin/nvidia-smi");
    assert!(files.hook.is_none());
}

#[test]
fn debians_layout_through_absolute_links() {
    let dir = debian();
    let files = scanned(&dir);
    assert_eq!(names(&files), all_libraries());
    let cuda = named(&files, "libcuda.so.550.163.01");
    assert_eq!(cuda.file.host.inside, dir.path().join(DEBIAN).join("libcuda.so.550.163.01"));
    assert_eq!(cuda.aliases, ["libcuda.so", "libcuda.so.1"]);
    let smi = &files.binaries[0];
    assert_eq!(smi.container, "/usr/bin/nvidia-smi");
    assert_eq!(smi.host.host, "/run/nvidia/driver/usr/lib/nvidia/current/nvidia-smi");
    assert_eq!(files.files[0].container, "/usr/share/nvidia/nvoptix.bin");
}

#[test]
fn a_root_that_is_the_hosts_own_has_plain_paths() {
    let files = scan(&root(&usual(), "/"), Some(VERSION)).unwrap();
    assert_eq!(files.libraries[0].file.host.host, "/usr/lib64/libcuda.so.550.163.01");
}

#[test]
fn merged_directories_give_each_library_once() {
    let dir = usual();
    link(dir.path(), "lib64", "usr/lib64");
    assert_eq!(names(&scanned(&dir)), all_libraries());
}

#[test]
fn libraries_of_another_word_size_or_version_are_left_out() {
    let dir = usual();
    put(dir.path(), &format!("usr/lib/libcuda.so.{VERSION}"), elf(1, 3));
    put(dir.path(), &format!("usr/lib/libnvidia-glcore.so.{VERSION}"), elf(1, 3));
    put(dir.path(), "usr/lib64/libnvidia-old.so.535.1.2", elf(2, 62));
    put(dir.path(), &format!("usr/lib64/libnvidia-text.so.{VERSION}"), "INPUT(-lfoo)");
    let files = scanned(&dir);
    assert_eq!(names(&files), all_libraries());
    assert_eq!(named(&files, "libcuda.so.550.163.01").file.container, "/usr/lib64/libcuda.so.550.163.01");
}

#[test]
fn libraries_for_arm() {
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), &format!("usr/lib/aarch64-linux-gnu/libcuda.so.{VERSION}"), elf(2, 183));
    let icd = "usr/share/vulkan/icd.d/nvidia_icd.aarch64.json";
    put(dir.path(), icd, b"{}");
    let files = scanned(&dir);
    assert_eq!((files.arch, files.libraries.len()), (Arch::Aarch64, 1));
    let mounted: Vec<_> = files.files.iter().map(|file| file.container.clone()).collect();
    assert_eq!(mounted, [format!("/{icd}")]);
}

#[test]
fn links_never_lead_out_of_the_root() {
    let outside = tempfile::tempdir().unwrap();
    let secret = outside.path().join("secret.so");
    fs::write(&secret, elf(2, 62)).unwrap();
    let dir = usual();
    let lib = |name: &str| format!("{USUAL}/{name}.so.{VERSION}");
    link(dir.path(), &lib("libabsolute"), secret.to_str().unwrap());
    link(dir.path(), &lib("libclimbing"), &format!("../../../../../../../../../..{}", secret.display()));
    link(dir.path(), &lib("libloop"), &format!("libloop.so.{VERSION}"));
    link(dir.path(), "usr/bin/nvidia-debugdump", "/proc/self/exe");
    link(dir.path(), "usr/lib", outside.path().to_str().unwrap());
    let files = scanned(&dir);
    assert_eq!(names(&files), all_libraries());
    assert_eq!(files.binaries.len(), 1);

    // The same names inside the root are found: links are followed as that root's own processes do.
    put(dir.path(), secret.strip_prefix("/").unwrap().to_str().unwrap(), elf(2, 62));
    let files = scanned(&dir);
    assert_eq!(files.libraries.iter().filter(|l| l.file.container.ends_with("secret.so")).count(), 1);
}

#[test]
fn libraries_with_a_version_of_their_own_come_by_name() {
    let dir = usual();
    put(dir.path(), "usr/lib64/libnvidia-egl-gbm.so.1.1.2", elf(2, 62));
    link(dir.path(), "usr/lib64/libnvidia-egl-gbm.so.1", "libnvidia-egl-gbm.so.1.1.2");
    put(dir.path(), "usr/lib64/libnvidia-container.so.1.17.0", elf(2, 62));
    let files = scanned(&dir);
    assert_eq!(named(&files, "libnvidia-egl-gbm.so.1.1.2").aliases, ["libnvidia-egl-gbm.so.1"]);
    assert!(!names(&files).iter().any(|name| name.contains("container")));
}

#[test]
fn firmware_sockets_and_other_files() {
    let dir = usual();
    for place in ["etc/OpenCL/vendors/nvidia.icd", "lib/firmware/nvidia/550.163.01/gsp_ga10x.bin"] {
        put(dir.path(), place, "x");
    }
    put(dir.path(), "lib/firmware/nvidia/535.1.2/gsp_ga10x.bin", "x");
    fs::create_dir_all(dir.path().join("run/nvidia-persistenced")).unwrap();
    let _socket =
        std::os::unix::net::UnixListener::bind(dir.path().join("run/nvidia-persistenced/socket")).unwrap();
    let files = scanned(&dir);
    let found: Vec<_> = files.files.iter().map(|file| (file.container.as_str(), file.kind)).collect();
    let expected = [
        ("/etc/OpenCL/vendors/nvidia.icd", FileKind::Plain),
        ("/lib/firmware/nvidia/550.163.01/gsp_ga10x.bin", FileKind::Plain),
        ("/run/nvidia-persistenced/socket", FileKind::Socket),
    ];
    assert_eq!(found, expected);
}

#[test]
fn the_hook_is_found_in_the_root_or_the_toolkits_root() {
    let dir = usual();
    put(dir.path(), "usr/bin/nvidia-ctk", "x");
    let hook = scanned(&dir).hook.unwrap();
    assert_eq!(
        (hook.path.host.as_str(), hook.tool),
        ("/run/nvidia/driver/usr/bin/nvidia-ctk", HookTool::NvidiaCtk)
    );

    let host = tempfile::tempdir().unwrap();
    put(host.path(), "usr/local/nvidia/toolkit/nvidia-cdi-hook", "x");
    let both =
        DriverRoot { toolkit: Some(RootView::new(host.path(), "/")), ..root(&dir, "/run/nvidia/driver") };
    let hook = scan(&both, None).unwrap().hook.unwrap();
    assert_eq!(hook.path.host, "/usr/local/nvidia/toolkit/nvidia-cdi-hook");
    assert_eq!(hook.tool, HookTool::NvidiaCdiHook);

    let off = DriverRoot { hook: HookChoice::Off, ..both.clone() };
    assert!(scan(&off, None).unwrap().hook.is_none());

    let path = HostPath { inside: dir.path().join("x"), host: "/opt/hook.sh".to_owned() };
    let other = DriverRoot { hook: HookChoice::At(path), ..both };
    assert!(scan(&other, None).unwrap_err().to_string().contains("/opt/hook.sh"));
}

#[test]
fn the_toolkits_folder_that_an_administrator_named_is_looked_at_first_and_told_while_it_has_no_hook() {
    let (dir, host) = (usual(), tempfile::tempdir().unwrap());
    put(dir.path(), "usr/bin/nvidia-cdi-hook", "x");
    put(host.path(), "usr/bin/nvidia-cdi-hook", "x");
    let named =
        DriverRoot { toolkit_dir: Some("/opt/vendor/toolkit".into()), ..root(&dir, "/run/nvidia/driver") };
    let on_host = DriverRoot { toolkit: Some(RootView::new(host.path(), "/")), ..named.clone() };
    for (root, below, seen, elsewhere) in [
        (on_host, host.path(), "", "/usr/bin/nvidia-cdi-hook"),
        (named, dir.path(), "/run/nvidia/driver", "/run/nvidia/driver/usr/bin/nvidia-cdi-hook"),
    ] {
        let cache = DriverRootCache::new(root.clone());
        let hook = || cache.root_files(None).unwrap().hook.clone().unwrap();
        assert_eq!(hook().path.host, elsewhere);
        let told = cache.missing_toolkit().unwrap().to_string();
        assert!(told.starts_with("/opt/vendor/toolkit on the host, which is named "), "{told}");
        assert!(told.contains("has neither nvidia-cdi-hook nor nvidia-ctk"), "{told}");
        // It comes later, as the GPU Operator's does.
        put(below, "opt/vendor/toolkit/nvidia-ctk", "x");
        assert_eq!(hook().path.host, format!("{seen}/opt/vendor/toolkit/nvidia-ctk"));
        assert_eq!(hook().tool, HookTool::NvidiaCtk);
        assert_eq!(cache.missing_toolkit(), None);
        put(below, "opt/vendor/toolkit/nvidia-cdi-hook", "x");
        assert_eq!(hook().path.host, format!("{seen}/opt/vendor/toolkit/nvidia-cdi-hook"));
        let off = DriverRootCache::new(DriverRoot { hook: HookChoice::Off, ..root });
        assert_eq!(off.missing_toolkit(), None);
    }
    let unnamed = DriverRootCache::new(root(&dir, "/run/nvidia/driver"));
    assert_eq!(unnamed.missing_toolkit(), None);
}

#[test]
fn layouts_of_node_images_are_known() {
    for (folder, programs) in [
        ("usr/lib/nvidia", "usr/bin"),
        ("usr/lib/nvidia/tesla", "usr/libexec/nvidia/tesla/bin"),
        ("usr/lib/nvidia/grid", "usr/bin"),
        ("usr/local/lib", "usr/local/bin"),
        ("usr/local/glibc/usr/lib", "usr/local/bin"),
        ("opt/nvidia/lib64", "opt/nvidia/bin"),
        ("home/kubernetes/bin/nvidia/lib64", "home/kubernetes/bin/nvidia/bin"),
        // The driver root is /home/kubernetes/bin/nvidia.
        ("lib64", "bin"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        put_libraries(dir.path(), folder);
        put(dir.path(), &format!("{programs}/nvidia-smi"), "x");
        let files = scanned(&dir);
        assert_eq!(names(&files), all_libraries(), "{folder}");
        assert_eq!(files.libraries[0].file.container, format!("/{folder}/libcuda.so.{VERSION}"));
        assert_eq!(files.binaries[0].host.inside, dir.path().join(programs).join("nvidia-smi"));
    }
}

#[test]
fn a_root_may_be_the_folder_of_the_libraries() {
    let dir = tempfile::tempdir().unwrap();
    put_libraries(dir.path(), ".");
    put(dir.path(), "nvidia-smi", "x");
    put(dir.path(), "usr/bin/nvidia-ctk", "x");
    let files = scan(&root(&dir, "/usr/lib/somewhere"), None).unwrap();
    assert_eq!(names(&files), all_libraries());
    // Not where a container has its root.
    let cuda = named(&files, "libcuda.so.550.163.01");
    assert_eq!(cuda.file.container, "/usr/lib/x86_64-linux-gnu/libcuda.so.550.163.01");
    assert_eq!(cuda.file.host.host, "/usr/lib/somewhere/libcuda.so.550.163.01");
    assert_eq!(files.binaries[0].host.host, "/usr/lib/somewhere/nvidia-smi");
}

#[test]
fn library_directories_of_the_administrator_come_first() {
    let dir = usual();
    put_libraries(dir.path(), "srv/nvidia/lib");
    let own = DriverPlace::new(dir.path(), vec!["srv/nvidia/lib".to_owned()]);
    let files = scan(&DriverRoot::of(own, "/"), None).unwrap();
    assert_eq!(files.libraries[0].file.container, format!("/srv/nvidia/lib/libcuda.so.{VERSION}"));
}

#[test]
fn a_root_that_cannot_be_used_says_why() {
    let empty = tempfile::tempdir().unwrap();
    let error = scan(&root(&empty, "/run/nvidia/driver"), None).unwrap_err().to_string();
    assert!(error.contains("/run/nvidia/driver") && error.contains("libcuda.so"), "{error}");
    assert!(error.contains("usr/lib64, ") && error.contains("--driver-library-dirs"), "{error}");

    let dir = usual();
    let error = scan(&root(&dir, "/"), Some("580.1.2")).unwrap_err().to_string();
    assert!(error.contains(VERSION) && error.contains("580.1.2"), "{error}");

    put(dir.path(), "usr/lib64/libcuda.so.535.1.2", elf(2, 62));
    let error = scan(&root(&dir, "/"), None).unwrap_err().to_string();
    assert!(error.contains("535.1.2, 550.163.01"), "{error}");
    assert_eq!(names(&scan(&root(&dir, "/"), Some(VERSION)).unwrap()), all_libraries());
}

/// Makes every directory look as if nothing had happened there for a minute.
fn settle(directory: &Path) {
    for entry in fs::read_dir(directory).unwrap().map(|entry| entry.unwrap()) {
        if entry.file_type().unwrap().is_dir() {
            settle(&entry.path());
        }
    }
    let past = SystemTime::now() - Duration::from_secs(60);
    File::open(directory).unwrap().set_times(FileTimes::new().set_modified(past)).unwrap();
}

#[test]
fn the_cache_scans_again_only_when_something_changed() {
    let dir = usual();
    settle(dir.path());
    let cache = DriverRootCache::new(root(&dir, "/"));
    let first = cache.root_files(None).unwrap();
    assert_eq!(*cache.root_files(None).unwrap(), *first);
    assert_eq!(cache.scans(), 1);

    put_library(dir.path(), USUAL, "libnvcuvid", Some("libnvcuvid.so.1"));
    // However long this machine takes from here on, it is a moment ago.
    let ahead = SystemTime::now() + Duration::from_secs(60);
    let changed = File::open(dir.path().join(USUAL)).unwrap();
    changed.set_times(FileTimes::new().set_modified(ahead)).unwrap();
    assert_eq!(cache.root_files(None).unwrap().libraries.len(), 4);
    // Changed a moment ago: what was found is not trusted yet.
    cache.root_files(None).unwrap();
    assert_eq!(cache.scans(), 3);

    settle(dir.path());
    cache.root_files(None).unwrap();
    cache.root_files(None).unwrap();
    assert_eq!(cache.scans(), 4);

    // A directory that was not there before.
    put(dir.path(), "etc/OpenCL/vendors/nvidia.icd", "x");
    assert_eq!(cache.root_files(None).unwrap().files.len(), 1);
    settle(dir.path());
    cache.root_files(None).unwrap();
    cache.root_files(Some(VERSION)).unwrap();
    assert_eq!(cache.scans(), 7, "another version is another question");
    cache.forget();
    cache.root_files(Some(VERSION)).unwrap();
    assert_eq!(cache.scans(), 8);
}

#[test]
fn a_failed_scan_leaves_nothing_behind() {
    let dir = usual();
    settle(dir.path());
    let cache = DriverRootCache::new(root(&dir, "/"));
    cache.root_files(None).unwrap();
    fs::remove_file(dir.path().join(USUAL).join(format!("libcuda.so.{VERSION}"))).unwrap();
    assert!(matches!(cache.root_files(None), Err(ScanError::NoDriver { .. })));
    put_libraries_again(dir.path());
    assert_eq!(names(&cache.root_files(None).unwrap()), all_libraries());
}

fn put_libraries_again(root: &Path) {
    put(root, &format!("{USUAL}/libcuda.so.{VERSION}"), elf(2, 62));
}

#[test]
fn a_path_that_vanished_is_named_before_the_file_is_written() {
    let dir = usual();
    let files = scanned(&dir);
    let paths: Vec<HostPath> = files.libraries.iter().map(|library| library.file.host.clone()).collect();
    check(&paths).unwrap();
    fs::remove_file(&paths[1].inside).unwrap();
    let error = check(&paths).unwrap_err();
    assert_eq!(error.host, paths[1].host);
    assert!(error.to_string().contains("is missing"), "{error}");
}

/// As Windows mounts it into WSL: copies under each name, the driver in a store, other makers' stores beside it.
fn wsl() -> tempfile::TempDir {
    const LIB: &str = "usr/lib/wsl/lib";
    let dir = tempfile::tempdir().unwrap();
    for name in ["libcuda.so", "libcuda.so.1", "libcuda.so.1.1", "libnvidia-ml.so.1", "libdxcore.so"] {
        put(dir.path(), &format!("{LIB}/{name}"), elf(2, 62));
    }
    put(dir.path(), &format!("{LIB}/nvidia-smi"), "x");
    put(dir.path(), "usr/lib/wsl/drivers/nv_dispi.inf_amd64_3d7a/libcuda.so.1.1", elf(2, 62));
    put(dir.path(), "usr/lib/wsl/drivers/iigd_dch.inf_amd64_11aa/igd.so", "x");
    dir
}

#[test]
fn wsls_layout_with_whatever_version_the_driver_in_windows_has() {
    let dir = wsl();
    let files = scan(&root(&dir, "/"), Some("576.02")).unwrap();
    assert_eq!((files.version.as_str(), files.arch), ("576.02", Arch::X86_64));
    assert_eq!(names(&files), ["libcuda.so.1", "libdxcore.so", "libnvidia-ml.so.1"]);
    let cuda = named(&files, "libcuda.so.1");
    assert_eq!(cuda.file.host.host, "/usr/lib/wsl/lib/libcuda.so.1");
    assert_eq!(cuda.aliases, ["libcuda.so", "libcuda.so.1.1"]);
    assert_eq!(files.binaries[0].container, "/usr/bin/nvidia-smi");
    let stores: Vec<&str> = files.files.iter().map(|file| file.container.as_str()).collect();
    assert_eq!(stores, ["/usr/lib/wsl/drivers/nv_dispi.inf_amd64_3d7a"], "NVIDIA's alone");
    assert_eq!(files.files[0].host.host, "/usr/lib/wsl/drivers/nv_dispi.inf_amd64_3d7a");
    // The folder alone, without WSL's own library, is a layout as any other.
    fs::remove_file(dir.path().join("usr/lib/wsl/lib/libdxcore.so")).unwrap();
    assert_eq!(scan(&root(&dir, "/"), None).unwrap().version, "1.1");
}

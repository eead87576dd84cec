//! Compiles the kubelet protocols under proto/ with a pure-Rust compiler (no protoc needed)
//! and stamps the build with its commit. Generated code stays in the build folder.

use std::path::{Path, PathBuf};
use std::process::Command;

const SERVED: [&str; 5] = [
    "proto/pluginregistration/v1.proto",
    "proto/dra/v1.proto",
    "proto/dra/v1beta1.proto",
    "proto/health/v1.proto",
    "proto/health/v1alpha1.proto",
];
/// Asked by us. Its package has the name of another one, so that its code has a folder of its own.
const ASKED: &str = "proto/podresources/v1.proto";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for proto in SERVED.into_iter().chain([ASKED]) {
        println!("cargo:rerun-if-changed={proto}");
    }
    // The older protocols' messages are the newer ones' (v1beta1 only lacks share_id, which its
    // readers skip as an unknown field), so both services share one set of types.
    tonic_prost_build::configure()
        .build_client(true) // used by the contract tests
        .extern_path(".k8s.io.kubelet.pkg.apis.dra.v1beta1", "crate::kubelet::pb::dra")
        .extern_path(".v1alpha1", "crate::kubelet::pb::health")
        .compile_fds(protox::compile(SERVED, ["proto"])?)?;
    let folder = PathBuf::from(std::env::var("OUT_DIR")?).join("podresources");
    std::fs::create_dir_all(&folder)?;
    tonic_prost_build::configure()
        .build_server(true) // used by the contract tests
        .out_dir(folder)
        .compile_fds(protox::compile([ASKED], ["proto"])?)?;
    stamp_commit();
    Ok(())
}

/// Sets TRANCHE_COMMIT to the short commit, or to "unknown" outside a checkout. While one works on the driver, the
/// commit of the last build may stay; hack/release.sh names the one of its beginning in TRANCHE_RELEASE_COMMIT.
fn stamp_commit() {
    println!("cargo:rerun-if-env-changed=TRANCHE_RELEASE_COMMIT");
    if let Ok(commit) = std::env::var("TRANCHE_RELEASE_COMMIT") {
        let short: String = commit.chars().take(12).collect();
        println!("cargo:rustc-env=TRANCHE_COMMIT={short}");
        return;
    }
    if Path::new(".git/HEAD").exists() {
        println!("cargo:rerun-if-changed=.git/HEAD");
    }
    let commit = Command::new("git")
        .args(["rev-parse", "--short=12", "HEAD"])
        .output()
        .ok()
        .filter(|out| out.status.success())
        .map(|out| String::from_utf8_lossy(&out.stdout).trim().to_owned())
        .unwrap_or_else(|| "unknown".to_owned());
    println!("cargo:rustc-env=TRANCHE_COMMIT={commit}");
}

//! Compiles the kubelet protocols under proto/ with a pure-Rust compiler (no protoc needed)
//! and stamps the build with its commit. Generated code stays in the build folder.

use std::path::Path;
use std::process::Command;

const PROTOS: [&str; 5] = [
    "proto/pluginregistration/v1.proto",
    "proto/dra/v1.proto",
    "proto/dra/v1beta1.proto",
    "proto/health/v1.proto",
    "proto/health/v1alpha1.proto",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for proto in PROTOS {
        println!("cargo:rerun-if-changed={proto}");
        let files = protox::compile([proto], ["proto"])?;
        // One module file per proto: the two health packages differ only in their package name.
        let name = proto.trim_start_matches("proto/").trim_end_matches(".proto").replace('/', "_");
        tonic_prost_build::configure()
            .build_client(true) // used by the contract tests and the health probe
            .include_file(format!("{name}.rs"))
            .compile_fds(files)?;
    }
    stamp_commit();
    Ok(())
}

/// Sets TRANCHE_COMMIT to the short commit, or to "unknown" outside a checkout.
fn stamp_commit() {
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

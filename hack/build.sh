#!/usr/bin/env bash
# Builds what the demo, the cluster tests and the bench run: the driver, the fake NVML library and the
# driver's image. Touches only the build folders. Prints nothing but progress.
#
# Makes, below TARGET (CARGO_TARGET_DIR or target/):
#   release/tranche   fake/release/libfake_nvml.so   fake/release/fake-nvml   image/tranche.tar
set -euo pipefail
top="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
target="${CARGO_TARGET_DIR:-$top/target}"

step() { # step WORDS COMMAND...
  local words="$1" start=$SECONDS
  shift
  echo "-- $words"
  "$@"
  echo "   done in $((SECONDS - start)) s"
}

cd "$top"
step "driver (release)" cargo build --release --locked --bin tranche
step "fake NVML library" env CARGO_TARGET_DIR="$target/fake" \
  cargo build --release --locked --manifest-path hack/fake-nvml/Cargo.toml
mkdir -p "$target/image"
step "image" hack/image/tranche.sh "$target/release/tranche" "$target/image/tranche.tar"

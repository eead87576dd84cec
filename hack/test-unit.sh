#!/usr/bin/env bash
# Unit, property, contract and tidy tests: no cluster, no GPU. What could not be tried says SKIPPED. Builds
# the fake NVML library first, since the NVML edge is tested through the very door that the real library
# comes in by.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target="${CARGO_TARGET_DIR:-$PWD/target}"
start=$SECONDS
fake() { CARGO_TARGET_DIR="$target/fake" cargo "$@" --release --locked --manifest-path hack/fake-nvml/Cargo.toml; }
fake build # the tests alone leave no library behind
fake test
# The experiments for a machine with a GPU: here only that they build, and their own tests.
CARGO_TARGET_DIR="$target/gpu" cargo test --locked --manifest-path tests/gpu/Cargo.toml
# NVIDIA's own control daemon and files, and the real helm: without them tests would be skipped.
HELM="$(hack/rig/rig build-helm)"
export HELM
if [ "$EUID" -eq 0 ]; then
  TRANCHE_TEST_DRIVER_ROOT="$(hack/rig/rig build-driver)"
  export TRANCHE_TEST_DRIVER_ROOT TRANCHE_MPS_CONTROL="$TRANCHE_TEST_DRIVER_ROOT/usr/bin/nvidia-cuda-mps-control"
else
  echo "SKIPPED: tests with NVIDIA's driver and its MPS daemon need root" >&2
fi
# The cluster tests need a rig: hack/test-cluster.sh runs them.
TRANCHE_FAKE_NVML="$target/fake/release/libfake_nvml.so" cargo test --locked --lib --bins --test it --test tidy
echo "-- unit and contract tests took $((SECONDS - start)) s"

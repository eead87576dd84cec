#!/usr/bin/env bash
# Unit, property, contract and tidy tests: no cluster, no GPU. Builds the fake NVML library first, since the NVML
# edge is tested through the very door that the real library comes in by. What cannot be tried here is counted as
# skipped, with a line that says why.
#
#   TRANCHE_DATA         a folder with the public trace (openb/); without it one test is skipped
#   TRANCHE_RESULTS      a file to which one row per group is added, for hack/summary.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target="${CARGO_TARGET_DIR:-$PWD/target}"
begin=$SECONDS
results="${TRANCHE_RESULTS:-$(mktemp)}"
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
failed=0

# group NAME SKIPPED COMMAND...: runs tests and adds the row; SKIPPED more tests were left out by the command.
group() {
  local name=$1 skipped=$2 start=$SECONDS rc=0
  shift 2
  echo "== $name"
  "$@" 2>&1 | tee "$log" || rc=$?
  ((rc == 0)) || failed=1
  awk -v OFS='\t' -v name="$name" -v skipped="$skipped" -v seconds=$((SECONDS - start)) -v rc="$rc" '
    /^test result: / { passed += $4; failures += $6; skipped += $8 }
    END { print name, "-", passed + 0, (rc && !failures ? 1 : failures + 0), skipped, seconds }' "$log" >>"$results"
}

skip() { echo "SKIPPED: $*" >&2; }

fake() { CARGO_TARGET_DIR="$target/fake" cargo "$@" --release --locked --manifest-path hack/fake-nvml/Cargo.toml; }

# The tests marked `ignore` need what this machine may lack. Each is run where that is there.
binding=(--include-ignored) driver=(--include-ignored) units=(--include-ignored) left_out=0
if [[ -z ${TRANCHE_DATA:-} ]]; then
  skip "the public trace: TRANCHE_DATA does not name a folder with openb/"
  units+=(--skip the_public_trace_is_packed_as_well_as_the_paper_packs_it) left_out=1
fi
if ! python3 -m pip --version >/dev/null 2>&1; then
  skip "the Python binding of NVML: there is no python3 with pip"
  binding=()
fi
if ((EUID == 0)); then
  # The real helm, NVIDIA's own control daemon and files.
  HELM="$(hack/rig/rig build-helm)"
  TRANCHE_TEST_DRIVER_ROOT="$(hack/rig/rig build-driver)"
  TRANCHE_MPS_CONTROL="$TRANCHE_TEST_DRIVER_ROOT/usr/bin/nvidia-cuda-mps-control"
  export HELM TRANCHE_TEST_DRIVER_ROOT TRANCHE_MPS_CONTROL
else
  skip "tests that make device nodes and mounts, and those with helm and NVIDIA's driver, need root"
  units=() driver=() left_out=0
fi

fake build # the tests alone leave no library behind
group "fake NVML" 0 fake test -- "${binding[@]}"
# The experiments for a machine with a GPU: here only that they build, and their own tests.
group "GPU check" 0 env CARGO_TARGET_DIR="$target/gpu" cargo test --locked --manifest-path tests/gpu/Cargo.toml
export TRANCHE_FAKE_NVML="$target/fake/release/libfake_nvml.so"
group "units" "$left_out" cargo test --locked --lib --bins -- "${units[@]}"
group "contracts" 0 cargo test --locked --test it -- "${driver[@]}"
group "tidy" 0 cargo test --locked --test tidy
[[ -n ${TRANCHE_RESULTS:-} ]] || hack/summary.sh "$results"
echo "-- unit and contract tests took $((SECONDS - begin)) s"
exit "$failed"

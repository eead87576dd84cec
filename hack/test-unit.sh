#!/usr/bin/env bash
# Unit, property, contract and tidy tests: no cluster, no GPU. Builds the fake NVML library first, since the NVML
# edge is tested through the very door that the real library comes in by. What cannot be tried here is counted as
# skipped, with a line that says why.
#
#   TRANCHE_DATA         a folder with the public trace (openb/); without it one test is skipped
#   TRANCHE_RESULTS      a file to which one row per group is added, for hack/summary.sh
#   PROPTEST_RNG_SEED    the numbers that property tests begin with: the same ones each time, so that a case which no
#                        change has to do with holds none up. `make soak` takes others
set -euo pipefail
export PROPTEST_RNG_SEED="${PROPTEST_RNG_SEED:-1}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target="${CARGO_TARGET_DIR:-$PWD/target}"
begin=$SECONDS
results="${TRANCHE_RESULTS:-$(mktemp)}"
log="$(mktemp)"
trap 'rm -f "$log"; [[ -n ${TRANCHE_RESULTS:-} ]] || rm -f "$results"' EXIT
failed=0

# group NAME COMMAND...: runs tests and adds their row; left_out: how many the command leaves out.
group() {
  local name=$1 start=$SECONDS rc=0
  shift
  echo "== $name"
  "$@" 2>&1 | tee "$log" || rc=$?
  ((rc == 0)) || failed=1
  awk -v OFS='\t' -v name="$name" -v skipped="${left_out:-0}" -v seconds=$((SECONDS - start)) -v rc="$rc" '
    /^test result: / { passed += $4; failures += $6; skipped += $8 }
    END { print name, "-", passed + 0, (rc && !failures ? 1 : failures + 0), skipped, seconds }' "$log" >>"$results"
}

skip() { echo "SKIPPED: $*" >&2; }

# fake VERB ARGS...
fake() {
  CARGO_TARGET_DIR="$target/fake" cargo "$1" --release --locked --manifest-path hack/fake-nvml/Cargo.toml "${@:2}"
}
# shellcheck disable=SC2317 # group calls it
gpu() { CARGO_TARGET_DIR="$target/gpu" cargo test --locked --manifest-path tests/gpu/Cargo.toml "$@"; }

# The tests marked `ignore` need what this machine may lack. Each is run where that is there.
# One of them is no test, but the process that another kills.
fake_tests=(--include-ignored) units=(--include-ignored) no_trace=0
driver=(--include-ignored --skip child_serves_until_killed)
if [[ -z ${TRANCHE_DATA:-} ]]; then
  skip "the public trace: TRANCHE_DATA does not name a folder with openb/"
  units+=(--skip the_public_trace_is_packed_as_well_as_the_paper_packs_it) no_trace=1
fi
NVML_BINDING="${TRANCHE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/tranche}/nvidia-ml-py/13.615.71"
export NVML_BINDING
if [[ ! -e $NVML_BINDING/pynvml.py ]] &&
  ! python3 -m pip install -q --no-deps --target "$NVML_BINDING" nvidia-ml-py==13.615.71; then
  skip "the Python binding of NVML: pip cannot bring it"
  fake_tests+=(--skip the_python_binding)
fi
if ((EUID == 0)); then
  # The real helm, NVIDIA's own control daemon and files.
  HELM="$(hack/rig/rig build-helm)"
  TRANCHE_TEST_DRIVER_ROOT="$(hack/rig/rig build-driver)"
  TRANCHE_TEST_MPS_CONTROL="$TRANCHE_TEST_DRIVER_ROOT/usr/bin/nvidia-cuda-mps-control"
  export HELM TRANCHE_TEST_DRIVER_ROOT TRANCHE_TEST_MPS_CONTROL
else
  skip "device nodes, mounts, helm, NVIDIA's driver and whole runs of the GPU check: their tests need root"
  units=() driver=() no_trace=0
  fake_tests+=(--skip the_real_library)
fi

# Prometheus' own opinion of what is served.
if TRANCHE_PROMTOOL="$(hack/rig/rig build-promtool)"; then
  export TRANCHE_PROMTOOL
elif ((EUID == 0)); then
  skip "what promtool says of the metrics: apt cannot bring Debian's package prometheus"
  driver+=(--skip promtool_finds_no_fault)
fi

if ! command -v jq >/dev/null && ((EUID == 0)); then
  skip "the image index of a release: jq is not here"
  driver+=(--skip release::images_of_two_architectures)
fi

fake build # the tests alone leave no library behind
group "fake NVML" fake test -- "${fake_tests[@]}"
export TRANCHE_FAKE_NVML="$target/fake/release/libfake_nvml.so"
# The experiments for a machine with a GPU: here only that they build, their own tests, and what whole runs do to the
# settings of a simulated card.
group "GPU check" gpu -- "${driver[@]}"
left_out=$no_trace group "units" cargo test --locked --lib --bins -- "${units[@]}"
# Most of them wait for something most of the time.
group "contracts" cargo test --locked --test it -- --test-threads=$(($(nproc) * 3)) "${driver[@]}" --skip memory::
# Each in a process of its own.
# shellcheck disable=SC2317 # group calls it
memory() {
  local test
  for test in of_nodes_with_gpus of_ordinary_claims_and_the_fattest of_pods_with_selectors_of_their_own \
    of_a_namespace_whose_pods_find_no_place; do
    cargo test --locked --test it -- --ignored --exact "memory::$test" || return
  done
}
group "memory" memory
# Hostile input: a second or so for each target, the same way through each time; `make soak` goes on for hours.
group "fuzz" cargo test --locked --test fuzz
group "tidy" cargo test --locked --test tidy
[[ -n ${TRANCHE_RESULTS:-} ]] || hack/summary.sh "$results"
echo "-- unit and contract tests took $((SECONDS - begin)) s"
exit "$failed"

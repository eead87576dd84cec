#!/usr/bin/env bash
# The tests on a real cluster (tests/cluster): deploy/ and the chart on a bare rig, then the driver at
# work on simulated GPUs. Once on the newest Kubernetes with two nodes, and once on the oldest that is
# supported with one. The rigs are brought down in the end, also after a failure; then the logs stay.
#
#   RIG_NAME (test)           name of the rigs
#   RIG_K8S (1.37.0)          the release of the first pass
#   TRANCHE_K8S_OLD (1.34.4)  the release of the second; empty: no second pass
#   TRANCHE_TESTS             only tests with this in their names, such as sharing::
#
# Run hack/build.sh first.
set -euo pipefail
top="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$top"
target="${CARGO_TARGET_DIR:-$top/target}"
rig="$top/hack/rig/rig"
export RIG_NAME="${RIG_NAME:-test}" RIG_FAKE_NVML="$target/fake/release/libfake_nvml.so"
newest="${RIG_K8S:-1.37.0}"
oldest="${TRANCHE_K8S_OLD-1.34.4}"
only="${TRANCHE_TESTS:-}"
kept="$target/test-cluster"
took=""
begin=$SECONDS

step() { # step WORDS COMMAND...
  local words="$1" start=$SECONDS
  shift
  echo "== $words"
  "$@"
  took+="$(printf '%5d s  %s' $((SECONDS - start)) "$words")"$'\n'
}

# What a failure leaves to read: every log of the rig, and what the cluster and the driver say.
keep_logs() {
  local to pod
  to="$kept/$(date +%Y%m%d-%H%M%S)-$RIG_K8S"
  mkdir -p "$to"
  cp -a "$("$rig" logs)/." "$to/" 2>/dev/null || true
  {
    "$rig" kubectl get nodes,pods,resourceclaims,resourceslices,events -A -o wide --sort-by=.metadata.creationTimestamp
    "$rig" kubectl get pods,resourceclaims,resourceslices -A -o yaml
  } >"$to/objects.txt" 2>&1 || true
  for pod in $("$rig" kubectl -n tranche-system get pods -o name 2>/dev/null || true); do
    {
      "$rig" kubectl -n tranche-system logs "$pod" --previous 2>/dev/null || true
      "$rig" kubectl -n tranche-system logs "$pod"
    } >"$to/${pod#pod/}.log" 2>&1 || true
  done
  echo "test-cluster: logs are in $to" >&2
}

ended() {
  local rc=$?
  trap - EXIT
  ((rc == 0)) || keep_logs
  "$rig" down || true
  printf '\n%s%5d s  all in all\n' "$took" $((SECONDS - begin))
  exit "$rc"
}

run() { # run ARGS...: of the test program
  TRANCHE_RIG="$RIG_NAME" RUST_BACKTRACE=0 cargo test --locked --test cluster -- --test-threads=1 --nocapture "$@"
}

pass() { # pass RELEASE NODES TESTS SPEC...: SPEC as hack/stage.sh has it
  export RIG_K8S="$1" RIG_NODES="$2"
  local tests="${only:-$3}"
  shift 3
  step "$RIG_K8S: the rig" "$rig" up
  case $only in
    '') step "$RIG_K8S: the API server, deploy/, the chart and the webhook" run api:: deploy:: webhook:: ;;
    api* | deploy* | webhook*)
      step "$RIG_K8S: $only" run "$only"
      return
      ;;
  esac
  step "$RIG_K8S: the driver staged" hack/stage.sh "$@"
  # shellcheck disable=SC2086
  step "$RIG_K8S: the driver at work" run --skip deploy:: --skip api:: --skip webhook:: $tests
}

# A rig of this name that somebody left is not the one that is wanted.
"$rig" down
trap ended EXIT
step "compiling the tests" cargo test --locked --test cluster --no-run
mig=7=1g.10gb,1g.10gb,2g.20gb
pass "$newest" 2 "" "node-a=h100:8:$mig" node-b=l40s:2
if [[ -n $oldest ]]; then
  "$rig" down
  # What does not depend on the release is not tried again.
  again="pods:: sharing:: shares::whole_only shares::placed bad_input:: discovery:: upgrade:: kubelet_is the_plugin_is_ready"
  again+=" controller::place controller::nodes controller::load controller::verbatim controller::kai"
  again+=" controller::explain controller::life controller::harm controller::settings controller::fail_over"
  again+=" controller::uninstall on_many_nodes who_loses"
  # Installed as most do it.
  STAGE_BY=chart pass "$oldest" 1 "$again" "node-a=h100:8:$mig"
fi

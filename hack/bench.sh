#!/usr/bin/env bash
# The figures of node plugin and controller: as tables, and as one flat object in TARGET/bench.json. Takes about
# fourteen minutes on two idle cores, builds not counted. Run hack/build.sh first (make bench does).
#
# BENCH_PARTS chooses from
#   decide      one decision of the controller's allocator, at 100, 1,000 and 5,000 nodes; needs no cluster
#   packing     how full it packs the public trace in TRANCHE_DATA/openb; needs no cluster
#   controller  1,000 claims end to end, beside kube-scheduler's own sharing
#   start latency shares watchdog idle pods     the node plugin
#
# Brings up a rig of its own (RIG_NAME, default bench) and ends it. BENCH_KEEP=1 leaves the rig up, and uses one
# that is. BENCH_TRANCHE names another binary to measure.
set -euo pipefail
top="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
target="${CARGO_TARGET_DIR:-$top/target}"
library="$target/fake/release/libfake_nvml.so"
tranche="${BENCH_TRANCHE:-$target/release/tranche}"
json="$target/bench.json"
parts="${BENCH_PARTS:-decide packing controller start latency shares watchdog idle pods}"
export RIG_NAME="${RIG_NAME:-bench}" RIG_NODES=1
rig="$top/hack/rig/rig"

# chosen PART...: those of the parts that are wanted.
chosen() {
  local part chosen=()
  for part in $parts; do
    [[ " $* " != *" $part "* ]] || chosen+=("$part")
  done
  echo "${chosen[*]}"
}
alone="$(chosen decide packing)" controller="$(chosen controller)"
node="$(chosen start latency shares watchdog idle pods)"
for part in $parts; do
  [[ " $alone $controller $node " == *" $part "* ]] || { echo "bench: no part $part; see $0" >&2; exit 2; }
done

needed=("$tranche")
if [ -n "$node" ]; then
  needed+=("$target/fake/release/fake-nvml" "$library" "$target/image/tranche.tar")
  export RIG_FAKE_NVML="$library"
fi
[ -z "$controller" ] || export RIG_AUDIT="$top/benches/node/audit.yaml"
for file in "${needed[@]}"; do
  [ -e "$file" ] || { echo "bench: $file is not there; run hack/build.sh first" >&2; exit 1; }
done

echo "-- bench program (release)"
CARGO_TARGET_DIR="$target" cargo build --release --locked --manifest-path "$top/benches/node/Cargo.toml"

# Short, because sockets lie below it; on the disk, because the ledger does.
work="$(mktemp -d "${TMPDIR:-/tmp}/tb-XXXX")"
rig_up=
down() {
  rm -rf --one-file-system "$work"
  [ -z "$rig_up" ] || [ "${BENCH_KEEP:-}" = 1 ] || "$rig" down
}
trap down EXIT
rm -f "$json"

# measure PARTS: adds their figures to the file. In namespaces of its own: controllers, MPS daemons and their mounts
# go with it, whatever becomes of the program. The first process in there is a shell, which clears away daemons
# that end.
measure() {
  local start=$SECONDS
  # shellcheck disable=SC2016 # the inner shell's
  BENCH_PARTS="$1" BENCH_WORK="$work" BENCH_JSON="$json" BENCH_TRANCHE="$tranche" \
    BENCH_DRIVER_ROOT="$work/driver" BENCH_AUDIT="$("$rig" logs)/audit.log" BENCH_FAKE_NVML="$target/fake/release/fake-nvml" \
    timeout --signal=KILL 900 unshare --mount --pid --fork --kill-child --mount-proc \
    bash -c '"$0"; exit $?' "$target/release/node-bench"
  echo "-- $1: measured in $((SECONDS - start)) s"
}

[ -z "$alone" ] || measure "$alone"
if [ -n "$controller$node" ]; then
  echo "-- a real cluster"
  rig_up=1
  "$rig" up
  KUBECONFIG="$("$rig" kubeconfig)"
  export KUBECONFIG
fi
if [ -n "$controller" ]; then
  "$rig" kubectl apply -f "$top/deploy/deviceclasses.yaml" -f "$top/deploy/since-1.36" >/dev/null
  measure "$controller"
fi
if [ -n "$node" ]; then
  "$rig" driver-root "$work/driver" "$library"
  # After the controller's part: what is staged has a controller, too.
  case $node in
    *pods*) "$top/hack/stage.sh" node-a=h100:16 ;;
  esac
  measure "$node"
fi
echo "-- figures in $json"

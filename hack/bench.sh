#!/usr/bin/env bash
# The node plugin's figures: as a table, and as one flat object in TARGET/bench.json. Takes about six
# minutes on two idle cores, builds not counted. Run hack/build.sh first (make bench does).
#
# Brings up a rig of its own (RIG_NAME, default bench) and ends it. BENCH_PARTS chooses from: start latency
# shares watchdog idle pods. BENCH_KEEP=1 leaves the rig up, and uses one that is.
set -euo pipefail
top="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
target="${CARGO_TARGET_DIR:-$top/target}"
library="$target/fake/release/libfake_nvml.so"
export RIG_NAME="${RIG_NAME:-bench}" RIG_NODES=1 RIG_FAKE_NVML="$library"
export BENCH_PARTS="${BENCH_PARTS:-start latency shares watchdog idle pods}"
rig="$top/hack/rig/rig"
for file in "$target/release/tranche" "$target/fake/release/fake-nvml" "$library" "$target/image/tranche.tar"; do
  [ -e "$file" ] || { echo "bench: $file is not there; run hack/build.sh first" >&2; exit 1; }
done

echo "-- bench program (release)"
CARGO_TARGET_DIR="$target" cargo build --release --locked --manifest-path "$top/benches/node/Cargo.toml"

# Short, because sockets lie below it; on the disk, because the ledger does.
work="$(mktemp -d "${TMPDIR:-/tmp}/tb-XXXX")"
down() {
  rm -rf --one-file-system "$work"
  [ "${BENCH_KEEP:-}" = 1 ] || "$rig" down
}
trap down EXIT
echo "-- a real cluster"
"$rig" up
"$rig" driver-root "$work/driver" "$library"
case $BENCH_PARTS in
  *pods*) "$top/hack/stage.sh" node-a=h100:16 ;;
esac

start=$SECONDS
# In namespaces of its own: MPS daemons and their mounts go with it, whatever becomes of the program. The first
# process in there is a shell, which clears away daemons that end.
# shellcheck disable=SC2016 # the inner shell's
KUBECONFIG="$("$rig" kubeconfig)" BENCH_WORK="$work" BENCH_JSON="$target/bench.json" \
  BENCH_DRIVER_ROOT="$work/driver" BENCH_FAKE_NVML="$target/fake/release/fake-nvml" \
  BENCH_TRANCHE="${BENCH_TRANCHE:-$target/release/tranche}" \
  timeout --signal=KILL 900 unshare --mount --pid --fork --kill-child --mount-proc \
  bash -c '"$0"; exit $?' "$target/release/node-bench"
echo "-- measured in $((SECONDS - start)) s; figures in $target/bench.json"

#!/usr/bin/env bash
# All tests: units and contracts, then the clusters. Ends with one table and one line,
# `N passed, N failed, N skipped`. What the clusters need is built while the units run.
#
#   hack/test.sh         what `make test` runs
#   hack/test.sh all     every test on every release that it can run on, those on a virtual machine, and the
#                        controller's long walk
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target="${CARGO_TARGET_DIR:-$PWD/target}"
releases="1.37.0 1.34.4" machine=()
if [[ ${1:-} == all ]]; then
  releases="1.37.0 1.36.3 1.34.4" machine=(machine)
  export TRANCHE_EVERYWHERE=1
fi
mkdir -p "$target"
export TRANCHE_RESULTS="$target/test-results.tsv"
: >"$TRANCHE_RESULTS"
begin=$SECONDS jobs=()

ended() {
  local rc=$? job
  trap - EXIT
  for job in "${jobs[@]}"; do kill -- "-$job" 2>/dev/null || true; done
  hack/summary.sh "$TRANCHE_RESULTS" || rc=1
  echo "-- all tests took $((SECONDS - begin)) s"
  exit "$rc"
}
trap ended EXIT

# Each in a process group of its own, so that its compilers end with it.
set -m
# shellcheck disable=SC2086
nice -n 5 hack/prefetch.sh driver helm prometheus $releases adapter "${machine[@]}" &
jobs+=($!)
nice -n 5 hack/build.sh &
jobs+=($!)
set +m
hack/test-unit.sh
for job in "${jobs[@]}"; do wait "$job"; done
jobs=()
TRANCHE_RELEASES="$releases" hack/test-cluster.sh
[[ ${1:-} != all ]] || make soak-walk

#!/usr/bin/env bash
# Runs the tests of tests/cluster on several rigs side by side: real clusters, some bare, some with the driver at
# work on simulated GPUs. Each test runs in a process of its own and has its rig to itself while it runs; the
# longest tests begin first. tests/cluster/plan.tsv says what each test needs.
#
#   hack/test-cluster.sh [NAME...]   only tests with one of these words in their names, such as sharing::
#
#   TRANCHE_RIGS         how many rigs at once; by default what memory and processors bear
#   TRANCHE_RELEASES     ("1.37.0 1.34.4") of Kubernetes. All that can run there run on the first; on the others
#                        the tests that depend on the release
#   TRANCHE_EVERYWHERE   1: all tests on every release that they can run on, and those on a virtual machine
#   TRANCHE_NODES        2: all rigs have two nodes of different GPUs. Otherwise some tests of one node run on such a
#                        rig and some do not, as it happens; this shows which of them take its only node for granted
#   RIG_NAME             (test) the rigs are RIG_NAME-1 and so on
#   TRANCHE_RESULTS      a file to which one row per group is added, for hack/summary.sh
#
# Rigs are brought down in the end. After a failure the rig's logs are kept, and the rig is replaced.
# Run hack/build.sh first.
set -euo pipefail
top="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$top"
target="${CARGO_TARGET_DIR:-$top/target}"
rig="$top/hack/rig/rig"
export RIG_FAKE_NVML="$target/fake/release/libfake_nvml.so"
name="${RIG_NAME:-test}"
read -ra releases <<<"${TRANCHE_RELEASES:-1.37.0 1.34.4}"
run="$target/test-cluster/$(date +%Y%m%d-%H%M%S)-$name"
mig=7=1g.10gb,1g.10gb,2g.20gb
spec=("node-a=h100:8:$mig" node-b=l40s:2) machine_spec=node-vm=h100:2
test_limit=1500 # seconds
begin=$SECONDS
workers=()

say() { printf '%s %s\n' "$(date +%T)" "$*"; }

# How many rigs: one needs up to 1.5 GiB and, while tests run on it, half a processor or more.
bearable() {
  local memory most=$(($(nproc) * 2))
  memory="$(awk '/^MemAvailable:/ {print int($2 / 1024 / 1536)}' /proc/meminfo)"
  ((memory < most)) && most=$memory
  echo $((most > 0 ? most : 1))
}

# One line per test and release: place, nodes, release, seconds, crowd or not, test.
plan() {
  awk -F '\t' -v releases="${releases[*]}" -v everywhere="${TRANCHE_EVERYWHERE:-}" -v words="$*" '
    BEGIN { count = split(releases, release, " "); wanted = split(words, word, " ") }
    FNR == NR { if ($0 !~ /^#/) row[$1] = $0; next }
    wanted { found = 0; for (i in word) found = found || index($0, word[i]); if (!found) next }
    {
      prefix = $0
      while (!(prefix in row)) prefix = substr(prefix, 1, length(prefix) - 1)
      split(row[prefix], field, "\t")
      if (field[3] == "vm" && !everywhere && !wanted) next
      minor_of = field[4]; sub(/^1\./, "", minor_of)
      for (i = 1; i <= count; i++) {
        split(release[i], part, ".")
        if (minor_of ~ /[+]$/ && part[2] < minor_of + 0) continue
        if (minor_of ~ /-$/ && part[2] > minor_of + 0) continue
        first = i == 1 || (minor_of ~ /-$/)
        if (first || everywhere || field[5] == "yes") print field[2], field[3], release[i], field[6], field[7] "-", $0
      }
    }' tests/cluster/plan.tsv -
}

# The queue is a folder: a test is a file that waits, and is taken by moving it.
fill_queue() {
  local place nodes release seconds crowd test
  mkdir -p "$run"/{waits,taken,at-work,logs}
  while read -r place nodes release seconds crowd test; do
    printf '%s %s\n' "$seconds" "$crowd" >"$run/waits/$(printf '%s.%s.%s.%04d.%s' "$release" "$place" "$nodes" $((9999 - seconds)) "$test")"
  done
}

# waiting PATTERN: the files that wait, longest test first.
# In a name `*` stands for anything, dots too; a release has two, and the rest of the name begins behind the fifth.
waiting() { find "$run/waits" -name "$1" -printf '%f\n' | sort -t . -k 6; }
seconds_waiting() { find "$run/waits" -name "$1" -exec cat {} + | awk '{sum += $1} END {print sum + 0}'; }

# take PATTERN: one test off the queue, its file's name. Fails when none waits. While a crowd is at work, another
# crowd waits: both at once would leave neither enough of the processors.
take() {
  local file mine crowds
  while :; do
    crowds=""
    while read -r file; do
      mine=""
      if is_crowd "$run/waits/$file"; then
        crowds=1
        mkdir "$run/crowd" 2>/dev/null || continue
        mine=1
      fi
      mv "$run/waits/$file" "$run/taken/$file" 2>/dev/null && echo "$file" && return
      [[ -z $mine ]] || rmdir "$run/crowd"
    done < <(waiting "$1")
    [[ -n $crowds ]] || return 1
    sleep 1
  done
}
is_crowd() { grep -q crowd "$1" 2>/dev/null; }

# skip_waiting PATTERN WHY: these tests cannot run here.
skip_waiting() {
  local file rest
  echo "SKIPPED: $2"
  while file="$(take "$1")"; do
    rest="${file#*.*.*.*.*.}"
    printf '%s\t%s\tskipped\t0\n' "${file%%.[bs]*}" "${rest#*.}" >>"$run/results.tsv"
  done
}

# choose N: which release worker N's next rig has, where most is left to do for each worker; and its nodes: 1, 2, or vm
# for a virtual machine. Fails when nothing is left for which another rig would be worth its start.
choose() {
  local release left others kind best=0 chosen="" nodes=1
  exec 9>"$run/lock"
  flock 9
  rm -f "$run/at-work/$1".*
  for release in "${releases[@]}"; do
    others="$(find "$run/at-work" -name "*.$release.*" | wc -l)"
    # One rig with two nodes is enough, and comes first. An emulated processor starves beside others: it comes last.
    kind=1 left="$(seconds_waiting "$release.*.1.*")"
    if [[ -n "$(waiting "$release.*.2.*")" && -z "$(find "$run/at-work" -name "*.$release.2")" ]]; then
      kind=2 left="$(seconds_waiting "$release.*.[12].*")"
    elif [[ -z "$(find "$run/waits" -type f ! -name "*.vm.*" -print -quit)" && -z "$(find "$run/at-work" -name "*.vm")" ]]; then
      kind=vm left="$(seconds_waiting "$release.*.vm.*")"
    fi
    ((left > 0)) || continue
    if [[ $kind == 1 ]] && ((others > 0 && left / others < 60)); then continue; fi
    left=$((left / (others + 1)))
    ((left > best)) && best=$left chosen=$release nodes=$kind
  done
  if [[ -n $chosen ]]; then
    touch "$run/at-work/$1.$chosen.$nodes"
    echo "$chosen $nodes"
  fi
  exec 9>&-
  [[ -n $chosen ]]
}

# What a failure leaves to read: every log of the rig, and what the cluster and the driver say.
keep_logs() {
  local to=$1 pod
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
}

# run_test RELEASE TEST: fails when the test does.
run_test() {
  local release=$1 test=$2 start=$SECONDS result log rc=0
  log="$run/logs/$release.$test.log"
  TRANCHE_RIG="$RIG_NAME" RUST_BACKTRACE=0 timeout --kill-after=10 "$test_limit" \
    "$program" --exact "$test" --ignored --nocapture --test-threads=1 >"$log" 2>&1 || rc=$?
  result=failed
  if ((rc == 0)) && grep -q '^test result: ok. 1 passed' "$log"; then
    result=passed
    ! grep -q '^SKIPPED: ' "$log" || result=skipped
  fi
  ((rc != 124)) || echo "ended after $test_limit s" >>"$log"
  printf '%s\t%s\t%s\t%s\n' "$release" "$test" "$result" $((SECONDS - start)) >>"$run/results.tsv"
  say "$(wc -l <"$run/results.tsv") of $count: $RIG_NAME $release $result $((SECONDS - start)) s $test"
  [[ $result == failed ]] || return 0
  grep -E "panicked at|^ended" -A 6 "$log" | head -n 12 >&2 || true
  keep_logs "$run/failed/$release.$test"
  return 1
}

# drain PATTERN...: runs what waits in these parts of the queue. Fails after a test that failed: nobody knows in
# what state the rig is then.
drain() {
  local pattern file rest rc
  for pattern in "$@"; do
    while file="$(take "$pattern")"; do
      rest="${file#*.*.*.*.*.}"
      rc=0
      run_test "${pattern%%.[bs]*}" "${rest#*.}" || rc=1
      ! is_crowd "$run/taken/$file" || rmdir "$run/crowd"
      ((rc == 0)) || return 1
    done
  done
}

# One rig after another until nothing is left.
worker() {
  local n=$1 release nodes choice start part parts bare staged nodes_spec
  export RIG_NAME="$name-$n"
  trap 'rm -f "$run/at-work/$n".*; "$rig" down 2>/dev/null || true' EXIT
  trap 'exit 143' TERM
  # A rig of this name that somebody left is not the one that is wanted.
  "$rig" down 2>/dev/null
  while choice="$(choose "$n")"; do
    read -r release nodes <<<"$choice"
    export RIG_K8S=$release RIG_NODES=$nodes RIG_MACHINE=""
    nodes_spec=("${spec[@]}") bare=("$release.bare.1.*") parts=("$release.staged.1.*")
    case $nodes in
      1) if [[ ${TRANCHE_NODES:-1} == 2 ]]; then RIG_NODES=2; else nodes_spec=("${spec[0]}"); fi ;;
      2) parts=("$release.staged.2.*" "${parts[@]}") ;;
      vm)
        RIG_NODES=0 RIG_MACHINE=1
        nodes_spec=("$machine_spec") bare=() parts=("$release.staged.vm.*")
        ;;
    esac
    start=$SECONDS
    "$rig" up >"$run/logs/$RIG_NAME.up.log" 2>&1 ||
      { cat "$run/logs/$RIG_NAME.up.log" >&2; return 1; }
    say "$RIG_NAME: Kubernetes $release is up (nodes: $RIG_NODES) after $((SECONDS - start)) s"
    if drain "${bare[@]}"; then
      staged=""
      for part in "${parts[@]}"; do [[ -z "$(waiting "$part")" ]] || staged=1; done
      if [[ -n $staged ]]; then
        start=$SECONDS
        # The oldest has the chart, as most install it; the others the plain manifests.
        STAGE_BY="$([[ $release == "${releases[-1]}" && ${#releases[@]} -gt 1 ]] && echo chart || echo manifests)" \
          hack/stage.sh "${nodes_spec[@]}" >"$run/logs/$RIG_NAME.stage.log" 2>&1 ||
          { cat "$run/logs/$RIG_NAME.stage.log" >&2; keep_logs "$run/failed/stage-$RIG_NAME"; return 1; }
        say "$RIG_NAME: the driver is staged after $((SECONDS - start)) s"
        drain "${parts[@]}" || true
      fi
    fi
    "$rig" down 2>/dev/null
  done
}

ended() {
  local rc=$? pid
  trap - EXIT INT TERM
  for pid in "${workers[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done
  wait || true
  exit "$rc"
}

report() {
  local left failed=0
  touch "$run/results.tsv"
  # What nobody came to run has not passed.
  find "$run/waits" -type f -printf '%f\n' |
    sed -E 's/^(([0-9]+[.]){2}[0-9]+)([.][^.]*){3}[.](.*)$/\1\t\4\tfailed\t0/' >"$run/left.tsv"
  cat "$run/left.tsv" >>"$run/results.tsv"
  echo
  echo "the longest tests:"
  # To the end of the list: with `head`, sort would die of what nobody reads, and the script of that.
  sort -t $'\t' -k 4,4nr "$run/results.tsv" | awk -F '\t' 'NR <= 10 {printf "%6d s  %s %s\n", $4, $1, $2}'
  awk -F '\t' -v OFS='\t' '
    { group = $2; sub(/::.*/, "", group); key = group OFS $1; all[key]; n[key, $3]++; s[key] += $4 }
    END { for (key in all) print "cluster " key, n[key, "passed"] + 0, n[key, "failed"] + 0, n[key, "skipped"] + 0, s[key] }
  ' "$run/results.tsv" | sort >"$run/groups.tsv"
  [[ -z ${TRANCHE_RESULTS:-} ]] || cat "$run/groups.tsv" >>"$TRANCHE_RESULTS"
  while IFS=$'\t' read -r release test result _; do
    [[ $result == failed ]] || continue
    failed=1
    if grep -qxF "$release"$'\t'"$test"$'\tfailed\t0' "$run/left.tsv"; then
      echo "not run: $release $test"
    else
      echo "failed: $release $test: $run/logs/$release.$test.log; the rig's logs: $run/failed/$release.$test"
    fi
  done <"$run/results.tsv"
  [[ -n ${TRANCHE_RESULTS:-} ]] || hack/summary.sh "$run/groups.tsv" || true
  echo "-- cluster tests: $((SECONDS - begin)) s on $rigs rigs"
  return "$failed"
}

# Brings jq, too, among the packages that a rig needs.
RIG_K8S="${releases[0]}" "$rig" build
program="$(cargo test --locked --test cluster --no-run --message-format=json-render-diagnostics |
  jq -r 'select(.reason == "compiler-artifact" and .profile.test and .target.name == "cluster").executable')"
[[ -x $program ]] || { echo "test-cluster: cargo names no test program" >&2; exit 1; }
rigs="${TRANCHE_RIGS:-$(bearable)}"
"$program" --list --ignored | sed -n 's/: test$//p' | plan "$@" | fill_queue
count="$(find "$run/waits" -type f | wc -l)"
((count > 0)) || { echo "test-cluster: no test has one of these words in its name: $*" >&2; exit 1; }
((rigs <= count)) || rigs=$count
# Once, and not by each worker for itself.
for release in "${releases[@]}"; do
  [[ -z "$(waiting "$release.*")" ]] || RIG_K8S="$release" "$rig" build
done
if [[ -n "$(waiting "*.autoscaling::*")" ]]; then
  "$rig" build-prometheus >/dev/null
  "$rig" build-adapter >/dev/null
fi
if [[ -n "$(waiting "*.staged.vm.*")" ]]; then
  rc=0
  "$rig" build-machine || rc=$?
  case $rc in
    0) ;;
    4) skip_waiting "*.staged.vm.*" "a virtual machine cannot be had here; rig build-machine says why" ;;
    *) exit "$rc" ;;
  esac
fi
say "$count tests on $rigs rigs; logs are in $run/logs"
trap ended EXIT
trap 'exit 130' INT TERM
set -m
for ((n = 1; n <= rigs; n++)); do
  worker "$n" &
  workers+=($!)
done
set +m
for pid in "${workers[@]}"; do wait "$pid" || say "a rig could not be had; the others go on"; done
report

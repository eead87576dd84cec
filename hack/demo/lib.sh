# What every part of the demo uses. Sourced.
# shellcheck shell=bash
top="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
rig="$top/hack/rig/rig"
# shellcheck disable=SC2034 # for those who source this
target="${CARGO_TARGET_DIR:-$top/target}"
kubectl() { "$rig" kubectl "$@"; }
fail() { printf 'demo: %s\n' "$*" >&2; exit 1; }

# until_true SECONDS WHAT COMMAND...: polls.
until_true() {
  local deadline=$((SECONDS + $1)) what="$2"
  shift 2
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$deadline" ] || fail "not seen: $what"
    sleep 0.3
  done
}

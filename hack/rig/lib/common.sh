# Shared by every script of the rig: where things lie, messages, the cache and
# the Debian packages the rig needs. Sourced, never run. Touches nothing by itself
# but, in need_pkgs, installs Debian packages that are absent.
# shellcheck shell=bash disable=SC2034

RIG_HOME="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
CACHE="${TRANCHE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/tranche}"

ETCD_VERSION=3.7.3
CONTAINERD_VERSION=2.4.2
HELM_VERSION=3.22.0
ADAPTER_LIBRARY_VERSION=1.37.0
DRIVER_VERSION=550.163.01
# What RIG_K8S may say. The first is the default.
K8S_RELEASES=(1.37.0 1.36.3 1.34.4)
RIG_K8S="${RIG_K8S:-${K8S_RELEASES[0]}}"

say() { printf 'rig: %s\n' "$*" >&2; }
die() {
  printf 'rig: error: %s\n' "$*" >&2
  exit 1
}

# within SECONDS CMD...: runs CMD ten times a second until it succeeds.
within() {
  local end=$((SECONDS + $1))
  shift
  until "$@" >/dev/null 2>&1; do
    ((SECONDS < end)) || return 1
    sleep 0.1
  done
}

# until_ok SECONDS WHAT CMD...: the same, and says what was waited for in vain.
until_ok() {
  local limit=$1 what=$2
  shift 2
  within "$limit" "$@" && return 0
  printf "rig: error: waited %s s in vain for %s\n" "$limit" "$what" >&2
  return 1
}

# in_cache NAME/VERSION MAKER ARGS...: makes $CACHE/NAME/VERSION once. MAKER is
# called with an empty folder as its first argument; only when it succeeds does
# the folder take its final name, so a half-made entry is never seen. A lock
# keeps two rigs from making the same thing twice.
in_cache() {
  local key=$1 maker=$2 final="$CACHE/$1" tmp start rc
  shift 2
  [[ -d $final ]] && return 0
  mkdir -p "$(dirname "$final")" "$CACHE/locks"
  exec 8>"$CACHE/locks/${key//\//_}"
  if ! flock -n 8; then
    say "$key is being made by another rig; waiting"
    flock 8
  fi
  if [[ ! -d $final ]]; then
    say "making $key"
    start=$SECONDS
    tmp="$(mktemp -d "$(dirname "$final")/.tmp.XXXXXX")"
    chmod 755 "$tmp"
    rc=0
    # In the background, because bash drops `set -e` on the left of a ||.
    (set -e; "$maker" "$tmp" "$@") 8>&- &
    wait $! || rc=$?
    if ((rc != 0)); then
      chmod -R u+w "$tmp" 2>/dev/null || true
      rm -rf "$tmp"
      exec 8>&-
      die "could not make $key (exit $rc); the lines above say why"
    fi
    mv -T "$tmp" "$final"
    say "made $key in $((SECONDS - start)) s ($(du -sh "$final" | cut -f1))"
  fi
  exec 8>&-
}

# need_pkgs PACKAGE...: Debian packages; the package lists are fetched only when
# an install without that fails.
need_pkgs() {
  local missing=() p
  for p in "$@"; do
    [[ "$(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null || true)" == installed ]] || missing+=("$p")
  done
  ((${#missing[@]})) || return 0
  [[ $EUID -eq 0 ]] || die "Debian packages are missing and only root can install them: apt-get install ${missing[*]}"
  say "installing Debian packages: ${missing[*]}"
  local log
  log="$(mktemp)"
  # -o DPkg::Lock::Timeout: another apt on the machine is waited for.
  local opts=(-y -q --no-install-recommends -o DPkg::Lock::Timeout=120)
  if ! DEBIAN_FRONTEND=noninteractive apt-get install "${opts[@]}" "${missing[@]}" >"$log" 2>&1; then
    apt-get update -q -o DPkg::Lock::Timeout=120 >>"$log" 2>&1 || {
      tail -n 20 "$log" >&2
      die "apt-get update failed; is there a Debian mirror in /etc/apt?"
    }
    DEBIAN_FRONTEND=noninteractive apt-get install "${opts[@]}" "${missing[@]}" >>"$log" 2>&1 || {
      tail -n 20 "$log" >&2
      die "could not install: ${missing[*]}"
    }
  fi
  rm -f "$log"
}

need_go() {
  command -v go >/dev/null 2>&1 || die "go is not on PATH; install Go (https://go.dev/dl), the release's own version or newer"
}

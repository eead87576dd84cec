#!/usr/bin/env bash
# Packs the program as the kubectl plugin: an archive with kubectl-tranche, the program by which kubectl completes its
# words (kubectl_complete-tranche), and the license, as krew wants it.
#
#   plugin.sh VERSION ARCH PROGRAM OUT_DIR     writes OUT_DIR/kubectl-tranche-VERSION-linux-ARCH.tar.gz, prints its path
#
# The same input gives the same bytes.
set -euo pipefail
top="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
(($# == 4)) || {
  echo "usage: plugin.sh VERSION ARCH PROGRAM OUT_DIR" >&2
  exit 2
}
out="$4/kubectl-tranche-$1-linux-$2.tar.gz"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
install -m 755 "$3" "$work/kubectl-tranche"
install -m 755 "$top/hack/release/kubectl_complete-tranche" "$work/kubectl_complete-tranche"
install -m 644 "$top/LICENSE" "$work/LICENSE"
tar --create --directory "$work" --sort=name --format=gnu --mtime=@0 --owner=0 --group=0 --numeric-owner \
  LICENSE kubectl-tranche kubectl_complete-tranche | gzip -n -9 >"$out"
printf '%s\n' "$out"

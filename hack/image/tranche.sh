#!/usr/bin/env bash
# Assembles Tranche's container image from a built binary, without an engine.
#
#   tranche.sh BINARY OUT.tar [NAME:TAG]
#
# The image (docker.io/local/tranche:dev unless named) holds the binary, the
# shared libraries it is linked with, and the parts of the GNU C library that the
# driver's libnvidia-ml.so.1 asks for when it is opened: no shell, no packages.
# Touches only OUT.tar and a temporary folder. Dockerfile beside it makes the
# same content where there is an engine.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=hack/image/libs.sh
. "$here/libs.sh"

(($# == 2 || $# == 3)) || {
  echo "usage: tranche.sh BINARY OUT.tar [NAME:TAG]" >&2
  exit 2
}
binary=$1 out=$2 name=${3:-docker.io/local/tranche:dev}
[[ -x $binary ]] || {
  echo "tranche.sh: error: no program at $binary; build it first (cargo build --release)" >&2
  exit 1
}

root="$(mktemp -d)"
trap 'rm -rf "$root"' EXIT
chmod 755 "$root"
usr_merge "$root"
mkdir -p "$root"/{etc,run,tmp,proc,sys,dev,var}
chmod 1777 "$root/tmp"
ln -s ../run "$root/var/run"
install -m 755 "$binary" "$root/usr/bin/tranche"
copy_runtime "$root" "$binary"
printf 'root:x:0:0:root:/:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/:/sbin/nologin\n' >"$root/etc/passwd"
printf 'root:x:0:\nnonroot:x:65532:\n' >"$root/etc/group"
printf 'hosts: files dns\n' >"$root/etc/nsswitch.conf"
chmod 644 "$root/etc"/*

"$here/oci.sh" "$root" "$name" "$out" --entrypoint '["/usr/bin/tranche"]'
printf 'unpacked %s, compressed %s\n' "$(du -sh "$root" | cut -f1)" "$(du -h "$out" | cut -f1)"

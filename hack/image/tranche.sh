#!/usr/bin/env bash
# Assembles Tranche's container image from a built binary, without an engine.
#
#   tranche.sh BINARY OUT.tar [NAME:TAG]     the image, as an OCI-layout tar
#   tranche.sh --rootfs DIR BINARY           only its files, into DIR (the Dockerfile's way)
#
# The image (docker.io/local/tranche:dev unless named) is for the architecture
# of the binary. It holds the binary, the shared libraries it is linked with, and the parts of the GNU C library that the
# driver's libnvidia-ml.so.1 asks for when it is opened: no shell, no packages.
# Touches only OUT.tar or DIR, and a temporary folder.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=hack/image/libs.sh
. "$here/libs.sh"

fill() { # fill ROOT BINARY
  local root=$1 binary=$2
  [[ -x $binary ]] || {
    echo "tranche.sh: error: no program at $binary; build it first (cargo build --release)" >&2
    exit 1
  }
  arch="$(arch_of "$binary")" FOREIGN=""
  [[ $arch == "$(own_arch)" ]] || FOREIGN="$(gnu_of "$arch")"
  chmod 755 "$root"
  usr_merge "$root"
  mkdir -p "$root"/{etc,run,tmp,proc,sys,dev,var}
  chmod 1777 "$root/tmp"
  ln -sfn ../run "$root/var/run"
  install -m 755 "$binary" "$root/usr/bin/tranche"
  copy_runtime "$root" "$binary"
  printf 'root:x:0:0:root:/:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/:/sbin/nologin\n' >"$root/etc/passwd"
  printf 'root:x:0:\nnonroot:x:65532:\n' >"$root/etc/group"
  printf 'hosts: files dns\n' >"$root/etc/nsswitch.conf"
  chmod 644 "$root/etc"/*
}

if [[ ${1:-} == --rootfs && $# -eq 3 ]]; then
  mkdir -p "$2"
  fill "$2" "$3"
  exit
fi
(($# == 2 || $# == 3)) || {
  echo "usage: tranche.sh BINARY OUT.tar [NAME:TAG] | tranche.sh --rootfs DIR BINARY" >&2
  exit 2
}
root="$(mktemp -d)"
trap 'rm -rf "$root"' EXIT
fill "$root" "$1"
"$here/oci.sh" "$root" "${3:-docker.io/local/tranche:dev}" "$2" --arch "$arch" --entrypoint '["/usr/bin/tranche"]'
printf 'unpacked %s, compressed %s\n' "$(du -sh "$root" | cut -f1)" "$(du -h "$2" | cut -f1)"

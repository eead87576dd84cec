#!/usr/bin/env bash
# Puts images of one name for several architectures under one OCI index, as one OCI-layout tar: what a registry then
# gives each node by its architecture.
#
#   index.sh NAME:TAG OUT.tar IMAGE.tar...     the images as oci.sh makes them
#
# The same input gives the same bytes. OUT.tar is written whole or not at all; nothing else is touched but a temporary
# folder.
set -euo pipefail

die() {
  printf 'index.sh: error: %s\n' "$*" >&2
  exit 1
}

(($# >= 3)) || die "usage: index.sh NAME:TAG OUT.tar IMAGE.tar..."
name=$1 out=$2
shift 2
[[ ${name##*/} == *:* ]] || die "image name $name has no tag; write $name:TAG"
command -v jq >/dev/null || die "jq is not on PATH; install it (Debian: apt-get install jq)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/layout/blobs/sha256"

for image in "$@"; do
  mkdir "$work/image"
  tar --extract --file "$image" --directory "$work/image"
  jq -e '.manifests | length == 1' "$work/image/index.json" >/dev/null || die "$image does not hold one image"
  jq -c '.manifests[0] | del(.annotations)' "$work/image/index.json" >>"$work/manifests"
  cp "$work/image/blobs/sha256"/* "$work/layout/blobs/sha256/"
  rm -r "$work/image"
done
twice="$(jq -r .platform.architecture "$work/manifests" | sort | uniq -d)"
[[ -z $twice ]] || die "two images are for $twice"
jq -sc '{schemaVersion: 2, mediaType: "application/vnd.oci.image.index.v1+json",
  manifests: sort_by(.platform.architecture)}' "$work/manifests" >"$work/index.json"
digest="$(sha256sum "$work/index.json" | cut -d' ' -f1)"
jq -cn --arg d "sha256:$digest" --argjson s "$(stat -c %s "$work/index.json")" --arg name "$name" \
  '{schemaVersion: 2, mediaType: "application/vnd.oci.image.index.v1+json",
    manifests: [{mediaType: "application/vnd.oci.image.index.v1+json", digest: $d, size: $s,
      annotations: {"io.containerd.image.name": $name,
        "org.opencontainers.image.ref.name": ($name | split(":") | last)}}]}' \
  >"$work/layout/index.json"
mv "$work/index.json" "$work/layout/blobs/sha256/$digest"
printf '{"imageLayoutVersion":"1.0.0"}\n' >"$work/layout/oci-layout"

mkdir -p "$(dirname "$out")"
chmod -R u=rwX,go=rX "$work/layout"
tar --create --directory "$work/layout" --sort=name --format=gnu --mtime=@0 \
  --owner=0 --group=0 --numeric-owner . >"$work/out.tar"
tmp="$(mktemp "$(dirname "$out")/.oci.XXXXXX")"
trap 'rm -rf "$work" "$tmp"' EXIT
cat "$work/out.tar" >"$tmp"
chmod 644 "$tmp"
mv -f "$tmp" "$out"
printf '%s: %s, %s, index sha256:%s\n' "$out" "$name" "$(jq -sr 'map(.platform.architecture) | sort | join(" ")' "$work/manifests")" "$digest"

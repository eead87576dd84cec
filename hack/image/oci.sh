#!/usr/bin/env bash
# Assembles a container image as an OCI-layout tar, without a container engine.
#
#   oci.sh ROOTFS_DIR NAME:TAG OUT.tar [--entrypoint JSON] [--cmd JSON]
#          [--env K=V]... [--user UID[:GID]] [--label K=V]... [--arch amd64|arm64]
#
# One gzip layer holds ROOTFS_DIR. The same input gives the same bytes: entries
# are sorted, times are the epoch, owners are 0:0. OUT.tar is written whole or not
# at all; nothing else is touched but a temporary folder.
set -euo pipefail

die() {
  printf 'oci.sh: error: %s\n' "$*" >&2
  exit 1
}

(($# >= 3)) || die "usage: oci.sh ROOTFS_DIR NAME:TAG OUT.tar [--entrypoint JSON] [--cmd JSON] [--env K=V]... [--user UID] [--label K=V]... [--arch ARCH]"
rootfs=$1 name=$2 out=$3
shift 3
[[ -d $rootfs ]] || die "no folder $rootfs"
[[ ${name##*/} == *:* ]] || die "image name $name has no tag; write $name:TAG"
command -v jq >/dev/null || die "jq is not on PATH; install it (Debian: apt-get install jq)"

entrypoint=null cmd=null user="" arch="" envs=(PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin) labels='{}'
while (($#)); do
  (($# >= 2)) || die "$1 lacks its value"
  case $1 in
    --entrypoint) entrypoint=$2 ;;
    --cmd) cmd=$2 ;;
    --env) envs+=("$2") ;;
    --user) user=$2 ;;
    --arch) arch=$2 ;;
    --label) labels="$(jq -c --arg k "${2%%=*}" --arg v "${2#*=}" '.[$k] = $v' <<<"$labels")" ;;
    *) die "unknown option $1" ;;
  esac
  shift 2
done

# The full name, as container runtimes write it.
host=${name%%/*}
if [[ $name != */* ]]; then
  name=docker.io/library/$name
elif [[ $host != *.* && $host != *:* && $host != localhost ]]; then
  name=docker.io/$name
fi

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=hack/image/libs.sh
. "$here/libs.sh"
arch="${arch:-$(own_arch)}"

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
blobs="$work/layout/blobs/sha256"
mkdir -p "$blobs"

pack() { # pack DIR: a tar that depends on nothing but names, modes and contents
  tar --create --directory "$1" --sort=name --format=gnu --mtime=@0 \
    --owner=0 --group=0 --numeric-owner .
}
blob() { # blob FILE: moves FILE among the blobs, sets digest and size
  digest="$(sha256sum "$1" | cut -d' ' -f1)"
  size="$(stat -c %s "$1")"
  mv "$1" "$blobs/$digest"
}

pack "$rootfs" >"$work/layer.tar"
diff_id="$(sha256sum "$work/layer.tar" | cut -d' ' -f1)"
gzip -n -6 <"$work/layer.tar" >"$work/layer.gz"
rm "$work/layer.tar"
blob "$work/layer.gz"
layer_digest=$digest layer_size=$size

jq -cn --arg arch "$arch" --arg diff "sha256:$diff_id" --arg user "$user" \
  --argjson entrypoint "$entrypoint" --argjson cmd "$cmd" --argjson labels "$labels" \
  '{architecture: $arch, os: "linux", created: "1970-01-01T00:00:00Z",
    config: ({Env: $ARGS.positional, WorkingDir: "/"}
      + (if $user == "" then {} else {User: $user} end)
      + (if $entrypoint then {Entrypoint: $entrypoint} else {} end)
      + (if $cmd then {Cmd: $cmd} else {} end)
      + (if $labels == {} then {} else {Labels: $labels} end)),
    rootfs: {type: "layers", diff_ids: [$diff]}}' --args "${envs[@]}" >"$work/config.json"
blob "$work/config.json"
config_digest=$digest config_size=$size

jq -cn --arg cd "sha256:$config_digest" --argjson cs "$config_size" \
  --arg ld "sha256:$layer_digest" --argjson ls "$layer_size" \
  '{schemaVersion: 2, mediaType: "application/vnd.oci.image.manifest.v1+json",
    config: {mediaType: "application/vnd.oci.image.config.v1+json", digest: $cd, size: $cs},
    layers: [{mediaType: "application/vnd.oci.image.layer.v1.tar+gzip", digest: $ld, size: $ls}]}' \
  >"$work/manifest.json"
blob "$work/manifest.json"

jq -cn --arg d "sha256:$digest" --argjson s "$size" --arg name "$name" --arg arch "$arch" \
  '{schemaVersion: 2, mediaType: "application/vnd.oci.image.index.v1+json",
    manifests: [{mediaType: "application/vnd.oci.image.manifest.v1+json", digest: $d, size: $s,
      platform: {architecture: $arch, os: "linux"},
      annotations: {"io.containerd.image.name": $name,
        "org.opencontainers.image.ref.name": ($name | split(":") | last)}}]}' \
  >"$work/layout/index.json"
printf '{"imageLayoutVersion":"1.0.0"}\n' >"$work/layout/oci-layout"

mkdir -p "$(dirname "$out")"
tmp="$(mktemp "$(dirname "$out")/.oci.XXXXXX")"
trap 'rm -rf "$work" "$tmp"' EXIT
chmod -R u=rwX,go=rX "$work/layout"
pack "$work/layout" >"$tmp"
chmod 644 "$tmp"
mv -f "$tmp" "$out"
printf '%s: %s, layer %s bytes compressed, manifest sha256:%s\n' "$out" "$name" "$layer_size" "$digest"

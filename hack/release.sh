#!/usr/bin/env bash
# Makes what a release consists of, and pushes nothing anywhere.
#
#   hack/release.sh VERSION [--url URL] [--homepage URL] [--image REPOSITORY]
#
#   --url        where the plugin's archives will lie (https://example.invalid/tranche/VERSION)
#   --homepage   for the krew manifest (the same without VERSION)
#   --image      the image's name without its tag (docker.io/local/tranche), also the chart's image.repository
#   RELEASE_ARCHES  ("amd64 arm64") what to build for; what cannot be built here is named in the end
#
# Into target/release-VERSION, which is made anew:
#   tranche-VERSION-linux-ARCH.oci.tar   the image for one architecture, an OCI layout
#   tranche-VERSION.oci.tar              all of them under one OCI index
#   tranche-VERSION.tgz                  the chart
#   kubectl-tranche-VERSION-linux-ARCH.tar.gz, tranche.yaml   the kubectl plugin with its completion, and its krew manifest
#   notes.md                             what CHANGELOG.md says of this version
#   SHA256SUMS
set -euo pipefail
top="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$top"
parts=hack/release
# shellcheck source=hack/image/libs.sh
. hack/image/libs.sh

die() {
  printf 'release: error: %s\n' "$*" >&2
  exit 1
}

(($#)) || die "usage: release.sh VERSION [--url URL] [--homepage URL] [--image REPOSITORY]"
version=$1 url="" homepage=https://example.invalid/tranche repository=docker.io/local/tranche
shift
while (($#)); do
  (($# >= 2)) || die "$1 lacks its value"
  case $1 in
    --url) url=$2 ;;
    --homepage) homepage=$2 ;;
    --image) repository=$2 ;;
    *) die "unknown option $1" ;;
  esac
  shift 2
done
url="${url:-https://example.invalid/tranche/$version}"
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.-]+)?$ ]] || die "$version is no version; one is 1.2.3 or 1.2.3-rc.1"
notes="$("$parts/notes.sh" "$version")"
program="$(sed -n 's/^version = "\(.*\)"/\1/p;T;q' Cargo.toml)"
[[ $program == "$version" ]] || die "Cargo.toml has version $program, not $version; the program would say so"

target="${CARGO_TARGET_DIR:-$top/target}"
out="$target/release-$version"
rm -rf "$out"
mkdir -p "$out"
missing=()

# The program names its commit, and cargo does not look at commits by itself.
TRANCHE_RELEASE_COMMIT="$(git rev-parse HEAD 2>/dev/null || echo unknown)"
export TRANCHE_RELEASE_COMMIT

# build ARCH: sets `binary`, or `why` there is none.
build() {
  local arch=$1 gnu triple name
  binary="" why=""
  if [[ $arch == "$(own_arch)" ]]; then
    cargo build --profile published --locked --bin tranche || die "the program does not build"
    binary="$target/published/tranche"
    return
  fi
  gnu="$(gnu_of "$arch")"
  [[ -n $gnu ]] || die "RELEASE_ARCHES: what is $arch? It is amd64 or arm64"
  triple="${gnu/-linux-/-unknown-linux-}"
  name="${triple//-/_}"
  if ! command -v "$gnu-gcc" >/dev/null; then
    why="there is no $gnu-gcc to compile and link for it; Debian: apt-get install gcc-${gnu//_/-} libc6-dev-$arch-cross"
  elif [[ ! -d "$(rustc --print sysroot)/lib/rustlib/$triple/lib" ]] && ! rustup target add "$triple"; then
    why="Rust's standard library for it cannot be had; the line above says why (rustup target add $triple)"
  else
    env "CC_$name=$gnu-gcc" "CARGO_TARGET_${name^^}_LINKER=$gnu-gcc" \
      cargo build --profile published --locked --bin tranche --target "$triple" ||
      die "the program does not build for $arch"
    binary="$target/$triple/published/tranche"
  fi
}

images=() archives=()
for arch in ${RELEASE_ARCHES:-amd64 arm64}; do
  echo "-- $arch"
  build "$arch"
  if [[ -n $why ]]; then
    missing+=("$arch: not built, because $why")
    continue
  fi
  # Where it can run, it has to say the same.
  if [[ $arch == "$(own_arch)" ]]; then
    said="$("$binary" --version)"
    [[ $said == "tranche $version (${TRANCHE_RELEASE_COMMIT:0:12})" ]] || die "$binary is $said, not $version of the commit that is checked out"
  fi
  image="$out/tranche-$version-linux-$arch.oci.tar"
  hack/image/tranche.sh "$binary" "$image" "$repository:$version"
  images+=("$image")
  archives+=("$("$parts/plugin.sh" "$version" "$arch" "$binary" "$out")")
done
((${#images[@]})) || die "nothing was built: ${missing[*]}"

echo "-- index, chart, manifest, notes"
hack/image/index.sh "$repository:$version" "$out/tranche-$version.oci.tar" "${images[@]}"
HELM="${HELM:-$(hack/rig/rig build-helm)}" "$parts/chart.sh" "$version" "$repository" "$out" >/dev/null
"$parts/krew.sh" "$version" "$url" "$homepage" "${archives[@]}" >"$out/tranche.yaml"
printf '%s\n' "$notes" >"$out/notes.md"
sums="$(cd "$out" && sha256sum -- *)"
printf '%s\n' "$sums" >"$out/SHA256SUMS"

echo "-- $out"
find "$out" -type f -printf '%10s  %f\n' | sort -k 2
((${#missing[@]} == 0)) || printf '%s\n' "${missing[@]}"
! grep -qx "## $version (unreleased)" CHANGELOG.md || echo "CHANGELOG.md still calls $version unreleased: write the date before you publish"
[[ -z "$(git status --porcelain 2>/dev/null)" ]] || echo "the working tree has changes that are in no commit: do not publish this"
echo "nothing was pushed"

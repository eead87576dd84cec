#!/usr/bin/env bash
# Prints the manifest of `kubectl krew` for these archives, from the template beside this file.
#
#   krew.sh VERSION URL HOMEPAGE ARCHIVE...     the archives as plugin.sh makes them; they will lie below URL
set -euo pipefail
template="$(dirname "${BASH_SOURCE[0]}")/krew.yaml"
(($# >= 4)) || {
  echo "usage: krew.sh VERSION URL HOMEPAGE ARCHIVE..." >&2
  exit 2
}
version=$1 url=${2%/} homepage=$3
shift 3

# fill NAME VALUE...: replaces each @NAME@, VALUE taken as it is.
fill() {
  local text
  text="$(cat)"
  while (($#)); do
    text="${text//"@$1@"/"$2"}"
    shift 2
  done
  printf '%s\n' "$text"
}

sed -e '/^#/d' -e '/^  platforms:$/q' "$template" | fill VERSION "$version" HOMEPAGE "$homepage"
for archive in "$@"; do
  name="${archive##*/}" arch="${archive##*-linux-}"
  sha="$(sha256sum "$archive")"
  sed '1,/^  platforms:$/d' "$template" |
    fill ARCH "${arch%.tar.gz}" URL "$url" ARCHIVE "$name" SHA256 "${sha%% *}"
done

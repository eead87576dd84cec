#!/usr/bin/env bash
# Packs the chart with a version, which is that of the image, too.
#
#   chart.sh VERSION REPOSITORY OUT_DIR     writes OUT_DIR/tranche-VERSION.tgz; HELM names the helm to use (default: helm)
#
# REPOSITORY is the image's name without the tag, and the default of the value `image.repository`.
set -euo pipefail
top="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
(($# == 3)) || {
  echo "usage: chart.sh VERSION REPOSITORY OUT_DIR" >&2
  exit 2
}
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cp -r "$top/charts/tranche" "$work/"
values="$work/tranche/values.yaml"
awk -v repository="$2" '
  /^image:$/ { image = 1 }
  image && /^  #/ && !done { next }
  image && /^  repository: / && !done { print "  repository: " repository; done = 1; next }
  { print }' "$top/charts/tranche/values.yaml" >"$values"
grep -qxF "  repository: $2" "$values" || {
  echo "release: error: charts/tranche/values.yaml has no line for image.repository" >&2
  exit 1
}
"${HELM:-helm}" package "$work/tranche" --version "$1" --app-version "$1" --destination "$3" >/dev/null
printf '%s\n' "$3/tranche-$1.tgz"

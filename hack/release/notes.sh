#!/usr/bin/env bash
# Prints what CHANGELOG.md says of one version, without its heading.
#
#   notes.sh VERSION [CHANGELOG]     fails in words when the version is not there or nothing is said of it
set -euo pipefail
(($# == 1 || $# == 2)) || {
  echo "usage: notes.sh VERSION [CHANGELOG]" >&2
  exit 2
}
changelog="${2:-$(dirname "${BASH_SOURCE[0]}")/../../CHANGELOG.md}"
awk -v version="$1" '
  /^## / { inside = $2 == version; found = found || inside; others = others (others ? ", " : "") $2; next }
  inside { text = text $0 "\n" }
  END {
    error = "release: error: CHANGELOG.md "
    if (!found) {
      print error "has no version " version "; it has: " others ". Write a heading \"## " version "\" with what changed" >"/dev/stderr"
      exit 1
    }
    gsub(/^\n+|\n+$/, "", text)
    if (text == "") { print error "says nothing of version " version >"/dev/stderr"; exit 1 }
    print text
  }' "$changelog"

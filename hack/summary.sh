#!/usr/bin/env bash
# Prints what test scripts found as one table, then the sum in one line. Fails if a test failed.
#
#   hack/summary.sh FILE     with one row per group: group, release, passed, failed, skipped, seconds; by tabs
set -euo pipefail
awk -F '\t' '
  BEGIN {
    form = "%-28s %-8s %7s %7s %8s %8s\n"
    printf "\n" form, "GROUP", "RELEASE", "PASSED", "FAILED", "SKIPPED", "SECONDS"
  }
  { printf form, $1, $2, $3, $4, $5, $6; passed += $3; failed += $4; skipped += $5 }
  END {
    printf "\n%d passed, %d failed, %d skipped\n", passed, failed, skipped
    exit failed > 0
  }' "$1"

#!/usr/bin/env bash
# Brings into the cache what takes long to make, so that it is made while other things are compiled. Whoever needs a
# part that is still being made waits for it by the rig's locks.
#
#   hack/prefetch.sh WHAT...      driver, helm, promtool, prometheus, adapter, machine, or a release of Kubernetes with all that its cluster needs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for what in "$@"; do
  case $what in
    driver | helm | promtool | prometheus | adapter) hack/rig/rig "build-$what" >/dev/null ;;
    # Who needs it finds out again that it cannot be had, and says so.
    machine) hack/rig/rig build-machine || (($? == 4)) ;;
    *) RIG_K8S="$what" hack/rig/rig build ;;
  esac
done

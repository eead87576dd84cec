#!/usr/bin/env bash
# Writes the plain manifests from the chart's defaults, one file per template:
#
#   deploy/generate.sh [OUT_DIR]     OUT_DIR: deploy/ unless given
#
# HELM names the helm to use (default: helm). Labels that only Helm needs are left out.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
out="${1:-$here}"
helm="${HELM:-helm}"
mkdir -p "$out"
for part in deviceclasses rbac policy podpolicy daemonset mps controller webhook; do
  {
    echo "# Made by deploy/generate.sh from charts/tranche: change that, not this."
    "$helm" template tranche "$here/../charts/tranche" --namespace tranche-system \
      --kube-version 1.37.0 --show-only "templates/$part.yaml" |
      sed -e '/^# Source: /d' -e '/app.kubernetes.io\/managed-by:/d' -e '/helm.sh\/chart:/d' |
      sed -e '1{/^---$/d}'
  } >"$out/$part.yaml.new"
  mv "$out/$part.yaml.new" "$out/$part.yaml"
done

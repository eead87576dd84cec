#!/usr/bin/env bash
# Writes the plain manifests from the chart's defaults, one file per template:
#
#   deploy/generate.sh [OUT_DIR]     OUT_DIR: deploy/ unless given
#
# What only newer API servers know goes to OUT_DIR/since-RELEASE. HELM names the helm to use (default: helm). Labels
# that only Helm needs are left out.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
out="${1:-$here}"
helm="${HELM:-helm}"

# part NAME FOLDER: one template's objects.
part() {
  mkdir -p "$2"
  {
    echo "# Made by deploy/generate.sh from charts/tranche: change that, not this."
    "$helm" template tranche "$here/../charts/tranche" --namespace tranche-system \
      --kube-version 1.37.0 --api-versions admissionregistration.k8s.io/v1/MutatingAdmissionPolicy \
      --show-only "templates/$1.yaml" |
      sed -e '/^# Source: /d' -e '/app.kubernetes.io\/managed-by:/d' -e '/helm.sh\/chart:/d' |
      sed -e '1{/^---$/d}'
  } >"$2/$1.yaml.new"
  mv "$2/$1.yaml.new" "$2/$1.yaml"
}

for name in deviceclasses rbac policy podpolicy shmpolicy hints classpolicy daemonset mps controller webhook networkpolicy viewer disruption; do
  part "$name" "$out"
done
part claimpolicy "$out/since-1.36"

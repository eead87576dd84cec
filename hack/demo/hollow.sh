#!/usr/bin/env bash
# Gives nodes without a machine (rig hollow) GPUs like those that a real node publishes and that can be shared.
#
#   hack/demo/hollow.sh LIKE NAME...
#
#   HOLLOW_GPUS   at most so many on each
set -euo pipefail
# shellcheck source=hack/demo/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
like="$1"
shift
"$rig" hollow "$@"
published="$(kubectl get resourceslices --field-selector "spec.nodeName=$like,spec.driver=gpu.nvidia.com" -o json)"
for name in "$@"; do
  uid="$(kubectl get node "$name" -o jsonpath='{.metadata.uid}')"
  jq --arg name "$name" --arg uid "$uid" --argjson most "${HOLLOW_GPUS:-64}" '
    [.items[].spec.devices[]? | select(.attributes.grantableMemoryMiB)
      | .attributes.uuid.string = "GPU-\($name)-\(.name)" | del(.consumesCounters, .taints)][:$most] as $devices |
    {apiVersion: "resource.k8s.io/v1", kind: "ResourceSlice",
     metadata: {name: "\($name)-gpus", labels: {"rig/hollow": "yes"},
       ownerReferences: [{apiVersion: "v1", kind: "Node", name: $name, uid: $uid}]},
     spec: {driver: "gpu.nvidia.com", nodeName: $name, devices: $devices,
       pool: {name: $name, generation: 1, resourceSliceCount: 1}}}' <<<"$published" |
    kubectl apply -f - >/dev/null
done

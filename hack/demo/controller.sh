#!/usr/bin/env bash
# The controller at work on four nodes, three of them without a machine: a pod with KAI's annotations runs on the
# real one under an enforced limit, thirty others are placed on the rest, and one is told why it waits.
#
#   hack/demo/controller.sh NODE      the real node; it needs a GPU that nobody has
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=hack/demo/lib.sh
. "$here/lib.sh"
node="$1"

"$here/hollow.sh" "$node" hollow-1 hollow-2 hollow-3
kubectl apply -f - >/dev/null <<'YAML'
apiVersion: v1
kind: Namespace
metadata: {name: kai, labels: {tranche.dev/kai-annotations: enabled}}
YAML
until_true 60 "the namespace's service account" kubectl -n kai get serviceaccount default

# The pod of deploy/examples, with an image that this machine has.
kubectl -n kai create --dry-run=client -o json -f "$top/deploy/examples/kai.yaml" |
  jq '.spec.containers[0] |= (del(.command) | .image = "docker.io/local/glibc:1" | .imagePullPolicy = "Never")' |
  kubectl -n kai apply -f - >/dev/null

# pod NAME ANNOTATION VALUE: one with KAI's annotation, for nodes without a machine.
pod() {
  cat <<YAML
apiVersion: v1
kind: Pod
metadata: {name: $1, namespace: kai, annotations: {$2: "$3"}}
spec:
  terminationGracePeriodSeconds: 0
  tolerations: [{key: rig/hollow, operator: Exists}]
  nodeSelector: {rig/hollow: "yes"}
  securityContext: {runAsNonRoot: true, runAsUser: 65534}
  containers:
    - name: main
      image: docker.io/local/glibc:1
      imagePullPolicy: Never
      securityContext: {allowPrivilegeEscalation: false}
---
YAML
}
for n in $(seq 10); do
  pod "fifth-$n" gpu-fraction 0.2
  pod "notebook-$n" gpu-memory 2000
  pod "server-$n" gpu-memory 24000
done | kubectl apply -f - >/dev/null
pod large gpu-memory 90000 | kubectl apply -f - >/dev/null

kubectl -n kai wait --for=condition=Ready pod/gpu-sharing --timeout=120s
bound() {
  local pods
  pods="$(kubectl -n kai get pods -o json | jq '[.items[] | select(.spec.nodeName)] | length')"
  [ "$pods" = 31 ]
}
until_true 120 "31 pods with a node" bound
told() { kubectl -n kai get events --field-selector involvedObject.name=large | grep WaitingForGpuShare; }
until_true 60 "the reason why the large pod waits" told

echo
kubectl -n kai get resourceclaims -o custom-columns='CLAIM:.metadata.name,NODE:.status.allocation.devices.results[*].pool,DEVICE:.status.allocation.devices.results[*].device,MEMORY:.status.allocation.devices.config[*].opaque.parameters.devices[*].memory,POD:.status.reservedFor[*].name'
printf '\nInside the pod with gpu-fraction: "0.5", on %s:\n' "$node"
limits="$(kubectl -n kai exec gpu-sharing -- sh -c 'env | grep -E "CUDA_MPS|GPU_PORTION" | sort')"
echo "$limits"
device="$(kubectl -n kai get resourceclaims -o json | jq -r '.items[] | select(.status.reservedFor[]?.name == "gpu-sharing") | .status.allocation.devices.results[0].device')"
grantable="$(kubectl get resourceslices -o json | jq --arg node "$node" --arg device "$device" \
  '.items[] | select(.spec.nodeName == $node) | .spec.devices[] | select(.name == $device) | .attributes.grantableMemoryMiB.int')"
grep -qx "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=$(((grantable + 1) / 2))M" <<<"$limits" ||
  fail "the limit is not half of $grantable MiB"
printf '\nWhere everything is:\n'
# The controller may not read what the node plugins measure; the series were shown above.
kubectl -n tranche-system exec deployment/tranche-controller -- tranche top --once --use=false || fail "tranche top"
printf '\nWhat waits, and why:\n'
kubectl -n kai get events --field-selector involvedObject.name=large -o custom-columns='REASON:.reason,MESSAGE:.message'
echo
rc=0
kubectl -n tranche-system exec deployment/tranche-controller -- tranche explain -n kai pod/large || rc=$?
[ "$rc" = 3 ] || fail "tranche explain of a pod that waits ended with $rc instead of 3"

#!/usr/bin/env bash
# Who gets a GPU when there is not enough, on two nodes without a machine: a small share keeps a large one out, and
# `tranche rebalance` shows which move makes room, and makes it; then a pod of lower priority ends for one of higher.
#
#   hack/demo/room.sh NODE      whose GPUs the two nodes have
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=hack/demo/lib.sh
. "$here/lib.sh"
first=room-1 second=room-2
rebalance() { "$target/release/tranche" rebalance -n room --kubeconfig "$("$rig" kubeconfig)" "$@"; }

HOLLOW_GPUS=1 "$here/hollow.sh" "$1" $first $second
kubectl apply -f - >/dev/null <<'YAML'
apiVersion: v1
kind: Namespace
metadata: {name: room}
---
apiVersion: scheduling.k8s.io/v1
kind: PriorityClass
metadata: {name: demo-urgent}
value: 1000
YAML
until_true 60 "the namespace's service account" kubectl -n room get serviceaccount default

# template NAME FRACTION: of the first GPU of one of the two nodes.
template() {
  cat <<YAML
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: $1, namespace: room}
spec:
  spec:
    devices:
      requests:
        - name: gpu
          exactly:
            deviceClassName: shared.gpu.nvidia.com
            selectors:
              - cel: {expression: "device.attributes['gpu.nvidia.com'].uuid in ['GPU-$first-gpu-0', 'GPU-$second-gpu-0']"}
      config:
        - requests: [gpu]
          opaque:
            driver: gpu.nvidia.com
            parameters: {apiVersion: tranche.dev/v1alpha1, kind: GpuShare, fraction: "$2"}
---
YAML
}

# spec NAME [PRIORITYCLASS]: of a pod with a claim of that template.
spec() {
  cat <<YAML
{terminationGracePeriodSeconds: 0, ${2:+priorityClassName: $2,} nodeSelector: {rig/hollow: "yes"},
 tolerations: [{key: rig/hollow, operator: Exists}],
 securityContext: {runAsNonRoot: true, runAsUser: 65534},
 resourceClaims: [{name: gpu, resourceClaimTemplateName: $1}],
 containers: [{name: main, image: "docker.io/local/glibc:1", imagePullPolicy: Never, resources: {claims: [{name: gpu}]},
   securityContext: {allowPrivilegeEscalation: false}}]}
YAML
}

pod() { # pod NAME FRACTION [PRIORITYCLASS]
  template "$1" "$2"
  printf 'apiVersion: v1\nkind: Pod\nmetadata: {name: %s, namespace: room}\nspec: %s\n' "$1" "$(spec "$1" "${3:-}")"
}

replica_set() { # replica_set NAME FRACTION
  template "$1" "$2"
  printf 'apiVersion: apps/v1\nkind: ReplicaSet\nmetadata: {name: %s, namespace: room}\nspec: {replicas: 1, ' "$1"
  printf 'selector: {matchLabels: {app: %s}}, template: {metadata: {labels: {app: %s}}, spec: %s}}\n' \
    "$1" "$1" "$(spec "$1")"
}

# is_on NAME NODE: a pod of that name, or of the ReplicaSet of that name, has that node.
is_on() {
  kubectl -n room get pods -o json | jq -e --arg name "$1" --arg node "$2" \
    '[.items[] | select((.metadata.name == $name or .metadata.labels.app == $name) and .spec.nodeName == $node
      and .metadata.deletionTimestamp == null)] | length == 1'
}
events() { # events REASON
  kubectl -n room get events -o json | jq -r --arg reason "$1" \
    '.items[] | select(.reason == $reason) | "\(.involvedObject.kind)/\(.involvedObject.name): \(.message)"'
}
told() { [ -n "$(events "$1")" ]; } # told REASON

# Half of one GPU is in use, and a tenth of the other.
kubectl cordon $second >/dev/null
replica_set half 0.5 | kubectl apply -f - >/dev/null
until_true 60 "half on $first" is_on half $first
kubectl uncordon $second >/dev/null
kubectl cordon $first >/dev/null
replica_set small 0.1 | kubectl apply -f - >/dev/null
until_true 60 "small on $second" is_on small $second
kubectl uncordon $first >/dev/null
pod large 0.95 | kubectl apply -f - >/dev/null
until_true 60 "the reason why the large share waits" told WaitingForGpuShare

echo "A share of 95 % waits beside two GPUs, of which half and a tenth are in use (tranche rebalance):"
rc=0
plan="$(rebalance)" || rc=$?
echo "$plan"
[ "$rc" = 3 ] || fail "tranche rebalance ended with $rc instead of 3"
grep -q "then this fits $second/gpu-0" <<<"$plan" || fail "the plan does not make room on $second"
printf '\nThe move is made (tranche rebalance --apply):\n'
rebalance --apply --yes --timeout 60s >/dev/null || fail "the move was not made"
until_true 60 "large on $second" is_on large $second
until_true 60 "small beside half on $first" is_on small $first

printf '\nA pod of priority 1000 wants 90 %% of a GPU; beside the tenth there is room for it once the half ends:\n'
half="$(kubectl -n room get pods -l app=half -o name)"
pod urgent 0.9 demo-urgent | kubectl apply -f - >/dev/null
until_true 120 "the urgent pod's node" is_on urgent $first
ended() { ! kubectl -n room get "$half"; }
until_true 30 "the end of $half" ended
is_on small $first >/dev/null || fail "small has ended, too"
is_on large $second >/dev/null || fail "large has ended, too"
until_true 30 "an event of who ended" told Preempted
for reason in Preempting Preempted; do printf '%s ' $reason && events $reason; done
echo
kubectl -n room get pods -o wide

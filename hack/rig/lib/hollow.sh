# Nodes without a machine: objects that say Ready, for whatever only schedules. Pods are bound to them and never
# start; they have to tolerate the taint rig/hollow. Sourced. Touches Node and Lease objects, one process of the
# rig that renews the leases, and RIG_DIR/hollow.
# shellcheck shell=bash disable=SC2016

HOLLOW_BEAT=8 # seconds; a node is given up after 40 without a sign

hollow_object() { # hollow_object NAME CPU MEMORY
  jq -n --arg name "$1" --arg cpu "$2" --arg memory "$3" --arg now "$(date -u +%FT%TZ)" '
    {cpu: $cpu, memory: $memory, pods: "250", "ephemeral-storage": "1Ti"} as $room |
    {apiVersion: "v1", kind: "Node",
     metadata: {name: $name, labels: {"kubernetes.io/hostname": $name, "kubernetes.io/os": "linux", "rig/hollow": "yes"}},
     spec: {taints: [{key: "rig/hollow", effect: "NoSchedule"}]},
     status: {capacity: $room, allocatable: $room, conditions: [{type: "Ready", status: "True", reason: "Hollow",
       message: "there is no kubelet", lastHeartbeatTime: $now, lastTransitionTime: $now}]}}'
}

# What keeps them Ready: a sign of life for each name in the folder, all in one call.
HOLLOW_LOOP='
  folder=$1 every=$2
  shift 2
  while sleep "$every"; do
    now="$(date -u +%FT%T.%6NZ)"
    for name in $(ls "$folder"); do
      printf "{apiVersion: coordination.k8s.io/v1, kind: Lease, metadata: {name: %s, namespace: kube-node-lease}, " "$name"
      printf "spec: {holderIdentity: %s, leaseDurationSeconds: 40, renewTime: \"%s\"}}\n---\n" "$name" "$now"
    done | "$@" replace -f - >/dev/null || true
  done'

hollow_lease() {
  kubectl create -f - >/dev/null <<YAML
apiVersion: coordination.k8s.io/v1
kind: Lease
metadata: {name: $1, namespace: kube-node-lease}
spec: {holderIdentity: $1, leaseDurationSeconds: 40, renewTime: "$(date -u +%FT%T.%6NZ)"}
YAML
}

hollow_add() { # hollow_add NAME...
  local name
  mkdir -p "$RIG_DIR/hollow"
  for name in "$@"; do
    [[ $name =~ ^[a-z0-9]([a-z0-9-]*[a-z0-9])?$ ]] || die "a hollow node cannot be named $name"
    ! node_index "$name" >/dev/null || die "$name is a node of this rig"
    kubectl delete node "$name" --ignore-not-found >/dev/null
    kubectl -n kube-node-lease delete lease "$name" --ignore-not-found >/dev/null
    hollow_object "$name" "${RIG_HOLLOW_CPU:-64}" "${RIG_HOLLOW_MEMORY:-512Gi}" | kubectl create -f - >/dev/null
    hollow_lease "$name"
    : >"$RIG_DIR/hollow/$name"
  done
  alive control hollow || spawn control hollow /bin/bash -c "$HOLLOW_LOOP" hollow "$RIG_DIR/hollow" "$HOLLOW_BEAT" \
    env "KUBECONFIG=$RIG_DIR/kubeconfig" "$CACHE/kubernetes/$RIG_K8S/kubectl"
  for name in "$@"; do
    until_ok 60 "$name to take pods" hollow_ready "$name" || exit 1
  done
}

hollow_ready() {
  [[ "$(kubectl get node "$1" -o 'jsonpath={.spec.taints[*].key}')" == rig/hollow ]]
}

hollow_remove() { # hollow_remove NAME...
  local name
  for name in "$@"; do
    rm -f "$RIG_DIR/hollow/$name"
    kubectl delete node "$name" --ignore-not-found >/dev/null
    kubectl -n kube-node-lease delete lease "$name" --ignore-not-found >/dev/null
  done
}

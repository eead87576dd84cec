#!/usr/bin/env bash
# Four pods with different shares of one GPU, placed by kube-scheduler; a fifth for which no room is left; and
# one that takes more than its share and is ended. All other GPUs of the cluster must be taken.
#
#   hack/demo/shares.sh NODE MINOR      the node and the minor number of the GPU that is left
set -euo pipefail
# shellcheck source=hack/demo/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
node="$1" minor="$2"
fake_nvml() { "$target/fake/release/fake-nvml" --dir "$("$rig" host-path "$node" /run/fake-nvml)" "$@"; }

# share NAME MEMORY [PERCENT]: a claim template, and a pod with a claim of it.
share() {
  cat <<YAML
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: $1, namespace: shared}
spec:
  spec:
    devices:
      requests:
        - name: gpu
          exactly:
            deviceClassName: gpu.nvidia.com
            capacity:
              requests: {memory: "$2"${3:+, compute: "$3"}}
---
YAML
  user shared "$1"
}

# What may be granted of the GPU, in MiB, as it is published: 81008Mi, or 79Gi.
grantable() {
  kubectl get resourceslices -o json | jq -r --arg device "gpu-$minor" \
    '.items[].spec.devices[] | select(.name == $device) | .capacity.memory.value' |
    awk '/Gi$/ { print $1 * 1024 } /Mi$/ { print $1 + 0 }'
}

all="$(grantable)"
[ -n "$all" ] || fail "gpu-$minor is not published with its memory"
quarter=$((all / 4))
rest=$((all - quarter - 10240 - 2000))
echo "gpu-$minor grants $all MiB: 2000 MiB, 10 GiB with 25 % of the multiprocessors, a quarter ($quarter MiB, 25 %), the rest ($rest MiB)"
kubectl create namespace shared --dry-run=client -o yaml | kubectl apply -f - >/dev/null
{
  share small 2000Mi
  share medium 10Gi 25
  share quarter "${quarter}Mi" 25
} | kubectl apply -f - >/dev/null
kubectl -n shared wait --for=condition=Ready pod/small pod/medium pod/quarter --timeout=120s
# The one that fills it comes last: while the others' shares are being written, kube-scheduler (seen: 1.37.0) may count
# one of them twice, and looks at a pod that did not fit again after five minutes only.
share rest "${rest}Mi" | kubectl apply -f - >/dev/null
kubectl -n shared wait --for=condition=Ready pod/rest --timeout=120s
share late 4Gi | kubectl apply -f - >/dev/null

echo
kubectl -n shared get resourceclaims -o custom-columns='CLAIM:.metadata.name,DEVICE:.status.allocation.devices.results[*].device,MEMORY:.status.allocation.devices.results[*].consumedCapacity.memory,COMPUTE:.status.allocation.devices.results[*].consumedCapacity.compute,POD:.status.reservedFor[*].name'
for pod in small medium quarter rest; do
  printf '\nInside %s:\n' "$pod"
  limits="$(kubectl -n shared exec "$pod" -- sh -c 'env | grep CUDA_MPS | sort; ls /run/nvidia-mps')"
  echo "$limits"
  case $pod in
    small) want="0=2000M" ;;
    medium) want="0=10240M" ;;
    quarter) want="0=${quarter}M" ;;
    rest) want="0=${rest}M" ;;
  esac
  grep -q "^CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=$want\$" <<<"$limits" || fail "$pod has not the limit $want"
done

printf '\nThe MPS daemon of the GPU, asked with NVIDIA'"'"'s own program:\n'
uuid="$(kubectl get resourceslices -o json | jq -r --arg device "gpu-$minor" \
  '.items[].spec.devices[] | select(.name == $device) | .attributes.uuid.string')"
"$rig" node-exec "$node" sh -c "
  for ask in 'get_default_device_pinned_mem_limit 0' get_default_active_thread_percentage; do
    printf '%s: ' \"\$ask\"
    echo \"\$ask\" | CUDA_MPS_PIPE_DIRECTORY=/run/tranche/mps/$uuid/pipe /driver/usr/bin/nvidia-cuda-mps-control
  done"
echo
"$rig" kubectl -n tranche-system exec daemonset/tranche-node -- tranche inspect

printf '\nThe fifth pod, for which no room is left:\n'
pending() { kubectl -n shared get pod late -o jsonpath='{.status.conditions[?(@.type=="PodScheduled")].message}'; }
unschedulable() { [ -n "$(pending)" ]; }
until_true 60 "the fifth pod's reason to wait" unschedulable
pending
echo

printf '\nOne takes more than its 2000 MiB:\n'
id="$(kubectl -n shared get pod small -o jsonpath='{.status.containerStatuses[0].containerID}')"
pid="$("$rig" ctr "$node" -n k8s.io tasks ls | awk -v id="${id#containerd://}" '$1 == id { print $2 }')"
[ -n "$pid" ] || fail "the container of pod small is not running"
fake_nvml process add "$minor" "$pid" 4096 --kind mps --only-if-alive >/dev/null
ended() { [ "$(kubectl -n shared get pod small -o jsonpath='{.status.containerStatuses[0].lastState.terminated.exitCode}')" = 137 ]; }
until_true 30 "the end of the process that took too much" ended
fake_nvml process remove "$minor" "$pid" >/dev/null
kubectl -n shared get pod small
told() { kubectl -n shared get events --field-selector involvedObject.name=small | grep ProcessEnded; }
until_true 30 "an event about it" told
kubectl -n shared get events --field-selector involvedObject.name=small -o custom-columns='REASON:.reason,MESSAGE:.message'
kubectl -n shared wait --for=condition=Ready pod/medium pod/quarter pod/rest --timeout=10s >/dev/null || fail "a neighbour was disturbed"
for pod in medium quarter rest; do
  [ "$(kubectl -n shared get pod "$pod" -o jsonpath='{.status.containerStatuses[0].restartCount}')" = 0 ] || fail "$pod was disturbed"
done

printf '\nWhat Prometheus is told of them (tranche-node, /metrics):\n'
plugin="$(kubectl -n tranche-system get pods -l app.kubernetes.io/component=node --field-selector "spec.nodeName=$node" \
  -o 'jsonpath={.items[0].metadata.name}')"
rows() {
  kubectl get --raw "/api/v1/namespaces/tranche-system/pods/$plugin:8080/proxy/metrics" |
    grep -E '^tranche_claim_(memory_(limit|used|peak)_bytes|violations_total|terminations_total)\{namespace="shared"'
}
# medium, quarter and rest run on; small, which was ended, runs again.
all_four() { [ "$(rows | grep -c '^tranche_claim_memory_limit_bytes')" = 4 ]; }
until_true 30 "the series of four claims" all_four
rows | grep -v '} 0$' | sed -E 's/,UUID="[^"]*"//' || fail "no series of the claims"
echo "charts/tranche/monitoring/dashboard.json shows these in Grafana (metrics.dashboard.enabled); docs/metrics.md explains them"

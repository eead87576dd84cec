#!/usr/bin/env bash
# Three pods with MIG devices of different sizes on one GPU that is idle and whole a moment before: its administrator
# names it, the controller chooses the places, and the node plugin switches MIG mode on and makes what the pods ask for.
#
#   hack/demo/mig.sh NODE MINOR      the GPU; nobody has it
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=hack/demo/lib.sh
. "$here/lib.sh"
node="$1" minor="$2"
device() { kubectl get resourceslices -o json | jq -r --arg device "gpu-$minor" --arg node "$node" \
  '.items[] | select(.spec.nodeName == $node) | .spec.devices[]? | select(.name == $device)'; }

[ "$(device | jq -r .attributes.type.string)" = gpu ] || fail "gpu-$minor is not whole"
mode() { kubectl -n tranche-system exec "$(plugin)" -- tranche inspect | grep "^GPU $minor "; }
plugin() {
  kubectl -n tranche-system get pods --field-selector "spec.nodeName=$node,status.phase=Running" \
    -l app.kubernetes.io/component=node -o name | head -n 1
}
echo "gpu-$minor is whole. Given whole or cut with --mig-on-demand=$minor --mig-keep=10m (chart: mig.onDemandGPUs, mig.keep):"
flags="$(kubectl -n tranche-system get daemonset tranche-node -o json |
  jq -c --arg gpus "--mig-on-demand=$minor" --arg keep "--mig-keep=10m" \
    '[.spec.template.spec.containers[] | select(.name == "node") | .args[] | select(startswith("--mig-") | not)] + [$gpus, $keep]')"
kubectl -n tranche-system patch daemonset tranche-node \
  -p "{\"spec\":{\"template\":{\"spec\":{\"containers\":[{\"name\":\"node\",\"args\":$flags}]}}}}" >/dev/null
kubectl -n tranche-system rollout status daemonset/tranche-node --timeout=120s
says_what_it_can_be() { [ "$(device | jq -r '.attributes | has("migProfile19")')" = true ]; }
until_true 60 "what the GPU can be cut into" says_what_it_can_be
is_off() { mode | grep -q "MIG mode is off"; }
until_true 60 "the GPU to be whole" is_off
mode

kubectl create namespace isolated --dry-run=client -o yaml | kubectl apply -f - >/dev/null
until_true 60 "the namespace's service account" kubectl -n isolated get serviceaccount default

isolated() { # isolated NAME AMOUNT: a pod with a MIG device of at least that
  cat <<YAML
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: $1, namespace: isolated}
spec:
  spec:
    devices:
      requests: [{name: gpu, exactly: {deviceClassName: shared.gpu.nvidia.com}}]
      config:
        - requests: [gpu]
          opaque:
            driver: gpu.nvidia.com
            parameters: {apiVersion: tranche.dev/v1alpha1, kind: GpuShare, minimumIsolation: mig, $2}
---
YAML
  user isolated "$1"
}
{
  isolated notebook 'memory: 5Gi'
  isolated server 'memory: 12Gi'
  isolated training 'memory: 30Gi'
} | kubectl apply -f - >/dev/null
kubectl -n isolated wait --for=condition=Ready pod/notebook pod/server pod/training --timeout=120s

printf '\nWhat each was given for what it asked:\n'
given() {
  kubectl -n isolated get resourceclaims -o json | jq -r '.items[] | .status as $status | $status.devices[]?.data |
    "\($status.reservedFor[0].name): \(.asked.memoryMiB) MiB asked; \(.profile) at slice \(.placement.start), \(.uuid)"'
}
all_told() { [ "$(given | wc -l)" = 3 ]; }
until_true 60 "what the three claims were given" all_told
given
for pod in notebook server training; do
  printf '\nInside %s:\n' "$pod"
  seen="$(kubectl -n isolated exec "$pod" -- sh -c 'ls /dev | grep -E "^nvidia[0-9]"; ls /dev/nvidia-caps')"
  echo "$seen"
  [ "$(grep -c '^nvidia-cap' <<<"$seen")" = 2 ] || fail "$pod has not the two capability nodes of a MIG device"
  grep -qx "nvidia$minor" <<<"$seen" || fail "$pod is on another GPU"
done
for profile in 1g.10gb 1g.20gb 3g.40gb; do
  given | grep -q " $profile at " || fail "nobody has a $profile"
done
printf '\nThe GPU now:\n'
mode
mode | grep -q "cut, MIG mode on for claims" || fail "MIG mode is not on"
printf '\nWhere everything is:\n'
kubectl -n tranche-system exec deployment/tranche-controller -- tranche top --once --use=false --node "$node" || fail "tranche top"

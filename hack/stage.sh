#!/usr/bin/env bash
# Puts the driver onto a running rig: image, fake GPUs, manifests; waits until the GPUs are published.
#
#   hack/stage.sh NODE=PROFILE:COUNT[:MIG] ...      e.g. node-a=h100:8:7=1g.10gb,2g.20gb
#
# RIG_NAME names the rig. Run hack/build.sh first.
#   STAGE_BY (manifests)  chart: by helm, as charts/ has it, in place of deploy/
set -euo pipefail
top="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
target="${CARGO_TARGET_DIR:-$top/target}"
rig="$top/hack/rig/rig"
kubectl() { "$rig" kubectl "$@"; }

for spec in "$@"; do
  node="${spec%%=*}" what="${spec#*=}"
  IFS=: read -r profile count mig <<<"$what"
  # The real nvidia-smi wants the real library. Removed first: it is a link into the cache. A machine that
  # can be rebooted has a place to keep the boards meanwhile.
  # shellcheck disable=SC2016
  "$rig" node-exec "$node" bash -ec '
    smi=/driver/usr/lib/nvidia/current/nvidia-smi
    rm -f "$smi"
    cat >"$smi"
    chmod 755 "$smi"
    mkdir -p /run/fake-nvml
    cd /run/fake-nvml
    [ -s boot_id ] || cat /proc/sys/kernel/random/uuid >boot_id
    (exec -a fake-nvml "$smi" --dir "$PWD" init "$@")
    # Containers get this program and nothing else of the simulation.
    (exec -a fake-nvml "$smi" --dir "$PWD" smi "$smi")
    [ ! -d /var/lib/fake-nvml ] || cp control.json /var/lib/fake-nvml/
  ' init --driver "$("$rig" driver-version)" --seed "$node" --profile "$profile" --count "$count" ${mig:+--mig "$mig"} \
    <"$target/fake/release/fake-nvml"
done
echo "-- loading the image"
"$rig" load all "$target/image/tranche.tar"
if [[ ${STAGE_BY:-manifests} == chart ]]; then
  echo "-- installing the chart"
  "$rig" helm install tranche "$top/charts/tranche" --namespace tranche-system --create-namespace \
    --values "$top/hack/demo/values.yaml" >/dev/null
else
  echo "-- applying the manifests"
  kubectl apply -k "$top/hack/demo" >/dev/null
  known="$(kubectl api-resources --api-group=admissionregistration.k8s.io -o name)"
  if [[ $known == *mutatingadmissionpolicies* ]]; then
    kubectl apply -f "$top/deploy/since-1.36" >/dev/null
  fi
fi
echo "-- waiting for the node plugin"
kubectl -n tranche-system rollout status daemonset/tranche-node --timeout=120s
for spec in "$@"; do
  node="${spec%%=*}"
  kubectl wait --for=create --timeout=60s resourceslices --field-selector "spec.nodeName=$node,spec.driver=gpu.nvidia.com" \
    >/dev/null
done

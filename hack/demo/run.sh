#!/usr/bin/env bash
# The demo: a real cluster on this machine with a simulated node of eight H100s, one of them in MIG mode;
# the driver runs on it from its image, pods take GPUs, four of them share one, and the controller places others
# on this node and three more, makes room by a move and by priority, and has MIG devices made. Ends with exit code 0 only
# when all of it was seen. Leaves the cluster up (make demo-down ends it).
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=hack/demo/lib.sh
. "$here/lib.sh"
export RIG_NAME="${RIG_NAME:-demo}" RIG_NODES=1 RIG_FAKE_NVML="$target/fake/release/libfake_nvml.so"
say() { printf '\n== %s\n' "$*"; }

# What a first run builds, and how long that takes.
first=()
[[ -x $target/release/tranche ]] || first+=("the driver 300")
while read -r what seconds; do first+=("$what $seconds"); done < <("$rig" absent | grep -v ^helm)
if ((${#first[@]})); then
  echo "The first time some things are built, and kept for the next; about how long that takes on two processors:"
  printf '%s\n' "${first[@]}" | awk '{s = $NF; sum += s; sub(/ [0-9]+$/, ""); printf "  %4d s  %s\n", s, $0}
    END {printf "  %4d s  all in all; after that the demo itself takes a minute\n", sum}'
fi
# In a process group of its own, so that its compilers end with it.
set -m
"$top/hack/prefetch.sh" driver "${RIG_K8S:-1.37.0}" &
prefetch=$!
set +m
trap 'kill -- "-$prefetch" 2>/dev/null || true' EXIT
say "1/9 building the driver, its image and the fake GPUs; Kubernetes meanwhile"
"$top/hack/build.sh"
wait "$prefetch"
say "2/9 a real cluster"
"$rig" up
say "3/9 the driver on it"
"$top/hack/stage.sh" node-a=h100:8:7=1g.10gb,1g.10gb,2g.20gb
say "4/9 pods that take whole GPUs"
kubectl apply -f "$here/workloads.yaml"
kubectl -n demo rollout status deployment/inference --timeout=120s
kubectl -n demo wait --for=condition=Ready pod/notebook --timeout=120s

say "5/9 what a user sees"
kubectl get resourceslices -o wide
echo
kubectl -n tranche-system exec daemonset/tranche-node -- tranche inspect
echo
kubectl -n demo get resourceclaims -o custom-columns='CLAIM:.metadata.name,DEVICE:.status.allocation.devices.results[*].device,POD:.status.reservedFor[*].name'
echo
kubectl -n demo get pods -o wide
seen="$(mktemp)"
trap 'rm -f "$seen"' EXIT
for pod in $(kubectl -n demo get pods -o name); do
  printf '\nInside %s:\n' "$pod"
  kubectl -n demo exec "$pod" -- sh -c \
    'env | grep NVIDIA; ls /dev | grep -E "^nvidia[0-9]"; ls /dev/nvidia-caps 2>/dev/null;
     /lib64/ld-linux-x86-64.so.2 --preload libcuda.so.1 --list /lib/x86_64-linux-gnu/libm.so.6 | grep libcuda' |
    tee -a "$seen"
done

# What was promised, checked on what was seen.
gpus="$(grep -cE '^nvidia[0-9]+$' "$seen")"
[ "$gpus" = 7 ] || fail "seven pods should see one GPU node each; seen: $gpus"
[ "$(grep -E '^nvidia[0-9]+$' "$seen" | sort -u | wc -l)" = 7 ] || fail "two pods see the same GPU"
[ "$(grep -c '^NVIDIA_VISIBLE_DEVICES=void$' "$seen")" = 7 ] || fail "NVIDIA_VISIBLE_DEVICES is not void everywhere"
grep -q '^nvidia-cap' "$seen" || fail "the MIG pod has no capability node"
[ "$(grep -c 'libcuda.so.1 => /' "$seen")" = 7 ] || fail "libcuda.so.1 does not load in every pod"

say "6/9 four pods on the one GPU that is left, each with a part of its own"
"$here/shares.sh" node-a 6

say "7/9 the controller: three more nodes, and pods with KAI's annotations"
# A GPU for them; the pod that waited for a share of kube-scheduler's would take it.
kubectl -n shared delete pod late --wait=false
kubectl -n demo scale deployment/inference --replicas=5
kubectl -n demo wait --for=jsonpath='{.status.replicas}'=5 deployment/inference --timeout=60s >/dev/null
"$here/controller.sh" node-a

say "8/9 who gets a GPU when there is not enough: a pod is moved, and one of lower priority ends"
"$here/room.sh" node-a

say "9/9 MIG devices made to measure, on the GPU that was shared before"
kubectl delete namespace shared --timeout=120s
"$here/mig.sh" node-a 6

say "all of it was seen. The cluster stays up; 'make demo-down' ends it."
echo "export KUBECONFIG=$("$rig" kubeconfig)"

#!/usr/bin/env bash
# Checks the rig itself: brings a two-node rig of its own up (RIG_K8S as given),
# tries what tests rely on, takes it down and looks for anything left behind.
# Touches what `rig up` touches, under the name "check" or $RIG_NAME.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export RIG_NAME="${RIG_NAME:-check}" RIG_NODES=2
rig() { "$here/rig" "$@"; }
ok() { printf 'ok    %s\n' "$*"; }
fail() {
  printf 'FAIL  %s\n' "$*"
  exit 1
}
k() { rig kubectl "$@"; }
# left_over: what a rig of this name might leave on the machine.
left_over() {
  find /sys/fs/cgroup -name "tranche-rig-$RIG_NAME-*" 2>/dev/null
  ip -o link | grep -F "alias tranche rig $RIG_NAME" || true
  grep -F " $(rig dir)/" /proc/self/mountinfo || true
  grep -lsaF "$(rig dir)/" /proc/[0-9]*/cmdline || true
  [[ ! -e $(rig dir) ]] || rig dir
}

rig down
[[ -z "$(left_over)" ]] || fail "before the start there is already: $(left_over)"
trap 'RIG_KEEP_LOGS=1 rig down' EXIT
rig up
[[ "$(rig up 2>/dev/null)" == "export KUBECONFIG=$(rig kubeconfig)" ]] || fail "a second up"
ok "up, and a second up changes nothing"

k apply -f - >/dev/null <<'YAML'
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: probe, namespace: default}
spec:
  selector: {matchLabels: {app: probe}}
  template:
    metadata: {labels: {app: probe}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: probe
        image: docker.io/local/glibc:1
        imagePullPolicy: Never
        securityContext: {privileged: true}
        command:
        - sh
        - -c
        - |
          mkdir -p /var/lib/kubelet/plugins/probe
          mount -t tmpfs probe /var/lib/kubelet/plugins/probe
          echo $NODE >/var/lib/kubelet/plugins/probe/node
          echo $NODE >/run/tranche/node
          nc -w 3 $KUBERNETES_SERVICE_HOST $KUBERNETES_SERVICE_PORT </dev/null && echo reached
          exec pause
        env: [{name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]
        volumeMounts:
        - {name: plugins, mountPath: /var/lib/kubelet/plugins, mountPropagation: Bidirectional}
        - {name: run, mountPath: /run/tranche}
      volumes:
      - {name: plugins, hostPath: {path: /var/lib/kubelet/plugins}}
      - {name: run, hostPath: {path: /run/tranche}}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: probe}
spec:
  failurePolicy: Fail
  matchConstraints:
    resourceRules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [configmaps]}]
  validations: [{expression: "object.metadata.name != 'bad'", message: no such name}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: probe}
spec: {policyName: probe, validationActions: [Deny]}
YAML
k rollout status ds/probe --timeout=120s >/dev/null
for node in node-a node-b; do
  pod="$(k get pods -l app=probe --field-selector "spec.nodeName=$node" -o 'jsonpath={.items[0].metadata.name}')"
  for ((i = 0; i < 50; i++)); do
    [[ "$(k logs "$pod")" != reached ]] || break
    sleep 0.1
  done
  [[ "$(k logs "$pod")" == reached ]] || fail "logs of $pod"
  [[ "$(k exec "$pod" -- cat /run/tranche/node)" == "$node" ]] || fail "exec in $pod"
  [[ "$(<"$(rig host-path "$node" /run/tranche/node)")" == "$node" ]] || fail "host path of $node"
  [[ "$(rig node-exec "$node" cat /var/lib/kubelet/plugins/probe/node)" == "$node" ]] ||
    fail "a mount made in a pod is not seen on $node"
done
ok "pods on both nodes: API server reached, logs, exec, own paths, mounts propagate"

refused=""
for ((i = 0; i < 100; i++)); do
  refused="$(k create configmap bad 2>&1 || true)"
  [[ $refused != *"no such name"* ]] || break
  k delete configmap bad --ignore-not-found >/dev/null
  sleep 0.1
done
[[ $refused == *"no such name"* ]] || fail "the admission policy did not refuse: $refused"
ok "an admission policy refuses"

slice='{"apiVersion":"resource.k8s.io/v1","kind":"DeviceClass","metadata":{"name":"probe"},"spec":{}}'
k create -f - >/dev/null <<<"$slice" || fail "resource.k8s.io/v1 is not served"
ok "resource.k8s.io/v1 is served by $(k version -o json | jq -r .serverVersion.gitVersion)"

[[ "$(k auth can-i create pods --as=system:serviceaccount:default:default || true)" == no ]] || fail "RBAC is not in force"
ok "RBAC is in force"

uid="$(k get pod "$pod" -o 'jsonpath={.metadata.uid} {.status.containerStatuses[0].containerID}')"
rig restart node-b kubelet
rig kill9 node-b containerd
rig start node-b containerd
# A kubelet that has just started learns of its pods a moment later.
for ((i = 0; i < 100; i++)); do
  ! k exec "$pod" -- true 2>/dev/null || break
  sleep 0.1
done
k exec "$pod" -- true
[[ "$(k get pod "$pod" -o 'jsonpath={.metadata.uid} {.status.containerStatuses[0].containerID}')" == "$uid" ]] ||
  fail "$pod did not outlive kubelet and containerd"
for c in etcd apiserver scheduler controller-manager; do rig restart control "$c"; done
rig status >/dev/null || {
  rig status || true
  fail "not all is up after restarts"
}
ok "kubelet, containerd and the control plane restarted; the pod lived on"

k delete ds probe --wait >/dev/null
k wait --for=delete pod -l app=probe --timeout=30s >/dev/null || fail "pods do not end"
ok "pods end"

trap - EXIT
rig down
[[ -z "$(left_over)" ]] || fail "left behind: $(left_over)"
ok "nothing left behind"

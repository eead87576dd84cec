# What every part of the demo uses. Sourced.
# shellcheck shell=bash
top="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
rig="$top/hack/rig/rig"
# shellcheck disable=SC2034 # for those who source this
target="${CARGO_TARGET_DIR:-$top/target}"
kubectl() { "$rig" kubectl "$@"; }
fail() { printf 'demo: %s\n' "$*" >&2; exit 1; }

# until_true SECONDS WHAT COMMAND...: polls.
until_true() {
  local deadline=$((SECONDS + $1)) what="$2"
  shift 2
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$deadline" ] || fail "not seen: $what"
    sleep 0.3
  done
}

# user NAMESPACE NAME: a pod of that name, with a claim of the template of that name.
user() {
  cat <<YAML
apiVersion: v1
kind: Pod
metadata: {name: $2, namespace: $1}
spec:
  terminationGracePeriodSeconds: 1
  securityContext: {runAsNonRoot: true, runAsUser: 65534}
  resourceClaims: [{name: gpu, resourceClaimTemplateName: $2}]
  containers:
    - name: main
      image: docker.io/local/glibc:1
      imagePullPolicy: Never
      securityContext: {allowPrivilegeEscalation: false}
      resources: {claims: [{name: gpu}]}
---
YAML
}

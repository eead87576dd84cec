# Builds the cluster's programs from their Go modules into the cache. Sourced.
# Touches only the cache folder and Go's own module and build caches.
# shellcheck shell=bash

go_quiet() { # runs go at low priority, its chatter shown only on failure
  local log rc=0
  log="$(mktemp)"
  nice -n 5 env CGO_ENABLED="${GO_CGO:-0}" GOFLAGS=-mod=mod GOWORK=off go "$@" >"$log" 2>&1 || rc=$?
  ((rc == 0)) || tail -n 40 "$log" >&2
  rm -f "$log"
  return "$rc"
}

# Kubernetes names its staging modules at v0.0.0 (they live in one tree), which
# no proxy serves; each is replaced by the release published for it.
make_kubernetes() {
  local out=$1 version=$2 work modfile name staging=()
  local major=${version%%.*} rest=${version#*.}
  local minor=${rest%%.*} programs=(kube-apiserver kube-controller-manager kube-scheduler kubelet kubectl)
  work="$(mktemp -d)"
  # shellcheck disable=SC2064
  trap "rm -rf '$work'" EXIT
  cd "$work" || exit
  modfile="$(GOWORK=off go mod download -json "k8s.io/kubernetes@v$version" | sed -n 's/^[[:space:]]*"GoMod": "\(.*\)",*$/\1/p')"
  [[ -s $modfile ]] || die "the Go module proxy has no k8s.io/kubernetes v$version"
  mapfile -t staging < <(awk '$2 == "v0.0.0" && $1 ~ /^k8s.io\// {print $1} $1 == "require" && $3 == "v0.0.0" {print $2}' "$modfile" | sort -u)
  {
    printf 'module rig.invalid/kubernetes\n\n'
    grep -E '^go [0-9]' "$modfile"
    printf '\nrequire k8s.io/kubernetes v%s\n' "$version"
    for name in "${staging[@]}"; do
      printf 'replace %s => %s v0.%s\n' "$name" "$name" "${version#*.}"
    done
  } >go.mod
  {
    printf '//go:build tools\n\npackage tools\n\nimport (\n'
    for name in "${programs[@]}"; do printf '\t_ "k8s.io/kubernetes/cmd/%s"\n' "$name"; done
    printf ')\n'
  } >tools.go
  go_quiet mod tidy
  local v=k8s.io/component-base/version
  local flags="-s -w -X $v.gitVersion=v$version -X $v.gitMajor=$major -X $v.gitMinor=$minor -X $v.gitTreeState=clean"
  # All at once: while one is linked, another compiles.
  go_quiet build -trimpath -ldflags "$flags" -o "$out/" "${programs[@]/#/k8s.io/kubernetes/cmd/}"
}

# go_programs OUT VERSION LDFLAGS PACKAGE...: programs of one module, built from
# a throw-away module that requires it (so that their versions can be stamped).
go_programs() {
  local out=$1 version=$2 flags=$3 work package
  shift 3
  work="$(mktemp -d)"
  # shellcheck disable=SC2064
  trap "rm -rf '$work'" EXIT
  cd "$work" || exit
  printf 'module rig.invalid/programs\n' >go.mod
  for package in "$@"; do go_quiet get "$package@v$version"; done
  go_quiet build -trimpath -ldflags "-s -w $flags" -o "$out/" "$@"
}

make_etcd() {
  go_programs "$1" "$2" "" go.etcd.io/etcd/server/v3
  mv "$1/server" "$1/etcd" 2>/dev/null || mv "$1/v3" "$1/etcd"
}

make_containerd() {
  local m=github.com/containerd/containerd/v2
  go_programs "$1" "$2" "-X $m/version.Version=v$2" \
    $m/cmd/containerd $m/cmd/containerd-shim-runc-v2 $m/cmd/ctr
}

make_helm() {
  go_programs "$1" "$2" "-X helm.sh/helm/v3/internal/version.version=v$2" helm.sh/helm/v3/cmd/helm
}

build_kubernetes() {
  local version=$1 known
  for known in "${K8S_RELEASES[@]}"; do
    [[ $known == "$version" ]] || continue
    [[ -d $CACHE/kubernetes/$version ]] || need_go
    in_cache "kubernetes/$version" make_kubernetes "$version"
    return
  done
  die "RIG_K8S=$version is not one of: ${K8S_RELEASES[*]}"
}
build_etcd() { [[ -d $CACHE/etcd/$ETCD_VERSION ]] || need_go; in_cache "etcd/$ETCD_VERSION" make_etcd "$ETCD_VERSION"; }
build_containerd() { [[ -d $CACHE/containerd/$CONTAINERD_VERSION ]] || need_go; in_cache "containerd/$CONTAINERD_VERSION" make_containerd "$CONTAINERD_VERSION"; }
build_helm() { [[ -d $CACHE/helm/$HELM_VERSION ]] || need_go; in_cache "helm/$HELM_VERSION" make_helm "$HELM_VERSION"; }

# build_prometheus: sets PROMETHEUS to the folder with prometheus and promtool, from the package prometheus of the Debian
# that this is, unpacked and not installed.
build_prometheus() {
  local version
  version="$(apt-cache policy prometheus 2>/dev/null | awk '$1 == "Candidate:" && $2 != "(none)" {print $2}')"
  if [[ -z $version ]]; then
    [[ $EUID -ne 0 ]] || apt-get update -q -o DPkg::Lock::Timeout=120 >/dev/null 2>&1 || true
    version="$(apt-cache policy prometheus 2>/dev/null | awk '$1 == "Candidate:" && $2 != "(none)" {print $2}')"
  fi
  [[ -n $version ]] || die "apt knows no package prometheus; is there a Debian mirror in /etc/apt?"
  in_cache "prometheus/${version//[^[:alnum:].+~-]/_}" make_prometheus "$version"
  # shellcheck disable=SC2034 # hack/rig/rig prints it
  PROMETHEUS="$CACHE/prometheus/${version//[^[:alnum:].+~-]/_}"
}

make_prometheus() {
  local out=$1 version=$2 work
  work="$(mktemp -d)"
  # shellcheck disable=SC2064
  trap "rm -rf '$work'" EXIT
  (cd "$work" && apt-get -q download -o APT::Sandbox::User=root "prometheus=$version") >"$work/log" 2>&1 ||
    { tail -n 5 "$work/log" >&2; die "Debian's package prometheus $version could not be fetched"; }
  dpkg-deb --fsys-tarfile "$work"/prometheus_*.deb |
    tar -x -C "$out" --strip-components=3 ./usr/bin/prometheus ./usr/bin/promtool
}

# build_adapter: sets ADAPTER to the program that answers HorizontalPodAutoscalers from Prometheus: adapter/main.go on
# the library that prometheus-adapter is made of, of which the Go module proxy has no release. By what it is made from,
# so that a change of the source is a new entry.
build_adapter() {
  local key
  key="adapter/$ADAPTER_LIBRARY_VERSION-$(sha256sum <"$RIG_HOME/adapter/main.go" | cut -c1-12)"
  [[ -d $CACHE/$key ]] || need_go
  in_cache "$key" make_adapter "$ADAPTER_LIBRARY_VERSION"
  # shellcheck disable=SC2034 # hack/rig/rig prints it
  ADAPTER="$CACHE/$key/adapter"
}

make_adapter() {
  local out=$1 version=$2 work
  work="$(mktemp -d)"
  # shellcheck disable=SC2064
  trap "rm -rf '$work'" EXIT
  cd "$work" || exit
  printf 'module rig.invalid/adapter\n' >go.mod
  cp "$RIG_HOME/adapter/main.go" .
  go_quiet get "sigs.k8s.io/custom-metrics-apiserver@v$version"
  go_quiet mod tidy
  go_quiet build -trimpath -ldflags "-s -w" -o "$out/adapter" .
}

# absent: what the cache lacks of all that a cluster needs, and about how many seconds it takes two idle processors to
# make it: a line each.
absent() {
  local key seconds
  while read -r key seconds; do
    [[ -d $CACHE/$key ]] || printf '%s %s\n' "$key" "$seconds"
  done <<TEXT
kubernetes/$RIG_K8S 420
etcd/$ETCD_VERSION 20
containerd/$CONTAINERD_VERSION 45
helm/$HELM_VERSION 50
driver/$DRIVER_VERSION 40
TEXT
}

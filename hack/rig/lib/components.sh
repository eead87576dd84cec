# The cluster's programs: how each is started, ended and known to be up. Sourced.
# Writes configuration and logs under RIG_DIR; starts and ends processes in the
# rig's own namespaces only.
# shellcheck shell=bash disable=SC2016

CONTROL_COMPONENTS=(etcd apiserver controller-manager scheduler)
NODE_COMPONENTS=(containerd kubelet)

# component_name PLACE COMPONENT: the name of its pid and log files.
component_name() { if [[ $1 == control ]]; then printf '%s\n' "$2"; else printf '%s.%s\n' "$1" "$2"; fi; }

check_component() {
  local known
  if [[ $1 == control ]]; then known=("${CONTROL_COMPONENTS[@]}"); else known=("${NODE_COMPONENTS[@]}"); fi
  [[ $1 == control ]] || node_index "$1" >/dev/null || die "no node $1 in rig $RIG_NAME; there are: control ${NODES[*]}"
  [[ " ${known[*]} " == *" $2 "* ]] || die "no component $2 on $1; there are: ${known[*]}"
}

# CDI is always on in containerd 2.x; only its folders are named.
write_node_config() {
  local node=$1 root="$RIG_DIR/$1" ip pods snapshotter=overlayfs runtime cgroups
  ip="$(node_ip "$node")" pods="$(node_pods "$node")"
  mkdir -p "$root/etc/rig" "$root/etc/cni/net.d" "$root/etc/kubernetes/manifests"
  # Overlay upon overlay is refused (when the cache lies inside a container).
  [[ "$(stat -f -c %T "$root")" != overlayfs ]] || is_machine "$node" || snapshotter=native
  runtime="restrict_oom_score_adj = true"
  cgroups="cgroupDriver: cgroupfs
cgroupRoot: /$(cgroup_name "$node")
failCgroupV1: false
enforceNodeAllocatable: []"
  if is_machine "$node"; then
    runtime='containerd.runtimes.runc = {runtime_type = "io.containerd.runc.v2", options = {SystemdCgroup = true}}'
    cgroups="cgroupDriver: systemd"
  fi
  cat >"$root/etc/rig/containerd.toml" <<TOML
version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.tracing", "io.containerd.tracing.processor.v1.otlp", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.erofs"]
[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.cri.v1.images"]
snapshotter = "$snapshotter"
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "docker.io/local/busybox:1"
[plugins."io.containerd.cri.v1.runtime"]
cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
disable_apparmor = true
$runtime
[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["/usr/lib/cni"]
conf_dir = "/etc/cni/net.d"
TOML
  cat >"$root/etc/cni/net.d/10-rig.conflist" <<JSON
{"cniVersion": "1.0.0", "name": "rig", "plugins": [{"type": "ptp", "ipMasq": false,
 "ipam": {"type": "host-local", "ranges": [[{"subnet": "$pods"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
JSON
  cat >"$root/etc/rig/kubelet.yaml" <<YAML
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: $ip
healthzBindAddress: $ip
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
authentication:
  x509: {clientCAFile: /etc/rig/ca.crt}
$cgroups
failSwapOn: false
localStorageCapacityIsolation: false
makeIPTablesUtilChains: false
evictionHard: {}
imageGCHighThresholdPercent: 100
clusterDNS: [10.96.0.10]
clusterDomain: cluster.local
kubeAPIQPS: 500
kubeAPIBurst: 1000
registryPullQPS: 0
eventRecordQPS: 0
syncFrequency: 10s
nodeStatusUpdateFrequency: 5s
$([[ -z $RIG_GATES ]] || printf 'featureGates: {%s}\n' "$(sed 's/=/: /g; s/,/, /g' <<<"$RIG_GATES")")
YAML
}

kubelet_args() { # kubelet_args NODE: one a line
  printf '%s\n' --config=/etc/rig/kubelet.yaml --kubeconfig=/etc/rig/kubelet.kubeconfig --root-dir=/var/lib/kubelet \
    --cert-dir=/var/lib/kubelet/pki "--hostname-override=$1" "--node-ip=$(node_ip "$1")" "--v=${RIG_KUBELET_V:-2}"
}

# start_component PLACE COMPONENT: starts it if it is not running; does not wait.
start_component() {
  local place=$1 component=$2 name ip etc="$RIG_DIR/etc" bin="$CACHE/kubernetes/$RIG_K8S" gates=() emulate=() audit=() admission=() args=()
  name="$(component_name "$place" "$component")"
  if is_machine "$place"; then
    in_node "$place" systemctl --no-block start "$component" </dev/null
    return
  fi
  ! alive "$place" "$name" || return 0
  ip="$(control_ip)"
  [[ -z $RIG_GATES ]] || gates=("--feature-gates=$RIG_GATES")
  [[ -z $RIG_EMULATE ]] || emulate=("--emulated-version=$RIG_EMULATE")
  [[ -z $RIG_AUDIT ]] ||
    audit=("--audit-policy-file=$RIG_AUDIT" "--audit-log-path=$RIG_DIR/logs/audit.log" --audit-log-maxsize=1000)
  [[ ! -f $etc/admission.yaml ]] || admission=("--admission-control-config-file=$etc/admission.yaml")
  case $component in
    etcd)
      spawn_first etcd "$CACHE/etcd/$ETCD_VERSION/etcd" --name rig --data-dir "$RIG_DIR/etcd-data" \
        --unsafe-no-fsync --log-level warn --listen-client-urls http://127.0.0.1:2379 \
        --advertise-client-urls http://127.0.0.1:2379 --listen-peer-urls http://127.0.0.1:2380 \
        --initial-advertise-peer-urls http://127.0.0.1:2380 --initial-cluster rig=http://127.0.0.1:2380
      ;;
    apiserver)
      spawn_first apiserver "$bin/kube-apiserver" --etcd-servers=http://127.0.0.1:2379 \
        --bind-address=0.0.0.0 --secure-port=443 "--advertise-address=$ip" \
        --service-cluster-ip-range=10.96.0.0/16 --allow-privileged=true \
        --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction \
        "--tls-cert-file=$etc/apiserver.crt" "--tls-private-key-file=$etc/apiserver.key" \
        "--client-ca-file=$etc/ca.crt" "--token-auth-file=$etc/tokens.csv" \
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local" \
        "--service-account-key-file=$etc/sa.pub" "--service-account-signing-key-file=$etc/sa.key" \
        "--kubelet-client-certificate=$etc/kubelet-client.crt" "--kubelet-client-key=$etc/kubelet-client.key" \
        --kubelet-preferred-address-types=InternalIP,Hostname \
        "--requestheader-client-ca-file=$etc/ca.crt" --requestheader-allowed-names=front-proxy-client \
        --requestheader-username-headers=X-Remote-User --requestheader-group-headers=X-Remote-Group \
        --requestheader-extra-headers-prefix=X-Remote-Extra- \
        "--proxy-client-cert-file=$etc/front-proxy.crt" "--proxy-client-key-file=$etc/front-proxy.key" \
        --enable-aggregator-routing=true --runtime-config=resource.k8s.io/v1=true \
        --max-requests-inflight=3000 --max-mutating-requests-inflight=1500 \
        "${admission[@]}" "${audit[@]}" "${emulate[@]}" "${gates[@]}"
      ;;
    controller-manager)
      spawn_first controller-manager "$bin/kube-controller-manager" \
        "--kubeconfig=$etc/controller-manager.kubeconfig" "--root-ca-file=$etc/ca.crt" \
        "--service-account-private-key-file=$etc/sa.key" --use-service-account-credentials=true \
        --bind-address=127.0.0.1 --leader-elect=false --kube-api-qps=500 --kube-api-burst=1000 \
        --horizontal-pod-autoscaler-sync-period=2s "${emulate[@]}" "${gates[@]}"
      ;;
    scheduler)
      spawn_first scheduler "$bin/kube-scheduler" "--kubeconfig=$etc/scheduler.kubeconfig" \
        "--authentication-kubeconfig=$etc/scheduler.kubeconfig" \
        "--authorization-kubeconfig=$etc/scheduler.kubeconfig" \
        --bind-address=127.0.0.1 --leader-elect=false --kube-api-qps=500 --kube-api-burst=1000 \
        "${emulate[@]}" "${gates[@]}"
      ;;
    containerd)
      spawn "$place" "$name" /usr/bin/env \
        PATH=/opt/containerd:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        /opt/containerd/containerd --config /etc/rig/containerd.toml
      ;;
    kubelet)
      mapfile -t args < <(kubelet_args "$place")
      spawn "$place" "$name" /opt/kubernetes/kubelet "${args[@]}"
      ;;
  esac
}

port_open() { in_place "$1" /bin/bash -c ': <"/dev/tcp/$1/$2"' port "$2" "$3" 2>/dev/null; }
ctr() { # ctr NODE ARGS...: containerd's own client, on that node
  local node=$1
  shift
  in_node "$node" /opt/containerd/ctr --address /run/containerd/containerd.sock "$@"
}
kubectl() { KUBECONFIG="$RIG_DIR/kubeconfig" "$CACHE/kubernetes/$RIG_K8S/kubectl" "$@"; }

component_answers() {
  case $2 in
    etcd) port_open control 127.0.0.1 2379 ;;
    apiserver) [[ "$(kubectl get --raw /readyz --request-timeout=2s 2>/dev/null)" == ok ]] ;;
    controller-manager) port_open control 127.0.0.1 10257 ;;
    scheduler) port_open control 127.0.0.1 10259 ;;
    containerd) ctr "$1" version ;;
    kubelet) port_open "$1" "$(node_ip "$1")" 10248 ;;
  esac
}

# await_component PLACE COMPONENT: until it answers; at once in vain when it died.
await_component() {
  local name limit=120 end
  # One without KVM takes its time when others use the processors.
  ! is_machine "$1" || limit=300
  end=$((SECONDS + limit))
  name="$(component_name "$1" "$2")"
  until component_answers "$1" "$2" >/dev/null 2>&1; do
    if ! component_alive "$1" "$2" || ((SECONDS >= end)); then
      tail -n 15 "$RIG_DIR/logs/$name.log" >&2
      die "$2 on $1 did not come up; its log is $RIG_DIR/logs/$name.log"
    fi
    sleep 0.1
  done
}

# component_alive PLACE COMPONENT: whether it runs, or is on its way up or down.
component_alive() {
  if is_machine "$1"; then
    # Nothing is known of it while the machine boots; a job is what systemd is yet to do with it.
    case "$(in_node "$1" systemctl show --property ActiveState,Job "$2" </dev/null 2>/dev/null)" in
      '') alive control "$1" ;;
      *=active* | *ating* | *Job=[1-9]*) return 0 ;;
      *) return 1 ;;
    esac
    return
  fi
  alive "$1" "$(component_name "$1" "$2")"
}
ended() { ! component_alive "$1" "$2"; }

signal_component() { # signal_component PLACE COMPONENT SIGNAL
  if is_machine "$1"; then
    in_node "$1" systemctl --kill-whom=main --signal="$3" kill "$2" </dev/null || true
    return
  fi
  signal "$1" "$(component_name "$1" "$2")" "$3"
}

# end_component PLACE COMPONENT SIGNAL SECONDS: and waits until it is gone.
end_component() {
  local name
  name="$(component_name "$1" "$2")"
  signal_component "$1" "$2" "$3"
  # It would wait up to a minute for those who watch.
  if [[ $2 == apiserver && $3 == TERM ]] && ! within 5 ended "$1" "$2"; then
    say "the API server still serves watches after 5 s; ending it with SIGKILL"
    signal_component "$1" "$2" KILL
  fi
  until_ok "$4" "$2 on $1 to end after SIG$3" ended "$1" "$2" || die "use: rig kill9 $1 $2"
  rm -f "$RIG_DIR/$name.pid"
}

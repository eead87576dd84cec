# Keys, certificates, tokens and kubeconfigs of one rig. Sourced. Writes into
# RIG_DIR/etc only. Good for a test cluster and nothing else.
# shellcheck shell=bash

make_secrets() {
  local etc="$RIG_DIR/etc" ip user node group token
  ip="$(control_ip)"
  mkdir -p "$etc"
  chmod 700 "$etc"
  ec() { openssl ecparam -name prime256v1 -genkey -noout -out "$1" 2>/dev/null; }
  ec "$etc/ca.key"
  openssl req -x509 -new -key "$etc/ca.key" -days 3650 -subj "/CN=tranche-rig-$RIG_NAME" \
    -addext keyUsage=critical,digitalSignature,keyCertSign -out "$etc/ca.crt"
  cert() { # cert NAME SUBJECT USAGE [SAN]
    local ext="keyUsage=critical,digitalSignature\nextendedKeyUsage=$3\n"
    ec "$etc/$1.key"
    [[ -z ${4:-} ]] || ext+="subjectAltName=$4\n"
    openssl req -new -key "$etc/$1.key" -subj "$2" |
      openssl x509 -req -CA "$etc/ca.crt" -CAkey "$etc/ca.key" -set_serial "0x$(openssl rand -hex 8)" \
        -days 3650 -extfile <(printf '%b' "$ext") -out "$etc/$1.crt" 2>/dev/null
  }
  cert apiserver /CN=kube-apiserver serverAuth \
    "IP:10.96.0.1,IP:$ip,IP:127.0.0.1,DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:kubernetes.default.svc.cluster.local"
  cert kubelet-client "/O=system:masters/CN=kube-apiserver-kubelet-client" clientAuth
  cert front-proxy /CN=front-proxy-client clientAuth
  openssl genrsa -out "$etc/sa.key" 2048 2>/dev/null
  openssl rsa -in "$etc/sa.key" -pubout -out "$etc/sa.pub" 2>/dev/null

  : >"$etc/tokens.csv"
  kubeconfig() { # kubeconfig FILE USER UID [GROUP]
    user=$2 group=${4:-}
    token="$(openssl rand -hex 16)"
    printf '%s,%s,%s%s\n' "$token" "$user" "$3" "${group:+,\"$group\"}" >>"$etc/tokens.csv"
    cat >"$1" <<YAML
apiVersion: v1
kind: Config
current-context: rig
clusters:
- name: rig
  cluster: {server: "https://$ip:443", certificate-authority-data: "$(base64 -w0 <"$etc/ca.crt")"}
users:
- name: rig
  user: {token: "$token"}
contexts:
- name: rig
  context: {cluster: rig, user: rig}
YAML
    chmod 600 "$1"
  }
  kubeconfig "$RIG_DIR/kubeconfig" admin admin system:masters
  kubeconfig "$etc/controller-manager.kubeconfig" system:kube-controller-manager kcm
  kubeconfig "$etc/scheduler.kubeconfig" system:kube-scheduler scheduler
  for node in "${NODES[@]}"; do
    mkdir -p "$RIG_DIR/$node/etc/rig"
    kubeconfig "$RIG_DIR/$node/etc/rig/kubelet.kubeconfig" "system:node:$node" "$node" system:nodes
    cp "$etc/ca.crt" "$RIG_DIR/$node/etc/rig/ca.crt"
  done
}

# Brings a whole cluster up and takes it down. Sourced. Touches what the files
# beside this one say, and nothing more.
# shellcheck shell=bash

# Settings a rig is made with; kept in RIG_DIR/settings, from where every later
# verb reads them.
SETTINGS=(RIG_NODES RIG_MACHINE RIG_K8S RIG_EMULATE RIG_GATES RIG_FAKE_NVML RIG_AUDIT)

save_settings() {
  local s
  for s in "${SETTINGS[@]}"; do printf '%s=%q\n' "$s" "${!s}"; done >"$RIG_DIR/settings"
}
set_nodes() {
  NODES=(node-a node-b)
  NODES=("${NODES[@]:0:$RIG_NODES}")
  [[ -z $RIG_MACHINE ]] || NODES+=("$MACHINE")
}
# load_settings: of the rig that is up; anything else is an error.
load_settings() {
  keeper_alive || die "rig $RIG_NAME is not up; bring it up with: rig up (RIG_NAME=$RIG_NAME)"
  # shellcheck disable=SC1091
  . "$RIG_DIR/settings"
  set_nodes
}

nodes_ready() {
  [[ "$(kubectl get nodes -l '!rig/hollow' --request-timeout=5s \
    -o 'jsonpath={range .items[*]}{.status.conditions[?(@.type=="Ready")].status}{" "}{end}' 2>/dev/null)" \
    == "$(printf 'True %.0s' "${NODES[@]}")" ]]
}
has_default_account() { kubectl get serviceaccount default --request-timeout=5s; }

# What a rig takes of the kernel's inotify instances, of which one user has few: the control plane, and each node with
# containerd, kubelet and the driver. As counted on rigs that were up.
INOTIFY_CONTROL=7
INOTIFY_NODE=11

# inotify_used: how many this user has open, as far as its processes can be seen. Where the processes of other
# containers share the limit, it is more.
inotify_used() { find /proc/[0-9]*/fd -user "$EUID" -lname 'anon_inode:*inotify' -printf . 2>/dev/null | wc -c || true; }

# inotify_short NEED: succeeds, with words, when fewer than NEED are left. RIG_INOTIFY_LIMIT stands in for the kernel's
# limit in tests.
inotify_short() {
  local limit used
  limit="${RIG_INOTIFY_LIMIT:-$(cat /proc/sys/fs/inotify/max_user_instances 2>/dev/null)}"
  [[ $limit == +([0-9]) ]] || return 1
  used="$(inotify_used)"
  ((limit - used < $1)) || return 1
  printf 'rig: error: %s of the %s inotify instances that one user may have are in use, and rig %s takes about %s more; raise the limit: sysctl -w fs.inotify.max_user_instances=1024\n' \
    "$used" "$limit" "$RIG_NAME" "$1" >&2
}

each_component() { # each_component FUNCTION: FUNCTION PLACE COMPONENT for all
  local c node
  for c in "${CONTROL_COMPONENTS[@]}"; do "$1" control "$c" || return 1; done
  for node in "${NODES[@]}"; do
    for c in "${NODE_COMPONENTS[@]}"; do "$1" "$node" "$c" || return 1; done
  done
}
healthy() { each_component component_alive && component_answers control apiserver && nodes_ready; }

load_image() { # load_image NODE FILE
  local out
  out="$(ctr "$1" -n k8s.io images import - <"$2" 2>&1)" ||
    die "containerd on $1 would not take $2: $out"
}

cluster_up() {
  local begin=$SECONDS s node was
  case $RIG_MACHINE in '' | 1) ;; *) die "RIG_MACHINE=$RIG_MACHINE; it is 1 or empty" ;; esac
  case $RIG_NODES$RIG_MACHINE in 1 | 2 | 01 | 11 | 21) ;; *) die "RIG_NODES=$RIG_NODES; it is 1 or 2, or 0 with RIG_MACHINE=1" ;; esac
  [[ -z $RIG_FAKE_NVML ]] || RIG_FAKE_NVML="$(readlink -m "$RIG_FAKE_NVML")"
  [[ -z $RIG_FAKE_NVML || -f $RIG_FAKE_NVML ]] || die "RIG_FAKE_NVML: no library at $RIG_FAKE_NVML; build it first"
  [[ -z $RIG_AUDIT ]] || RIG_AUDIT="$(readlink -m "$RIG_AUDIT")"
  [[ -z $RIG_AUDIT || -f $RIG_AUDIT ]] || die "RIG_AUDIT: no policy at $RIG_AUDIT"
  set_nodes
  mkdir -p "$RIG_DIR"
  exec 7>"$RIG_DIR.lock"
  flock -n 7 || die "another rig up or down of $RIG_NAME is under way"
  if keeper_alive && [[ -s $RIG_DIR/settings ]]; then
    for s in "${SETTINGS[@]}"; do
      # shellcheck disable=SC1091
      was="$(. "$RIG_DIR/settings" && printf '%s' "${!s:-}")"
      [[ $was == "${!s}" ]] || die "rig $RIG_NAME is up with $s='$was', not '${!s}'; run rig down first or choose another RIG_NAME"
    done
    if healthy; then
      say "rig $RIG_NAME is up and healthy"
      printf 'export KUBECONFIG=%s\n' "$RIG_DIR/kubeconfig"
      return 0
    fi
    say "rig $RIG_NAME is half up; starting afresh"
  fi
  clean_up
  ! inotify_short $((INOTIFY_CONTROL + RIG_NODES * INOTIFY_NODE)) || exit 1
  build_all
  [[ -z $RIG_FAKE_NVML ]] || build_driver
  [[ -z $RIG_MACHINE ]] || build_machine

  mkdir -p "$RIG_DIR/logs"
  chmod 755 "$RIG_DIR"
  local start=$SECONDS
  say "starting Kubernetes $RIG_K8S${RIG_EMULATE:+ as $RIG_EMULATE} with ${NODES[*]} in $RIG_DIR"
  save_settings
  # What failed half way is ended, its logs kept.
  # Rigs that start at the same time may have taken the instances that were left.
  trap 'rc=$?; trap - EXIT; ((rc == 0)) || { inotify_short 2 || true; say "giving up; logs are in $RIG_DIR/logs"; end_all 7>&-; }; exit $rc' EXIT
  {
    open_space
    make_secrets
    [[ -z $RIG_MACHINE ]] || start_machine
    start_component control etcd
    start_component control apiserver
    for node in "${NODES[@]:0:$RIG_NODES}"; do
      open_node "$node"
      write_node_config "$node"
      [[ -z $RIG_FAKE_NVML ]] || driver_root "$RIG_DIR/$node/driver" "$RIG_FAKE_NVML"
      start_component "$node" containerd
    done
    for node in "${NODES[@]:0:$RIG_NODES}"; do
      await_component "$node" containerd
      load_image "$node" "$CACHE/images/$IMAGES_VERSION/busybox.tar"
      load_image "$node" "$CACHE/images/$IMAGES_VERSION/glibc.tar"
    done
    say "  containerd ready after $((SECONDS - start)) s"
    await_component control apiserver
    say "  API server ready after $((SECONDS - start)) s"
    start_component control controller-manager
    start_component control scheduler
    for node in "${NODES[@]:0:$RIG_NODES}"; do start_component "$node" kubelet; done
    [[ -z $RIG_MACHINE ]] || await_machine
    for node in "${NODES[@]}"; do await_component "$node" kubelet; done
    until_ok 180 "the nodes to be Ready (logs in $RIG_DIR/logs)" nodes_ready || exit 1
    await_component control controller-manager
    await_component control scheduler
    until_ok 120 "the default service account" has_default_account || exit 1
  } 7>&-
  trap - EXIT
  say "rig $RIG_NAME is up: ${NODES[*]} Ready after $((SECONDS - start)) s (all in all $((SECONDS - begin)) s)"
  printf 'export KUBECONFIG=%s\n' "$RIG_DIR/kubeconfig"
}

# end_all: every process, link and control group; the files stay.
end_all() {
  local node
  close_space
  for node in node-a node-b; do remove_cgroups "$node"; done
}

# clean_up [keep-logs]: ends and removes whatever there is of this rig.
clean_up() {
  end_all
  wipe_state "${1:-}"
}

cluster_down() {
  local start=$SECONDS keep=""
  [[ ${RIG_KEEP_LOGS:-} != 1 ]] || keep="keep-logs"
  [[ -d $RIG_DIR ]] || {
    say "rig $RIG_NAME is not up"
    return 0
  }
  exec 7>"$RIG_DIR.lock"
  flock -n 7 || die "another rig up or down of $RIG_NAME is under way"
  clean_up "$keep"
  rm -f "$RIG_DIR.lock"
  say "rig $RIG_NAME is down after $((SECONDS - start)) s${keep:+; its logs are in $RIG_DIR/logs}"
}

cluster_status() {
  local rc=0
  if ! keeper_alive; then
    printf 'rig %s: down\n' "$RIG_NAME"
    return 1
  fi
  load_settings
  printf 'rig %s: Kubernetes %s%s, number %s, state in %s\n' "$RIG_NAME" "$RIG_K8S" \
    "${RIG_EMULATE:+ as $RIG_EMULATE}" "$(<"$RIG_DIR/slot")" "$RIG_DIR"
  # shellcheck disable=SC2317
  show() {
    local state=down
    ! component_alive "$1" "$2" || state=up
    [[ $state == up ]] || rc=1
    printf '  %-8s %-19s %s\n' "$1" "$2" "$state"
  }
  each_component show
  if nodes_ready; then
    printf "  all nodes Ready\n"
  else
    printf '  not all nodes Ready\n'
    rc=1
  fi
  return "$rc"
}

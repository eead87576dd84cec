# The namespaces a rig lives in. Sourced.
#
# One keeper process holds a network, mount and process namespace for the whole
# rig; inside it each node has a mount and a process namespace of its own, with a
# root file system assembled by node-init.sh. Ending the keeper ends every process
# of the rig and unmounts everything.
# Touches: the keeper, one veth pair (trigN), one route, files under RIG_DIR.
# shellcheck shell=bash disable=SC2016 disable=SC2016

# start_time PID: the kernel's start time of a process, which with the pid names
# it for good; nothing when it is gone (a zombie counts as gone).
start_time() {
  local stat
  stat="$(cat "/proc/$1/stat" 2>/dev/null)" || return 0
  # shellcheck disable=SC2086
  set -- ${stat##*) }
  [[ $1 == Z || $1 == X ]] || printf '%s\n' "${20}"
}

# same_process FILE: FILE holds "PID START"; true when that process still lives.
same_process() {
  local pid="" start=""
  [[ -s $1 ]] && read -r pid start <"$1" && [[ -n $pid && $start == "$(start_time "$pid")" ]]
}

keeper_alive() { same_process "$RIG_DIR/keeper"; }

ns_of() { # ns_of PID: nsenter's options for what the unshare process PID made
  printf '%s\n' "--mount=/proc/$1/ns/mnt" "--pid=/proc/$1/ns/pid_for_children"
}

# in_rig CMD...: runs CMD in the rig's namespaces (the machine's file system).
in_rig() {
  local pid opts
  read -r pid _ <"$RIG_DIR/keeper"
  mapfile -t opts < <(ns_of "$pid")
  nsenter "--net=/proc/$pid/ns/net" "${opts[@]}" -- "$@"
}

# in_node NODE CMD...: runs CMD in that node's namespaces and root file system.
in_node() {
  local node=$1 pid opts
  shift
  if is_machine "$node" && [[ -s $RIG_DIR/$node.pid ]]; then
    machine_exec "$@"
    return
  fi
  [[ -s $RIG_DIR/$node.pid ]] || die "rig $RIG_NAME has no $node (nodes: ${NODES[*]})"
  read -r pid _ <"$RIG_DIR/$node.pid"
  mapfile -t opts < <(ns_of "$pid")
  in_rig nsenter "${opts[@]}" -- "$@"
}

# in_place NODE CMD...: in_rig for the control plane, in_node for a node.
in_place() {
  if [[ $1 == control ]]; then
    shift
    in_rig "$@"
  else
    in_node "$@"
  fi
}

# spawn_first NAME CMD...: the same as spawn in place control, for what a real cluster has machines of its own for: it
# gets its processors before pods, nodes and tests do.
spawn_first() {
  local name=$1
  shift
  # shellcheck disable=SC2016
  spawn control "$name" /bin/bash -c '
    # Where each session has a share of the processors of its own, niceness counts within the session only.
    [[ ! -w /proc/self/autogroup ]] || echo -10 >/proc/self/autogroup || true
    exec nice -n -10 "$@"' "$name" "$@"
}

# spawn PLACE NAME CMD...: starts CMD detached in PLACE, output to logs/NAME.log,
# and records "PID START" (as seen inside PLACE) in RIG_DIR/NAME.pid.
spawn() {
  local place=$1 name=$2
  shift 2
  # shellcheck disable=SC2016
  in_place "$place" /bin/bash -c '
    setsid "$@" </dev/null >&3 2>&3 3>&- &
    stat=$(cat /proc/$!/stat) && set -- ${stat##*) } && echo "$! ${20}"
  ' spawn "$@" 3>>"$RIG_DIR/logs/$name.log" >"$RIG_DIR/$name.pid"
}

# alive PLACE NAME: whether what spawn started still runs.
alive() {
  local pid="" start=""
  [[ -s $RIG_DIR/$2.pid ]] || return 1
  read -r pid start <"$RIG_DIR/$2.pid"
  # shellcheck disable=SC2016
  in_place "$1" /bin/bash -c '
    stat=$(cat "/proc/$1/stat" 2>/dev/null) || exit 1
    want=$2; set -- ${stat##*) }; [[ $1 != Z && ${20} == "$want" ]]' alive "$pid" "$start"
}

# signal PLACE NAME SIGNAL: to the very process that spawn started, or to none.
signal() {
  local pid
  alive "$1" "$2" || return 0
  read -r pid _ <"$RIG_DIR/$2.pid"
  in_place "$1" /bin/bash -c 'kill -"$1" "$2"' signal "$3" "$pid"
}

# open_space: the keeper, the link to the machine, and a free number N for it:
# addresses 10.99.N.0/29 (.1 the machine, .2 control and node-a, .3 node-b, .4
# node-vm), pods in 10.97.N.0/24, those of node-vm in 10.98.N.0/24. Taking the
# link's name is what claims the number.
open_space() {
  local pid n="" try
  # Not a member of any shared mount group of the machine's: made private, then
  # shared again among the rig's own namespaces, which kubelet needs.
  setsid unshare --net --mount --pid --fork --kill-child --mount-proc --propagation private \
    /bin/bash -c 'mount --make-rshared / && : >"$1" && while :; do sleep 3600; done' \
    keeper "$RIG_DIR/keeper.ready" </dev/null >"$RIG_DIR/logs/keeper.log" 2>&1 &
  pid=$!
  disown "$pid"
  until_ok 30 "the rig's namespaces (see $RIG_DIR/logs/keeper.log)" test -e "$RIG_DIR/keeper.ready"
  printf '%s %s\n' "$pid" "$(start_time "$pid")" >"$RIG_DIR/keeper"
  for ((try = 1; try <= 250; try++)); do
    [[ -z "$(ip -4 route show "10.99.$try.0/29")" ]] || continue
    if ip link add "trig$try" type veth peer name eth0 netns "$pid" 2>/dev/null; then
      n=$try
      break
    fi
  done
  [[ -n $n ]] || die "no free link name among trig1 to trig250; end some rigs (ip link show type veth)"
  printf '%s\n' "$n" >"$RIG_DIR/slot"
  ip link set "trig$n" alias "tranche rig $RIG_NAME"
  ip addr add "10.99.$n.1/29" dev "trig$n"
  ip link set "trig$n" up
  # The first address to be added is the one the namespace speaks from.
  # shellcheck disable=SC2016
  in_rig /bin/bash -c '
    set -e
    ip link set lo up
    ip addr add 10.96.0.1/32 dev lo
    ip addr add "10.99.$1.2/29" dev eth0
    ip addr add "10.99.$1.3/29" dev eth0
    ip link set eth0 up
    ip route add default via "10.99.$1.1"
    echo 1 >/proc/sys/net/ipv4/ip_forward' net "$n"
  ip route add "10.97.$n.0/24" via "10.99.$n.2"
}

node_index() { # place among the rig's nodes
  local i
  for i in "${!NODES[@]}"; do
    [[ ${NODES[i]} != "$1" ]] || { printf '%s\n' "$i"; return 0; }
  done
  return 1
}
control_ip() { printf '10.99.%s.2\n' "$(<"$RIG_DIR/slot")"; }
node_ip() {
  local host=4
  is_machine "$1" || host=$(($(node_index "$1") + 2))
  printf '10.99.%s.%s\n' "$(<"$RIG_DIR/slot")" "$host"
}
node_pods() {
  if is_machine "$1"; then
    printf '10.98.%s.0/24\n' "$(<"$RIG_DIR/slot")"
  else
    printf '10.97.%s.%s/25\n' "$(<"$RIG_DIR/slot")" "$(($(node_index "$1") * 128))"
  fi
}
cgroup_name() { printf 'tranche-rig-%s-%s\n' "$RIG_NAME" "$1"; }

# The control groups a node's pods lie under: one folder below every controller
# (cgroup v1) or one folder (v2).
make_cgroups() {
  local name base dir f
  name="$(cgroup_name "$1")"
  if [[ -e /sys/fs/cgroup/cgroup.controllers ]]; then
    mkdir -p "/sys/fs/cgroup/$name"
    for base in /sys/fs/cgroup "/sys/fs/cgroup/$name"; do
      for f in $(<"$base/cgroup.controllers"); do
        echo "+$f" >"$base/cgroup.subtree_control" 2>/dev/null || true
      done
    done
    return 0
  fi
  for base in /sys/fs/cgroup/*/; do
    [[ -e $base/cgroup.procs && ! -L ${base%/} ]] || continue
    dir="$base$name"
    mkdir -p "$dir"
    for f in cpuset.cpus cpuset.mems; do # empty until somebody fills them in
      [[ ! -e $dir/$f || -n "$(<"$dir/$f")" ]] || cat "$base$f" >"$dir/$f"
    done
  done
}

cgroup_dirs() {
  local d
  for d in "/sys/fs/cgroup/$(cgroup_name "$1")" /sys/fs/cgroup/*/"$(cgroup_name "$1")"; do
    [[ -d $d ]] && printf '%s\n' "$d"
  done
  return 0
}
remove_cgroups() {
  local d
  while read -r d; do
    [[ -z $d ]] || until_ok 30 "the processes in $d to be gone" find "$d" -depth -type d -exec rmdir {} +
  done < <(cgroup_dirs "$1")
}

# open_node NODE: its state folder, which is its root file system, and its
# namespaces. `spawn` cannot serve here: the node's place does not exist yet.
open_node() {
  local node=$1
  mkdir -p "$RIG_DIR/$node"
  make_cgroups "$node"
  spawn control "$node" unshare --mount --pid --fork --kill-child --propagation private \
    /bin/bash "$RIG_HOME/node-init.sh" "$RIG_DIR/$node" "$node" \
    "$CACHE/kubernetes/$RIG_K8S" "$CACHE/containerd/$CONTAINERD_VERSION"
  until_ok 30 "$node's file system (see $RIG_DIR/logs/$node.log)" test -e "$RIG_DIR/$node/run/rig-ready"
  # in_node is called from inside the rig, whose /proc shows this very pid.
}

# close_space: ends the keeper, and with it everything; waits until it is so.
close_space() {
  local pid n="" child=""
  if keeper_alive; then
    read -r pid _ <"$RIG_DIR/keeper"
    child="$(cat "/proc/$pid/task/$pid/children" 2>/dev/null || true)"
    child=${child%% *}
    kill -KILL "$pid"
    # The first process of a process namespace is gone only after all others.
    [[ -z $child ]] || until_ok 30 "the rig's processes to end" not_running "$child"
    until_ok 30 "the keeper to end" not_running "$pid"
  fi
  rm -f "$RIG_DIR/keeper" "$RIG_DIR"/*.pid
  [[ -s $RIG_DIR/slot ]] && n="$(<"$RIG_DIR/slot")"
  # The pair goes with the namespace, a moment later; by name only if it is ours.
  if [[ -n $n ]] && ip link show "trig$n" 2>/dev/null | grep -qF "alias tranche rig $RIG_NAME"; then
    ip link del "trig$n" 2>/dev/null || true
  fi
  rm -f "$RIG_DIR/slot" "$RIG_DIR/keeper.ready"
}
not_running() { [[ -z "$(start_time "$1")" ]]; }

# wipe_state: removes what a rig wrote. Refuses while anything is mounted below,
# for a bind mount seen from here would be emptied with it.
wipe_state() {
  local d
  [[ -d $RIG_DIR ]] || return 0
  if grep -qF " $RIG_DIR/" /proc/self/mountinfo; then
    die "something is mounted under $RIG_DIR (findmnt shows it); unmount it, then run rig down again"
  fi
  for d in "$RIG_DIR"/* "$RIG_DIR"/.[!.]*; do
    [[ $d == "$RIG_DIR/logs" && ${1:-} == keep-logs ]] || rm -rf --one-file-system "$d"
  done
  rmdir "$RIG_DIR" 2>/dev/null || true
}

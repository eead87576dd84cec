# A node that is a virtual machine: systemd, control groups v2, a kernel and disks of its own, so that it
# can be rebooted. Its root is made of Debian's packages, its programs are the rig's. Sourced. In this file
# "the machine" is the virtual one.
#
# qemu runs it without KVM, inside the rig's namespaces, so that ending the keeper ends it. Its disks:
#   root      from the cache, with what this rig has written to it in a file of the rig
#   programs  Kubernetes, containerd, runc and the images, from the cache, read-only
#   driver    the driver root, as the first
#   files     a tar with the files of this rig, which the machine unpacks at each boot
# Commands are run in it over ssh, on one connection that is kept.
# Touches: the cache, files under RIG_DIR, one process and one tap device inside the rig, one route.
# shellcheck shell=bash disable=SC2016

MACHINE=node-vm
MACHINE_DEBIAN=trixie
# Change when what make_machine does, or a file in hack/rig/machine, changes: it is part of the cache key.
MACHINE_VERSION=1
RUNC_VERSION=1.5.2
MACHINE_MEMORY="${RIG_MACHINE_MEMORY:-1536M}"
# `rig` ends with it where no machine can be had, so that others can pass it over.
NO_MACHINE=4

no_machine() {
  printf 'rig: no machine: %s\n' "$*" >&2
  exit "$NO_MACHINE"
}

is_machine() { [[ $1 == "$MACHINE" ]]; }

# machine_tools: what it takes to make and run it, or exit status 4.
machine_tools() {
  local said
  [[ "$(uname -m)" == x86_64 ]] || no_machine "its recipe is for x86_64, and this is $(uname -m)"
  said="$( (need_pkgs qemu-system-x86 qemu-utils mmdebstrap e2fsprogs openssh-client libseccomp-dev) 2>&1)" ||
    no_machine "Debian's packages for it cannot be had: ${said##*error: }"
  [[ -c /dev/net/tun ]] || no_machine "there is no /dev/net/tun, which connects it with the rig"
  command -v cc >/dev/null || no_machine "there is no C compiler, which runc takes"
}

# Unlike the rig's other programs it has parts in C.
make_runc() {
  local work
  work="$(mktemp -d)"
  # shellcheck disable=SC2064
  trap "rm -rf '$work'" EXIT
  cd "$work" || exit
  printf 'module rig.invalid/programs\n' >go.mod
  GO_CGO=1 go_quiet get "github.com/opencontainers/runc@v$2"
  GO_CGO=1 go_quiet build -trimpath -tags seccomp -ldflags "-s -w -X main.version=$2" -o "$1/runc" \
    github.com/opencontainers/runc
}

make_machine() { # make_machine OUT: vmlinuz and root.ext4
  local out=$1 work root package
  work="$(mktemp -d)"
  # shellcheck disable=SC2064
  trap "rm -rf '$work'" EXIT
  root="$work/root"
  # Nothing of it is read by people.
  nice -n 5 mmdebstrap --mode=root --variant=essential --format=directory --quiet \
    --aptopt='Acquire::Languages "none"' --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    --include=systemd-sysv,dbus,udev,kmod,iproute2,mount,dropbear-bin,libseccomp2,containernetworking-plugins \
    --customize-hook="cd '$work' && APT_CONFIG=\"\$MMDEBSTRAP_APT_CONFIG\" apt-get -q download \
      \"\$(APT_CONFIG=\"\$MMDEBSTRAP_APT_CONFIG\" apt-cache depends linux-image-cloud-amd64 | sed -n 's/.*Depends: //p')\"" \
    "$MACHINE_DEBIAN" "$root" "${RIG_DEBIAN_MIRROR:-http://deb.debian.org/debian}" >"$work/log" 2>&1 ||
    { tail -n 20 "$work/log" >&2; die "mmdebstrap could not make a Debian $MACHINE_DEBIAN"; }
  package="$(find "$work" -maxdepth 1 -name 'linux-image-*.deb')"
  [[ -s $package ]] || die "Debian $MACHINE_DEBIAN has no package linux-image-cloud-amd64"
  dpkg-deb -x "$package" "$work/kernel"
  mv "$work/kernel/usr/lib/modules" "$root/usr/lib/"
  mv "$work"/kernel/boot/vmlinuz-* "$out/vmlinuz"
  chroot "$root" depmod "$(ls "$root/usr/lib/modules")"
  machine_files "$root"
  truncate -s 3G "$out/root.ext4"
  mke2fs -q -t ext4 -d "$root" "$out/root.ext4"
}

# machine_files ROOT: what Debian does not bring.
machine_files() {
  local root=$1 unit
  cp -a "$RIG_HOME/machine/." "$root/"
  chown -R 0:0 "$root/etc/systemd" "$root/usr/local"
  for unit in rig dropbear containerd kubelet; do
    ln -s "/etc/systemd/system/$unit.service" "$root/etc/systemd/system/multi-user.target.wants/"
  done
  # Each costs a part of a second or more of the start, and nothing needs it here: the kernel finds all
  # devices by itself, and there is one user.
  for unit in apt-daily.timer apt-daily-upgrade.timer dev-hugepages.mount dev-mqueue.mount dpkg-db-backup.timer \
    e2scrub_all.timer fstrim.timer getty.target kmod-static-nodes.service ldconfig.service \
    proc-sys-fs-binfmt_misc.automount sys-fs-fuse-connections.mount sys-kernel-config.mount sys-kernel-debug.mount \
    sys-kernel-tracing.mount systemd-binfmt.service systemd-firstboot.service systemd-hwdb-update.service \
    systemd-journal-catalog-update.service systemd-logind.service systemd-machine-id-commit.service \
    systemd-modules-load.service systemd-pcrphase.service systemd-pstore.service systemd-random-seed.service systemd-remount-fs.service \
    systemd-sysusers.service systemd-tmpfiles-setup-dev.service systemd-tmpfiles-setup-dev-early.service \
    systemd-udev-trigger.service systemd-udevd.service systemd-udevd-control.socket systemd-udevd-kernel.socket \
    systemd-update-done.service systemd-user-sessions.service; do
    ln -sf /dev/null "$root/etc/systemd/system/$unit"
  done
  mkdir -p "$root/etc/systemd/system-generators"
  for unit in "$root"/usr/lib/systemd/system-generators/*; do
    ln -s /dev/null "$root/etc/systemd/system-generators/${unit##*/}"
  done
  printf '127.0.0.1 localhost\n' >"$root/etc/hosts"
  printf 'nameserver 10.96.0.10\n' >"$root/etc/resolv.conf"
  printf '%s\n' "$MACHINE" >"$root/etc/hostname"
  mkdir -p "$root"/{driver,opt,etc/cdi,etc/cni/net.d,etc/kubernetes/manifests,var/lib/fake-nvml,var/lib/kubelet}
  mkdir -p "$root/root/.ssh" "$root/etc/dropbear"
}

# The machine's second disk, by release.
machine_programs() { printf 'machine-programs/%s\n' "$RIG_K8S-containerd-$CONTAINERD_VERSION-runc-$RUNC_VERSION-images-$IMAGES_VERSION"; }
make_machine_programs() {
  local out=$1 work
  work="$(mktemp -d)"
  # shellcheck disable=SC2064
  trap "rm -rf '$work'" EXIT
  chmod 755 "$work"
  mkdir "$work/kubernetes"
  cp "$CACHE/kubernetes/$RIG_K8S/kubelet" "$work/kubernetes/"
  cp -r "$CACHE/containerd/$CONTAINERD_VERSION" "$work/containerd"
  cp "$CACHE/runc/$RUNC_VERSION/runc" "$work/containerd/"
  cp -r "$CACHE/images/$IMAGES_VERSION" "$work/images"
  disk_of "$work" "$out/disk.ext4" 32
}

make_machine_driver() {
  local root="$CACHE/driver/$DRIVER_VERSION"
  # Room for what is put in place of files of the driver's.
  disk_of "$root" "$1/disk.ext4" 64
}

# disk_of DIR FILE SPARE: DIR as an ext4 file system with SPARE MiB to spare.
disk_of() {
  local mib files
  mib="$(du -sm --apparent-size "$1" | cut -f1)"
  files="$(find "$1" | wc -l)"
  truncate -s "$((mib + mib / 20 + files / 1000 + 16 + $3))M" "$2"
  mke2fs -q -t ext4 -O ^has_journal -m 0 -N "$((files + 1000))" -d "$1" "$2"
}

build_machine() {
  [[ $EUID -eq 0 ]] || die "a machine's root is made in a chroot: run it as root"
  machine_tools
  in_cache "machine/$MACHINE_DEBIAN-$MACHINE_VERSION" make_machine
  [[ -d $CACHE/runc/$RUNC_VERSION ]] || need_go
  in_cache "runc/$RUNC_VERSION" make_runc "$RUNC_VERSION"
  in_cache "$(machine_programs)" make_machine_programs
  [[ -z $RIG_FAKE_NVML ]] || { build_driver; in_cache "machine-driver/$DRIVER_VERSION" make_machine_driver; }
}

# machine_network: a tap with the machine behind it. The machine has an address of the rig's link, for
# which the rig answers on the link (proxy_arp), and a /24 for its pods.
machine_network() {
  local n
  n="$(<"$RIG_DIR/slot")"
  in_rig /bin/bash -c '
    set -e
    ip tuntap add dev vm mode tap
    ip link set vm up
    ip route add "10.99.$1.4/32" dev vm src "10.99.$1.2"
    ip route add "10.98.$1.0/24" via "10.99.$1.4" dev vm onlink src "10.99.$1.2"
    echo 1 >/proc/sys/net/ipv4/conf/eth0/proxy_arp' net "$n"
  ip route add "10.98.$n.0/24" via "10.99.$n.2"
}

# start_machine: its disks, and qemu. RIG_DIR/node-vm has the files of the rig that it unpacks.
start_machine() {
  local files="$RIG_DIR/$MACHINE" disks="$RIG_DIR/machine" drives=() logs=() spec
  local kernel="$CACHE/machine/$MACHINE_DEBIAN-$MACHINE_VERSION"
  write_node_config "$MACHINE"
  kubelet_args "$MACHINE" | paste -sd ' ' | sed 's/.*/KUBELET_ARGS="&"/' >"$files/etc/rig/kubelet.env"
  printf 'ADDRESS=%s\nGATEWAY=%s\n' "$(node_ip "$MACHINE")" "$(control_ip)" >"$files/etc/rig/network"
  mkdir -p "$disks" "$files/root/.ssh"
  chmod 700 "$files/root" "$files/root/.ssh"
  ssh-keygen -q -t ed25519 -N '' -C rig -f "$disks/key"
  cp "$disks/key.pub" "$files/root/.ssh/authorized_keys"
  [[ -z $RIG_FAKE_NVML ]] || driver_fake "$files/driver" "$RIG_FAKE_NVML"
  tar -C "$files" --owner=0 --group=0 -cf "$disks/files.tar" .
  machine_overlay root "$kernel/root.ext4"
  # The kernel finds this one by itself.
  machine_disk root nvme "file=$disks/root.qcow2,format=qcow2"
  machine_disk programs virtio-blk-pci "file=$CACHE/$(machine_programs)/disk.ext4,format=raw,readonly=on"
  machine_disk files virtio-blk-pci "file=$disks/files.tar,format=raw,readonly=on"
  if [[ -n $RIG_FAKE_NVML ]]; then
    machine_overlay driver "$CACHE/machine-driver/$DRIVER_VERSION/disk.ext4"
    machine_disk driver virtio-blk-pci "file=$disks/driver.qcow2,format=qcow2"
  fi
  for spec in containerd kubelet; do
    logs+=(-chardev "file,id=$spec,path=$RIG_DIR/logs/$MACHINE.$spec.log,append=on"
      -device "virtserialport,bus=logs.0,chardev=$spec,name=$spec,nr=$((${#logs[@]} / 4 + 1))")
  done
  machine_network
  # A reset is a new process on the same disks: what qemu has translated of the system that ended makes the
  # next start twice as slow.
  spawn control "$MACHINE" /bin/bash -c 'while "$@"; do :; done' qemu qemu-system-x86_64 -no-reboot -name "rig-$RIG_NAME" -accel tcg,thread=multi,tb-size=1024 -cpu max -smp 2 \
    -m "$MACHINE_MEMORY" -nodefaults -display none \
    -chardev "file,id=console,path=$RIG_DIR/logs/$MACHINE.console.log,append=on" -serial chardev:console \
    -kernel "$kernel/vmlinuz" -append "root=/dev/nvme0n1 rw rootwait console=ttyS0 net.ifnames=0 mitigations=off \
nowatchdog lsm=landlock quiet systemd.show_status=false systemd.hostname=$MACHINE systemd.machine_id=$(printf 'tranche-rig-%s' "$files" | sha256sum | cut -c1-32)" \
    -device virtio-serial-pci,id=logs "${logs[@]}" "${drives[@]}" -device virtio-rng-pci \
    -netdev tap,id=net,ifname=vm,script=no,downscript=no -device virtio-net-pci,netdev=net,romfile=
}

machine_disk() { # machine_disk NAME KIND FILE: adds to start_machine's drives
  drives+=(-drive "if=none,id=$1,cache=unsafe,$3" -device "$2,drive=$1,serial=$1")
}

machine_overlay() { # machine_overlay NAME BASE: the machine writes to a file of the rig's, never to BASE
  qemu-img create -q -f qcow2 -b "$2" -F raw "$RIG_DIR/machine/$1.qcow2"
}

# machine_exec CMD...: runs CMD in the machine, as root.
machine_exec() {
  local words
  printf -v words '%q ' "$@"
  # One connection is kept for all commands. Its socket is named from its folder, so that the path is short.
  in_rig /bin/bash -c 'cd "$1" && shift && exec ssh "$@"' ssh "$RIG_DIR/machine" -q -T -F none -i key \
    -o ControlMaster=auto -o ControlPath=ssh -o ControlPersist=yes -o StrictHostKeyChecking=no \
    -o UserKnownHostsFile=/dev/null -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10 \
    -o ServerAliveCountMax=6 "root@$(node_ip "$MACHINE")" "$words"
}

machine_answers() { machine_exec true </dev/null; }

# await_machine: until commands can be run in it and it has the images; at once in vain when qemu has ended.
await_machine() {
  local image end=$((SECONDS + 300))
  until machine_answers >/dev/null 2>&1; do
    if ! alive control "$MACHINE" || ((SECONDS >= end)) ||
      grep -q -e 'Kernel panic' -e 'rig-boot\[' "$RIG_DIR/logs/$MACHINE.console.log"; then
      tail -n 15 "$RIG_DIR/logs/$MACHINE.log" "$RIG_DIR/logs/$MACHINE.console.log" >&2
      die "$MACHINE did not come up; its logs are $RIG_DIR/logs/$MACHINE.log and $MACHINE.console.log"
    fi
    sleep 0.2
  done
  await_component "$MACHINE" containerd
  for image in busybox glibc; do
    ctr "$MACHINE" -n k8s.io images import "/opt/images/$image.tar" </dev/null >/dev/null ||
      die "containerd on $MACHINE would not take $image.tar"
  done
}

machine_boot() { machine_exec cat /proc/sys/kernel/random/boot_id </dev/null; }
machine_restarts() { grep -c 'reboot: Restarting system' "$RIG_DIR/logs/$MACHINE.console.log"; }
machine_restarted() { (($(machine_restarts) > $1)); }
machine_booted() { # machine_booted BEFORE: with another boot id
  local now
  now="$(machine_boot 2>/dev/null)" && [[ -n $now && $now != "$1" ]]
}

# machine_reboot: as an administrator does it; until kubelet answers again.
machine_reboot() {
  local before restarts start=$SECONDS
  before="$(machine_boot)"
  restarts="$(machine_restarts || true)"
  machine_exec systemctl --no-block --job-mode=replace-irreversibly start reboot.target </dev/null || true
  until_ok 60 "$MACHINE to end (see $RIG_DIR/logs/$MACHINE.console.log)" machine_restarted "$restarts" || exit 1
  say "$MACHINE has ended all after $((SECONDS - start)) s"
  machine_hang_up
  until_ok 120 "$MACHINE to boot again (see $RIG_DIR/logs/$MACHINE.console.log)" machine_booted "$before" || exit 1
  await_component "$MACHINE" containerd
  await_component "$MACHINE" kubelet
  say "$MACHINE is up again after $((SECONDS - start)) s"
}

# machine_hang_up: ends the connection that is kept. The machine at its other end is gone.
machine_hang_up() {
  in_rig /bin/bash -c 'cd "$1" && ssh -q -F none -o ControlPath=ssh -O exit machine' ssh "$RIG_DIR/machine" 2>/dev/null || true
}

#!/usr/bin/env bash
# First process of a node: assembles the node's root file system, moves into it,
# then waits for ever and reaps orphans. Started by `rig up` inside new mount and
# process namespaces.
#
#   node-init.sh ROOT NODE KUBERNETES_DIR CONTAINERD_DIR
#
# ROOT is the node's state folder; it becomes `/`. So every standard path
# (/var/lib/kubelet, /run/cdi, /etc/cdi, /driver, ...) is the node's own, and is
# seen from outside as ROOT/that path. Only programs and the kernel's file systems
# are shared with the machine: /usr, /sys, /dev, and the cluster's binaries.
# Touches nothing outside ROOT.
set -euo pipefail
root=$1 node=$2 kubernetes=$3 containerd=$4

cd "$root"
mkdir -p etc/cdi etc/cni/net.d var/lib/kubelet var/lib/containerd var/lib/cni var/log run/cdi \
  run/fake-nvml run/tranche run/containerd run/lock driver tmp root usr sys dev proc opt/kubernetes opt/containerd .machine
chmod 1777 tmp
ln -sfn ../run var/run
ln -sfn ../run/lock var/lock
for d in bin sbin lib lib32 lib64 libx32; do
  if [[ -L /$d ]]; then ln -sfn "$(readlink "/$d")" "$d"; elif [[ -d /$d ]]; then mkdir -p "$d"; fi
done
for f in passwd group nsswitch.conf ld.so.cache ld.so.conf ld.so.conf.d alternatives ssl localtime; do
  [[ ! -e /etc/$f || -e etc/$f ]] || cp -a "/etc/$f" etc/
done
printf '127.0.0.1 localhost\n' >etc/hosts
printf '%s\n' "$node" >etc/hostname
printf 'nameserver 10.96.0.10\n' >etc/resolv.conf
printf 'tranche-rig-%s' "$root" | sha256sum | cut -c1-32 >etc/machine-id

mount --bind "$root" "$root"
cd "$root" # into the mount, not the folder beneath it
mount --rbind /usr usr
mount --rbind /sys sys
mount --rbind /dev dev
mount --bind "$kubernetes" opt/kubernetes
mount --bind "$containerd" opt/containerd
for d in bin sbin lib lib32 lib64 libx32; do
  [[ ! -d /$d || -L /$d ]] || mount --rbind "/$d" "$d"
done
mount -t proc proc proc
PATH=$PATH:/sbin:/usr/sbin
pivot_root . .machine
# shellcheck disable=SC2016
exec chroot . /bin/bash -c '
  set -e
  cd /
  umount -l /.machine
  rmdir /.machine
  mount --make-rshared /
  : >/run/rig-ready
  while :; do sleep 3600; done'

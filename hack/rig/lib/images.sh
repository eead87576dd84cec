# The two small images that tests run: docker.io/local/busybox:1 (which is also
# the sandbox image) and docker.io/local/glibc:1 (the same and a GNU C library, for
# programs that open shared libraries). Sourced. Writes into the cache only.
# shellcheck shell=bash
# shellcheck source=hack/image/libs.sh
. "$RIG_HOME/../image/libs.sh"

# Change when what make_images does changes: it is part of the cache key.
IMAGES_VERSION=2

busybox_root() {
  local root=$1 applet
  usr_merge "$root"
  mkdir -p "$root"/{etc,tmp,run,proc,sys,dev,var,root}
  chmod 1777 "$root/tmp"
  ln -s ../run "$root/var/run"
  install -m 755 "$(command -v busybox)" "$root/usr/bin/busybox"
  while read -r applet; do
    [[ $applet == busybox ]] || ln -s busybox "$root/usr/bin/$applet"
  done < <("$root/usr/bin/busybox" --list)
  printf 'root:x:0:0:root:/root:/bin/sh\n' >"$root/etc/passwd"
  printf 'root:x:0:\n' >"$root/etc/group"
  # As a sandbox it waits, reaps what is left to it, and ends at once when told.
  cat >"$root/usr/bin/pause" <<'PAUSE'
#!/bin/sh
[ $# -eq 0 ] || exec "$@"
trap 'kill $! 2>/dev/null; exit 0' TERM INT
while :; do
  sleep 3600 &
  wait $!
done
PAUSE
  chmod 755 "$root/usr/bin/pause"
}

make_images() {
  local out=$1 root oci="$RIG_HOME/../image/oci.sh"
  root="$(mktemp -d)"
  # shellcheck disable=SC2064
  trap "rm -rf '$root'" EXIT
  chmod 755 "$root"
  busybox_root "$root"
  "$oci" "$root" docker.io/local/busybox:1 "$out/busybox.tar" --entrypoint '["/bin/pause"]' >&2
  copy_runtime "$root"
  install -m 755 "$(PATH=$PATH:/sbin:/usr/sbin command -v ldconfig)" "$root/usr/sbin/ldconfig"
  # As Debian has it: what NVIDIA's hook adds to the folder is read.
  mkdir -p "$root/etc/ld.so.conf.d"
  echo 'include /etc/ld.so.conf.d/*.conf' >"$root/etc/ld.so.conf"
  printf '/usr/local/lib\n/usr/lib/%s-linux-gnu\n' "$(uname -m)" >"$root/etc/ld.so.conf.d/libc.conf"
  "$oci" "$root" docker.io/local/glibc:1 "$out/glibc.tar" --entrypoint '["/bin/pause"]' >&2
}

build_images() { in_cache "images/$IMAGES_VERSION" make_images; }

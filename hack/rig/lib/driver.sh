# A driver root as an administrator would have it: NVIDIA's real user-space driver
# from Debian's non-free packages, unpacked and not installed, with device nodes.
# Sourced. Writes into the cache and into the folder it is asked to fill.
# shellcheck shell=bash

DRIVER_PACKAGES=(libcuda1 libnvidia-ml1 libnvidia-ptxjitcompiler1 libnvidia-nvvm4 libnvcuvid1
  libnvidia-encode1 libnvidia-opticalflow1 libnvoptix1 libnvidia-allocator1 libnvidia-cfg1
  libnvidia-rtcore nvidia-smi nvidia-cuda-mps)
DRIVER_GPUS=16

# One capability device for the MIG configuration, one for the monitor, then for
# each GPU 15 GPU instances of 1 access file and 8 compute instances.
driver_caps() { printf '%s\n' $((2 + DRIVER_GPUS * 15 * 9)); }

make_driver() {
  local out=$1 work apt i caps
  work="$(mktemp -d)"
  # shellcheck disable=SC2064
  trap "rm -rf '$work'" EXIT
  mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/debs"
  printf 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s trixie non-free\n' \
    "${RIG_DEBIAN_MIRROR:-http://deb.debian.org/debian}" >"$work/sources.list"
  apt=(apt-get -q -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=-
    -o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root
    -o APT::Get::List-Cleanup=0 -o Acquire::Languages=none)
  "${apt[@]}" update >"$work/log" 2>&1 || { tail "$work/log" >&2; die "Debian's trixie non-free package list could not be fetched"; }
  (cd "$work/debs" && "${apt[@]}" download "${DRIVER_PACKAGES[@]}") >"$work/log" 2>&1 ||
    { tail "$work/log" >&2; die "NVIDIA's driver packages could not be fetched from Debian"; }
  for i in "$work"/debs/*.deb; do
    dpkg-deb -x "$i" "$out"
  done
  [[ -e $out/usr/lib/$(uname -m)-linux-gnu/nvidia/current/libcuda.so.$DRIVER_VERSION ]] ||
    die "Debian's driver is no longer $DRIVER_VERSION; set DRIVER_VERSION in hack/rig/lib/common.sh to what these are: $(ls "$work/debs")"
  rm -rf "${out:?}/usr/share"
  mkdir -p "$out/dev/nvidia-caps"
  mknod -m 666 "$out/dev/nvidiactl" c 195 255
  mknod -m 666 "$out/dev/nvidia-modeset" c 195 254
  mknod -m 666 "$out/dev/nvidia-uvm" c 511 0
  mknod -m 666 "$out/dev/nvidia-uvm-tools" c 511 1
  for ((i = 0; i < DRIVER_GPUS; i++)); do mknod -m 666 "$out/dev/nvidia$i" c 195 "$i"; done
  caps="$(driver_caps)"
  for ((i = 1; i <= caps; i++)); do mknod -m 444 "$out/dev/nvidia-caps/nvidia-cap$i" c 237 "$i"; done
}

build_driver() {
  [[ $EUID -eq 0 ]] || die "a driver root has device nodes, and only root can make them"
  in_cache "driver/$DRIVER_VERSION" make_driver
}

# driver_root DIR [FAKE]: fills DIR from the cache (hard links where it lies on the
# same file system, so it costs nothing), FAKE in place of libnvidia-ml.so.1.
driver_root() {
  local dir=$1 fake=${2:-} from="$CACHE/driver/$DRIVER_VERSION"
  [[ -z $fake || -f $fake ]] || die "no library at $fake; build it first, or leave it out"
  build_driver
  mkdir -p "$dir"
  cp -alf "$from/." "$dir/" 2>/dev/null || cp -a --remove-destination "$from/." "$dir/"
  [[ -z $fake ]] || driver_fake "$dir" "$fake"
}

# driver_fake DIR FAKE: what differs in a driver root whose GPUs are simulated.
driver_fake() {
  local dir=$1 fake=$2 place
  place="$dir/usr/lib/$(uname -m)-linux-gnu/nvidia/current"
  # The real files are links into the cache: removed, never written to.
  mkdir -p "$place"
  rm -f "$place"/libnvidia-ml.so*
  # The file exports the names of all versions that are known; the node gets those of its driver.
  "$(dirname "$fake")/fake-nvml" install --lib "$fake" --driver "$DRIVER_VERSION" "$place" >/dev/null ||
    die "$fake cannot be installed as the library of driver $DRIVER_VERSION; the tool fake-nvml is wanted beside it"
  driver_proc "$dir/proc"
}

# driver_proc DIR: what the driver's kernel module would tell below /proc, for GPUs that are simulated:
# the majors of the device nodes, and which capability device stands for which MIG instance.
driver_proc() {
  mkdir -p "$1/driver/nvidia-caps"
  printf '%s\n' 'Character devices:' '195 nvidia' '195 nvidia-modeset' '195 nvidiactl' '237 nvidia-caps' \
    '511 nvidia-uvm' '' 'Block devices:' >"$1/devices"
  awk -v gpus="$DRIVER_GPUS" 'BEGIN {
    print "config 1"; print "monitor 2"; minor = 3
    for (g = 0; g < gpus; g++) for (i = 0; i < 15; i++) {
      printf "gpu%d/gi%d/access %d\n", g, i, minor++
      for (c = 0; c < 8; c++) printf "gpu%d/gi%d/ci%d/access %d\n", g, i, c, minor++
    }
  }' >"$1/driver/nvidia-caps/mig-minors"
}

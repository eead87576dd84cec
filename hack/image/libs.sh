# Copies programs' shared libraries into an image's root folder. Sourced by the
# scripts that assemble images; touches only the folder it is given.
# shellcheck shell=bash

# The parts of the GNU C library (and gcc's unwinder) that a library opened at
# run time, such as NVIDIA's libnvidia-ml.so.1, asks for, and that the driver's
# own nvidia-cuda-mps-control and nvidia-cuda-mps-server are linked with.
RUNTIME_LIBS=(libc.so.6 libm.so.6 libdl.so.2 libpthread.so.0 librt.so.1 libgcc_s.so.1)

# lib_path NAME: where this machine keeps the library, as its linker cache says.
lib_path() {
  local cache path
  cache="$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p)"
  path="$(awk -v n="$1" '$1 == n && /x86-64|AArch64/ {print $NF; exit}' <<<"$cache")"
  [[ -n $path ]] || {
    printf 'error: this machine has no %s; install the GNU C library and libgcc-s1\n' "$1" >&2
    return 1
  }
  printf '%s\n' "$path"
}

# copy_lib ROOT PATH: PATH into the same place under ROOT (below /usr, with the
# root's /lib and /lib64 as links, as on every current distribution).
copy_lib() {
  local root=$1 path=$2 dir
  dir="$(dirname "$path")"
  [[ $dir == /usr/* ]] || dir=/usr$dir
  mkdir -p "$root$dir"
  install -m 755 "$(readlink -f "$path")" "$root$dir/$(basename "$path")"
}

# needed_libs PROGRAM: every library the program is linked with, loader included.
needed_libs() {
  local listing
  listing="$(ldd "$1" 2>/dev/null)" || return 0 # a static program
  if grep -q 'not found' <<<"$listing"; then
    printf 'error: %s needs libraries this machine lacks:\n%s\n' "$1" "$(grep 'not found' <<<"$listing")" >&2
    return 1
  fi
  awk '$2 == "=>" && $3 ~ /^\// {print $3} $1 ~ /^\// {print $1}' <<<"$listing" | sort -u
}

# usr_merge ROOT: the links that make /bin, /lib and so on mean /usr/...
usr_merge() {
  local d
  for d in bin sbin lib lib64; do
    mkdir -p "$1/usr/$d"
    ln -sfn "usr/$d" "$1/$d"
  done
}

# copy_runtime ROOT PROGRAM...: the loader, RUNTIME_LIBS and what PROGRAMs need.
copy_runtime() {
  local root=$1 name path listing
  shift
  for name in "${RUNTIME_LIBS[@]}"; do
    path="$(lib_path "$name")" || return 1
    copy_lib "$root" "$path"
  done
  for path in "$@" "$(lib_path libgcc_s.so.1)"; do
    listing="$(needed_libs "$path")" || return 1
    while read -r name; do
      [[ -z $name ]] || copy_lib "$root" "$name"
    done <<<"$listing"
  done
}

# Copies programs' shared libraries into an image's root folder. Sourced by the
# scripts that assemble images; touches only the folder it is given.
#
# FOREIGN names the architecture of the image (aarch64-linux-gnu) where it is not
# this machine's: its libraries are then those of Debian's cross packages below
# /usr/FOREIGN/lib, and programs are read by FOREIGN-readelf, since they cannot run.
# shellcheck shell=bash

# The parts of the GNU C library (and gcc's unwinder) that a library opened at
# run time, such as NVIDIA's libnvidia-ml.so.1, asks for, and that the driver's
# own nvidia-cuda-mps-control and nvidia-cuda-mps-server are linked with.
RUNTIME_LIBS=(libc.so.6 libm.so.6 libdl.so.2 libpthread.so.0 librt.so.1 libgcc_s.so.1)

# arch_of PROGRAM: its architecture as images name it, by its ELF header; this machine's for what is no ELF file.
arch_of() {
  local elf machine
  read -r elf < <(od -An -tx1 -N4 "$1" | tr -d ' ')
  machine="$(od -An -tx1 -j18 -N2 "$1" | tr -d ' ')"
  case $elf$machine in
    7f454c463e00) echo amd64 ;;
    7f454c46b700) echo arm64 ;;
    7f454c46*) printf 'error: no image architecture known for %s\n' "$1" >&2 && return 1 ;;
    *) own_arch ;;
  esac
}
own_arch() {
  case $(uname -m) in
    x86_64) echo amd64 ;;
    aarch64) echo arm64 ;;
    *) printf 'error: no image architecture known for %s\n' "$(uname -m)" >&2 && return 1 ;;
  esac
}
# gnu_of ARCH: what compilers and Debian call it.
gnu_of() { case $1 in amd64) echo x86_64-linux-gnu ;; arm64) echo aarch64-linux-gnu ;; esac; }

# lib_path NAME: where this machine keeps the library, as its linker cache says.
lib_path() {
  local cache path
  if [[ -n ${FOREIGN:-} ]]; then
    path="/usr/$FOREIGN/lib/$1"
    [[ -e $path ]] || {
      printf 'error: no %s; install the GNU C library and libgcc of %s (Debian: gcc-%s and libc6-dev-...-cross)\n' \
        "$path" "$FOREIGN" "${FOREIGN//_/-}" >&2
      return 1
    }
    printf '%s\n' "$path"
    return
  fi
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
  # Where its own system has it: the loader's place is that which programs name.
  case ${FOREIGN:+$(basename "$path")} in
    '') ;;
    ld-linux-x86-64.*) dir=/usr/lib64 ;;
    ld-linux-*) dir=/usr/lib ;;
    *) dir=/usr/lib/$FOREIGN ;;
  esac
  mkdir -p "$root$dir"
  install -m 755 "$(readlink -f "$path")" "$root$dir/$(basename "$path")"
}

# needed_libs PROGRAM: every library the program is linked with, loader included.
needed_libs() {
  local listing name
  if [[ -n ${FOREIGN:-} ]]; then
    listing="$("$FOREIGN-readelf" -d -l "$1")" || return 1
    while read -r name; do
      lib_path "$name" || return 1
    done < <(sed -n -e 's/.*(NEEDED).*\[\(.*\)\]/\1/p' -e 's/.*program interpreter: .*\/\(.*\)\]/\1/p' <<<"$listing")
    return
  fi
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

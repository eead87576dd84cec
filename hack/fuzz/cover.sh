#!/usr/bin/env bash
# The compiler for a fuzz run that is led by what its inputs reach: cargo calls it for the crates of this tree
# (RUSTC_WORKSPACE_WRAPPER). The driver's library gets a counter at each edge, which tests/fuzz/driver/cover.rs reads.
# A stable compiler will do.
set -euo pipefail
rustc=$1
shift
name='' kind=''
previous=''
for argument in "$@"; do
  case $previous in
    --crate-name) name=$argument ;;
    --crate-type) kind=$argument ;;
  esac
  previous=$argument
done
flags=()
if [[ $name == tranche && $kind == lib ]]; then
  flags=(-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=3
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters)
elif [[ $name == tranche && $kind == bin ]]; then
  # Cargo builds the program for every test of the package. It has nobody to count for, and nothing runs it here.
  flags=(-Clinker=true)
fi
exec "$rustc" "$@" "${flags[@]}"

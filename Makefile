# make demo      the main job on a real cluster with simulated GPUs; leaves it up
# make demo-down ends it, leaves nothing
# make check     format, lints, units and contracts: what to run before a commit; no cluster
# make test      everything that can fail: units, contracts, and real clusters
# make test-all  the same on every release, on a virtual machine with systemd, and the controller's long walk
# make soak      hours: the controller's model, a million random steps; then property tests with random numbers and many
#                cases, and fuzzing, FUZZ_SECONDS=900 for each target
# make bench     figures, as a table and in target/bench.json
# make release   what a release consists of, VERSION=0.1.0; pushes nothing (hack/release.sh has more options)
# make help      this text

.DELETE_ON_ERROR:
.PHONY: help demo demo-down check test test-all bench build fmt lint release soak soak-walk soak-properties soak-fuzz

help:
	@sed -n 's/^# //p' Makefile

demo:
	hack/demo/run.sh

demo-down:
	RIG_NAME=demo hack/rig/rig down

build:
	hack/build.sh

check: lint
	hack/test-unit.sh

test:
	hack/test.sh

test-all:
	hack/test.sh all

bench: build
	hack/bench.sh

release:
	hack/release.sh $(VERSION)

soak: soak-walk soak-properties soak-fuzz

soak-walk:
	TRANCHE_STEPS=1000000 cargo test --locked --profile soak --lib controller::tests::walk -- --nocapture
	TRANCHE_STEPS=100000 cargo test --locked --profile soak --lib allocate::tests::cut::walk -- --nocapture
	TRANCHE_STEPS=100000 cargo test --locked --profile soak --test it mig_walk -- --nocapture

FUZZ_SECONDS ?= 900
SEED ?= $(shell date +%s)
soak-properties:
	for round in 0 1 2 3 4 5 6 7 8 9; do PROPTEST_CASES=2000 PROPTEST_RNG_SEED=$$(($(SEED) + round)) \
		cargo test --locked --profile soak --lib || exit; done
	PROPTEST_RNG_SEED=$(SEED) cargo test --locked --profile soak --test it crash::

soak-fuzz:
	RUSTC_WORKSPACE_WRAPPER="$(CURDIR)/hack/fuzz/cover.sh" cargo test --locked --profile soak --test fuzz -- \
		--seconds $(FUZZ_SECONDS) --seed $(SEED)

fmt:
	cargo fmt
	cargo fmt --manifest-path hack/fake-nvml/Cargo.toml
	cargo fmt --manifest-path benches/node/Cargo.toml
	cargo fmt --manifest-path tests/gpu/Cargo.toml

lint:
	.ci/run lint

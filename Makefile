# make demo      the main job on a real cluster with simulated GPUs; leaves it up
# make demo-down ends it, leaves nothing
# make test      everything that can fail: units, contracts, and the real cluster
# make soak      the controller's model, a million random steps
# make bench     figures, as a table and in target/bench.json
# make help      this text

.DELETE_ON_ERROR:
.PHONY: help demo demo-down test test-unit test-cluster bench build fmt lint soak

help:
	@sed -n 's/^# //p' Makefile

demo:
	hack/demo/run.sh

demo-down:
	RIG_NAME=demo hack/rig/rig down

build:
	hack/build.sh

test: test-unit test-cluster

test-unit:
	hack/test-unit.sh

test-cluster: build
	hack/test-cluster.sh

bench: build
	hack/bench.sh

soak:
	TRANCHE_STEPS=1000000 cargo test --locked --profile soak --lib controller::tests::walk -- --nocapture

fmt:
	cargo fmt
	cargo fmt --manifest-path hack/fake-nvml/Cargo.toml
	cargo fmt --manifest-path benches/node/Cargo.toml
	cargo fmt --manifest-path tests/gpu/Cargo.toml

lint:
	.ci/run lint

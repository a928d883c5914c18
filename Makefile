# `make run` and `make test` set up the virtual environment themselves. PYTHON=python3.12 chooses its Python: an
# environment of another version is made again. Without PYTHON the one that is there serves, whatever its version.
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
CORE   := $(VENV)/.core
comma  := ,

version = $(shell $(1) -c 'import $(2) platform; print(platform.python_version())' 2>/dev/null)
# An environment without pip was left half made, and is made again.
THERE  := $(call version,$(BIN)/python,pip$(comma))
WANTED := $(or $(if $(PYTHON),$(call version,$(PYTHON),),$(THERE)),unknown)
PYTHON ?= python3
CONFIG ?= configs/digits.yaml
# Where `make pytest` keeps the GPU compiler, and what it tests with it.
GPU       := build/plan-gpu
GPU_TESTS := tests/strategies/test_gpu_topology.py tests/strategies/test_strategies_on_gpu.py tests/strategies/test_sharded_on_gpu.py tests/plan/test_gpu.py
# What a change in any one room needs first: without processes and documentation.
QUICK := tests/test_rooms.py tests/test_public_names.py tests/callbacks/test_callbacks.py tests/checkpoint/test_leaves.py \
  tests/checkpoint/test_restore_part.py tests/cluster/test_spec.py tests/cluster/resolvers/test_tf_config.py \
  tests/cluster/resolvers/test_slurm.py tests/cluster/watch/test_membership.py tests/cluster/watch/test_messages.py tests/core/test_context.py \
  tests/core/test_host_reduce.py tests/core/test_per_replica.py tests/core/test_sharded_leaf.py tests/core/test_show.py \
  tests/core/test_step_state.py tests/core/test_strategy.py tests/data/test_arrays.py tests/data/test_batching.py tests/data/test_position.py \
  tests/data/test_shards.py tests/cli/doctor/test_gpus.py tests/experiment/test_load.py tests/experiment/test_optimizer.py \
  tests/experiment/test_parse.py tests/jaxpr tests/launcher/test_supervisor.py tests/launcher/test_exit_cause.py \
  tests/launcher/test_options.py tests/launcher/test_environment.py tests/launcher/test_place.py tests/loop/test_evaluate.py tests/metrics \
  tests/nnx tests/launcher/notebook/test_pickled.py tests/plan/test_collectives.py tests/plan/test_flops.py \
  tests/plan/test_hlo.py tests/plan/test_roofline.py tests/plan/test_target.py tests/ps/program/test_partition.py \
  tests/ps/protocol/test_scheduler.py tests/ps/protocol/test_wire.py tests/ps/server/test_shard_server.py tests/reduction/test_by_name.py \
  tests/reduction/test_exact.py tests/reduction/test_packs.py tests/replica/test_collectives.py tests/replica/test_losses.py \
  tests/loop/report/test_times.py tests/cli/runs/test_contents.py tests/cli/runs/test_grid.py \
  tests/sharded_state/test_update.py tests/step/test_options.py tests/step/test_signature.py tests/step/test_outputs.py \
  tests/step/test_tree_checks.py tests/step/test_replica_program.py tests/strategies/test_by_name.py tests/support/test_checks.py \
  tests/support/test_html.py tests/support/test_versions.py tests/tasks/test_arrays.py tests/tasks/test_options.py tests/weights/test_axes.py
# Two worker processes suit two cores; more processes than cores only slow compilation down.
WORKERS ?= 2
# The default suite compiles without LLVM's optimisations (tests/conftest.py), these targets with them.
OPTIMIZED := XLA_FLAGS=--xla_backend_optimization_level=3

.PHONY: run test setup lint types types-newest docs notebooks quick pytest test-newest test-loaders test-jax conformance full remote soak soak-ps trackers ray bench gpu bench-peers clean

run: $(CORE)
	$(BIN)/jdist run $(CONFIG)

test: lint types docs pytest

setup: $(STAMP)

ifneq ($(THERE),$(WANTED))
.PHONY: $(CORE)
endif

# What `make run` needs: 800 MB where the tests need 2.2 GB.
$(CORE): pyproject.toml
ifneq ($(THERE),$(WANTED))
	@$(PYTHON) -c '' >/dev/null || { echo "PYTHON=$(PYTHON): not found, or it does not start. Give the path of a Python 3.11 or newer."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "jdist needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
endif
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[examples]'
	@touch $@

$(STAMP): $(CORE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python docs/site/docstrings.py
	$(BIN)/python docs/site/words.py jdist docs README.md CONTRIBUTING.md notebooks examples configs
	$(BIN)/python docs/site/sentences.py

types: setup
	$(BIN)/pyright --pythonpath $(BIN)/python

# As `types`, on the newest JAX that there is. Types need no interpreter that could run it, so it is only unpacked.
types-newest: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --target build/newest \
	  --ignore-requires-python --python-version 3.12 --only-binary :all: jax jaxlib
	PYTHONPATH=build/newest $(BIN)/pyright --pythonpath $(BIN)/python --pythonversion 3.12

# The default suite on the newest of every package, whatever pyproject.toml allows, in an environment of its own.
test-newest:
	$(MAKE) setup VENV=.venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade jax jaxlib flax optax chex numpy orbax-checkpoint grpcio
	.venv-newest/bin/python -c 'import jax; print("JAX", jax.__version__)'
	$(MAKE) pytest VENV=.venv-newest

# The default suite on another line of JAX, `make test-jax JAX=0.11 PYTHON=python3.12`, in an environment of its own.
test-jax:
	$(MAKE) setup VENV=.venv-jax-$(JAX)
	.venv-jax-$(JAX)/bin/python -m pip install --quiet --disable-pip-version-check 'jax==$(JAX).*' 'jaxlib==$(JAX).*'
	$(MAKE) pytest VENV=.venv-jax-$(JAX)

# The site, into build/site; a warning is an error.
docs: setup
	$(BIN)/python docs/site/gather.py
	$(BIN)/zensical build --strict --clean

# Runs the notebooks, and stores what their cells show.
notebooks: setup
	$(BIN)/python notebooks/store_outputs.py

quick: setup
	$(BIN)/python -m pytest -n $(WORKERS) -m "not full and not soak" $(QUICK)

pytest: setup $(GPU)/.installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "not full and not soak"
	PYTHONPATH=$(CURDIR)/$(GPU) $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "not full and not soak" $(GPU_TESTS)

# The GPU compiler, of JAX's version, in a folder of its own: in the environment it would print what it misses in every process.
$(GPU)/.installed: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --target $(GPU) nvidia-cuda-nvcc-cu12 \
	  $$($(BIN)/python -c 'import jax; print(*(f"jax-cuda12-{part}=={jax.__version__}" for part in ("plugin", "pjrt")))')
	@touch $@

# The tests of other libraries' loaders and models, in an environment of their own: PyTorch and TensorFlow take 8 GB.
test-loaders:
	$(MAKE) setup VENV=.venv-loaders
	.venv-loaders/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,loaders]'
	.venv-loaders/bin/python -m pytest -n0 -m "full or not full" tests/data/adapters tests/loop/test_feeds_killed.py tests/docs/test_input_guide.py
	.venv-loaders/bin/python -m pytest -n0 tests/weights/test_transformers.py  # alone: Triton, which it imports, crashes behind TensorFlow

conformance: setup
	$(OPTIMIZED) $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup tests/conformance tests/examples -m "full or not full"

# Checkpoints in buckets, by emulators of S3 and Google Cloud Storage, which are too large for every environment: one of their own.
remote:
	$(MAKE) setup VENV=.venv-remote
	.venv-remote/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,emulators]'
	.venv-remote/bin/python -m pytest -n $(WORKERS) --dist loadgroup tests/checkpoint/test_buckets.py tests/checkpoint/test_emulated_buckets.py

# All but the long runs.
full: setup
	$(OPTIMIZED) $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "not soak"

soak: setup
	$(OPTIMIZED) $(BIN)/python -m pytest -n $(WORKERS) -m soak

# 200 schedules of faults of the parameter server (killed, stopped, cut off, out of files), 200 of links cut round a snapshot, and
# its longest random tests: two hours.
soak-ps: setup
	$(OPTIMIZED) JDIST_SOAK_S=600 JDIST_SOAK_SCHEDULES=200 $(BIN)/python -m pytest -n $(WORKERS) -m soak tests/ps

# The tests of all trackers, in an environment of its own: W&B and MLflow bring some 700 MB.
trackers:
	$(MAKE) setup VENV=.venv-trackers
	.venv-trackers/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[wandb,mlflow]'
	.venv-trackers/bin/python -m pytest -n0 tests/callbacks/test_trackers.py

# The tests of the launcher in Ray's actors, in an environment of its own: Ray is 250 MB.
ray:
	$(MAKE) setup VENV=.venv-ray
	.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[ray]'
	.venv-ray/bin/python -m pytest -n0 tests/launcher/test_engines.py tests/launcher/test_place.py

bench: setup
	$(BIN)/python benchmarks/start.py
	$(BIN)/python benchmarks/step_overhead.py
	$(BIN)/python benchmarks/nnx_host.py
	$(BIN)/python benchmarks/replica_check.py
	$(BIN)/python benchmarks/verify.py
	$(BIN)/python benchmarks/input.py
	$(BIN)/python benchmarks/readers.py
	$(BIN)/python benchmarks/reductions.py
	$(BIN)/python benchmarks/sharded.py
	$(BIN)/python benchmarks/central_storage.py
	$(BIN)/python benchmarks/multi_worker.py
	$(BIN)/python benchmarks/checkpoints.py
	$(BIN)/python benchmarks/restart.py
	$(BIN)/python benchmarks/parameter_server.py
	$(BIN)/python benchmarks/parameter_server_costs.py

# A GPU machine's first hour, into build/first_hour.md; JDIST_PLATFORM=cpu tries the script itself on CPU devices.
gpu: setup
ifneq ($(JDIST_PLATFORM),cpu)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,cuda]'
endif
	$(BIN)/python benchmarks/first_hour.py

bench-peers: setup
	test -x .venv-tf/bin/python || $(PYTHON) -m venv .venv-tf
	.venv-tf/bin/python -m pip install --quiet --disable-pip-version-check tensorflow-cpu==2.21.0
	$(BIN)/python benchmarks/peers/mirrored.py --tensorflow-python .venv-tf/bin/python | tee benchmarks/peers/mirrored.log
	$(BIN)/python benchmarks/peers/multi_worker.py --tensorflow-python .venv-tf/bin/python | tee benchmarks/peers/multi_worker.log
	$(BIN)/python benchmarks/peers/parameter_server.py --tensorflow-python .venv-tf/bin/python | tee benchmarks/peers/parameter_server.log

clean:
	rm -rf .venv .venv-newest .venv-trackers .venv-ray .venv-remote .venv-loaders .venv-jax-* .venv-tf runs build *.egg-info

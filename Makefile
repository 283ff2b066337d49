# Two commands do everything from a bare clone: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# Python 3.11 cannot install the newest JAX; a newer Python does, in a second environment.
NEWEST_PYTHON = $(shell .ci/newest_python $(PYTHON))
NEWEST := .venv-newest
# Number of test processes.
JOBS ?= 2
export JAX_PLATFORMS ?= cpu

.PHONY: setup quickstart perfect-start looking moving seeking real vocabularies try-vocabularies test test-newest test-tpu test-slow parity check bench clean

setup: $(STAMP)

# Runs again only when the dependencies change.
$(STAMP): pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
	  { echo "error: $$($(PYTHON) --version) found; jaxrl needs Python 3.11 to 3.13. Set PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "error: no venv module; on Debian or Ubuntu: apt install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $(STAMP)

data/quickstart/questions_eval.jsonl: $(STAMP) examples/quickstart_world.py
	$(BIN)/python -m examples.quickstart_world --out=data/quickstart --seed=0

quickstart: data/quickstart/questions_eval.jsonl
	$(BIN)/jaxrl quickstart

# The score of a warm start on perfect demonstrations alone; see docs/quickstart.md.
perfect-start: data/quickstart/questions_eval.jsonl
	$(BIN)/python -m jaxrl.launch --config=configs/quickstart.py --workdir=runs/perfect_start \
	  --config.stages="('sft', 'evaluate')" \
	  --config.sft.source=data/quickstart/demonstrations_perfect.jsonl

# A small Qwen2.5-VL learns to look at pictures and videos, and to search what it sees; see docs/images.md.
data/looking/questions_eval.jsonl: $(STAMP) examples/looking_world.py
	$(BIN)/python -m examples.looking_world --out=data/looking --seed=0

looking: data/looking/questions_eval.jsonl
	$(BIN)/python -m jaxrl.launch --config=configs/looking.py --workdir=runs/looking

data/moving/questions_eval.jsonl: $(STAMP) examples/looking_world.py
	$(BIN)/python -m examples.looking_world --out=data/moving --seed=0 --kind=moving

moving: data/moving/questions_eval.jsonl
	$(BIN)/python -m jaxrl.launch --config=configs/moving.py --workdir=runs/moving

data/seeking/questions_eval.jsonl: $(STAMP) examples/looking_world.py
	$(BIN)/python -m examples.looking_world --out=data/seeking --seed=0 --kind=seeking

seeking: data/seeking/questions_eval.jsonl
	$(BIN)/python -m jaxrl.launch --config=configs/seeking.py --workdir=runs/seeking

# Published weights learn to search real documents; see docs/research/real.md. MODEL=FOLDER sets the model,
# PRESET=real_24gb or real_8x80gb sizes for accelerators, FLAGS="..." further flags, NAME=... the workdir.
data/real/questions_eval.jsonl: $(STAMP) examples/real_world.py examples/convert_gguf.py
	$(BIN)/python -m examples.real_world --out=data/real --seed=0

PRESET = real
NAME = $(PRESET)$(if $(MODEL),_$(notdir $(MODEL:/=)))
REAL_RUN = runs/$(NAME)
REAL = $(BIN)/python -m jaxrl.launch --config=configs/$(PRESET).py $(if $(MODEL),"--config.model.path=$(MODEL)") $(FLAGS)
real: data/real/questions_eval.jsonl
	$(REAL) --workdir="$(REAL_RUN)_as_it_is" --config.stages="('evaluate',)" \
	  --config.eval.final_suites="('sampled', 'greedy')"
	$(REAL) --workdir="$(REAL_RUN)"
	$(BIN)/python -m benchmarks.real --run="$(REAL_RUN)"

# Published tokenizers and chat templates, cached for all checkouts; see tests/vocabularies.py.
vocabularies: $(STAMP)
	$(BIN)/python -m tests.vocabularies

# Without a network, tests that need them are skipped.
try-vocabularies: $(STAMP)
	-@$(BIN)/python -m tests.vocabularies

test: $(STAMP) try-vocabularies
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not slow and not torch"

# Tests that depend on the version of JAX: kernels, lowering, export, sharding and complete runs.
test-newest:
ifeq ($(NEWEST_PYTHON),)
	@echo "no Python newer than $$($(PYTHON) --version) was found: the newest JAX is not tested"
else
	$(MAKE) --no-print-directory PYTHON=$(NEWEST_PYTHON) VENV=$(NEWEST) setup
	@$(NEWEST)/bin/python -c 'import tokamax' 2>/dev/null || \
	  $(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check tokamax==0.0.17 || \
	  echo "tokamax 0.0.17 cannot be installed: tests of its kernels are skipped"
	$(NEWEST)/bin/python -c 'import flax, jax, sys; print("Python %d.%d, jax" % sys.version_info[:2], jax.__version__, "flax", flax.__version__)'
	$(NEWEST)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not slow and not torch" \
	  tests/models/attention tests/extras/kernels tests/extras/experts/test_products.py tests/extras/experts/test_gpu.py \
	  tests/extras/experts/test_tokamax.py \
	  tests/runtime/test_compilation.py \
	  tests/runtime/test_compilation_cache.py tests/runtime/test_sharding.py tests/test_export.py \
	  tests/test_runs.py::test_training_works tests/test_runs.py::test_a_restart_changes_nothing
endif

# Compile kernels and programs with the TPU compiler, which needs no TPU. It is installed in a separate
# folder, so that only these tests find it.
test-tpu: $(STAMP)
	@wanted="$$($(BIN)/python -c 'from importlib.metadata import requires; print(next(one.split(";")[0] for one in requires("jax") if one.startswith("libtpu")))')"; \
	folder="data/libtpu/$(notdir $(VENV))-$$(echo "$$wanted" | tr -dc 0-9.)"; \
	if ! [ -e "$$folder/installed" ]; then \
	  rm -rf "$$folder"; \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target="$$folder" "$$wanted" && \
	  touch "$$folder/installed" || { echo "libtpu cannot be installed: nothing is compiled for TPUs"; exit 0; }; \
	fi; \
	LIBTPU_DIR="$(CURDIR)/$$folder" $(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m slow \
	  tests/extras/kernels/test_lowering.py tests/extras/delta_net/test_lowering.py tests/test_export.py
ifneq ($(NEWEST_PYTHON),)
	$(MAKE) --no-print-directory PYTHON=$(NEWEST_PYTHON) VENV=$(NEWEST) NEWEST_PYTHON= test-tpu
endif

# Slow tests and the comparison with torch compile as users do, without tests/conftest.py's flags.
test-slow: $(STAMP)
	XLA_FLAGS= $(BIN)/python -m pytest -m slow

# Comparison with transformers on torch; installs torch.
parity: $(STAMP)
	$(BIN)/python -c 'import torch, peft' 2>/dev/null || \
	  $(BIN)/python -m pip install --quiet torch==2.13.0 peft==0.21.2
	XLA_FLAGS= $(BIN)/python -m pytest -m torch

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not slow and not torch and not minutes" -x

# The comparison with peers installs torch, like `parity`.
bench: $(STAMP)
	$(BIN)/python -m benchmarks.rollout
	$(BIN)/python -m benchmarks.rollout --case=search --warm_up=1 --repetitions=3
	$(BIN)/python -m benchmarks.endpoint --warm_up=1 --repetitions=2
	$(BIN)/python -m benchmarks.update
	$(BIN)/python -m benchmarks.update --vocab_size=151936 --json=runs/bench/update_152k.json
	$(BIN)/python -m benchmarks.step
	$(BIN)/python -m benchmarks.scaling
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m benchmarks.peers

clean:
	rm -rf $(VENV) $(NEWEST) runs data/quickstart data/looking data/moving data/seeking data/real data/libtpu .pytest_cache .mypy_cache .ruff_cache

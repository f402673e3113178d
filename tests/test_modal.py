"""modal_app.py without an account: what each function asks Modal for, the command that it runs, what bench keeps."""

import importlib.util
import json
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import apart, run, table
from tests import needs

ROOT = Path(__file__).parents[1]
BENCH = {"bench_nanospec": "nanospec", "bench_vllm": "vllm", "bench_sglang": "sglang"}
HOUR = 3600


@pytest.fixture(scope="module")
def modal():
    """In the gate (NANOSPEC_GATE=1) its absence is a failure."""
    if importlib.util.find_spec("modal") is None:
        needs.lacking("modal is not installed: pip install -e '.[modal]'")
    return importlib.import_module("modal")


@pytest.fixture
def load(modal, monkeypatch):
    """Import the file anew. By name: what it passed to App.function is in `asked`, the plain function in `plain`."""
    monkeypatch.setenv("NANOSPEC_COMMIT", "abc123")
    monkeypatch.delenv("HF_TOKEN", raising=False)

    def load():
        asked, plain = {}, {}
        register = modal.App.function

        def spy(app, **options):
            def decorate(function):
                asked[function.__name__], plain[function.__name__] = options, function
                return register(app, **options)(function)

            return decorate

        spec = importlib.util.spec_from_file_location("modal_app", ROOT / "modal_app.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "modal_app", module)
        with monkeypatch.context() as patch:
            patch.setattr(modal.App, "function", spy)
            spec.loader.exec_module(module)
        module.asked, module.plain = asked, plain
        return module

    return load


@pytest.fixture
def app(load):
    return load()


def test_every_function_asks_for_one_h100_and_both_volumes(app):
    """Bugs: rows of an H200 among an H100's; weights fetched anew by every container; results that end with one."""
    assert set(app.asked) == {"test", "diag", "grpo", *BENCH}
    for function, options in app.asked.items():
        assert options["gpu"] == "H100!", function
        assert set(options["volumes"]) == {"/root/.cache/huggingface", "/runs"}
        assert options["env"]["NANOSPEC_COMMIT"] == "abc123"
        assert options["image"] is app.IMAGES[BENCH.get(function, "nanospec")]


def test_the_commit_is_known_where_the_package_is_not_installed(app, monkeypatch):
    """Bug: `modal run` that wants torch on the machine where it is typed."""
    for name in ("nanospec_fn", "torch"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it is an ImportError
    assert app.commit() == "abc123"


def test_volumes_are_the_named_ones(load, modal, monkeypatch):
    names, real = [], modal.Volume.from_name

    def spy(name, **options):
        names.append((name, options))
        return real(name, **options)

    monkeypatch.setattr(modal.Volume, "from_name", spy)
    load()
    assert names == [(name, {"create_if_missing": True}) for name in ("nanospec-hf-cache", "nanospec-runs")]


def test_timeouts_and_retries_fit_the_limits(app, modal):
    """Bugs: Modal's 5 minutes by default; more than the 24 hours it gives; a retry that starts a run from nothing."""
    timeouts = {function: options["timeout"] for function, options in app.asked.items()}
    assert timeouts == {"test": 2 * HOUR, "diag": HOUR, "grpo": 24 * HOUR} | dict.fromkeys(BENCH, 4 * HOUR)
    retried = {function: options["retries"] for function, options in app.asked.items() if "retries" in options}
    assert set(retried) == {"grpo", *BENCH}  # those that go on where they were
    assert {retried[function] for function in BENCH} == {1}
    assert isinstance(retried["grpo"], modal.Retries)
    assert "--resume" in app.grpo_command("e0", "")
    # A process of bench.run's ends by its own limit first, and says why.
    assert run.build_parser().get_default("time_limit") < timeouts["bench_vllm"]


def test_the_token_decides_the_repository(load, monkeypatch):
    """Bugs: a gated repository without a token; a token that containers do not get."""
    plain = load()
    assert plain.MODEL == "NousResearch/Meta-Llama-3.1-8B-Instruct"
    assert all(options["secrets"] == [] for options in plain.asked.values())
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    gated = load()
    assert gated.MODEL == "meta-llama/Llama-3.1-8B-Instruct"
    assert gated.TOKEN == {"HF_TOKEN": "hf_x"}
    assert all(len(options["secrets"]) == 1 for options in gated.asked.values())
    assert gated.asked["diag"]["env"]["NANOSPEC_MODEL"] == gated.MODEL


class Builder:
    """Stands in for modal.Image: keeps the calls that build one."""

    def __init__(self, calls=()):
        self.calls = list(calls)

    def __getattr__(self, name):
        return lambda *args, **options: Builder([*self.calls, (name, args, options)])


@pytest.mark.parametrize("engine", ["nanospec", *apart.RELEASE])
def test_images(app, modal, monkeypatch, engine):
    """Bugs: a runtime image, in which FlashInfer cannot compile; another release than the adapter's; files added before
    the installs, which every edit would run again; an extra that pyproject.toml lacks, which Modal passes over."""
    monkeypatch.setattr(modal, "Image", Builder())
    calls = {name: (args, options) for name, args, options in app.image(engine).calls}
    assert "-devel-" in calls["from_registry"][0][0]
    assert calls["from_registry"][1] == {"add_python": "3.12"}
    first = next(args for name, args, _ in app.image(engine).calls if name == "pip_install")
    pinned = [f"{engine}=={apart.RELEASE[engine]}"] if engine in apart.RELEASE else []
    assert list(first) == ["torch==2.11.0", *pinned]
    file, extras = calls["pip_install_from_pyproject"][0]
    assert Path(file) == ROOT / "pyproject.toml"
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) <= set(known)
    assert ("gpu" in extras) == (engine == "nanospec")
    assert [name for name, *_ in app.image(engine).calls][-1] == "add_local_dir"
    assert calls["add_local_dir"][0] == (app.ROOT, app.REMOTE)
    assert calls["env"][0][0]["PYTHONPATH"] == app.REMOTE


def parse(command):
    """The options of a `python -m bench.run` command, by its own parser."""
    assert command[:3] == ["python", "-m", "bench.run"]
    return run.build_parser().parse_args(command[3:])


@pytest.mark.parametrize("engine", ["nanospec", *apart.RELEASE])
@pytest.mark.parametrize("config", ["nospec", "chain", "tree"])
def test_bench_commands_parse(app, engine, config):
    """Bug: a run starts a GPU to say that an option is unknown."""
    args = parse(app.bench_command(engine, config, "1 8 32", 3, app.MODEL, "/runs/bench/abc123"))
    assert (args.engine, args.config, args.bs, args.runs) == ([engine], config, [1, 8, 32], 3)
    assert (args.model, str(args.out), args.prompts) == (app.MODEL, "/runs/bench/abc123", "mt-bench")
    assert args.draft == ("auto" if config == "nospec" else "eagle:yuhuili/EAGLE3-LLaMA3.1-Instruct-8B")


def test_grpo_commands_parse(app):
    """Bugs: a run that lands outside the volume; a name that leaves its folder; options that rl.grpo lacks."""
    from rl import grpo_options

    options = "--task gsm8k --steps 300 --prompts 64 --group 8 --max-tokens 256 --draft frozen"
    command = app.grpo_command("e0", options)
    assert command[:3] == ["python", "-m", "rl.grpo"]
    args = grpo_options.build_parser().parse_args(command[3:])
    assert (str(args.out), args.resume, args.task, args.steps, args.group) == ("/runs/e0", True, "gsm8k", 300, 8)
    for name in ("", "../e0", "a b", "-x", "/abs"):
        with pytest.raises(ValueError, match="name must be"):
            app.grpo_command(name, "")


def test_test_and_diag_commands_are_there(app):
    assert app.test_command("tests/gpu -k 'a or b'")[3:] == ["-p", "no:cacheprovider", "tests/gpu", "-k", "a or b"]
    for command in (app.test_command(""), app.diag_command()):
        assert command[:2] == ["python", "-m"]
        assert importlib.util.find_spec(command[2]) is not None


def test_functions_run_their_commands(app, monkeypatch, tmp_path):
    """Bugs: a function that runs another's command; a failed command that counts as done; rows of another commit."""
    ran = []

    def record(command, cwd, check):
        assert (cwd, check) == ("/root/nanospec", True)
        ran.append(command)
        if command[2] == "bench.run":
            args = parse(command)
            args.out.mkdir(parents=True)
            (args.out / f"{args.engine[0]}-{args.config}.jsonl").write_text("row\n")

    monkeypatch.setattr(app.subprocess, "run", record)
    monkeypatch.setattr(app, "RUNS", str(tmp_path))
    app.plain["test"]("-x")
    app.plain["diag"]()
    app.plain["grpo"]("e1", "--steps 2")
    assert ran == [app.test_command("-x"), app.diag_command(), app.grpo_command("e1", "--steps 2")]
    for i, (function, engine) in enumerate(BENCH.items()):
        monkeypatch.setattr(app, "RUNS", str(tmp_path / str(i)))
        assert app.plain[function]("chain", "1 8", 2) == "row\n"
        args = parse(ran[-1])
        assert (args.engine, args.bs, args.out) == ([engine], [1, 8], tmp_path / str(i) / "bench" / "abc123")


def test_a_failed_command_fails_the_function(app, monkeypatch):
    monkeypatch.setattr(app, "REMOTE", str(ROOT))
    app.execute([sys.executable, "-c", "import bench.run"])
    with pytest.raises(subprocess.CalledProcessError):
        app.execute([sys.executable, "-c", "raise SystemExit(3)"])


@pytest.mark.parametrize(
    ("engines", "configs", "jobs"),
    [
        ("nanospec", "tree", [("nanospec", "tree")]),
        ("vllm sglang", "chain tree", [("vllm", "chain"), ("sglang", "chain"), ("sglang", "tree")]),
        ("nanospec torch", "tree", "engines must be some of nanospec, vllm, sglang"),
        ("", "tree", "engines must be"),
        ("vllm", "trees", "configs must be some of nospec, chain, tree"),
    ],
)
def test_bench_jobs(app, engines, configs, jobs):
    """Bug: a name is found wrong after an hour of measuring the others; a GPU waits for vLLM's tree to be skipped."""
    if isinstance(jobs, str):
        with pytest.raises(ValueError, match=jobs):
            app.bench_jobs(engines, configs)
    else:
        assert app.bench_jobs(engines, configs) == jobs


def test_bench_keeps_rows_where_the_table_reads_them(app, monkeypatch, tmp_path, capsys):
    """Bugs: a second call doubles the rows; one engine's failure loses the others' rows, or passes for success."""
    folder = tmp_path / "bench" / "results"
    folder.mkdir(parents=True)
    monkeypatch.setattr(app, "ROOT", tmp_path)
    own = json.loads((ROOT / "bench" / "results" / "cpu" / "nanospec-nospec.jsonl").read_text().splitlines()[0])
    calls = []

    def remote(engine):
        def call(config, bs, runs):
            calls.append((engine, config, bs, runs))
            if engine == "vllm":
                raise subprocess.CalledProcessError(1, "bench.run")
            rows = [own | {"engine": engine, "config": config, "run": i} for i in range(runs)]
            return "".join(json.dumps(row) + "\n" for row in rows)

        return SimpleNamespace(remote=call)

    for function, engine in BENCH.items():
        monkeypatch.setattr(app, function, remote(engine))
    with pytest.raises(SystemExit, match=r"vllm chain: .*bench\.run"):
        app.bench("nanospec vllm sglang", "chain", "1", 1)
    assert calls == [(engine, "chain", "1", 1) for engine in ("nanospec", "vllm", "sglang")]
    app.bench("nanospec sglang", "chain", "1", 2)
    files = sorted(folder.glob("*.jsonl"))
    assert [file.name for file in files] == ["nanospec-chain.jsonl", "sglang-chain.jsonl"]
    assert [json.loads(line)["run"] for line in files[0].read_text().splitlines()] == [0, 1]
    assert table.main([str(file) for file in files]) == 0
    assert "| sglang " in capsys.readouterr().out


SEED = """\
modal run --detach modal_app.py::grpo --name e0 --args \
"--task gsm8k --steps 300 --prompts 64 --group 8 --max-tokens 256 --draft frozen"
modal run modal_app.py::bench
modal run modal_app.py::bench --engines nanospec --configs tree --bs "1 8"
"""


@pytest.mark.parametrize("command", SEED.splitlines())
def test_commands_of_the_original_readme_parse(command, app):
    """Bug: a function or an option of modal_app.py is gone; the command that it makes of them does not parse."""
    from rl import grpo_options

    words = [word for word in shlex.split(command)[2:] if word != "--detach"]
    given = dict(zip((word.removeprefix("--") for word in words[1::2]), words[2::2], strict=True))
    if words[0] == "modal_app.py::grpo":
        args = grpo_options.build_parser().parse_args(app.grpo_command(**given)[3:])
        assert (args.task, args.prompts, args.group, args.max_tokens, args.resume) == ("gsm8k", 64, 8, 256, True)
        return
    assert words[0] == "modal_app.py::bench"
    code = app.bench.info.raw_f.__code__
    assert set(given) <= set(code.co_varnames[: code.co_argcount])
    every = [(engine, config) for engine in app.ENGINES for config in app.CONFIGS]
    jobs = app.bench_jobs(given.get("engines", " ".join(app.ENGINES)), given.get("configs", " ".join(app.CONFIGS)))
    assert jobs == ([("nanospec", "tree")] if given else [pair for pair in every if pair != ("vllm", "tree")])


def test_commands_of_the_file_are_modals(app):
    """Bug: the file's own instructions name a function or option that is gone."""
    shown = [line.strip() for line in app.__doc__.splitlines() if line.strip().startswith("modal run")]
    assert len(shown) >= 5
    for line in shown:
        words = shlex.split(line.split("   #")[0])
        function = next(word for word in words if "::" in word).split("::")[1]
        body = app.bench.info.raw_f if function == "bench" else app.plain[function]
        options = [word[2:] for word in words if word.startswith("--") and " " not in word and word != "--detach"]
        assert set(options) <= set(body.__code__.co_varnames[: body.__code__.co_argcount])

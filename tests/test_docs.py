"""The pages of the repository: their code runs, their commands parse, and what they name is there."""

import ast
import dataclasses
import importlib.util
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import bench.acceptance
import bench.identity
import bench.prefill
import bench.roofline
import bench.run
import bench.table
import bench.widen
import nanospec_fn as ns
import nanospec_fn.__main__
import rl.bias
import rl.grpo_options
import rl.plot
import rl.train_options
from tests import tiny
from tests.test_architecture import ORDER

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
PARSERS = {
    "nanospec_fn": nanospec_fn.__main__.build_parser,
    "bench.run": bench.run.build_parser,
    "bench.acceptance": bench.acceptance.build_parser,
    "bench.identity": bench.identity.build_parser,
    "bench.prefill": bench.prefill.build_parser,
    "bench.roofline": bench.roofline.build_parser,
    "bench.table": bench.table.build_parser,
    "bench.widen": bench.widen.build_parser,
    "rl.bias": rl.bias.build_parser,
    "rl.grpo": rl.grpo_options.build_parser,
    "rl.plot": rl.plot.build_parser,
    "rl.train_eagle": rl.train_options.build_parser,
}
SOURCES = sorted(path for name in ("nanospec_fn", "bench", "rl") for path in (ROOT / name).rglob("*.py"))
README = (ROOT / "README.md").read_text()
PROMISES = (ROOT / "docs" / "promises.md").read_text()


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language in a page, "" for those that name none; not those inside a longer fence."""
    text = re.sub(r"^````.*?^````$", "", page.read_text(), flags=re.M | re.S)
    # All of them, whatever their language: else the end of one is taken for the beginning of the next.
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.M | re.S)
    return [body for name, body in fenced if name == language]


def commands(page: Path) -> list[list[str]]:
    """The `python -m` lines of a page's blocks and of its inline code, as arguments."""
    inline = re.findall(r"`(python -m [^`]+)`", page.read_text())
    lines = [line for block in blocks(page, "") for line in block.splitlines() if "python -m" in line] + inline
    split = (shlex.split(line, comments=True) for line in lines)
    return [words[words.index("python") + 2 :] for words in split]


COMMANDS = [(page.name, words) for page in PAGES for words in commands(page)]


@pytest.mark.parametrize("page, words", COMMANDS, ids=lambda x: " ".join(x) if isinstance(x, list) else x)
def test_commands_parse(page, words):
    """Bug: a page shows an option, a value or a module that is gone."""
    module, *arguments = words
    assert importlib.util.find_spec(module)
    if module == "pytest":
        assert all((ROOT / word).exists() for word in arguments if "/" in word)
    if module not in PARSERS:
        assert module in ("pytest", "tests.gpu.timing", "tests.gpu.tiles", "tests.diag_numerics")
        return
    if "--help" in arguments:
        with pytest.raises(SystemExit) as stopped:
            PARSERS[module]().parse_args(arguments)
        assert stopped.value.code == 0
    elif arguments != ["generate", "--trace", "FILE"]:  # named without its prompt
        PARSERS[module]().parse_args(arguments)


def test_there_are_commands_to_parse():
    assert {words[0] for _, words in COMMANDS} >= {"nanospec_fn", "bench.run", "pytest"}


def test_overridden_modules_exist():
    """Bug: a type checker's exception that outlives its file, and waits for another of that name."""
    for name in re.findall(r'"(nanospec_fn\.[\w.]+)"', (ROOT / "pyproject.toml").read_text()):
        assert (ROOT / f"{name.replace('.', '/')}.py").exists(), name


def test_make_targets_and_extras_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", "\n".join(blocks(ROOT / "README.md", "")), flags=re.M):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target
    for extra in ",".join(re.findall(r"\.\[([\w,]+)\]", README)).split(","):
        assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text()


def test_commands_of_the_makefile_parse(tmp_path):
    """Bug: an hour on a lent GPU that ends at an option that is gone."""
    dry = subprocess.run(
        ["make", "-n", "gpu-bits", "gpu-speed", "gpu-rl", "PY=python", f"RESULTS={tmp_path}", f"RUNS={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    text = dry.stdout.decode().replace("\\\n", " ").replace("*.jsonl", "x.jsonl")
    found = [shlex.split(words) for words in re.findall(r"python -m ((?!pytest)[^\n]+)", text)]
    assert len(found) == 18
    assert {words[0] for words in found} == {
        "bench.identity", "bench.roofline", "bench.prefill", "bench.run", "bench.table", "rl.grpo", "rl.plot",
    }  # fmt: skip
    for module, *arguments in found:
        PARSERS[module]().parse_args(arguments)


def test_readme_code_runs(monkeypatch, one_thread):
    """Bug: the first thing that a newcomer pastes fails."""
    model = dataclasses.replace(tiny.model(vocab_size=258, eos_token_id=257), tokenizer=tiny.tokenizer())
    frozen = ns.load_draft("frozen", model)  # no head comes with the tiny model
    monkeypatch.setattr(ns, "load", lambda name: model)
    monkeypatch.setattr(ns, "load_draft", lambda name, target: frozen)
    code = blocks(ROOT / "README.md", "python")
    assert len(code) >= 2
    names: dict[str, object] = {}
    for block in code:
        exec(compile(block, "README.md", "exec"), names)
    assert len(names["out"][0].tokens) == len(names["out"][0].target_logp) > 0
    assert int(names["info"].count[0]) >= 1


def test_trace_page_code_runs(tmp_path, monkeypatch, one_thread):
    """Bug: the reader's example names what the trace does not have."""
    monkeypatch.chdir(tmp_path)
    model, spec = tiny.model(), ns.Speculation(top_k=1, depth=5)
    sampling = ns.Sampling(max_tokens=12, temperature=1.0, ignore_eos=True)
    ns.generate(model, [[3, 4, 5]], sampling, draft=ns.load_draft("frozen", model), speculation=spec, trace="run.jsonl")
    names: dict[str, object] = {}
    for block in blocks(ROOT / "docs" / "trace-format.md", "python"):
        exec(compile(block, "trace-format.md", "exec"), names)
    assert int(names["verdict"].count.sum()) >= len(names["rounds"]) > 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_and_files_exist(page):
    """Bug: a page names what was renamed: a public name, a file, a link's target."""
    text = page.read_text()
    for block in blocks(page, "python"):
        ast.parse(block)
    assert not [name for name in re.findall(r"\bns\.(\w+)", text) if not hasattr(ns, name)]
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert not [link for link in links if not (page.parent / link).exists()]
    named = re.findall(r"\b((?:tests|properties|nanospec_fn|bench|rl|docs)/[\w/]+\.(?:py|md))\b", text)
    assert not [name for name in named if not (ROOT / name).exists()]


def test_readme_lists_every_file_in_import_order():
    """Bug: a file that the layout leaves out, or one that is gone; a list that is not the architecture's."""
    layout = README[README.index("## Layout") : README.index("## Environment")]
    own = re.sub(r"(?m)^  \w+/ .*$", "", layout[: layout.index("bench/")])  # a folder's files are in no order
    named = re.findall(r"\b(\w+)\.py\b", own)
    top = [name for name in named if (ROOT / "nanospec_fn" / f"{name}.py").exists()]
    assert top == sorted(top, key=ORDER.index)
    folders = ("nanospec_fn", "nanospec_fn/kernels", "nanospec_fn/doctor", "nanospec_fn/commands", "rl", "bench")
    there = {path.name for folder in folders for path in (ROOT / folder).glob("*.py")} - {"__init__.py"}
    assert set(re.findall(r"\w+\.py\b", layout)) == {*there, "modal_app.py", "test_architecture.py"}
    assert set(re.findall(r"[\w-]+\.md\b", layout)) >= {path.name for path in (ROOT / "docs").glob("*.md")}
    assert len(README.splitlines()) <= 150


def test_readme_lists_every_environment_variable():
    """Bug: a variable that changes results and is told nowhere, or told and read by nobody."""
    read = {name for path in SOURCES for name in re.findall(r"NANOSPEC_[A-Z_]+", path.read_text())}
    assert set(re.findall(r"^\| (NANOSPEC_[A-Z_]+)", README, flags=re.M)) == read


def test_promises_and_failures_are_where_the_page_says():
    """Bug: a comment cites a promise or failure that the page lacks; the page names a test that is not about it."""
    for row in re.findall(r"^\| (C\d\d) \|.*$", PROMISES, flags=re.M):
        line = next(line for line in PROMISES.splitlines() if line.startswith(f"| {row} "))
        for file in re.findall(r"`([\w/]+\.py)`", line):
            assert re.search(rf"\b{row}\b|_{row.lower()}_", (ROOT / file).read_text()), (row, file)
    defined = set(re.findall(r"^\| ([GC]\d\w*) \|", PROMISES, flags=re.M))
    assert len(defined) == 26
    files = [*SOURCES, *(ROOT / "properties").glob("*.py"), *(ROOT / "tests").rglob("*.py"), *PAGES]
    for path in files:
        cited = set(re.findall(r"\b(G[1-9]b?|C[0-2]\d)\b", path.read_text()))
        assert cited <= defined, (path, cited - defined)


def test_readers_can_follow_what_they_are_told():
    """Bug: a comment cites a document outside the repository, or an error speaks of promises by number."""
    for path in SOURCES:
        text = path.read_text()
        assert not re.search(r"design\.md|design section|cases/", text), path
        raised = [ast.unparse(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Raise)]
        assert not [line for line in raised if re.search(r"\b[GC]\d", line)], path

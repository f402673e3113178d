"""The layout is the architecture: imports point upwards in ORDER, files stay small, nothing is hidden."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = (
    "struct",
    "rng",
    "schedule",
    "variants",
    "kernels",
    "filters",
    "trees",
    "sampling",
    "acceptance",
    "pages",
    "slots",
    "capture",
    "model",
    "attention",
    "flashinfer",
    "eagle",
    "rehearsal",
    "files",
    "config",
    "checkpoint",
    "chat",
    "weights",
    "draft",
    "draft_model",
    "step",
    "admission",
    "program",
    "jsonl",
    "trace",
    "reports",
    "engine",
    "generate",
    "__init__",  # the package root, as seen by users and by the command lines below
    "revision",
    "prompts",
    "arguments",
    "recorded",
    "kl",
    "narrow",
    "counterfactual",
    "view",
    "tally",
    "picture",
    "doctor",
    "commands",
    "__main__",
)
LIBRARY = sorted((ROOT / "nanospec_fn").rglob("*.py"))
CLIENTS = sorted(path for name in ("bench", "rl") for path in (ROOT / name).rglob("*.py"))
TRAINING = [path for path in CLIENTS if path.parent.name == "rl"]
PARSE = ("bias", "grpo_options", "plot", "train_options")  # of rl: what reads a command line


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def row(path: Path) -> int:
    """The row of the table that a library file stands in."""
    return ORDER.index(path.relative_to(ROOT / "nanospec_fn").parts[0].removesuffix(".py"))


def imported(path: Path, package: str) -> set[str]:
    """The submodules of `package` that a file imports, anywhere in it; "__init__" for the package root itself."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno} imports relatively"
            names = [node.module or ""]
            if node.module == package:
                folder = ROOT / package
                names = [
                    f"{package}.{a.name}" if any((folder / f"{a.name}{s}").exists() for s in ("", ".py")) else package
                    for a in node.names
                ]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == package:
                found.add(parts[1] if len(parts) > 1 else "__init__")
    return found


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_library_imports_only_rows_above(path):
    """Bugs: an import cycle; policy that depends on arithmetic; a file missing from the table."""
    here = row(path)
    allowed = {*ORDER[:here], *({path.parent.name} & {"kernels", "doctor"})}
    assert imported(path, "nanospec_fn") <= allowed
    assert not imported(path, "bench") | imported(path, "rl")


@pytest.mark.parametrize("path", CLIENTS, ids=name_of)
def test_clients_name_the_modules_that_they_use(path):
    """Bug: a function taken out of its module (`from nanospec_fn.step import f`): its use does not say whose it is."""
    for node in ast.walk(ast.parse(path.read_text())):
        modules = (
            [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None) or ""]
        )
        assert not [m for m in modules if m.startswith("nanospec_fn.")], f"{name_of(path)}:{node.lineno}"


@pytest.mark.parametrize("path", TRAINING, ids=name_of)
def test_training_stands_on_the_library_alone(path):
    """Bug: rl and bench import each other, so that neither is read, or moved, without the other."""
    assert not imported(path, "bench")


@pytest.mark.parametrize("path", TRAINING, ids=name_of)
def test_trainers_take_values_and_no_command_line(path):
    """Bug: a trainer that only a parsed command line can call, whose fields no type checker sees."""
    assert ("argparse" in {m for node in ast.walk(ast.parse(path.read_text())) for m in modules_of(node)}) == (
        path.stem in PARSE
    )


def test_schedule_and_struct_of_policy_need_no_torch():
    """Bug: host policy that reads a tensor, and so waits for the device."""
    for name in ("schedule.py", "variants.py"):
        tree = ast.parse((ROOT / "nanospec_fn" / name).read_text())
        assert not {m for node in ast.walk(tree) for m in modules_of(node)} - {"collections.abc", "dataclasses"}


def modules_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


@pytest.mark.parametrize("path", [*LIBRARY, *CLIENTS], ids=name_of)
def test_files_are_small_and_named_for_what_they_hold(path):
    """Bug: a file that became two things, or one that holds whatever fitted nowhere."""
    assert len(path.read_text().splitlines()) <= 400
    assert path.stem not in ("utils", "util", "helpers", "common", "misc", "base", "core")


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_library_has_no_globals_and_no_hosts_randomness(path):
    """Bugs: `global` and host randomness make a result depend on more than arguments."""
    for node in ast.walk(ast.parse(path.read_text())):
        where = f"{name_of(path)}:{getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.Global), where
        assert not (isinstance(node, ast.Attribute) and node.attr in ("manual_seed_all", "set_rng_state")), where
        assert not {"random", "numpy.random"} & set(modules_of(node)), where
        if isinstance(node, ast.ClassDef):
            assert not node.name.endswith(("Manager", "Registry", "Helper", "Utils")), where


# What a function is cached by is hashable statics alone, and what it holds is never written.
CACHES = {
    "model.py:inv_freq",
    "struct.py:_field_names",
    "kernels/dependent.py:launch_options",
    "kernels/launches.py:pick_tile",
}
# Modules that a captured step runs through, and what in them waits for the device all the same.
STEPPED = ("acceptance", "attention", "draft", "draft_model", "eagle", "filters", "flashinfer", "model", "pages", "rng")
STEPPED += ("sampling", "slots", "step", "struct", "trees")
WAITS = {"pages.py:check"}  # for tests
WAITING = ("item", "tolist", "cpu", "numpy", "synchronize")


def functions(path: Path) -> list[tuple[str, ast.FunctionDef]]:
    """Those of a module of the library, classes' too, with names as in CACHES."""
    tree = ast.parse(path.read_text())
    where = path.relative_to(ROOT / "nanospec_fn")
    return [(f"{where}:{node.name}", node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def test_what_is_cached_and_what_waits_is_known():
    """Bugs: a result that depends on what ran before; `.tolist()` in a step, which stalls the device at every round."""
    cached, waiting = set(), set()
    for path in LIBRARY:
        stepped = path.stem in STEPPED or path.parent.name == "kernels"
        for name, function in functions(path):
            if any("cache" in ast.unparse(decorator) for decorator in function.decorator_list):
                cached.add(name)
            calls = [node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)]
            if stepped and set(calls) & set(WAITING):
                waiting.add(name)
    assert cached == CACHES
    assert waiting == WAITS


def test_the_root_is_the_public_contract():
    """Bug: a name of the contract is not there, or a module's internals leak into the root's list."""
    import nanospec_fn as ns

    contract = "load load_draft Sampling Speculation EngineConfig generate stream prepare score forward build Params"
    assert {*contract.split(), "capture", "DonatedError", "Completion"} <= set(ns.__all__)
    assert all(hasattr(ns, name) for name in ns.__all__)
    assert ns.__all__ == sorted(ns.__all__)

"""Kernels that are launched as dependents wait before they touch memory: read off their source, without a GPU."""

import ast

import pytest

from tests.test_architecture import ROOT

TOUCHES = {"load", "store", "atomic_add", "atomic_xchg", "atomic_cas"}
WAITS = {"wait", "enter"}
SOURCES = sorted((ROOT / "nanospec_fn" / "kernels").glob("*.py"))


def calls(node: ast.AST) -> list[tuple[int, str]]:
    """Line and last name of every call inside a node."""
    found = [c for c in ast.walk(node) if isinstance(c, ast.Call)]
    names = [(c.lineno, c.func.attr if isinstance(c.func, ast.Attribute) else getattr(c.func, "id", "")) for c in found]
    return sorted(names)


def touching(functions: dict[str, ast.FunctionDef]) -> set[str]:
    """The names of what reads or writes memory: Triton's, and functions that call one of them."""
    names, before = set(TOUCHES), 0
    while len(names) > before:
        before = len(names)
        names |= {name for name, node in functions.items() if any(called in names for _, called in calls(node))}
    return names


def functions() -> dict[str, ast.FunctionDef]:
    trees = [ast.parse(path.read_text()) for path in SOURCES]
    return {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


DEPENDENT = [
    (name, node)
    for name, node in functions().items()
    if "DEPENDENT" in [argument.arg for argument in node.args.args] and name not in (*WAITS, "release")
]


@pytest.mark.parametrize("name, node", DEPENDENT, ids=[name for name, _ in DEPENDENT])
def test_it_waits_before_it_touches_memory(name, node):
    """Bug: a load in front of the wait reads what the kernel before has not written yet."""
    memory = touching(functions())
    waits = [line for line, called in calls(node) if called in WAITS]
    touches = [line for line, called in calls(node) if called in memory]
    assert len(waits) == 1, "once, whatever way a program takes"
    assert waits[0] < min(touches)
    assert any(isinstance(statement, ast.Expr) and statement.lineno == waits[0] for statement in node.body)


def test_the_kernels_of_a_layer_and_of_a_level_are_dependents():
    assert {name for name, _ in DEPENDENT} == {
        *("_few_rows", "_many_rows", "_many_rows_copied", "_rms_norm", "_turn_and_store", "_attend"),
        *("_embed_beside", "_angles", "_rows_at", "_top", "_expand"),
    }

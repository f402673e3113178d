"""What the adapters use of a released engine, recorded from its wheel: `python -m tests.peers.record WHEEL`.

Writes tests/peers/<engine>-<version>.json: the parameters of constructors and calls, the fields of what they return,
the names of counters. Nothing in the wheel is imported or run, and names alone are kept.
"""

import ast
import json
import sys
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parent
CLASSES = {
    # engine: {class: the file that defines it}
    "vllm": {
        "LLM": "vllm/entrypoints/llm.py",
        "EngineArgs": "vllm/engine/arg_utils.py",
        "SpeculativeConfig": "vllm/config/speculative.py",
        "SamplingParams": "vllm/sampling_params.py",
        "TokensPrompt": "vllm/inputs/llm.py",
        "RequestOutput": "vllm/outputs.py",
        "CompletionOutput": "vllm/outputs.py",
        "RequestStateStats": "vllm/v1/metrics/stats.py",
        "Counter": "vllm/v1/metrics/reader.py",
        "Metric": "vllm/v1/metrics/reader.py",
    },
    "sglang": {
        "Engine": "sglang/srt/entrypoints/engine.py",
        "ServerArgs": "sglang/srt/server_args.py",
        "SamplingParams": "sglang/srt/sampling/sampling_params.py",
    },
}
METHODS = {"vllm": ("LLM.generate", "LLM.get_metrics"), "sglang": ("Engine.generate", "Engine.shutdown")}
# Where the keys of dictionaries and the names of counters are recorded from.
STRINGS = {
    "vllm": ("vllm/v1/spec_decode/metrics.py",),
    "sglang": ("sglang/srt/managers/tokenizer_manager.py", "sglang/srt/observability/req_time_stats.py"),
}


def record(wheel: Path) -> Path:
    """Write the record of a wheel; the file's path."""
    engine, version = wheel.name.split("-")[:2]
    with zipfile.ZipFile(wheel) as files:
        sources = {path: ast.parse(files.read(path)) for path in {*CLASSES[engine].values(), *STRINGS[engine]}}
    classes = {name: class_of(sources[path], name) for name, path in CLASSES[engine].items()}
    recorded = {
        "engine": engine,
        "version": version,
        "parameters": {name: parameters(node) for name, node in classes.items()}
        | {name: arguments(method(classes[name.split(".")[0]], name.split(".")[1])) for name in METHODS[engine]},
        "strings": sorted({text for path in STRINGS[engine] for text in strings(sources[path], engine)}),
    }
    out = FOLDER / f"{engine}-{version}.json"
    out.write_text(json.dumps(recorded, indent=1) + "\n")
    return out


def class_of(module: ast.Module, name: str) -> ast.ClassDef:
    """A class by name."""
    return next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name)


def method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    """A method by name, where the class has one."""
    return next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == name), None)


def parameters(node: ast.ClassDef) -> list[str]:
    """The names that a class is made with: those of __init__, else its annotated fields."""
    init = method(node, "__init__")
    if init is not None:
        return arguments(init)
    return [
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]


def arguments(function: ast.FunctionDef | None) -> list[str]:
    """The parameters of a function, `self` left out; "**" where it takes any others."""
    assert function is not None
    names = [arg.arg for arg in (*function.args.args, *function.args.kwonlyargs) if arg.arg != "self"]
    return [*names, "**"] if function.args.kwarg else names


def strings(module: ast.Module, engine: str) -> set[str]:
    """The keys that a file's dictionaries have or are read by, and the names of its counters."""
    nodes: list[ast.expr | None] = []
    for node in ast.walk(module):
        nodes += node.keys if isinstance(node, ast.Dict) else [node.slice] if isinstance(node, ast.Subscript) else []
        nodes += [node] if isinstance(node, ast.Constant) and str(node.value).startswith(f"{engine}:") else []
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


if __name__ == "__main__":
    for wheel in sys.argv[1:]:
        print(record(Path(wheel)))

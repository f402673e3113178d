"""The public contract by reflection: names, signatures, defaults, docstrings; and C20, what bad values are told."""

import dataclasses
import inspect
import math
import pkgutil
import re
from importlib import import_module
from typing import Any

import pytest
import torch

import nanospec_fn as ns
from nanospec_fn import step, struct
from nanospec_fn.capture import Captured
from nanospec_fn.engine import Engine
from tests.scripted import TREE, prompt, target

pytestmark = pytest.mark.usefixtures("one_thread")
REQUIRED = inspect.Parameter.empty
SIGNATURES: dict[str, dict[str, Any]] = {
    "load": {"device": "auto", "dtype": "auto"},
    "load_draft": {"name": REQUIRED, "model": REQUIRED},
    "generate": {
        "model": REQUIRED,
        "prompts": REQUIRED,
        "sampling": None,
        "draft": None,
        "speculation": None,
        "engine": None,
        "progress": False,
        "trace": None,
        "on_error": "raise",
    },
    "prepare": {"model": REQUIRED, "draft": None, "engine": None, "speculation": None},
    "score": {"model": REQUIRED, "prompt": REQUIRED, "tokens": REQUIRED, "sampling": None},
    "build": {"model": REQUIRED, "draft": None, "engine": None, "speculation": None},
    "forward": {"params": REQUIRED, "cfg": REQUIRED, "tokens": REQUIRED},
    "capture": {"step": REQUIRED, "donate": ("state",)},
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "Sampling": {
        "max_tokens": 128,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "seed": 0,
        "rule": "exact",
        "tau": 1.0,
        "accept_top_k": 0,
        "alpha": 1.0,
        "stop_ids": (),
        "ignore_eos": False,
    },
    "Speculation": {"top_k": 1, "depth": 5, "num_nodes": None, "coupled": False},
    "EngineConfig": {
        "max_slots": 8,
        "num_pages": None,
        "page_size": 16,
        "attend": "auto",
        "capture": "auto",
        "prefill_chunk": 512,
        "max_context": None,
        "variants": "fixed",
    },
}
STEPS = ("prefill", "decode", "speculate")
# Kernels hold no states, and those for a GPU cannot be imported everywhere.
MODULES = [
    import_module(m.name)
    for m in pkgutil.walk_packages(ns.__path__, "nanospec_fn.")
    if "__main__" not in m.name and "kernels" not in m.name
]
STATES = sorted(
    {
        member
        for module in MODULES
        for member in vars(module).values()
        if inspect.isclass(member) and dataclasses.is_dataclass(member) and "__slots__" in vars(member)
    },
    key=lambda c: c.__qualname__,
)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_the_contracts(name):
    """The documented arguments come first, in order, with their defaults; what is added has a default."""
    found = inspect.signature(getattr(ns, name)).parameters
    wanted = SIGNATURES[name]
    named = {n: p.default for n, p in found.items() if n in wanted}
    assert named == wanted
    assert list(named) == list(wanted)
    assert all(p.default is not REQUIRED for n, p in found.items() if n not in wanted)


def test_stream_and_generate_share_their_arguments():
    ours, theirs = (inspect.signature(f).parameters for f in (ns.stream, ns.generate))
    assert {n: p.default for n, p in ours.items()} == {n: p.default for n, p in theirs.items() if n != "progress"}


@pytest.mark.parametrize("name", DEFAULTS)
def test_dataclasses_have_the_contracts_defaults(name):
    """Fields in order; hashable and frozen, so that they can be statics."""
    cls = getattr(ns, name)
    assert {f.name: f.default for f in dataclasses.fields(cls)} == DEFAULTS[name]
    assert [f.name for f in dataclasses.fields(cls)] == list(DEFAULTS[name])
    assert cls() == cls()
    assert hash(cls()) == hash(cls())
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(cls(), next(iter(DEFAULTS[name])), 1)
    cls().validate()


def test_completions_and_chunks_have_the_contracts_fields():
    completion = {f.name for f in dataclasses.fields(ns.Completion)}
    assert completion >= {
        *("tokens", "text", "target_logp", "behaviour_logp", "finish_reason", "accepted", "origin"),
    }
    assert {f.name for f in dataclasses.fields(ns.Chunk)} >= {"index", "tokens", "text", "finish_reason"}
    assert issubclass(ns.DonatedError, Exception)
    assert {f.name for f in dataclasses.fields(ns.Params)} == {"target", "draft"}
    assert {"cfg", "params", "tokenizer"} <= {f.name for f in dataclasses.fields(ns.Model)}
    assert hash(target().cfg) == hash(dataclasses.replace(target().cfg))


@pytest.mark.parametrize("name", ns.__all__)
def test_public_names_are_documented(name):
    """A docstring of its own, and one for each public method; dataclasses' generated ones do not count."""
    thing = getattr(ns, name)
    assert thing.__doc__
    assert not thing.__doc__.startswith(f"{name}(")
    if inspect.isclass(thing):
        for method, value in vars(thing).items():
            if inspect.isfunction(value) and not method.startswith("_"):
                assert value.__doc__, f"{name}.{method}"


@pytest.mark.parametrize("name", ["generate", "stream", "prepare", "score", "load", "load_draft", "build", "forward"])
def test_public_functions_say_what_they_raise(name):
    assert re.search(r"\b(Errors|errors)\b", getattr(ns, name).__doc__)


@pytest.mark.parametrize("name", [*STEPS, "insert", "evict"])
def test_steps_have_one_form(name):
    """(params,) state, ..., put: what `capture` needs, and what a reader expects."""
    signature = inspect.signature(getattr(ns.Program, name))
    arguments = list(signature.parameters)
    assert arguments[:2] == ["self", "params"] if name in STEPS else arguments[:2] == ["self", "state"]
    assert "state" in arguments[1:3]
    assert arguments[-1] == "put"
    assert signature.parameters["put"].default is struct.put
    assert signature.return_annotation == (tuple[ns.State, ns.Info] if name in STEPS else ns.State)
    if name in STEPS:
        assert arguments[3] == "slot"
        inner = list(inspect.signature(getattr(step, name)).parameters)
        assert inner == ["static", *arguments[1:]]


@pytest.mark.parametrize("name", ["gemm", "bmm"])
def test_an_unknown_way_to_multiply_is_refused(name):
    """Bug: a misspelt one is silently another."""
    model = target()
    wrong = dataclasses.replace(model, cfg=dataclasses.replace(model.cfg, **{name: "onednn2"}))
    with pytest.raises(ValueError, match=f"the model's config has {name} 'onednn2', known are "):
        ns.build(wrong)


@pytest.mark.parametrize("cls", STATES, ids=lambda c: c.__qualname__)
def test_states_describe_their_tensors(cls):
    """Each tensor field has its shape beside it; a state cannot be compared with ==, and holds no None by default."""
    assert cls.__doc__
    assert not cls.__doc__.startswith(f"{cls.__name__}(")
    assert cls.__eq__ is object.__eq__
    source = inspect.getsource(cls)
    for field in dataclasses.fields(cls):
        line = next(line for line in source.splitlines() if line.strip().startswith(f"{field.name}:"))
        if re.search(r"\bTensor\b", line.split("#")[0]):
            assert "#" in line or "[" in cls.__doc__, f"{cls.__name__}.{field.name}"
        assert field.default is not None


def test_there_are_states_to_describe():
    assert {ns.State, ns.Info, ns.Params} <= set(STATES)
    assert len(STATES) >= 10


@pytest.mark.parametrize("draft", ["none", "ngram", "frozen"])
def test_composition_as_documented(draft):
    """The contract's own loop, and the shapes and dtypes of Info after each step."""
    model = target()
    draft = ns.load_draft(draft, model)
    config = ns.EngineConfig(max_slots=3, num_pages=60)
    program = ns.build(model, draft=draft, engine=config, speculation=TREE if draft else None)
    assert hash(program) == hash(dataclasses.replace(program))
    params = ns.Params(target=model.params, draft=draft.params if draft else ())
    state = program.init()
    state = program.insert(state, 1, prompt(5), ns.Sampling(max_tokens=9))
    width = TREE.depth + 1 if draft else 1
    fast = ns.capture(program.speculate, donate=("state",))
    assert isinstance(fast, Captured)
    text: list[int] = []
    for run in (program.prefill, program.decode, program.speculate, fast):
        state, info = run(params, state)
        assert isinstance(state, ns.State)
        assert isinstance(info, ns.Info)
        assert info.tokens.shape == info.target_logp.shape == info.behaviour_logp.shape == (3, width)
        assert info.tokens.dtype == torch.int32
        assert info.target_logp.dtype == info.behaviour_logp.dtype == torch.float32
        for name in ("count", "accepted", "done", "ok", "left"):
            assert getattr(info, name).shape == (3,)
        assert info.count.tolist()[::2] == [0, 0]
        count = int(info.count[1])
        assert (info.tokens[1, :count] >= 0).all()
        assert (info.tokens[1, count:] == -1).all()
        assert (info.tokens[::2] == -1).all()
        text += info.tokens[1, :count].tolist()
    state = program.evict(state, 1)
    assert not state.slots.active.any()
    assert text == ns.generate(model, [prompt(5)], ns.Sampling(max_tokens=9))[0].tokens[: len(text)]


NOT_INTEGERS = (1.5, math.nan, math.inf, "abc", None, True, 10**30, -1)
NOT_NUMBERS = (math.nan, math.inf, -math.inf, "abc", None, True, -1, 10**30)
BAD_SAMPLING: dict[str, tuple[Any, ...]] = {
    "max_tokens": (*NOT_INTEGERS, 0),
    "temperature": (*NOT_NUMBERS, 1e-9),
    "top_k": NOT_INTEGERS,
    "top_p": (*NOT_NUMBERS, 0, 1.5),
    "seed": (*NOT_INTEGERS, 2**63),
    "rule": (-1, 0, 1.5, math.nan, "abc", "", None, True),
    "tau": (*NOT_NUMBERS, 1.5),
    "accept_top_k": NOT_INTEGERS,
    "alpha": (*NOT_NUMBERS, 0, 1.5),
    "stop_ids": (-1, 0, 1.5, "abc", None, True, (-1,), (1.5,), ("a",), (None,), (10**30,), tuple(range(33))),
    "ignore_eos": (-1, 0, 1, 1.5, "abc", None),
}
BAD_SPECULATION: dict[str, tuple[Any, ...]] = {
    "top_k": (*NOT_INTEGERS, 0),
    "depth": (*NOT_INTEGERS, 0),
    "num_nodes": (1.5, math.nan, math.inf, "abc", True, 10**30, -1, 0, 4, 6),
    "coupled": (-1, 0, 1, 1.5, "abc", None),
}
BAD_ENGINE: dict[str, tuple[Any, ...]] = {
    "max_slots": (*NOT_INTEGERS, 0),
    "num_pages": (1.5, math.nan, math.inf, "abc", True, 10**30, -1, 0),
    "page_size": (*NOT_INTEGERS, 0, 3, 128, 16.0),
    "attend": (-1, 0, 1.5, "abc", "", None, True, "canonical", "flashinfer"),
    "capture": (-1, 0, 1.5, "abc", "", None, True),
    "variants": (-1, 0, 1.5, "abc", "", None, True),
    "prefill_chunk": (*NOT_INTEGERS, 0),
    "max_context": (1.5, math.nan, math.inf, "abc", True, 10**30, -1, 0),
}


def cases(table: dict[str, tuple[Any, ...]]) -> list[Any]:
    return [pytest.param(n, v, id=f"{n}-{str(v)[:20]}") for n, values in table.items() for v in values]


def refused(name: str, **arguments: Any) -> None:
    """generate and stream raise ValueError that names the parameter, before any step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "run", lambda *args: pytest.fail("a step ran"))
        for call in (ns.generate, ns.stream):
            with pytest.raises(ValueError, match=rf"\b{name}\b"):
                call(target(), [prompt(3)], **arguments)


@pytest.mark.parametrize("name, value", cases(BAD_SAMPLING))
def test_c20_sampling(name, value):
    """Every field is checked, with its own name, with and without speculation, and by a program of one's own."""
    refused(name, sampling=ns.Sampling(**{name: value}))
    program = ns.build(target(), engine=ns.EngineConfig(max_slots=1, num_pages=4))
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        program.insert(program.init(), 0, prompt(3), ns.Sampling(**{name: value}))
    refused(name, sampling=[ns.Sampling(**{name: value})], draft=ns.load_draft("ngram", target()))


@pytest.mark.parametrize("name, value", cases(BAD_SPECULATION))
def test_c20_speculation(name, value):
    refused(name, draft=ns.load_draft("ngram", target()), speculation=ns.Speculation(**{name: value}))
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        ns.build(target(), ns.load_draft("ngram", target()), speculation=ns.Speculation(**{name: value}))


@pytest.mark.parametrize("name, value", cases(BAD_ENGINE))
def test_c20_engine_config(name, value):
    config = ns.EngineConfig(**{name: value})
    refused(name, engine=config)
    refused(name, engine=config, draft=ns.load_draft("ngram", target()))
    for make in (ns.build, ns.prepare):
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            make(target(), engine=config)


CLASHES = [
    ({"rule": "power", "alpha": 0.5}, "rule 'power' needs a temperature above 0"),
    ({"rule": "relaxed", "tau": 0.5}, "rule 'relaxed' needs a temperature above 0"),
    ({"temperature": 1.0, "alpha": 0.5}, "alpha belongs to rule 'power'"),
    ({"temperature": 1.0, "tau": 0.5}, "tau belongs to rule 'relaxed'"),
    ({"temperature": 1.0, "accept_top_k": 2}, "accept_top_k belongs to rule 'relaxed'"),
    ({"temperature": 1.0, "rule": "power", "tau": 0.5}, "tau belongs to rule 'relaxed'"),
    ({"temperature": 1.0, "rule": "relaxed", "tau": 0.5, "alpha": 0.5}, "alpha belongs to rule 'power'"),
    ({"temperature": 1.0, "rule": "relaxed"}, "accepts nothing"),
]


@pytest.mark.parametrize("fields, message", CLASHES)
def test_c20_sampling_that_clashes(fields, message):
    with pytest.raises(ValueError, match=message):
        ns.generate(target(), [prompt(3)], ns.Sampling(**fields))


def test_c20_what_cannot_be_combined():
    draft = ns.load_draft("frozen", target())
    lossy = ns.Sampling(temperature=1.0, rule="power", alpha=0.5)
    for arguments, message in (
        ({"speculation": TREE}, "speculation needs a draft"),
        ({"draft": draft, "speculation": ns.Speculation(coupled=True), "sampling": lossy}, "coupled"),
        ({"draft": draft, "speculation": ns.Speculation(depth=5, num_nodes=4)}, "num_nodes is 4: .* depth 5"),
        (
            {"draft": draft, "speculation": ns.Speculation(top_k=2, depth=3, num_nodes=7)},
            "num_nodes is 7: .* = 6 nodes",
        ),
        ({"draft": "ngram"}, "draft"),
        ({"speculation": "tree", "draft": draft}, "speculation"),
        ({"engine": "fast"}, "engine"),
        ({"sampling": "greedy"}, "sampling"),
        ({"sampling": 0.7}, "sampling"),
        ({"sampling": [0.7]}, "sampling"),
        ({"prompts": None}, "prompts"),
        ({"prompts": 5}, "prompts"),
        ({"prompts": [5]}, "prompt 0"),
        ({"on_error": None}, "on_error"),
    ):
        with pytest.raises(ValueError, match=message):
            ns.generate(**{"model": target(), "prompts": [prompt(3)]} | arguments)

"""What the Python interface refuses: one ValueError that names the thing, before any work (G5)."""

import pytest
import torch

import nanospec_fn as ns
from tests.scripted import target


def program(**sizes) -> ns.Program:
    return ns.build(target(), engine=ns.EngineConfig(**({"max_slots": 2, "num_pages": 8, "page_size": 4} | sizes)))


def insert(slot=0, tokens=(1, 2), sampling=None):
    p = program()
    return p.insert(p.init(), slot, list(tokens) if isinstance(tokens, tuple) else tokens, sampling or ns.Sampling())


def forward(tokens):
    return ns.forward(target().params, target().cfg, tokens)


REFUSED = {
    "forward negative": (lambda: forward(torch.tensor([[-1]])), "vocabulary"),
    "forward past the vocabulary": (lambda: forward(torch.tensor([[10**6]])), "vocabulary"),
    "forward float": (lambda: forward(torch.tensor([[1.0]])), "integer tensor"),
    "forward list": (lambda: forward([[1]]), "integer tensor"),
    "forward empty": (lambda: forward(torch.zeros(2, 0, dtype=torch.long)), "not empty"),
    "forward one axis": (lambda: forward(torch.tensor([1])), r"\[B, T\]"),
    "insert float token": (lambda: insert(tokens=[1.5]), "token 1.5"),
    "insert bool token": (lambda: insert(tokens=[True]), "token True"),
    "insert text": (lambda: insert(tokens="ab"), "tokens must be a list"),
    "insert None": (lambda: insert(tokens=None), "tokens must be a list"),
    "insert slot True": (lambda: insert(slot=True), "slot must be"),
    "insert slot 0.0": (lambda: insert(slot=0.0), "slot must be"),
    "insert slot past the end": (lambda: insert(slot=2), "slot must be an integer from 0 to 1"),
    "insert sampling": (lambda: insert(sampling="x"), "sampling"),
    "insert stop id": (lambda: insert(sampling=ns.Sampling(stop_ids=(10**6,))), "stop_ids: 1000000"),
    "evict slot": (lambda: program().evict(program().init(), "a"), "slot must be"),
    "pool larger than memory": (lambda: program(num_pages=2**30), "num_pages"),
    "tree of too many nodes": (lambda: ns.Speculation(top_k=256, depth=256).validate(), r"top_k \* depth"),
    "generate model": (lambda: ns.generate(None, [[1]]), "model must be"),
    "generate dict": (lambda: ns.generate(target(), {1: [1, 2]}), "prompts must be a list of prompts, got {1:"),
    "generate one set": (lambda: ns.generate(target(), {(1, 2)}), "prompts must be a list of prompts"),
    "stream dict": (lambda: ns.stream(target(), {"a": 1}), "prompts must be a list of prompts"),
    "generate set": (lambda: ns.generate(target(), [{1, 2}]), "prompt 0"),
    "generate bytes": (lambda: ns.generate(target(), [b"ab"]), "prompt 0"),
    "stream model": (lambda: ns.stream("x", [[1]]), "model must be"),
    "score prompt": (lambda: ns.score(target(), 5, [1]), "prompt"),
    "score tokens": (lambda: ns.score(target(), [1], None), "tokens"),
    "score sampling": (lambda: ns.score(target(), [1], [1], "x"), "sampling"),
    "load_draft name": (lambda: ns.load_draft(5, target()), "draft must be a name"),
    "capture": (lambda: ns.capture(5), "step must be a function"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    """Bug: a raw error from deep inside, or an answer to a question that makes no sense."""
    call, name = REFUSED[case]
    with pytest.raises(ValueError, match=name):
        call()


@pytest.mark.parametrize("call", [ns.load, lambda name: ns.load_draft(f"eagle:{name}", target()),
                                  lambda name: ns.load_draft(f"model:{name}", target())])  # fmt: skip
@pytest.mark.parametrize("name", ["a" * 5000, "a/" + "b" * 300, "./" + "a" * 300, "/" + "a/" * 3000])
def test_a_name_that_no_file_can_have_is_not_found(call, name):
    """Bug: the system's "File name too long"; and no hub is asked for what can be no id of it."""
    with pytest.raises(FileNotFoundError, match=r"^[ab./]{60}\.\.\.[ab/]{60}: no such folder or .gguf file$"):
        call(name)

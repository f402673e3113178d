"""Sizes of an engine: pages and page table for the requests at hand, and what stays of them over a reset."""

from typing import Any

import pytest
from torch.utils import _pytree as pytree

import nanospec_fn as ns
from nanospec_fn import pages, struct
from nanospec_fn.engine import Engine
from nanospec_fn.program import pages_for
from tests.scripted import CHAIN, TREE, prompt, target

pytestmark = pytest.mark.usefixtures("one_thread")


def test_an_engine_is_sized_for_its_prompts():
    """Without sizes the pool holds the longest prompts at once: no preemption, and no more memory than that."""
    seen: list[Engine] = []
    init = Engine.__init__

    def kept(self: Engine, *args: Any) -> None:
        init(self, *args)
        seen.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "__init__", kept)
        ns.generate(
            target(),
            [prompt(30), prompt(5)],
            ns.Sampling(max_tokens=3),
            draft=ns.load_draft("ngram", target()),
            speculation=CHAIN,
        )
    (engine,) = seen
    assert engine.program.max_slots == 2
    assert engine.program.pool.num_pages == -(-(30 + 3 + 4) // 16) + -(-(5 + 3 + 4) // 16)
    assert pages.check(engine.state.pages, engine.state.slots.page_table) == ""


@pytest.mark.parametrize("spec", [None, TREE], ids=["plain", "tree"])
def test_max_context_bounds_requests_and_page_table(spec):
    """The bytes are those of the whole context; a request ends at the bound; a prompt that reaches it is refused."""
    draft = ns.load_draft("frozen", target()) if spec else None
    starts, sampling = [prompt(9, 1), prompt(14, 2)], ns.Sampling(max_tokens=10, temperature=1.0)
    whole = ns.generate(target(), starts, sampling, draft=draft, speculation=spec)
    config = ns.EngineConfig(max_slots=2, page_size=4, max_context=24)
    assert ns.generate(target(), starts, sampling, draft=draft, speculation=spec, engine=config) == whole
    ahead = spec.lookahead if spec else 0
    program = ns.build(target(), draft, config, spec)
    assert program.init().slots.page_table.shape == (2, -(-(24 + ahead) // 4))
    assert program.pool.num_pages == 2 * -(-(24 + ahead) // 4)
    assert ns.build(target(), None, ns.EngineConfig(max_context=10**6)).max_context == 1024  # the model's
    (out,) = ns.generate(target(), starts[1:], ns.Sampling(max_tokens=99), draft=draft, speculation=spec, engine=config)
    assert (len(out.tokens), out.finish_reason) == (10, "length")
    with pytest.raises(ValueError, match="prompt 0 can never fit: its 24 tokens leave no room in the context of 24"):
        ns.generate(target(), [prompt(24)], sampling, draft=draft, speculation=spec, engine=config)


@pytest.mark.parametrize(
    ("lengths", "lookahead", "slots", "want"),
    [([], 4, 2, 1), ([12], 4, 2, 4), ([13], 4, 2, 5), ([5, 30, 9], 0, 2, 8 + 3), ([4, 4, 4], 1, 9, 6)],
)
def test_pages_for(lengths, lookahead, slots, want):
    """Bugs: the shortest counted in place of the longest; the look-ahead counted once for all, or after rounding up."""
    assert pages_for(lengths, 4, lookahead, slots) == want


def test_prompts_that_all_misfit_are_named():
    """Bug: the pool sized for none of them is smaller than a wide tree's look-ahead: a negative size."""
    draft = ns.load_draft("frozen", target())
    for prompts in ([prompt(24)], []):
        config = ns.EngineConfig(max_context=24)
        out = ns.generate(
            target(), prompts, None, draft=draft, speculation=ns.Speculation(8, 8), engine=config, on_error="return"
        )
        assert [o.finish_reason for o in out] == ["error"] * len(prompts)


@pytest.mark.parametrize("how", ["closed", "within a step", "as a state is consumed"])
@pytest.mark.parametrize("spec", [None, TREE], ids=["plain", "tree"])
def test_a_reset_keeps_the_buffers(monkeypatch, how, spec):
    """Bugs: a new state beside the old one, so twice the memory and graphs of other addresses; a state that was
    consumed in part cannot be reset; something of the old requests is left."""
    draft = ns.load_draft("frozen", target()) if spec else None
    config = ns.EngineConfig(max_slots=2, num_pages=60, page_size=4)
    engine = ns.prepare(target(), draft, config, spec)
    starts, sampling = [prompt(5), prompt(7)], ns.Sampling(max_tokens=8, temperature=1.0, seed=4)
    first = ns.generate(target(), starts, sampling, engine=engine)
    fresh = engine.program.init()

    def where() -> list[int]:
        return [leaf.data_ptr() for leaf in pytree.tree_leaves(engine.state)]

    home, captures = where(), (engine.prefill.captures, engine.round.captures)
    stream = ns.stream(target(), starts, sampling, engine=engine)
    next(stream)
    if how == "closed":
        stream.close()
    else:
        run = engine.run

        def interrupted(*args: Any) -> Any:
            if how == "as a state is consumed":
                run(*args)
                struct.consume(engine.state.slots)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(engine, "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                list(stream)
    assert where() == home
    assert struct.bytes_equal(
        (engine.state.pages, engine.state.slots, engine.state.draft.feature),
        (fresh.pages, fresh.slots, fresh.draft.feature),
    )
    assert ns.generate(target(), starts, sampling, engine=engine) == first
    assert (engine.prefill.captures, engine.round.captures) == captures
    assert where() == home

"""`generate`, `stream`, `score` and `prepare` as users meet them."""

import dataclasses
import inspect
from typing import Any

import pytest
import torch

import nanospec_fn as ns
from nanospec_fn.engine import Engine
from tests import tiny
from tests.scripted import CHAIN, TREE, assert_empty, greedy, prompt, scripted, target, watch

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def talking() -> ns.Model:
    """A tiny model over bytes, with a tokenizer; its EOS is </s>."""
    model = tiny.model("llama-3.2-1b", num_hidden_layers=2, vocab_size=258, eos_token_id=1, rope_scaling=None)
    return dataclasses.replace(model, tokenizer=tiny.tokenizer())


def test_completions_come_in_the_order_of_the_prompts():
    """More prompts than slots, of mixed lengths and caps, finishing in any order."""
    starts = [prompt(1 + 5 * i % 17, i) for i in range(9)]
    sampling = [ns.Sampling(max_tokens=1 + 7 * i % 10) for i in range(9)]
    out = ns.generate(target(), starts, sampling, engine=ns.EngineConfig(max_slots=3, page_size=4))
    assert [o.tokens for o in out] == [
        list(greedy(tuple(p), s.max_tokens)) for p, s in zip(starts, sampling, strict=True)
    ]
    assert {o.finish_reason for o in out} == {"length"}
    assert all(o.text is None for o in out)  # no tokenizer


def test_one_prompt_with_every_default():
    (out,) = ns.generate(target(), [prompt(4)])
    assert len(out.tokens) == 128
    assert out.tokens[:24] == list(greedy(tuple(prompt(4)), 24))


def test_text_and_token_prompts_agree(talking):
    sampling = ns.Sampling(max_tokens=6)
    ids = talking.tokenizer.encode("hello")
    by_text, by_ids = ns.generate(talking, ["hello", ids], sampling)
    assert by_text == by_ids
    assert ids[0] == 0  # BOS
    assert isinstance(by_text.text, str)


def test_a_stop_token_is_in_tokens_and_not_in_text(talking):
    """The text is that of the tokens before it; at the cap it is "stop" as well, and ordinary ids stop too."""
    (whole,) = ns.generate(talking, ["hello"], ns.Sampling(max_tokens=12, ignore_eos=True))
    at = next(j for j in range(2, 12) if whole.tokens.index(whole.tokens[j]) == j)
    decode = talking.tokenizer.decode
    for cap in (12, at + 1):
        sampling = ns.Sampling(max_tokens=cap, ignore_eos=True, stop_ids=(whole.tokens[at],))
        (out,) = ns.generate(talking, ["hello"], sampling)
        assert out.tokens == whole.tokens[: at + 1]
        assert out.finish_reason == "stop"
        assert out.text == decode(whole.tokens[:at], skip_special_tokens=True)
    assert whole.text == decode(whole.tokens, skip_special_tokens=True)
    assert whole.finish_reason == "length"


@pytest.mark.parametrize("spec", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_stream_adds_up_to_generate(talking, spec):
    """Chunks in order of their completion; text pieces concatenate to the text, bytes of one character held back."""
    draft = ns.load_draft("frozen", talking) if spec else None
    prompts = ["hello", "what?", [3, 4, 5], "hello"]
    sampling = [ns.Sampling(max_tokens=9, temperature=1.0, seed=i, ignore_eos=i < 3) for i in range(4)]
    whole = ns.generate(talking, prompts, sampling, draft=draft, speculation=spec)
    got = [ns.Completion(text="") for _ in prompts]
    for chunk in ns.stream(talking, prompts, sampling, draft=draft, speculation=spec):
        one = got[chunk.index]
        assert one.finish_reason is None
        assert chunk.tokens
        one.tokens += chunk.tokens
        one.text += chunk.text
        one.origin += chunk.origin
        one.finish_reason = chunk.finish_reason
        if chunk.accepted is not None:
            one.accepted.append(chunk.accepted)
    for one, want in zip(got, whole, strict=True):
        for name in ("tokens", "text", "origin", "finish_reason", "accepted"):
            assert getattr(one, name) == getattr(want, name)


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_accepted_and_origin_keep_the_books(spec):
    """tokens = the prefill's own + accepted + one per round; a stop or a cap inside a block takes some of that away."""
    start = prompt(5)
    for a in range(5):
        draft = scripted([start], 40, lambda i, total, a=a: (total + a) % 5)
        for cap in range(1, 14):
            (out,) = ns.generate(target(), [start], ns.Sampling(max_tokens=cap), draft=draft, speculation=spec)
            assert len(out.tokens) == len(out.origin) == cap
            assert out.origin[0] == 0
            full = 1 + sum(out.accepted) + len(out.accepted)
            assert cap in (full, full - 1)  # a cap within the accepted ones takes the round's own token
            expected = [0]
            for n in out.accepted:
                expected += [*range(1, n + 1), 0]
            assert out.origin == expected[:cap]
            assert sum(d > 0 for d in out.origin) == sum(out.accepted)


def test_plain_decoding_accepts_nothing():
    (out,) = ns.generate(target(), [prompt(5)], ns.Sampling(max_tokens=6))
    assert (out.accepted, out.origin) == ([0] * 5, [0] * 6)


@pytest.mark.parametrize(
    "sampling",
    [
        ns.Sampling(max_tokens=9),
        ns.Sampling(max_tokens=9, temperature=0.7, seed=3),
        ns.Sampling(max_tokens=9, temperature=1.0, top_k=5, seed=4),
        ns.Sampling(max_tokens=9, temperature=1.3, top_p=0.8, top_k=40, seed=5),
    ],
)
def test_score_has_generates_bits(sampling):
    starts = [prompt(n, n) for n in (1, 9, 70)]
    draft = ns.load_draft("frozen", target())
    for out in (
        ns.generate(target(), starts, sampling),
        ns.generate(target(), starts, sampling, draft=draft, speculation=TREE),
    ):
        for start, one in zip(starts, out, strict=True):
            assert ns.score(target(), start, one.tokens, sampling) == one.target_logp
            assert one.behaviour_logp == one.target_logp
    assert ns.score(target(), starts[0], [], sampling) == []


def test_score_refuses():
    for args, match in (
        (([], [1]), "prompt is empty"),
        (([1], [128]), "token 128 is not in the vocabulary of 128"),
        (([-1], [1]), "token -1 "),
        (([1] * 1020, [1] * 6), "context"),
    ):
        with pytest.raises(ValueError, match=match):
            ns.score(target(), *args)


def test_sampling_per_prompt_is_sampling_alone():
    """Greedy and sampled, filtered and not, lossy and exact rules side by side: each as it would be by itself."""
    draft = ns.load_draft("frozen", target())
    sampling = [
        ns.Sampling(max_tokens=8),
        ns.Sampling(max_tokens=8, temperature=1.0, seed=1),
        ns.Sampling(max_tokens=8, temperature=0.8, top_k=4, seed=2),
        ns.Sampling(max_tokens=8, temperature=1.0, top_p=0.7, seed=3),
        ns.Sampling(max_tokens=8, temperature=1.0, seed=4, rule="power", alpha=0.3),
        ns.Sampling(max_tokens=8, temperature=1.0, seed=5, rule="relaxed", tau=0.1, accept_top_k=2),
    ]
    starts = [prompt(5, s) for s in range(6)]
    together = ns.generate(target(), starts, sampling, draft=draft, speculation=TREE)
    for start, one, out in zip(starts, sampling, together, strict=True):
        assert ns.generate(target(), [start], one, draft=draft, speculation=TREE) == [out]
    assert together[4].behaviour_logp != together[4].target_logp
    assert together[5].behaviour_logp != together[5].target_logp
    for start, one, out in list(zip(starts, sampling, together, strict=True))[:4]:
        assert ns.generate(target(), [start], one)[0].target_logp == out.target_logp


def test_equal_seeds_agree_and_others_do_not():
    sampling = [ns.Sampling(max_tokens=8, temperature=1.0, seed=s) for s in (7, 7, 8)]
    a, b, c = ns.generate(target(), [prompt(5)] * 3, sampling)
    assert a == b
    assert a.tokens != c.tokens


def peak(engine: Engine) -> list[int]:
    """The most pages in use after any step, as a list that grows."""
    seen: list[int] = []
    run = engine.run

    def watched(*args: Any) -> Any:
        result = run(*args)
        seen.append(engine.program.pool.num_pages - int(engine.state.pages.num_free))
        return result

    engine.run = watched
    return seen


@pytest.mark.parametrize("draft", ["none", "frozen"])
def test_a_group_shares_its_prompts_pages(draft):
    """Eight samples of one prompt hold its full pages once, and one partial page each."""
    model, start = target(), prompt(35)
    draft = ns.load_draft(draft, model)
    spec = CHAIN if draft else None
    sampling = [ns.Sampling(max_tokens=6, temperature=1.0, seed=s) for s in range(8)]
    engine = watch(ns.prepare(model, draft, ns.EngineConfig(max_slots=8, num_pages=200, page_size=4), spec))
    used = peak(engine)
    out = ns.generate(model, [start] * 8, sampling, engine=engine)
    ahead = 4 if draft else 0
    alone = -(-(35 + 6 + ahead) // 4)
    assert max(used) <= 8 + 8 * (alone - 8)  # 34 positions are shared: 8 whole pages
    assert out == [ns.generate(model, [start], s, draft=draft, speculation=spec)[0] for s in sampling]
    assert len({tuple(o.tokens) for o in out}) == 8
    assert_empty(engine)


def test_a_prepared_engine_is_kept_and_left_empty():
    engine = watch(ns.prepare(target(), None, ns.EngineConfig(max_slots=2, num_pages=30, page_size=4)))
    pools = [pool.data_ptr() for pool in engine.state.pools]
    for i in range(3):
        out = ns.generate(target(), [prompt(6, i)] * 2, ns.Sampling(max_tokens=5), engine=engine)
        assert out[0].tokens == list(greedy(tuple(prompt(6, i)), 5))
        assert_empty(engine)
        assert [pool.data_ptr() for pool in engine.state.pools] == pools


def test_a_prepared_engine_takes_no_other_parts():
    model, draft = target(), ns.load_draft("ngram", target())
    engine = ns.prepare(model, draft, ns.EngineConfig(max_slots=2, num_pages=30), CHAIN)
    other = dataclasses.replace(model)
    for args, kwargs in (
        ((other,), {}),
        ((model,), {"draft": ns.load_draft("ngram", model)}),
        ((model,), {"speculation": CHAIN}),
    ):
        for call in (ns.generate, ns.stream):
            with pytest.raises(ValueError, match="engine was prepared with a model, draft and speculation of its own"):
                call(*args, [prompt(3)], engine=engine, **kwargs)
    assert len(ns.generate(model, [prompt(3)], ns.Sampling(max_tokens=3), draft=draft, engine=engine)[0].tokens) == 3


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_ctrl_c_returns_what_is_there(monkeypatch, after):
    """KeyboardInterrupt within a step: partial completions, marked; the engine serves the next call."""
    starts = [prompt(5), prompt(9)]
    sampling = [ns.Sampling(max_tokens=3), ns.Sampling(max_tokens=20)]
    engine = watch(ns.prepare(target(), None, ns.EngineConfig(max_slots=2, num_pages=60, page_size=4)))
    run, calls = engine.run, []

    def interrupted(*args: Any) -> Any:
        if len(calls) == after:
            raise KeyboardInterrupt
        calls.append(args)
        return run(*args)

    monkeypatch.setattr(engine, "run", interrupted)
    out = ns.generate(target(), starts, sampling, engine=engine)
    assert len(calls) == after
    for start, one, s in zip(starts, out, sampling, strict=True):
        assert one.tokens == list(greedy(tuple(start), 20))[: len(one.tokens)]
        assert one.finish_reason == ("length" if len(one.tokens) == s.max_tokens else "aborted")
        assert len(one.target_logp) == len(one.origin) == len(one.tokens)
    assert [len(one.tokens) for one in out] == [min(after, 3), after]
    assert_empty(engine)
    monkeypatch.setattr(engine, "run", run)
    assert [len(o.tokens) for o in ns.generate(target(), starts, sampling, engine=engine)] == [3, 20]


def test_an_error_within_a_step_leaves_the_engine_usable(monkeypatch):
    engine = ns.prepare(target(), None, ns.EngineConfig(max_slots=2, num_pages=60, page_size=4))
    run = engine.run

    def broken(*args: Any) -> Any:
        run(*args)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine, "run", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        ns.generate(target(), [prompt(5)], engine=engine)
    monkeypatch.setattr(engine, "run", run)
    (out,) = ns.generate(target(), [prompt(5)], ns.Sampling(max_tokens=4), engine=engine)
    assert out.tokens == list(greedy(tuple(prompt(5)), 4))
    assert_empty(engine)


def test_a_stream_may_be_left_early():
    engine = watch(ns.prepare(target(), None, ns.EngineConfig(max_slots=2, num_pages=60, page_size=4)))
    stream = ns.stream(target(), [prompt(5), prompt(7)], ns.Sampling(max_tokens=20), engine=engine)
    for _ in range(3):
        next(stream)
    assert int(engine.state.pages.num_free) < 60
    stream.close()
    assert_empty(engine)
    (out,) = ns.generate(target(), [prompt(5)], ns.Sampling(max_tokens=4), engine=engine)
    assert out.tokens == list(greedy(tuple(prompt(5)), 4))


def test_an_engine_serves_one_call_at_a_time():
    """A second call into an engine whose stream is not done is refused, and the stream goes on unharmed."""
    engine = ns.prepare(target(), None, ns.EngineConfig(max_slots=1, num_pages=60, page_size=4))
    stream = ns.stream(target(), [prompt(5)], ns.Sampling(max_tokens=6), engine=engine)
    tokens = next(stream).tokens
    with pytest.raises(ValueError, match="engine"):
        ns.generate(target(), [prompt(7)], ns.Sampling(max_tokens=3), engine=engine)
    for chunk, _ in zip(stream, range(20), strict=False):
        tokens += chunk.tokens
    assert tokens == list(greedy(tuple(prompt(5)), 6))


def test_nothing_runs_before_the_arguments_are_right(monkeypatch, talking):
    """stream raises at the call, not at the first chunk; a bad prompt is named by its index."""
    monkeypatch.setattr(Engine, "run", lambda *args: pytest.fail("a step ran"))
    good = prompt(3)
    cases: list[tuple[list[Any], dict[str, Any], str]] = [
        (["text", good], {}, "prompt 0: prompt is text, but the model has no tokenizer"),
        ([good, []], {}, "prompt 1: prompt is empty"),
        ([good, [128]], {}, "prompt 1: token 128 is not in the vocabulary of 128"),
        ([good, [-1]], {}, "prompt 1: token -1 "),
        ([good, [1.5]], {}, "prompt 1: token 1.5 "),
        ([good, [True]], {}, "prompt 1: token True "),
        ([good] * 2, {"sampling": [ns.Sampling()]}, "sampling has 1 entries for 2 prompts"),
        ([good] * 2, {"sampling": [ns.Sampling(), ns.Sampling(top_p=2.0)]}, "prompt 1: top_p must be"),
        ([good], {"on_error": "ignore"}, "on_error must be"),
        ([good], {"speculation": CHAIN}, "speculation needs a draft"),
        ([good, [1] * 1024], {}, "prompt 1 can never fit: .* context of 1024"),
    ]
    for prompts, kwargs, match in cases:
        for call in (ns.generate, ns.stream):
            with pytest.raises(ValueError, match=match):
                call(target(), prompts, **kwargs)
    for call in (ns.generate, ns.stream):
        with pytest.raises(ValueError, match="prompts must be a list of prompts, got one string"):
            call(talking, "hello")


@pytest.mark.parametrize("spec", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_preemption_changes_nothing(monkeypatch, spec):
    """A pool that holds two of six requests at their longest gives what a roomy one gives, bytes and bookkeeping."""
    draft = ns.load_draft("frozen", target()) if spec else None
    starts = [prompt(6 + i, i) for i in range(6)]
    sampling = [ns.Sampling(max_tokens=20, temperature=float(i % 2), seed=i) for i in range(6)]
    roomy = ns.generate(target(), starts, sampling, draft=draft, speculation=spec)
    ahead = spec.top_k * spec.depth if spec else 0
    tight = -(-(11 + 20 + ahead) // 4) + 4
    engine = watch(ns.prepare(target(), draft, ns.EngineConfig(max_slots=6, num_pages=tight, page_size=4), spec))
    recomputed = []
    insert = engine.insert
    monkeypatch.setattr(
        engine, "insert", lambda state, coming: recomputed.extend(a.emitted for a in coming) or insert(state, coming)
    )
    assert ns.generate(target(), starts, sampling, engine=engine) == roomy
    assert any(recomputed), "nothing was preempted"
    assert_empty(engine)


def test_chunked_prefill_changes_nothing():
    starts = [prompt(n, n) for n in (3, 40, 71)]
    sampling = ns.Sampling(max_tokens=6, temperature=1.0)
    whole = ns.generate(target(), starts, sampling)
    for chunk in (8, 16, 64):
        config = ns.EngineConfig(max_slots=3, page_size=4, prefill_chunk=chunk)
        assert ns.generate(target(), starts, sampling, engine=config) == whole


def test_progress_goes_to_stderr(capsys):
    ns.generate(target(), [prompt(3)] * 2, ns.Sampling(max_tokens=3), progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "2/2" in err
    assert "tokens=6" in err
    ns.generate(target(), [prompt(3)] * 2, ns.Sampling(max_tokens=3))
    assert capsys.readouterr() == ("", "")


def test_mean_accepted_len():
    """Bugs: the prefill's own token counted; a prompt without tokens counted as minus one."""
    some = [ns.Completion(tokens=[1] * 8, accepted=[2, 3]), ns.Completion(tokens=[1] * 2, accepted=[0])]
    assert ns.mean_accepted_len(some) == 8 / 3
    assert ns.mean_accepted_len([*some, ns.Completion(finish_reason="error")]) == 8 / 3
    assert ns.mean_accepted_len([ns.Completion(tokens=[1])]) is None
    assert ns.mean_accepted_len([]) is None


def test_stream_takes_what_generate_takes():
    """Bug: an argument that only one of the two has."""
    theirs = list(inspect.signature(ns.stream).parameters)
    assert theirs == [n for n in inspect.signature(ns.generate).parameters if n != "progress"]


def test_grad_mode_is_left_alone():
    with torch.enable_grad():
        ns.generate(target(), [prompt(3)], ns.Sampling(max_tokens=2))
        for _ in ns.stream(target(), [prompt(3)], ns.Sampling(max_tokens=2)):
            pass
        assert torch.is_grad_enabled()

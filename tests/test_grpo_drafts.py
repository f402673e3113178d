"""Drafts of a GRPO run: another model, a head, and a head that learns on the rollouts, beside an untouched policy."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

import nanospec_fn as ns
from nanospec_fn.struct import bytes_equal, leaf_names
from rl import drafts, eagle_loss, grpo, grpo_options, policy
from rl.ranks import Ranks
from tests import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
RAW = tiny.config("smollm2-135m", num_hidden_layers=6)  # room for three taps
LEARN = "--draft-train --draft-lr 1e-2 --spec-depth 3"


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("target"), RAW, tiny.state_of(tiny.llama(RAW)))


@pytest.fixture(scope="module")
def head(tmp_path_factory) -> Path:
    """A random head for it, with an output head of its own over half of the vocabulary."""
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}
    return tiny.write_head(tmp_path_factory.mktemp("head"), RAW, tiny.head_state(RAW, 64), "sglang", eagle_config=ids)


def options(target: Path, out: Path, more: str):
    text = f"--model {target} --device cpu --out {out} --prompts 2 --group 3 --max-tokens 8 --lr 1e-2 --quiet {more}"
    return grpo_options.parse(text.split())


def train(target: Path, out: Path, more: str, on=lambda what, step: None) -> tuple[grpo.RunState, list[dict]]:
    state = grpo.run(options(target, out, more), Ranks(), on)
    return state, [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()][1:]


def setting_of(target: Path, out: Path, more: str) -> tuple[grpo.Setting, grpo.RunState]:
    args = options(target, out, more)
    model = ns.load(str(target), device="cpu", dtype=args.dtype)
    setting = grpo.begin(model, ns.load_draft(args.draft, model), grpo.tasks.load("toy", model, 0), args, Ranks())
    return setting, grpo.init(setting)


def test_a_head_that_learns_leaves_the_policy_alone_and_gets_better(target, head, tmp_path):
    """Under exact nothing of the rollouts depends on the draft, so the policy goes the same way, bit by bit.

    Catches: a gradient that reaches the policy, a served head that stays as it was, versions that do not count.
    """
    slow = (
        f"--steps 12 --draft eagle:{head} --lr 1e-4 --max-tokens 16"  # a policy that stands nearly still can be learned
    )
    fixed, before = train(target, tmp_path / "a", f"{slow} --spec-depth 3")
    learned, after = train(target, tmp_path / "b", f"{slow} {LEARN} --draft-lr 3e-2")
    assert bytes_equal(learned.policy, fixed.policy)
    assert [line["reward"] for line in after] == [line["reward"] for line in before]
    losses = [line["draft_loss"] for line in after]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    assert {(line["draft_version"], line["draft_loss"]) for line in before} == {(0, None)}
    assert [line["draft_age"] for line in before] == list(range(12))
    assert [line["draft_version"] for line in after] == list(range(12))  # one batch a step
    assert [line["draft_age"] for line in after] == [0, *[1] * 11]


def test_a_head_learns_in_its_place_and_starts_as_it_was_loaded(target, head, tmp_path):
    """Catches: the taps' scale folded in twice or not at all, a served head in other storage."""
    setting, state = setting_of(target, tmp_path, f"--draft eagle:{head} {LEARN}")
    served = setting.engine.draft.params
    loaded, places = pytree.tree_map(torch.clone, served), [x.data_ptr() for x in pytree.tree_leaves(served)]
    drafts.serve_(setting.engine.draft, setting.upkeep.recipe, state.draft.train)
    for mine, theirs in zip(pytree.tree_leaves(served), pytree.tree_leaves(loaded), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    assert float(state.draft.train.scale.max()) > 0
    assert not torch.equal(state.draft.train.scale, torch.ones_like(state.draft.train.scale))
    started = pytree.tree_map(torch.clone, served)
    grpo.train_step_(setting, state)
    assert not bytes_equal(served, started)
    assert torch.equal(served.target_id, loaded.target_id)
    assert [x.data_ptr() for x in pytree.tree_leaves(served)] == places


def test_a_head_learns_from_what_the_policy_makes_of_the_rollouts(target, head, tmp_path):
    """Against a pass of its own over the same sequences. Catches: taps of other rows, prompts or padding that count."""
    setting, state = setting_of(target, tmp_path, f"--draft eagle:{head} {LEARN} --micro-tokens 40")
    rollouts = grpo.collect(setting, state)
    scored, _ = grpo.score(setting, rollouts)
    assert len(scored) > 1
    upkeep, model = setting.upkeep, setting.engine.model
    ids = state.draft.train.target_id
    for (micro, _), found in zip(scored, drafts.supervised(model, upkeep, state.draft, scored), strict=True):
        row, live = eagle_loss.supervise(micro.length, micro.prompt, micro.tokens.shape[1], 3)
        view = eagle_loss.observe(model, upkeep.taps, micro.tokens)
        expected = eagle_loss.prepare(model, ids, micro.tokens, view, row, live)
        for name in ("tokens", "row", "live", "best", "known"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
        torch.testing.assert_close(found.target, expected.target, rtol=1e-4, atol=1e-6)
        inside = torch.arange(micro.tokens.shape[1]) < micro.length[:, None]
        torch.testing.assert_close(found.taps[inside], expected.taps[inside], rtol=1e-4, atol=1e-4)


OVERWRITTEN = {
    "": (".policy.master",),
    "--dtype bf16": (),
    "--draft frozen --draft-refresh 1": (".policy.master", ".draft.weights"),
    "--draft frozen --draft-refresh 2": (".policy.master",),
    "--draft frozen --draft-refresh 1 --dtype bf16": (".draft.weights",),
    f"--draft eagle:HEAD {LEARN}": (".policy.master",),
}


@pytest.mark.parametrize("more, parts", OVERWRITTEN.items(), ids=OVERWRITTEN)
def test_a_step_overwrites_what_is_served_and_nothing_else_of_its_state(target, head, tmp_path, more, parts):
    """By their bytes, and all of those parts. Catches: moments, an fp32 master or a version that are updated in place,
    so that a state which is kept is none; served weights that a step leaves in other storage."""
    setting, state = setting_of(target, tmp_path, more.replace("HEAD", str(head)))
    before = pytree.tree_map(torch.clone, state)
    grpo.train_step_(setting, state)
    pairs = list(zip(leaf_names(state), pytree.tree_leaves(before), pytree.tree_leaves(state), strict=True))
    assert [name for name, *two in pairs if not bytes_equal(*two)] == [n for n, *_ in pairs if n.startswith(parts)]


def test_the_logged_loss_is_that_of_all_rows_of_the_step(target, head, tmp_path):
    """Bug: the last microbatch's alone was logged, however small."""
    more = f"--draft eagle:{head} {LEARN} --micro-tokens 40"
    setting, state = setting_of(target, tmp_path, more)
    scored, _ = grpo.score(setting, grpo.collect(setting, state))
    batches = list(drafts.supervised(setting.engine.model, setting.upkeep, state.draft, scored))
    _, losses = drafts.learn_(setting.engine.draft, setting.upkeep, state.draft, setting.engine.model, batches, 0)
    rows = [int(batch.known.sum()) for batch in batches]
    assert [n for _, n in losses] == rows
    assert len(set(rows)) > 1
    setting, state = setting_of(target, tmp_path, more)
    state, line = grpo.train_step_(setting, state)
    assert line["draft_loss"] == sum(loss * n for loss, n in losses) / sum(rows)
    assert int(state.draft.version) == len(batches)


@pytest.mark.parametrize("why", ["one token each", "another rank has nothing"])
def test_nothing_to_learn_from_is_no_update(target, head, tmp_path, monkeypatch, why):
    """A completion of one token supervises no row. Bug: an optimizer step of decay alone, a loss of 0.0, a version."""
    short = why == "one token each"
    setting, state = setting_of(target, tmp_path, f"--draft eagle:{head} {LEARN} --max-tokens {1 if short else 8}")
    if not short:
        monkeypatch.setattr(grpo.ranks, "gather", lambda ranks, own: [own, 0] if isinstance(own, int) else [own])
    served = pytree.tree_map(torch.clone, setting.engine.draft.params)
    after, line = grpo.train_step_(setting, state)
    assert line["draft_loss"] is None
    assert (int(after.draft.version), int(after.draft.changed)) == (0, 0)
    assert bytes_equal(after.draft.train, state.draft.train)
    assert bytes_equal(setting.engine.draft.params, served)


class Killed(Exception):
    pass


def test_a_head_that_learns_resumes_to_the_same_bits(target, head, tmp_path):
    """Catches: a head, its optimizer or its scale that starts over."""
    more = f"--steps 5 --draft eagle:{head} {LEARN} --acceptance power --alpha 0.4 --save-every 2"

    def on(what: str, step: int) -> None:
        if (what, step) == ("rollout", 4):
            raise Killed

    whole, _ = train(target, tmp_path / "whole", more)
    with pytest.raises(Killed):
        train(target, tmp_path / "died", more, on)
    again, lines = train(target, tmp_path / "died", f"{more} --resume")
    assert bytes_equal(again, whole)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]


def test_another_model_drafts(target, tmp_path):
    """Catches: model:X taken for a head or a copy, a vocabulary that does not fit found late."""
    small = tiny.config("smollm2-135m", num_hidden_layers=2)
    path = tiny.write(tmp_path / "small", small, tiny.state_of(tiny.llama(small)))
    _, lines = train(target, tmp_path / "run", f"--steps 2 --draft model:{path} --acceptance power --alpha 0.3")
    assert [line["draft_version"] for line in lines] == [0, 0]
    assert lines[0]["exact_share"] == 1
    model = ns.load(str(target), device="cpu")
    with pytest.raises(ValueError, match="is no EAGLE-3 head and cannot be trained"):
        drafts.trained(ns.load_draft("frozen", model), 3, grpo.optimizer.adamw(lambda n: n), model)


def test_checksums_see_every_bit():
    weights = {"a": torch.zeros(3, 4), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.arange(4)}
    one = policy.fingerprint(weights)
    assert policy.fingerprint(pytree.tree_map(torch.clone, weights)) == one
    for name in weights:
        changed = pytree.tree_map(torch.clone, weights)
        changed[name].view(torch.uint8).view(-1)[3] ^= 1
        assert policy.fingerprint(changed) != one
    assert policy.fingerprint(()) == policy.fingerprint({})

"""Bugs to plant: plausible mistakes, as engines of this kind have made them, each a patch of the package.

`PLANTS` maps a name to (patch, properties of `machine.Machine` that may catch it). A patch is a function of pytest's
monkeypatch. Patched functions are called through their modules, so every step sees the patch.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nanospec_fn import acceptance, admission, attention, draft, kernels, pages, slots, step, struct


def wrap(patch: pytest.MonkeyPatch, owner: Any, name: str, new: Callable[..., Any]) -> None:
    """Replace owner.name by new(original, *args, **kwargs)."""
    original = getattr(owner, name)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return new(original, *args, **kwargs)

    patch.setattr(owner, name, replaced)


def stale_draft_kv(patch: pytest.MonkeyPatch) -> None:
    """After a round the draft is run on the newest token alone: accepted ones keep the KV that drafting left (C08)."""

    def emit(original: Any, s: Any, tokens: Any, count: Any) -> Any:
        new, emitted = original(s, tokens, count)
        return struct.replace(new, unseen=new.unseen.clamp_max(1)), emitted

    wrap(patch, slots, "emit", emit)

    def observe(original: Any, state: Any, features: Any, path: Any, live: Any) -> Any:
        kept = original(state, features, path, live)
        last = torch.where(live[:, None], (path >= 0).sum(1, keepdim=True), 0)
        first = kernels.rows_at(kept.feature, last)
        return struct.replace(kept, feature=torch.cat((first, kept.feature[:, 1:]), dim=1))

    wrap(patch, draft, "observe", observe)


def position_by_row(patch: pytest.MonkeyPatch) -> None:
    """A tree node's position is its place in the batch of nodes, not its depth (C09)."""

    def verify_rows(original: Any, s: Any, tree: Any, live: Any, spec: Any) -> Any:
        rows = original(s, tree, live, spec)
        by_row = torch.where(rows.position == attention.DEAD, attention.DEAD, rows.store)
        return struct.replace(rows, position=by_row)

    wrap(patch, step, "verify_rows", verify_rows)


def tail_not_reserved(patch: pytest.MonkeyPatch) -> None:
    """Pages are reserved for known tokens, not for the draft's look-ahead past them (C03)."""

    def reserve(original: Any, free: Any, s: Any, upto: Any, page_size: int, width: int) -> Any:
        return original(free, s, torch.minimum(upto, s.total), page_size, width)

    wrap(patch, slots, "reserve", reserve)


def pad_row_at_page_zero(patch: pytest.MonkeyPatch) -> None:
    """A padding row writes to the first position of its slot, not to the sink (C07)."""

    def locate(original: Any, page_table: Any, position: Any, page_size: int) -> Any:
        return original(page_table, position.clamp_min(0), page_size)

    wrap(patch, pages, "locate", locate)


def pad_row_at_minus_one(patch: pytest.MonkeyPatch) -> None:
    """A padding row writes to page -1: in Python the pool's last one (C07)."""

    def locate(original: Any, page_table: Any, position: Any, page_size: int) -> Any:
        page, offset = original(page_table, position, page_size)
        return torch.where(position < 0, -1, page), offset

    wrap(patch, pages, "locate", locate)


def key_by_batch_index(patch: pytest.MonkeyPatch) -> None:
    """The request's key is mixed with its row in the batch."""

    def weigh(original: Any, logits: Any, tree: Any, controls: Any, position: Any, *args: Any, **kwargs: Any) -> Any:
        key = controls.key + torch.arange(len(controls.key))
        return original(logits, tree, struct.replace(controls, key=key), position, *args, **kwargs)

    wrap(patch, acceptance, "weigh", weigh)


def noise_by_row(patch: pytest.MonkeyPatch) -> None:
    """A row's Gumbel noise is named by its number among the step's rows, not by the position that it predicts."""

    def target_tokens(original: Any, logits: Any, logp: Any, key: Any, temperature: Any, position: Any) -> Any:
        return original(logits, logp, key, temperature, torch.arange(len(position)))

    wrap(patch, acceptance, "target_tokens", target_tokens)


def shared_page_written(patch: pytest.MonkeyPatch) -> None:
    """The last page of a shared prompt is taken by reference, not copied; both then write into it."""

    def share(original: Any, state: Any, slot: Any, donor: Any, tokens: Any, page_size: int, put: Any) -> Any:
        new = original(state, slot, donor, tokens, page_size, put)
        table, free = new.slots.page_table.clone(), new.pages
        for mine, its, whole in zip(slot.tolist(), donor.tolist(), (tokens // page_size).tolist(), strict=True):
            if int(new.slots.num_pages[mine]) > whole:
                free = pages.share(pages.free(free, table[mine, whole : whole + 1]), table[its, whole : whole + 1])
                table[mine, whole] = table[its, whole]
        return struct.replace(new, pages=free, slots=struct.replace(new.slots, page_table=table))

    wrap(patch, admission, "_share", share)


def commit_skipped(patch: pytest.MonkeyPatch) -> None:
    """The accepted path's KV stays where the tree kept it."""
    wrap(patch, pages, "commit", lambda _, pools, *args: pools)


def stop_at_the_blocks_end(patch: pytest.MonkeyPatch) -> None:
    """Only the last token of an accepted block is looked at for a stop id (C01)."""

    def emit(original: Any, s: Any, tokens: Any, count: Any) -> Any:
        new, emitted = original(struct.replace(s, stop_ids=s.stop_ids * 0 - 1), tokens, count)
        last = tokens.gather(1, (emitted - 1).clamp_min(0).long()[:, None])
        stopped = (emitted > 0) & (last == s.stop_ids).any(1)
        done = torch.where(stopped, slots.STOP, new.done)
        return struct.replace(new, stop_ids=s.stop_ids, done=done), emitted

    wrap(patch, slots, "emit", emit)


def pages_leak(patch: pytest.MonkeyPatch) -> None:
    """An evicted slot gives back the pages of its tokens, not those reserved for look-ahead (C06)."""

    def evict(original: Any, s: Any, going: Any, put: Any) -> Any:
        kept = torch.arange(s.page_table.shape[1]) < (s.num_pages[going, None] - 1).clamp_min(1)
        new, held = original(s, going, put)
        return new, torch.where(kept, held, pages.SINK)

    wrap(patch, slots, "evict", evict)


def reads_past_the_row(patch: pytest.MonkeyPatch) -> None:
    """Keys that a row may not see are masked in the scores, but their values are still multiplied by zero."""

    def layer(original: Any, self: Any, plan: Any, *args: Any) -> Any:
        parts = tuple(struct.replace(part, read=torch.ones_like(part.read)) for part in plan.parts)
        return original(self, struct.replace(plan, parts=parts), *args)

    wrap(patch, attention.Sdpa, "layer", lambda original, self, *args: layer(original, self, *args))


def rows_depend_on_neighbours(patch: pytest.MonkeyPatch) -> None:
    """A slot's logits have other last bits when others run beside it, as with a library's matrix product."""

    def weigh(original: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        nudge = 1 + 2**-22 if len(logits) > 2 else 1
        return original(logits * nudge, *args, **kwargs)

    wrap(patch, acceptance, "weigh", weigh)


def bystanders_feature_lost(patch: pytest.MonkeyPatch) -> None:
    """A round overwrites the carried feature of slots that sit it out: refused, or still in their prompt."""
    wrap(patch, draft, "observe", lambda original, *args: original(*args[:3], torch.ones_like(args[3])))


def donated_in_a_pure_step(patch: pytest.MonkeyPatch) -> None:
    """The pool is written in place whatever `put` says."""

    def write(original: Any, pool: Any, page: Any, offset: Any, k: Any, v: Any, put: Any) -> Any:
        return original(pool, page, offset, k, v, struct.put_)

    wrap(patch, pages, "write", write)


PLANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], tuple[str, ...]]] = {
    "stale draft KV": (stale_draft_kv, ("tree",)),
    "position by row": (position_by_row, ("tokens", "log-probs", "acceptance")),
    "tail not reserved": (tail_not_reserved, ("tokens", "log-probs", "acceptance", "tree")),
    "pad row at slot 0": (pad_row_at_page_zero, ("storage", "tokens", "log-probs")),
    "pad row at page -1": (pad_row_at_minus_one, ("storage", "tokens", "log-probs")),
    "key by batch index": (key_by_batch_index, ("tokens", "log-probs")),
    "noise by row": (noise_by_row, ("tokens", "log-probs")),
    "shared page written": (shared_page_written, ("storage",)),
    "commit skipped": (commit_skipped, ("tokens", "log-probs", "acceptance")),
    "stop at the block's end": (stop_at_the_blocks_end, ("tokens", "finish")),
    "pages leak": (pages_leak, ("pages",)),
    "values read past the row": (reads_past_the_row, ("tokens", "log-probs", "tree")),
    "bits depend on neighbours": (rows_depend_on_neighbours, ("tokens", "log-probs")),
    "bystander's feature lost": (bystanders_feature_lost, ("bystanders",)),
    "pure step writes in place": (donated_in_a_pure_step, ("purity",)),
}

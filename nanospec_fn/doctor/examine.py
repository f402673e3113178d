"""A head rehearsed along a target's own completions, and paired with itself run in another way.

Every draft of every depth from every position of the responses is looked at, so that two ways of running a head are
compared position by position on the same tokens.

Shapes: B sequences, T tokens, M response tokens, D depth, E hidden, V target vocabulary, Vd draft vocabulary.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from nanospec_fn import eagle, kernels, model, rehearsal, struct
from nanospec_fn.doctor import rounds
from nanospec_fn.model import Model

DEPTH = 5  # drafted tokens from each position
LONG = 640  # tokens of completions that are looked at one after another
CHUNK = 2048  # rows whose logits are in memory at once
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Subject:
    """A head, and the way in which it is run."""

    cfg: eagle.HeadConfig
    params: eagle.HeadParams
    rows: bool = False  # the output head is the target's rows of the map
    normed: bool = False  # an output goes through the final norm before it is fed to the next draft step


@dataclass(frozen=True, eq=False)
class View:
    """Responses behind their prompts, and what the target makes of them."""

    tokens: Tensor  # [B, T] int64, padded on the right
    prompt: Tensor  # [B], tokens of each prompt
    length: Tensor  # [B], tokens of each response
    streams: dict[int, Tensor]  # layer -> its input [B, T, E]


@struct.state
class Marks:
    """What a head drafts. Entry (j, b, m): the token of depth j + 1 that stands for response token m + 1."""

    hit: Tensor  # [D, B, M] bool, the head's best token is the response's
    logp: Tensor  # [D, B, M] fp32, nats, of the response's token; NaN where the map lacks it
    drafted: Tensor  # [D, B, M] int64, the head's best token, a draft id
    live: Tensor  # [D, B, M] bool, whether a round can draft here


@dataclass(frozen=True)
class Comparison:
    """One way of running a head against another, from every position from which either could draft."""

    given: float  # mean accepted length (bonus counted) of a chain of depth D
    other: float
    positions: int
    more: int  # positions from which the other way drafts better: its expected accepted length is larger
    fewer: int
    gain: float  # mean gain of the expected accepted length, tokens
    chance: float  # probability of such a majority if both were equally good: one-sided sign test


def observe(target: Model, layers: Sequence[int], prompts: Sequence[list[int]], responses: Sequence[list[int]]) -> View:
    """Run the target over prompts and responses, keeping the inputs of `layers`; without any it does not run."""
    device = target.params.embed.device
    whole = [[*p, *r] for p, r in zip(prompts, responses, strict=True)]
    b, t = len(whole), max(map(len, whole))
    tokens = torch.tensor([w + [0] * (t - len(w)) for w in whole], device=device)
    prompt, length = (torch.tensor([len(x) for x in part], device=device) for part in (prompts, responses))
    kept = tuple(sorted(layers))
    if not kept:
        return View(tokens=tokens, prompt=prompt, length=length, streams={})
    with torch.no_grad():
        position = torch.arange(t, device=device).repeat(b)
        attend = rehearsal.causal(target.cfg, b, t)
        _, taps = model.hidden(target.params, target.cfg, tokens.flatten(), position, attend, kept)
        streams = dict(zip(kept, taps.view(b, t, len(kept), -1).unbind(2), strict=True))
    return View(tokens=tokens, prompt=prompt, length=length, streams=streams)


def pack(
    target: Model, layers: Sequence[int], prompts: Sequence[list[int]], responses: Sequence[list[int]], longest: int
) -> View | None:
    """`observe` of all completions one after another, so that positions are far apart; None where too few fit.

    Args: longest: tokens of a sequence; its first completion stands for the prompt, all that follows is drafted along.
    """
    packed: list[list[list[int]]] = [[]]
    for p, r in zip(prompts, responses, strict=True):
        if sum(map(len, packed[-1])) + len(p) + len(r) > longest:
            packed.append([])
        packed[-1].append([*p, *r])
    packed = [whole for whole in packed if len(whole) > 1]
    if not packed:
        return None
    return observe(target, layers, [w[0] for w in packed], [[t for part in w[1:] for t in part] for w in packed])


def rehearse(subject: Subject, target: Model, view: View, depth: int = DEPTH, heard: View | None = None) -> Marks:
    """Every draft of every depth along the responses. `heard`: what the head reads in place of the view's inputs."""
    heard = heard or view
    cfg, params = subject.cfg, subject.params
    m = int(view.length.max())
    index = torch.arange(m, device=view.tokens.device)
    row = (view.prompt[:, None] - 1 + index).clamp_max(view.tokens.shape[1] - 2)  # it predicts response token m + 1
    sequence = torch.arange(len(row), device=row.device)[:, None]
    wanted = following(view)
    inverse = torch.full((cfg.vocab_size,), -1, dtype=torch.int64, device=row.device)
    inverse[params.target_id] = torch.arange(len(params.target_id), device=row.device)
    known = inverse[wanted]

    def feed(out: Tensor) -> Tensor:
        return kernels.rms_norm(out, params.norm, cfg.rms_eps) if subject.normed else out

    with torch.no_grad():
        taps = torch.cat([heard.streams[layer] for layer in cfg.taps], dim=-1)
        outs = rehearsal.outputs(params, cfg, target.params.embed, heard.tokens, taps, depth, feed)
        rows = torch.stack([out[sequence, row] for out in outs]).flatten(0, 2)
        parts = zip(rows.split(CHUNK), known.expand(depth, -1, -1).flatten().split(CHUNK), strict=True)
        drafted, logp = zip(*(score(subject, target, part, label) for part, label in parts), strict=True)
    best = torch.cat(drafted).view(depth, *row.shape)
    step = torch.arange(depth, device=row.device)[:, None, None]
    live = (index >= step) & (index + 1 < view.length[:, None])
    hit = live & (params.target_id[best] == wanted)
    return Marks(hit=hit, logp=torch.cat(logp).view(best.shape), drafted=best, live=live)


def score(subject: Subject, target: Model, out: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """The head's best draft ids [n], and its log-probs [n] of label [n], NaN for -1; out [n, E] of its layer."""
    logits = eagle.logits(subject.params, subject.cfg, out, model.output_head(target.params))
    own = logits.log_softmax(-1).gather(1, label.clamp_min(0)[:, None])[:, 0]
    return logits.argmax(-1), torch.where(label >= 0, own, torch.nan)


def expected(marks: Marks) -> Tensor:
    """[B, M] fp32: drafted tokens accepted from the pending response token m if each were drawn from the head.

    Unlike the count of the head's best tokens it sees every change of its distribution.
    """
    p = torch.where(marks.live & ~marks.logp.isnan(), marks.logp.exp(), 0.0)
    longest = p.shape[2]  # tokens of the longest response, which may be fewer than the depths
    ahead = [torch.nn.functional.pad(p[j, :, j:], (0, min(j, longest))) for j in range(len(p))]
    return torch.stack(ahead).cumprod(0).sum(0)


def accepted_length(marks: Marks, view: View) -> float:
    """Mean accepted length of a chain, the bonus token counted, as rounds over these responses would have it."""
    return rounds.mean_length(rounds.along(marks.hit.cpu(), view.length.tolist()), len(marks.hit))


def compare(given: Marks, other: Marks, view: View) -> Comparison:
    """Pair two ways of running a head, position by position."""
    base = given.live[0]
    gain = (expected(other) - expected(given))[base]
    more, fewer = int((gain > 0).sum()), int((gain < 0).sum())
    return Comparison(
        given=accepted_length(given, view),
        other=accepted_length(other, view),
        positions=int(base.sum()),
        more=more,
        fewer=fewer,
        gain=float(gain.mean()),
        chance=sign_test(more, fewer),
    )


def sign_test(more: int, fewer: int) -> float:
    """Probability of at most `fewer` losses in more + fewer fair coin tosses."""
    n = more + fewer
    return sum(math.comb(n, k) for k in range(fewer + 1)) / 2**n if n else 1.0


def elsewhere(view: View, x: Tensor) -> Tensor:
    """An input [B, T, ..] of a view with that of every response token taken from half of all response tokens further.

    The control of an experiment: the same values, none of them where it belongs.
    """
    n = view.length.tolist()
    row = torch.arange(len(n), device=x.device).repeat_interleave(view.length)
    column = torch.cat([torch.arange(p, p + k, device=x.device) for p, k in zip(view.prompt.tolist(), n, strict=True)])
    half, moved = len(row) // 2, x.clone()
    moved[row, column] = x[row.roll(half), column.roll(half)]
    return moved


def watched(items: Sequence[T], what: str, progress: bool) -> Iterable[T]:
    """The same items, each a run along the completions; a bar on stderr counts them, for a run takes seconds."""
    return tqdm(items, desc=what, unit="run", disable=not progress)


def listening(subject: Subject, target: Model, view: View, progress: bool = False) -> dict[str, Comparison]:
    """Each input of a head -> its drafting with that input from elsewhere (given) against with its own (other)."""
    streams = {layer: elsewhere(view, x) for layer, x in view.streams.items()}
    heard = {"features": replace(view, streams=streams), "tokens": replace(view, tokens=elsewhere(view, view.tokens))}
    runs = (rehearse(subject, target, view, heard=h) for h in watched((None, *heard.values()), "inputs", progress))
    own = next(runs)
    return {name: compare(marks, own, view) for name, marks in zip(heard, runs, strict=True)}


def attending(draft: model.Params, cfg: model.Config, view: View) -> Comparison:
    """A draft model's best next tokens with its tokens from elsewhere (given) against with its own (other)."""
    wanted = following(view)
    live = torch.arange(wanted.shape[1], device=wanted.device) + 1 < view.length[:, None]

    def marks(tokens: Tensor) -> Marks:
        best, logp = [], []
        for row, first, label in zip(tokens, view.prompt.tolist(), wanted, strict=True):
            at = (first + torch.arange(len(label), device=row.device)).clamp_max(len(row) - 1)
            with torch.no_grad():
                logits = model.forward(draft, cfg, row[None])[0, at]
            best.append(logits.argmax(-1))
            logp.append(logits.log_softmax(-1).gather(1, label[:, None])[:, 0])
        drafted = torch.stack(best)
        return Marks((live & (drafted == wanted))[None], torch.stack(logp)[None], drafted[None], live[None])

    return compare(marks(elsewhere(view, view.tokens)), marks(view.tokens), view)


def coverage(marks: Marks) -> float:
    """The share of the target's tokens that the draft vocabulary has."""
    return float((~marks.logp[0].isnan())[marks.live[0]].float().mean())


def relabelled(marks: Marks, target_id: Tensor, view: View) -> tuple[Marks, Marks]:
    """The head's best tokens under its map, and under one that is read off the completions themselves.

    Every draft id is taken for the token that it fell on most often at depth 1 in the other half of the sequences.
    """
    wanted = following(view)
    half = (torch.arange(len(wanted), device=wanted.device) % 2).bool()[:, None]
    hit = torch.zeros_like(marks.hit)
    for mine in (half, ~half):
        learned = marks.live[0] & ~mine
        fell = Counter(zip(marks.drafted[0][learned].tolist(), wanted[learned].tolist(), strict=True))
        names = target_id.tolist()
        for (draft_id, token), _ in reversed(fell.most_common()):  # the most frequent one is written last
            names[draft_id] = token
        label = torch.tensor(names, device=wanted.device)
        hit = hit | (marks.live & mine & (label[marks.drafted] == wanted))
    return certain(marks, marks.hit), certain(marks, hit)


def certain(marks: Marks, hit: Tensor) -> Marks:
    """Marks of a head that is sure of its best tokens, so that only these count."""
    return struct.replace(marks, hit=hit, logp=torch.where(hit, 0.0, -torch.inf))


def following(view: View) -> Tensor:
    """[B, M]: response token m + 1; any token past the end."""
    m = torch.arange(int(view.length.max()), device=view.tokens.device)
    return view.tokens.gather(1, (view.prompt[:, None] + m + 1).clamp_max(view.tokens.shape[1] - 1))


def with_map(subject: Subject, target: Model, target_id: Tensor) -> Subject:
    """The head with another vocabulary map, and the target's rows of it where these are its output head."""
    params = struct.replace(subject.params, target_id=target_id)
    if subject.rows:
        params = struct.replace(params, head=model.output_head(target.params)[target_id])
    cfg = replace(subject.cfg, draft_vocab_size=len(target_id))
    return replace(subject, cfg=cfg, params=params)

"""One timed pass over a set of prompts."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import nanospec_fn as ns
from nanospec_fn import program

NAN = float("nan")
WARM_UP = 8  # tokens


@dataclass(frozen=True)
class Measured:
    """What one pass over all prompts gave; NaN where an engine has no such figure."""

    outputs: list[list[int]]  # tokens per prompt, stop token included
    seconds: float  # the whole call, prefill included
    tpot_ms: float  # mean over requests: first token to last, per token after the first
    round_ms: float  # the same time per round
    mean_accepted_len: float  # (tokens - completions) / rounds


class Contender(Protocol):
    """What an engine has to do to be measured beside others."""

    def measure(self, requests: Sequence[Sequence[int]], bs: int, max_tokens: int) -> Measured:
        """Complete token-id prompts greedily, at most `bs` at once."""


class Nanospec:
    """This engine: one prepared engine per batch size, with pages enough that nothing is preempted."""

    def __init__(
        self, model: ns.Model, draft: ns.Draft | None, speculation: ns.Speculation | None, config: ns.EngineConfig
    ) -> None:
        # Without its tokenizer: no text is made, as in the engines that this one is compared with.
        self.model, self.draft, self.speculation = dataclasses.replace(model, tokenizer=None), draft, speculation
        self.config = config
        self.engines: dict[int, ns.Engine] = {}

    def measure(self, requests: Sequence[Sequence[int]], bs: int, max_tokens: int) -> Measured:
        """Complete token-id prompts, at most `bs` at once; the first call for a batch size warms up and captures."""
        if bs not in self.engines:
            sized = dataclasses.replace(self.config, max_slots=bs, num_pages=self.pages(requests, bs, max_tokens))
            self.engines[bs] = ns.prepare(self.model, self.draft, sized, self.speculation)
            timed(self.engines[bs], requests[:bs], min(max_tokens, WARM_UP))
        return timed(self.engines[bs], requests, max_tokens)

    def pages(self, requests: Sequence[Sequence[int]], bs: int, max_tokens: int) -> int:
        """Pages for the longest `bs` requests at once."""
        lengths = [min(len(r) + max_tokens, self.model.cfg.max_context) for r in requests]
        ahead = program.tree_shape(self.draft, self.speculation).lookahead
        return program.pages_for(lengths, self.config.page_size, ahead, bs)


def timed(engine: ns.Engine, requests: Sequence[Sequence[int]], max_tokens: int) -> Measured:
    """One pass on a prepared engine."""
    out = [ns.Completion() for _ in requests]
    first, last = [NAN] * len(requests), [NAN] * len(requests)
    start = time.perf_counter()
    for chunk in ns.stream(engine.model, requests, ns.Sampling(max_tokens=max_tokens), engine=engine):
        i = chunk.index
        last[i] = time.perf_counter()
        if not out[i].tokens:
            first[i] = last[i]
        out[i].add(chunk)
    seconds = time.perf_counter() - start
    decode = [b - a for a, b in zip(first, last, strict=True)]
    accepted = ns.mean_accepted_len(out)
    return Measured(
        [o.tokens for o in out],
        seconds,
        tpot_ms=1e3 * mean([t / (len(o.tokens) - 1) for t, o in zip(decode, out, strict=True) if len(o.tokens) > 1]),
        round_ms=1e3 * mean([t / len(o.accepted) for t, o in zip(decode, out, strict=True) if o.accepted]),
        mean_accepted_len=NAN if accepted is None else accepted,
    )


def mean(values: Sequence[float]) -> float:
    """The mean, NaN of nothing."""
    return sum(values) / len(values) if values else NAN

"""Prompts in, completions out: `generate`, `stream` and `score`."""

import contextlib
import os
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from nanospec_fn import acceptance, chat
from nanospec_fn import trace as tracing
from nanospec_fn.draft import Draft, Speculation
from nanospec_fn.engine import Engine, Request, serve, trace_header
from nanospec_fn.filters import log_probs
from nanospec_fn.model import Model, forward
from nanospec_fn.program import EngineConfig, check_parts, check_tokens, pages_for, tree_shape
from nanospec_fn.reports import Update
from nanospec_fn.sampling import Sampling, controls
from nanospec_fn.struct import replace
from nanospec_fn.trees import Tree

Prompt = str | Sequence[int]
TraceFile = str | os.PathLike[str] | tracing.File


@dataclass
class Completion:
    """What a prompt became. Log-probs are in nats; lists have one entry per token, `accepted` one per round."""

    tokens: list[int] = field(default_factory=list)  # the stop token included
    text: str | None = None  # without the stop token; None without a tokenizer
    target_logp: list[float] = field(default_factory=list)
    behaviour_logp: list[float] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length", "aborted" or "error"
    accepted: list[int] = field(default_factory=list)  # drafted tokens that were emitted
    origin: list[int] = field(default_factory=list)  # 0: the target's own token; d: a draft node at depth d
    error: str | None = None  # why, where finish_reason is "error"

    def add(self, piece: "Chunk | Update") -> None:
        """Take in what a step did for this prompt; the text is left to the caller."""
        self.tokens += piece.tokens
        self.target_logp += piece.target_logp
        self.behaviour_logp += piece.behaviour_logp
        self.origin += piece.origin
        if piece.accepted is not None:
            self.accepted.append(piece.accepted)
        self.finish_reason = piece.finish_reason


@dataclass(frozen=True)
class Chunk:
    """What one step added to one completion."""

    index: int  # of the prompt
    tokens: list[int]
    text: str  # whole characters only; "" without a tokenizer
    finish_reason: str | None
    target_logp: list[float]  # as in Completion, for these tokens; the next two as well
    behaviour_logp: list[float]
    origin: list[int]
    accepted: int | None  # drafted tokens that were emitted; None for a chunk that no round emitted


def spoken(piece: "Completion | Chunk | Update") -> list[int]:
    """The tokens that have text: all but the stop token."""
    return piece.tokens[:-1] if piece.finish_reason == "stop" else piece.tokens


def mean_accepted_len(completions: Sequence[Completion]) -> float | None:
    """Tokens per round, the bonus token counted and the prefill's own left out; None where there was no round."""
    rounds = sum(len(one.accepted) for one in completions)
    return sum(max(len(one.tokens) - 1, 0) for one in completions) / rounds if rounds else None


def generate(
    model: Model,
    prompts: Sequence[Prompt],
    sampling: Sampling | Sequence[Sampling] | None = None,
    *,
    draft: Draft | None = None,
    speculation: Speculation | None = None,
    engine: EngineConfig | Engine | None = None,
    progress: bool = False,
    trace: TraceFile | None = None,
    on_error: str = "raise",
) -> list[Completion]:
    """Complete every prompt.

    Args:
      prompts: texts (the chat template applied where the tokenizer has one) or token ids.
      sampling: one for all, or one per prompt; None: greedy, 128 tokens.
      draft, speculation: how tokens are proposed; None: plain decoding. A prepared engine has its own.
      engine: sizes, or what `prepare` returned; None, or no `num_pages`: a pool that holds these prompts.
      progress: show a progress bar on stderr.
      trace: a path that the round trace is written to (nanospec_fn/trace.py), or a `trace.File` with the weights'
        versions; nothing of the output depends on it. A prepared engine must have been prepared with record=True.
      on_error: "raise", or "return": a prompt that can never fit gets finish_reason "error", the others are served.
    Returns: completions in the order of the prompts. Ctrl-C returns early: unfinished ones carry what they have and
      finish_reason "aborted".
    Errors: ValueError, before any work, naming the parameter, or the index of a prompt that can never fit.
    """
    job = _job(model, prompts, sampling, draft, speculation, engine, trace, on_error)
    with tqdm(total=len(job.completions), unit="prompt", disable=not progress) as bar:
        bar.update(len(job.completions) - len(job.requests))
        tokens = 0
        try:
            for _, update in job.run():
                tokens += len(update.tokens)
                if update.finish_reason:
                    bar.set_postfix(tokens=tokens, refresh=False)
                    bar.update(1)
        except KeyboardInterrupt:
            job.abort()
    return job.completions


def stream(
    model: Model,
    prompts: Sequence[Prompt],
    sampling: Sampling | Sequence[Sampling] | None = None,
    *,
    draft: Draft | None = None,
    speculation: Speculation | None = None,
    engine: EngineConfig | Engine | None = None,
    trace: TraceFile | None = None,
    on_error: str = "raise",
) -> Iterator[Chunk]:
    """`generate`, piece by piece: an iterator of chunks, one whenever a completion grows or ends.

    Arguments and errors as for `generate`; bad arguments raise here, not at the first chunk.
    """
    return _chunks(_job(model, prompts, sampling, draft, speculation, engine, trace, on_error))


def _chunks(job: "_Job") -> Iterator[Chunk]:
    decoders = [chat.Decoder(job.engine.model.tokenizer) for _ in job.completions]
    for index, completion in enumerate(job.completions):
        if completion.finish_reason:
            yield Chunk(index, [], "", completion.finish_reason, [], [], [], None)
    # Python 3.12 may close a generator without unwinding it: what it iterates over would go on serving.
    with contextlib.closing(job.run()) as updates:
        for index, update in updates:
            yield Chunk(
                index=index,
                tokens=update.tokens,
                text=decoders[index].add(spoken(update), last=update.finish_reason is not None),
                finish_reason=update.finish_reason,
                target_logp=update.target_logp,
                behaviour_logp=update.behaviour_logp,
                origin=update.origin,
                accepted=update.accepted,
            )


def score(model: Model, prompt: Prompt, tokens: Sequence[int], sampling: Sampling | None = None) -> list[float]:
    """The target log-prob of given tokens after a prompt, by one pass without a cache: the same bits as `generate`'s.

    Returns: nats, one per token.
    Errors: ValueError for an empty prompt, a token out of range, or more tokens than the context.
    """
    _check_model(model)
    sampling = Sampling() if sampling is None else sampling
    if not isinstance(sampling, Sampling):
        raise ValueError(f"sampling must be of class Sampling, got {sampling!r}")
    sampling.validate()
    if not isinstance(prompt, str | list | tuple) or not isinstance(tokens, list | tuple):
        raise ValueError(f"prompt must be text or a list, and tokens a list, got {prompt!r} and {tokens!r}")
    context = chat.encode(model.tokenizer, prompt)
    check_tokens([*context, *tokens], model.cfg.vocab_size)
    if not tokens:
        return []
    device = model.params.embed.device
    with torch.no_grad():
        logits = forward(model.params, model.cfg, torch.tensor([[*context, *tokens[:-1]]], device=device))
    rows = logits[0, len(context) - 1 :]
    c = controls([sampling] * len(rows), device)
    logp = log_probs(rows, c.temperature, c.top_k, c.top_p)
    return logp.gather(1, torch.tensor([*tokens], device=device)[:, None])[:, 0].tolist()


@dataclass
class _Job:
    """A call's requests on their engine, and what has come of them."""

    engine: Engine
    requests: list[Request]
    origin: list[int]  # the prompt of each request; prompts that can never fit have no request
    completions: list[Completion]
    trace: tracing.File | None

    def run(self) -> Generator[tuple[int, Update], None, None]:
        """Serve the requests: the prompt that grew, and by what."""
        with torch.no_grad(), contextlib.ExitStack() as stack:
            writer = stack.enter_context(tracing.Writer(self.trace)) if self.trace else None
            for update in stack.enter_context(contextlib.closing(serve(self.engine, self.requests))):
                record = self._round(update, writer.file) if writer else None
                prompt = self.origin[update.request]
                completion = self.completions[prompt]
                completion.add(update)
                if update.finish_reason:
                    self._finish(completion)
                if writer and record:  # after the completion, which an error or ctrl-C here must not cost
                    try:
                        writer.write(record)
                    except OSError as error:
                        file, writer = writer.file.path, None  # a file with a gap would be no trace
                        text = f"trace {file} ends early, the run goes on without it: {error.strerror}"
                        warnings.warn(text, RuntimeWarning, stacklevel=2)
                yield prompt, update

    def _round(self, update: Update, file: tracing.File) -> tracing.Round:
        """The record of an update that has not been added yet."""
        assert update.evidence is not None  # _job made sure that the engine records
        request, (nodes, rows) = self.requests[update.request], update.evidence
        return tracing.Round(
            step=update.step,
            request=update.request,
            prefill=update.accepted is None,
            seed=request.sampling.seed,
            position=len(request.tokens) + len(self.completions[self.origin[update.request]].tokens),
            nodes=nodes,
            rows=rows,
            path=_path(nodes, update.tokens[: update.accepted or 0]),
            tokens=update.tokens,
            target_logp=update.target_logp,
            behaviour_logp=update.behaviour_logp,
            origin=update.origin,
            finish_reason=update.finish_reason,
            ms={"step": update.milliseconds},
            policy_version=file.policy_version,
            draft_version=file.draft_version,
        )

    def _finish(self, completion: Completion) -> None:
        completion.text = chat.decode(self.engine.model.tokenizer, spoken(completion))

    def abort(self) -> None:
        for completion in self.completions:
            if completion.finish_reason is None:
                completion.finish_reason = "aborted"
                self._finish(completion)


def _path(nodes: tracing.Nodes, tokens: Sequence[int]) -> list[int]:
    """The nodes that a path of tokens from the root runs through."""
    path: list[int] = []
    for token in tokens:
        above = path[-1] if path else Tree.ROOT
        siblings = zip(nodes.token, nodes.parent, nodes.depth, strict=True)
        path.append([t == token and p == above and d > 0 for t, p, d in siblings].index(True))
    return path


def _job(
    model: Model,
    prompts: Sequence[Prompt],
    sampling: Sampling | Sequence[Sampling] | None,
    draft: Draft | None,
    speculation: Speculation | None,
    engine: EngineConfig | Engine | None,
    trace: TraceFile | None,
    on_error: str,
) -> _Job:
    """Check every argument, then make the engine and begin the trace; nothing has run when this raises."""
    _check_model(model)
    if on_error not in ("raise", "return"):
        raise ValueError(f'on_error must be "raise" or "return", got {on_error!r}')
    # The keys of a dict, or a set's members in no order, are no list of prompts.
    if isinstance(prompts, str | Mapping | Set) or not hasattr(prompts, "__len__"):
        got = "one string" if isinstance(prompts, str) else repr(prompts)
        raise ValueError(f"prompts must be a list of prompts, got {got}")
    file = trace if isinstance(trace, tracing.File) or trace is None else tracing.File(trace)
    if file:
        file.validate()
    requests = _requests(model, prompts, sampling)
    if isinstance(engine, Engine):
        if file:
            engine.check_idle()
        if file and not engine.program.static.record:
            raise ValueError("trace needs an engine that was prepared with record=True")
        if file and engine.program.static.decide is not acceptance.decide:
            raise ValueError("trace: its format has no place for a rule of one's own, which this engine has")
        if (draft is not None and draft is not engine.draft) or speculation is not None or model is not engine.model:
            raise ValueError("engine was prepared with a model, draft and speculation of its own; do not pass others")
    else:
        engine = _sized(model, requests, draft, speculation, engine, record=file is not None)
    for request in requests:
        engine.program.check_sampling(request.sampling)
    misfit = [engine.program.misfit(len(r.tokens)) for r in requests]
    for index, reason in enumerate(misfit):
        if reason and on_error == "raise":
            raise ValueError(f"prompt {index} can never fit: {reason}")
    completions = [Completion(finish_reason="error", error=reason) if reason else Completion() for reason in misfit]
    job = _Job(
        engine=engine,
        requests=[r for r, reason in zip(requests, misfit, strict=True) if not reason],
        origin=[i for i, reason in enumerate(misfit) if not reason],
        completions=completions,
        trace=file,
    )
    if file:
        tracing.create(file, trace_header(engine, job.requests, job.origin, file))
    return job


def _check_model(model: Model) -> None:
    if not isinstance(model, Model):
        raise ValueError(f"model must be what load returned, got {model!r}")


def _requests(model: Model, prompts: Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None) -> list[Request]:
    if sampling is None or isinstance(sampling, Sampling):
        sampling = [sampling or Sampling()] * len(prompts)
    if not hasattr(sampling, "__len__") or not all(isinstance(one, Sampling) for one in sampling):
        raise ValueError(f"sampling must be a Sampling, or a list of one per prompt, got {sampling!r}")
    if len(sampling) != len(prompts):
        raise ValueError(f"sampling has {len(sampling)} entries for {len(prompts)} prompts")
    requests = []
    for index, (prompt, one) in enumerate(zip(prompts, sampling, strict=True)):
        try:
            one.validate()
            if not isinstance(prompt, str | list | tuple):
                raise ValueError(f"it must be text or a list of token ids, got {prompt!r}")
            tokens = chat.encode(model.tokenizer, prompt)
            check_tokens(tokens, model.cfg.vocab_size)
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from None
        requests.append(Request(tuple(tokens), one))
    return requests


def _sized(
    model: Model,
    requests: list[Request],
    draft: Draft | None,
    speculation: Speculation | None,
    config: EngineConfig | None,
    record: bool,
) -> Engine:
    """An engine for just these requests: no more slots than prompts, and pages for the longest of them at once."""
    check_parts(model.cfg, draft, config, speculation)
    config = config or EngineConfig()
    max_slots = max(1, min(config.max_slots, len(requests)))
    num_pages = config.num_pages
    if num_pages is None:
        limit = min(model.cfg.max_context, config.max_context or model.cfg.max_context)
        lengths = [min(len(r.tokens) + r.sampling.max_tokens, limit) for r in requests if len(r.tokens) < limit]
        num_pages = pages_for(lengths, config.page_size, tree_shape(draft, speculation).lookahead, max_slots)
    return Engine(model, draft, replace(config, max_slots=max_slots, num_pages=num_pages), speculation, record)

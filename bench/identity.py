"""Is every configuration the same bits as plain decoding? `python -m bench.identity --bs 1:8x256 8:40x512 --shape 4x5`.

For each temperature one plain run of all prompts, to the longest length asked for, is the reference. Every shape, batch
size, and eager or captured steps must give its tokens and target log-probs as bytes, and so must a prefill over prompt
and output (`ns.score`).
One strict JSON line a comparison is printed, and appended to --out; then a table; exit code 1 where a bit differs.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import nanospec_fn as ns
from bench import acceptance, records, widen
from nanospec_fn import arguments, chat, prompts

PLAIN = "plain"
WORKS = ("1:8x256", "8:40x512")


@dataclass(frozen=True)
class Work:
    """How much one comparison decodes."""

    bs: int
    prompts: int
    tokens: int
    eager: bool = False


@dataclass(frozen=True)
class Task:
    """What is compared: a model with its draft and the prompts."""

    model: ns.Model
    draft: ns.Draft
    name: str  # of the draft
    requests: list[list[int]]
    attend: str


def work(text: str) -> Work:
    """The type of --bs and --eager: BS:PROMPTSxTOKENS."""
    sizes = text.replace(":", "x").split("x")
    if len(sizes) != 3 or not all(part.isascii() and part.isdecimal() and int(part) for part in sizes):
        raise argparse.ArgumentTypeError(f"must be BS:PROMPTSxTOKENS, got {text!r}")
    bs, count, tokens = map(int, sizes)
    return Work(bs, count, tokens)


def complete(
    task: Task, one: Work, spec: ns.Speculation | None, temperature: float
) -> tuple[list[ns.Completion], float]:
    """The first prompts' completions, prompt i with seed i, and the seconds that a warm engine took."""
    requests = task.requests[: one.prompts]
    config = ns.EngineConfig(
        max_slots=one.bs,
        max_context=max(map(len, requests)) + one.tokens,
        attend=task.attend,
        capture="off" if one.eager else "auto",
    )
    engine = ns.prepare(task.model, task.draft if spec else None, config, spec)
    sampling = [ns.Sampling(max_tokens=one.tokens, temperature=temperature, seed=i) for i in range(len(requests))]
    short = [dataclasses.replace(s, max_tokens=8) for s in sampling]
    ns.generate(task.model, requests[: one.bs], short[: one.bs], engine=engine)
    start = time.perf_counter()
    out = ns.generate(task.model, requests, sampling, engine=engine)
    return out, time.perf_counter() - start


def differing(out: Sequence[ns.Completion], reference: Sequence[ns.Completion], tokens: int) -> int:
    """Completions whose tokens or target log-probs are not the first `tokens` of the reference's of the same prompt."""
    return sum(
        o.tokens != r.tokens[:tokens] or o.target_logp != r.target_logp[:tokens] or o.behaviour_logp != o.target_logp
        for o, r in zip(out, reference[: len(out)], strict=True)
    )


def covering(works: Sequence[Work]) -> Work:
    """The work that every other is a part of: one of them where there is such a one, else as much as all of them."""
    most = Work(max(w.bs for w in works), max(w.prompts for w in works), max(w.tokens for w in works))
    whole = [w for w in works if (w.prompts, w.tokens) == (most.prompts, most.tokens)]
    return max(whole, key=lambda w: (not w.eager, w.bs), default=most)


def compare(
    task: Task, works: Sequence[Work], shapes: Sequence[ns.Speculation | None], temperature: float, scored: int
) -> Iterator[dict[str, Any]]:
    """One row per comparison at one temperature, the reference's own first.

    Args:
      shapes: None is plain decoding.
      scored: completions of the reference that `ns.score` goes over.
    """
    whole = covering(works)
    reference, seconds = complete(task, whole, None, temperature)
    unequal = differing_scores(task, reference[:scored], temperature)
    yield row_of(whole, None, temperature, reference, seconds) | {"differing": unequal, "against": "score"}
    for spec in shapes:
        for one in sorted(works, key=lambda w: (w.prompts * w.tokens, w.bs), reverse=True):
            if (spec, one) == (None, whole):
                continue
            out, seconds = complete(task, one, spec, temperature)
            unequal = differing(out, reference, one.tokens)
            yield row_of(one, spec, temperature, out, seconds) | {"differing": unequal, "against": PLAIN}


def row_of(
    one: Work, spec: ns.Speculation | None, temperature: float, out: Sequence[ns.Completion], seconds: float
) -> dict[str, Any]:
    """What a row tells of one run, the comparison left out."""
    tokens = sum(len(o.tokens) for o in out)
    row = dataclasses.asdict(one) | {"shape": acceptance.name_of(spec), "temperature": temperature}
    row |= {"out_tokens": tokens, "tok_s": tokens / seconds, "mean_accepted_len": ns.mean_accepted_len(out)}
    return row | {"request_rounds": sum(len(o.accepted) for o in out), "seconds": seconds}


def differing_scores(task: Task, out: Sequence[ns.Completion], temperature: float) -> int:
    """Completions of which a prefill over prompt and output gives other log-probs."""
    return sum(
        ns.score(task.model, task.requests[i], o.tokens, ns.Sampling(temperature=temperature, seed=i)) != o.target_logp
        for i, o in enumerate(out)
    )


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: differing completions and tokens a second."""
    lines = ["| shape | T | batch | prompts x tokens | steps | against | differing | tok/s | tokens a round |"]
    lines.append("|" + "---|" * 9)
    for r in rows:
        accepted = "" if r["mean_accepted_len"] is None else f"{r['mean_accepted_len']:.2f}"
        cells = [r["shape"], f"{r['temperature']:g}", r["bs"], f"{r['prompts']} x {r['tokens']}"]
        cells += [
            "eager" if r["eager"] or r.get("gpu") == "cpu" else "captured",
            r["against"],
            r["differing"],
            f"{r['tok_s']:.1f}",
            accepted,
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    """The options of bench.identity."""
    parser = arguments.Parser(
        prog="python -m bench.identity",
        description="Compare every configuration with plain decoding, as bytes.",
    )
    add = parser.add_argument
    sizes: dict[str, Any] = {"type": work, "metavar": "BS:PROMPTSxTOKENS"}
    chain = ns.Speculation()
    add("--bs", nargs="+", default=[work(text) for text in WORKS], help=f"what is decoded ({' '.join(WORKS)})", **sizes)
    add("--eager", nargs="*", default=[], help="the same, with eager steps (none)", **sizes)
    add(
        "--shape",
        nargs="+",
        type=acceptance.shape,
        default=[chain],
        metavar="TOPKxDEPTH[xNODES]",
        help=f"trees ({acceptance.name_of(chain)})",
    )
    add("--temperature", nargs="+", type=acceptance.temperature, default=[0.0, 1.0], help="0: greedy")
    add("--score", type=arguments.positive, default=8, metavar="N", help="completions that ns.score goes over")
    add("--prompts", default="mt-bench", help="mt-bench, gsm8k (from NANOSPEC_DATA) or a file")
    add("--like", metavar="SHAPE", help="embed model and head in a larger shape first, in memory; see bench.widen")
    add("--out", type=arguments.file, help="file that the lines are appended to")
    arguments.add_engine(parser)
    return parser


def load(args: argparse.Namespace, count: int) -> Task:
    """Model, draft and the first `count` prompts."""
    texts = prompts.load(args.prompts, count)
    if len(texts) < count:
        raise ValueError(f"arguments --bs, --eager: {count} prompts are more than the {len(texts)} of {args.prompts}")
    model, name, draft = widen.load(args.model, args.draft, args.like, args.device)
    if draft is None:
        raise ValueError(f"argument --draft: a draft is needed, got {name}")
    requests = [chat.encode(model.tokenizer, text) for text in texts]
    return Task(dataclasses.replace(model, tokenizer=None), draft, name, requests, args.backend)


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    """Compare everything; the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    arguments.check_engine(parser, args)
    works = [*args.bs, *(dataclasses.replace(one, eager=True) for one in args.eager)]
    rows = []
    try:
        task = load(args, max(one.prompts for one in works))
        about = records.about_own(task.model, task.name, task.attend) | {"prompt_set": args.prompts}
        for temperature in args.temperature:
            for row in compare(task, works, [None, *args.shape], temperature, args.score):
                rows.append(records.append(args.out, row | about))
    except (ValueError, FileNotFoundError) as error:
        parser.error(" ".join(str(error).split()))
    print(table(rows))
    return int(any(row["differing"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())

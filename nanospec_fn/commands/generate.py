"""`python -m nanospec_fn generate "PROMPT"`: one completion, as it comes."""

import argparse
import contextlib
import functools
import os
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator

import nanospec_fn as ns
from nanospec_fn import arguments, chat, jsonl, trace, view
from nanospec_fn.program import VARIANTS


def add_parser(commands: "argparse._SubParsersAction[arguments.Parser]") -> None:
    """The `generate` command."""
    parser = commands.add_parser(
        "generate",
        help="complete a prompt, with speculation",
        description="Complete a prompt: the text as it comes, then one line of statistics.",
        epilog="Exit codes: 0; 2 for bad arguments; 1 for a failed or interrupted run, or a difference that --compare "
        "found; 130 for Ctrl-C before or after the answer.",
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the chat template is applied where the tokenizer has one")
    arguments.add_engine(parser)
    tree = parser.add_argument_group("speculation")
    integer, default = arguments.integer, ns.Speculation()  # an option that is not given stays None
    tree.add_argument("--spec-topk", type=integer, metavar="K", help=f"nodes per level ({default.top_k}: a chain)")
    tree.add_argument("--spec-depth", type=integer, metavar="D", help=f"levels ({default.depth})")
    tree.add_argument("--spec-nodes", type=integer, metavar="N", help="drafted nodes that are verified (K * D)")
    tree.add_argument("--coupled", action="store_true", help="proposals share the target's noise (rule exact)")
    tree.add_argument(
        "--variants",
        choices=VARIANTS,
        default="fixed",
        help="auto: each round's tree is this one or smaller, by measured time (not in a trace or under a lossy rule)",
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=integer, metavar="N", help="(NANOSPEC_MAX_NEW, else 128)")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="(%(default)s: greedy)")
    sampling.add_argument("--top-k", type=integer, default=0, metavar="K", help="(%(default)s: off)")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P", help="(%(default)s: off)")
    sampling.add_argument("--seed", type=integer, default=0, metavar="N", help="(%(default)s)")
    sampling.add_argument(
        "--rule", default="exact", metavar="exact|relaxed|power", help="how drafts are accepted (%(default)s)"
    )
    sampling.add_argument(
        "--tau", type=float, default=1.0, metavar="P", help="relaxed: accept from this probability on (%(default)s)"
    )
    sampling.add_argument(
        "--accept-topk",
        type=integer,
        default=0,
        metavar="K",
        help="relaxed: or among the K most probable (%(default)s)",
    )
    sampling.add_argument(
        "--alpha",
        type=float,
        default=1.0,
        metavar="A",
        help="power: exponent of the acceptance probability (%(default)s)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object a completion and nothing else")
    output.add_argument("--compare", action="store_true", help="also decode plainly; exit code 1 if a byte differs")
    output.add_argument(
        "--show", action="store_true", help="colour each token by where it came from, and print trees of rounds"
    )
    output.add_argument(
        "--show-rounds", type=arguments.positive, metavar="N", help="with --show: the first N rounds that drafted (1)"
    )
    output.add_argument(
        "--trace", metavar="FILE", help="write what every round rested on, for `replay`, `picture` and `kl`"
    )
    parser.set_defaults(run=functools.partial(run, parser))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """`generate`: every check that needs no model comes before the model."""
    sampling, speculation = check(parser, args)
    with contextlib.ExitStack() as stack:
        record = args.trace
        if record is None and args.show and args.draft != "none":  # the trees are read from a trace
            record = os.path.join(stack.enter_context(tempfile.TemporaryDirectory()), "rounds.jsonl")
        return answer(parser, args, sampling, speculation, record)


def answer(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    sampling: ns.Sampling,
    speculation: ns.Speculation,
    record: str | None,
) -> int:
    """Complete the prompt and print what was asked for; the exit code. Args: record: where the trace goes."""
    try:
        model = ns.load(args.model, device=args.device)
        name, draft = arguments.load_draft(args.draft, model)
        engine = ns.EngineConfig(max_slots=1, attend=args.backend, variants=args.variants)
        chunks = ns.stream(
            model,
            [args.prompt],
            sampling,
            draft=draft,
            speculation=speculation if draft else None,
            engine=engine,
            trace=record,
        )
    except (ValueError, FileNotFoundError) as error:
        parser.error(" ".join(str(error).split()))
    out, colour = ns.Completion(), view.coloured(sys.stdout)
    started = time.perf_counter()
    try:
        for text in follow(chunks, out, model if args.show and colour else None):
            if not args.json:
                print(text, end="", flush=True)
    except KeyboardInterrupt:
        out.finish_reason = "aborted"
    seconds = time.perf_counter() - started
    identical, verdict = True, ""
    if args.compare and out.finish_reason != "aborted":
        if not args.json:
            print("\nplain decoding of the same prompt, to compare with ...", file=sys.stderr, flush=True)
        started = time.perf_counter()
        (plain,) = ns.generate(model, [args.prompt], sampling, engine=engine)
        identical, verdict = compare(out, plain, time.perf_counter() - started)
    if args.json:
        print(jsonl.to_line(vars(out) | ({"identical": identical} if verdict else {})))
    else:
        shown = []
        if args.show:
            shown = [origins(out, colour)]
            shown += trees(record, args.show_rounds or 1, model, colour) if record else []
        print("", *shown, statistics(out, seconds, name), *([verdict] if verdict else []), sep="\n")
    return int(out.finish_reason == "aborted" or not identical)


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> tuple[ns.Sampling, ns.Speculation]:
    """The arguments as what the engine takes; exits with code 2 and the option's name where one is wrong."""
    if not args.prompt:
        parser.error("argument PROMPT: is empty")
    if not chat.is_unicode(args.prompt):
        parser.error("argument PROMPT: is not valid Unicode")
    arguments.check_engine(parser, args)
    limit = "--max-tokens"
    if args.max_tokens is None:
        limit = "NANOSPEC_MAX_NEW"
        args.max_tokens = arguments.environment(parser, limit, arguments.integer, 128)
    sampling = arguments.checked(
        parser,
        ns.Sampling,
        {
            "max_tokens": (limit, args.max_tokens),
            "temperature": ("--temperature", args.temperature),
            "top_k": ("--top-k", args.top_k),
            "top_p": ("--top-p", args.top_p),
            "seed": ("--seed", args.seed),
            "rule": ("--rule", args.rule),
            "tau": ("--tau", args.tau),
            "accept_top_k": ("--accept-topk", args.accept_topk),
            "alpha": ("--alpha", args.alpha),
        },
    )
    options = {
        "top_k": ("--spec-topk", args.spec_topk),
        "depth": ("--spec-depth", args.spec_depth),
        "num_nodes": ("--spec-nodes", args.spec_nodes),
        "coupled": ("--coupled", args.coupled or None),
    }
    given = {field: option for field, option in options.items() if option[1] is not None}
    speculation = arguments.checked(parser, ns.Speculation, given)
    needs_draft = [*(name for name, _ in given.values()), *(["--rule"] if args.rule != "exact" else [])]
    if args.draft == "none" and needs_draft:
        parser.error(f"argument {needs_draft[0]}: needs a draft, got --draft none")
    if args.coupled and args.draft == "ngram":
        parser.error("argument --coupled: needs a draft with logits, got --draft ngram")
    if args.coupled and args.rule != "exact":
        parser.error(f"argument --coupled: needs --rule exact, got {args.rule}")
    if args.trace is not None:
        try:
            trace.File(args.trace).validate()
        except (ValueError, FileNotFoundError) as error:
            parser.error(f"argument --trace: {error}")
    if args.json and args.show:
        parser.error("argument --show: cannot be combined with --json")
    if args.show_rounds is not None and not args.show:
        parser.error("argument --show-rounds: needs --show")
    return sampling, speculation


def follow(chunks: Iterator[ns.Chunk], out: ns.Completion, show: ns.Model | None) -> Iterator[str]:
    """Gather the chunks into `out` and yield the text to print, coloured by token where a model is given to `show`."""
    out.text = ""
    decoder = chat.Decoder(show.tokenizer if show else None)
    for chunk in chunks:
        out.add(chunk)
        out.text += chunk.text
        if show is None:
            yield chunk.text
            continue
        for count, (token, origin) in enumerate(zip(chunk.tokens, chunk.origin, strict=True), start=1):
            last = chunk.finish_reason is not None and count == len(chunk.tokens)
            stop = last and chunk.finish_reason == "stop"  # it has no text
            yield paint(decoder.add([] if stop else [token], last), origin)


def paint(text: str, origin: int) -> str:
    """Text in the colour of the draft depth it came from; the target's own tokens (0) stay plain."""
    return f"{view.COLOURS[min(origin, len(view.COLOURS)) - 1]}{text}{view.RESET}" if origin and text else text


def origins(out: ns.Completion, colour: bool) -> str:
    """How many tokens came from where, each place in the colour of its tokens."""
    counts = [(d, out.origin.count(d)) for d in range(max(out.origin, default=0) + 1)]
    names = [(f"draft depth {d}" if d else "the target's own", d, n) for d, n in counts]
    head = f"{view.DIM}tokens:{view.RESET} " if colour else "tokens: "
    return head + ", ".join(f"{paint(name, d if colour else 0)} {n}" for name, d, n in names)


def trees(file: str, count: int, model: ns.Model, colour: bool) -> list[str]:
    """The trees of the first rounds that drafted something, as text."""
    found = trace.read(file)
    drafted = [r for r in view.rounds_of(found, 0) if any(r.nodes.depth)]
    views = [view.of(found, r) for r in drafted[:count]]
    encoding = sys.stdout.encoding or "ascii"
    return [line for v in views for line in ("", *view.lines(v, model.tokenizer, colour, encoding), view.legend(v), "")]


def statistics(out: ns.Completion, seconds: float, draft: str) -> str:
    """One line: tokens, tok/s, rounds, mean accepted length (the bonus token counted, the prefill's own not)."""
    rounds, mean = len(out.accepted), ns.mean_accepted_len([out])
    length = "none" if mean is None else f"{mean:.2f}"
    count = f"{len(out.tokens)} tokens ({out.finish_reason}), {len(out.tokens) / seconds:.1f} tok/s"
    return f"[{count}, {rounds} rounds, mean accepted length {length}, draft {draft}]"


def compare(out: ns.Completion, plain: ns.Completion, seconds: float) -> tuple[bool, str]:
    """Whether a completion is plain decoding's, byte for byte, and a line that says so."""

    def same(a: list[float], b: list[float]) -> bool:
        return array("d", a).tobytes() == array("d", b).tobytes()

    rate = f"plain decoding: {len(plain.tokens)} tokens, {len(plain.tokens) / seconds:.1f} tok/s"
    if out.tokens == plain.tokens and same(out.target_logp, plain.target_logp):
        return True, f"[{rate}; tokens and target log-probs are equal byte for byte]"
    pairs = zip(out.tokens, plain.tokens, out.target_logp, plain.target_logp, strict=False)
    first = next((i for i, (a, b, p, q) in enumerate(pairs) if a != b or not same([p], [q])), None)
    where = "in their length" if first is None else f"from token {first} on"
    return False, f"[{rate}; DIFFERENT {where}]"

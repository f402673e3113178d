"""`python -m nanospec_fn picture`: a trace as text or as SVG; view.py, tally.py and nanospec_fn/picture.py make them.

python -m nanospec_fn picture FILE                             the tree of a round, as text
python -m nanospec_fn picture FILE --round 3 --out tree.svg    of another one, as SVG
python -m nanospec_fn picture FILE --acceptance                what was accepted, by position in draft and answer
"""

import argparse
import functools
import os
import sys
from pathlib import Path
from typing import Any

from nanospec_fn import arguments, chat, checkpoint, files, picture, tally, trace, view

PANELS = ("accepted by draft position", "accepted by position in the answer")


def add_parser(commands: "argparse._SubParsersAction[arguments.Parser]") -> None:
    """The `picture` command."""
    parser = commands.add_parser(
        "picture",
        help="a round's tree, or acceptance by position, from a trace",
        description="Show the tree of a recorded round, or how much was accepted by position, as text or as SVG.",
        epilog="Exit codes: 0; 2 for bad arguments; 1 for a picture that cannot be written.",
    )
    parser.add_argument("file", metavar="FILE", help="a trace written by generate --trace")
    parser.add_argument("--acceptance", action="store_true", help="acceptance by position in the draft and the answer")
    parser.add_argument(
        "--request",
        type=arguments.natural,
        metavar="R",
        help="of the trace, from 0 (a tree: 0; with --acceptance: all)",
    )
    parser.add_argument(
        "--round",
        type=arguments.natural,
        metavar="N",
        help="of the request, from 0 (the first that accepted the most)",
    )
    parser.add_argument("--model", metavar="M", help="whose tokenizer gives tokens their text (ids without it)")
    parser.add_argument("--out", metavar="X.svg", help="write an SVG file in place of text")
    parser.set_defaults(run=functools.partial(run, parser))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """`picture`; the exit code."""
    check(parser, args)
    found = read_trace(parser, args)
    if args.acceptance:
        tried = tally.trials(found, args.request)
        title = f"{view.printable(str(found.header.draft))} draft, {shape(found)}: acceptance of {len(tried)} tokens"
        panels = dict(zip(PANELS, (tally.by_depth(tried), tally.by_place(tried)), strict=True))
        if args.out is None:
            print("\n\n".join([title, *("\n".join(tally.lines(*panel)) for panel in panels.items())]))
            return 0
        drawn = picture.acceptance(title, panels)
    else:
        record = view.pick(found, args.request or 0, args.round)
        shown, tokenizer = view.of(found, record), read_tokenizer(parser, args.model)
        if args.out is None:
            colour, encoding = view.coloured(sys.stdout), sys.stdout.encoding or "ascii"
            print("\n".join([*view.lines(shown, tokenizer, colour, encoding), view.legend(shown)]))
            return 0
        drawn = picture.tree(shown, tokenizer)
    try:
        files.write(Path(args.out), drawn.encode())
    except OSError as error:
        print(f"{parser.prog}: error: {args.out} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    print(args.out)
    return 0


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse, before anything is read, what cannot be combined or written."""
    if args.out is not None:
        check_out(parser, args.out, args.file)
    if args.acceptance and args.round is not None:
        parser.error("argument --round: not allowed with --acceptance")
    if args.acceptance and args.model is not None:
        parser.error("argument --model: not allowed with --acceptance")
    if args.model == "":
        parser.error("argument --model: model is empty")


def check_out(parser: argparse.ArgumentParser, out: str, file: str) -> None:
    """Refuse a place that is none, or the trace's own."""
    if not out or "\0" in out or os.path.isdir(out):
        parser.error(f"argument --out: {out!r} is no name of a file")
    if os.path.realpath(out) == os.path.realpath(file):
        parser.error(f"argument --out: {out} is the trace itself")
    folder = Path(out).parent
    if not files.is_folder(folder):
        parser.error(f"argument --out: no such folder: {files.short(folder)}")
    if not os.access(folder, os.W_OK):
        parser.error(f"argument --out: folder {folder} cannot be written")


def read_trace(parser: argparse.ArgumentParser, args: argparse.Namespace) -> trace.Trace:
    """The trace, once what is asked for is known to be in it; a last line that is not whole is told of."""
    try:
        found = trace.read(args.file)
    except (ValueError, FileNotFoundError) as error:
        parser.error(f"argument FILE: {error}")
    torn = f"line {len(found.rounds) + 2} is not whole and is left out" if found.cut else ""
    option, count = "FILE" if args.request is None else "--request", len(found.header.requests)
    try:
        if args.request is not None and args.request >= count:
            raise ValueError(f"request {args.request} is not in the trace, which has {count}")
        option = option if args.round is None else "--round"
        if args.acceptance:
            tally.trials(found, args.request)
        else:
            view.pick(found, args.request or 0, args.round)
    except ValueError as error:
        parser.error(f"argument {option}: {args.file}: {error}" + (f"; {torn}" if torn else ""))
    if torn:
        print(f"{parser.prog}: {args.file}: {torn}", file=sys.stderr)
    return found


def shape(found: trace.Trace) -> str:
    """A trace's tree in words."""
    spec = found.header.speculation
    assert spec is not None  # there are drafted tokens
    return f"top_k {spec.top_k}, depth {spec.depth}, {spec.nodes} nodes"


def read_tokenizer(parser: argparse.ArgumentParser, name: str | None) -> Any:
    """A model's tokenizer without its weights, None where no model is named."""
    if name is None:
        return None
    try:
        source = checkpoint.open_checkpoint(name)
        tokenizer = chat.from_gguf(source.metadata) if source.metadata else chat.from_folder(source.path)
        if tokenizer is None:
            raise ValueError(f"{name} has no tokenizer")
    except (ValueError, FileNotFoundError) as error:
        parser.error(f"argument --model: {' '.join(str(error).split())}")
    return tokenizer

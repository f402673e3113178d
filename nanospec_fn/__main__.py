"""The command line: `python -m nanospec_fn COMMAND`; each command has a file of its own."""

import argparse
import io
import os
import sys

from nanospec_fn import arguments, revision
from nanospec_fn.commands import generate, kl, picture, replay
from nanospec_fn.doctor import command as doctor


def build_parser() -> argparse.ArgumentParser:
    """The whole command line's parser; each command's `run` takes the parsed arguments."""
    parser = arguments.Parser(prog="python -m nanospec_fn", description="Study speculative decoding.")
    version = revision.version("nanospec") or "not installed"
    parser.add_argument("--version", action="version", version=version, help="print it and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=arguments.Parser)
    for command in (generate, doctor, replay, kl, picture):
        command.add_parser(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # characters that the terminal's encoding lacks
    try:
        try:
            args = build_parser().parse_args(argv)
            code: int = args.run(args)
        finally:
            sys.stdout.flush()  # so that a closed pipe is noticed here, not at exit
    except KeyboardInterrupt:
        return 130  # as a shell reports SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered goes nowhere
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())

"""--help of every command: what it says of a default is that of the parser."""

import argparse
import re
from collections.abc import Iterator

import pytest

from nanospec_fn import arguments
from tests.test_docs import PARSERS


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser, and those of its commands."""
    yield parser
    for action in parser._actions:
        for inner in set(action.choices.values()) if isinstance(action, argparse._SubParsersAction) else ():
            yield from parsers(inner)


@pytest.mark.parametrize("name", PARSERS)
def test_no_help_tells_of_none(name):
    """Catches: "(1) (default: None)", of an option whose absence is told by None."""
    for parser in parsers(PARSERS[name]()):
        text = parser.format_help()
        assert "None" not in text
        assert "default:" not in text
        assert "[]" not in text


@pytest.mark.parametrize("name", PARSERS)
def test_numbers_are_told(name):
    """Catches: an option without help, and so without its default; a default that was changed in one place of two."""
    for parser in parsers(PARSERS[name]()):
        for action in parser._actions:
            if isinstance(action.default, int | float) and not isinstance(action.default, bool):
                help_text = parser._get_formatter()._expand_help(action)
                assert str(action.default) in help_text, action.option_strings


def test_a_default_is_told_once_and_follows_the_parser():
    """Catches: a number typed by hand; one told twice; a list in Python's brackets; 0 taken for nothing to tell."""
    parser = arguments.Parser(prog="x")
    for option, default, text in (
        ("--plain", 3, "a"),
        ("--zero", 0, "b"),
        ("--told", 3, "c (three)"),
        ("--many", [1, 2], "d"),
        ("--percent", "5%", "e"),
        ("--none", None, "f"),
        ("--empty", [], "g"),
    ):
        parser.add_argument(option, default=default, help=text)
    parser.add_argument("--flag", action="store_true", help="h")
    parser.set_defaults(plain=7)
    said = dict(
        re.split(r" +(?:[A-Z]+ +)?", line.strip(), maxsplit=1)
        for line in parser.format_help().splitlines()
        if line.startswith("  --")
    )
    assert said == {
        "--plain": "a (7)",
        "--zero": "b (0)",
        "--told": "c (three)",
        "--many": "d (1 2)",
        "--percent": "e (5%)",
        "--none": "f",
        "--empty": "g",
        "--flag": "h",
    }

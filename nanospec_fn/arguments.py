"""What the command lines share: options and their environment, checks before any model is loaded.

An option that is wrong ends the program with exit code 2 and one line that names it.
"""

import argparse
import difflib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import nanospec_fn as ns
from nanospec_fn import draft_model, files, weights
from nanospec_fn.draft_model import DraftName
from nanospec_fn.model import Model
from nanospec_fn.program import ATTEND

DRAFTS = ("eagle", "ngram", "frozen", "none")


class Checkable(Protocol):
    """Fields that can be wrong."""

    def validate(self) -> None:
        """Errors: ValueError that begins with a field's name."""


T = TypeVar("T")
C = TypeVar("C", bound=Checkable)


class Help(argparse.HelpFormatter):
    """Help that ends with the option's default in brackets, where it has one and its text does not end so already."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if default is None or default is False or default in ("", [], argparse.SUPPRESS) or text.endswith(")"):
            return text
        shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
        return f"{text} ({shown.replace('%', '%%')})"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that takes no abbreviations, tells defaults, and whose errors are one line."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=Help, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """argparse's own, but what a parser does not know is its error, told with the command's name."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            names = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
            alike = difflib.get_close_matches(unknown[0].partition("=")[0], names, n=1)
            hint = f"; did you mean {alike[0]}?" if alike else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def add_engine(parser: argparse.ArgumentParser) -> None:
    """--model, --draft, --device, --backend."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--model",
        default="auto",
        metavar="M",
        help='"smollm2", a folder, a .gguf file or a hub id (NANOSPEC_MODEL, else smollm2)',
    )
    group.add_argument(
        "--draft",
        type=draft_name,
        default="auto",
        metavar="|".join((*DRAFTS, "eagle:X", "model:X")),
        help="X: a folder or hub id (eagle:NANOSPEC_EAGLE, else the model's bundled head, else ngram)",
    )
    group.add_argument(
        "--device", default="auto", metavar="D", help="auto, cpu, cuda, cuda:N or mps (NANOSPEC_DEVICE, else auto)"
    )
    group.add_argument(
        "--backend", default=None, metavar="B", help=f"{', '.join(ATTEND)} (NANOSPEC_BACKEND, else auto)"
    )


def draft_name(text: str) -> str:
    """The type of --draft."""
    if text == "auto":
        return text
    try:
        return str(DraftName.parse(text))
    except ValueError:
        known = ", ".join((*DRAFTS, "eagle:X", "model:X"))
        raise argparse.ArgumentTypeError(f"must be one of {known}, got {text!r}") from None


def integer(text: str) -> int:
    """The type of an integer: digits and a sign; int() would take " 1", "1_000" and the digits of every script too."""
    if not text.isascii() or not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}")
    return int(text)


def positive(text: str) -> int:
    """The type of a count."""
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"must be an integer from 1 to 2147483647, got {text!r}")
    return int(text)


def natural(text: str) -> int:
    """The type of a count that may be 0, of an index, of a seed."""
    if not text.isascii() or not text.isdecimal() or int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"must be an integer from 0 to 2147483647, got {text!r}")
    return int(text)


def real(low: float, high: float, low_too: bool = False) -> Callable[[str], float]:
    """The type of a number between two others, the upper one included."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (low < value <= high or (low_too and value == low)):
            least = f"from {low:g} to" if low_too else f"above {low:g} and at most"
            raise argparse.ArgumentTypeError(f"must be a number {least} {high:g}, got {text!r}")
        return value

    return number


def path(text: str) -> Path:
    """The type of a file or folder that is to be written: Path would take "" for the current folder."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"must be a path, got {text!r}")
    return Path(text)


def folder(text: str) -> Path:
    """The type of a folder to write into, which need not exist."""
    place = _looked_at(path(text))
    found = next(part for part in (place, *place.parents) if os.path.lexists(part))
    if not found.is_dir():
        raise argparse.ArgumentTypeError(f"{found} is {'a file' if found.exists() else 'a link to nothing'}")
    if not os.access(found, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{found} may not be written to")
    return place


def make_folder(place: Path) -> None:
    """Make a folder, and those above it, before any work is done for it. Errors: ValueError that names it."""
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"argument --out: {place}: {error.strerror}") from None


def _looked_at(place: Path) -> Path:
    """The same, unless the system does not let us look: a name that is too long, a folder that may not be entered."""
    try:
        place.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{files.short(place)}: {error.strerror}") from None
    return place


def file(text: str) -> Path:
    """The type of a file to write."""
    place = _looked_at(path(text))
    if place.is_dir() or not place.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{place} is a folder, or in one that does not exist")
    return place


def environment(parser: argparse.ArgumentParser, name: str, convert: Callable[[str], T], default: T) -> T:
    """An environment variable's value, or the default where it is unset or empty."""
    text = os.environ.get(name)
    if not text:
        return default
    try:
        return convert(text)
    except (ValueError, argparse.ArgumentTypeError) as error:
        parser.error(f"environment variable {name}: {error}")


def check_engine(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse an empty model name, and a device or backend that this machine cannot serve; fills in args.backend."""
    if not args.model:
        parser.error("argument --model: model is empty")
    origin = "argument --backend" if args.backend is not None else "environment variable NANOSPEC_BACKEND"
    if args.backend is None:
        args.backend = os.environ.get("NANOSPEC_BACKEND") or "auto"
    if args.backend not in ATTEND:
        parser.error(f"{origin}: must be one of {', '.join(ATTEND)}, got {args.backend!r}")
    try:
        device = weights.pick_device(args.device)
    except ValueError as error:
        where = "environment variable NANOSPEC_DEVICE" if args.device == "auto" else "argument --device"
        parser.error(f"{where}: {error}")
    if args.backend in ("canonical", "flashinfer") and device.type != "cuda":
        parser.error(f"{origin}: {args.backend} needs a CUDA device, got {device}")


def checked(parser: argparse.ArgumentParser, make: Callable[..., C], options: Mapping[str, tuple[str, Any]]) -> C:
    """`make(**fields)`, validated; a ValueError that begins with a field's name is reported under its option.

    Args: options: field -> (option or environment variable, value).
    """
    made = make(**{field: value for field, (_, value) in options.items()})
    try:
        made.validate()
    except ValueError as error:
        parser.error(error_line(error, {field: option for field, (option, _) in options.items()}))
    return made


def error_line(error: Exception, options: Mapping[str, str]) -> str:
    """An error in one line, under the option of the field whose name it begins with.

    "lr must be 1" becomes "argument --lr: lr must be 1", and "draft: gone" becomes "argument --draft: gone". Further on
    a field of several words is called by its option too; one word may be any word.
    Args: options: field -> option or environment variable.
    """
    first, space, rest = " ".join(str(error).split()).partition(" ")
    for name, option in options.items():
        if "_" in name and option.startswith("-"):
            rest = re.sub(rf"(?<![\w./-]){name}(?![\w/-])", option, rest)  # not inside of a path
    text = first + space + rest
    field = text.partition(" ")[0].rstrip(":")
    if field not in options:
        return text
    kind = "argument" if options[field].startswith("-") else "environment variable"
    return f"{kind} {options[field]}: {text.removeprefix(f'{field}: ')}"


def head_of_environment(name: str) -> str:
    """A --draft name, "auto" resolved where $NANOSPEC_EAGLE says what it means."""
    head = os.environ.get("NANOSPEC_EAGLE")
    return str(DraftName("eagle", head)) if name == "auto" and head else name


def draft_for(name: str, model: Model) -> str:
    """A --draft name, "auto" resolved: $NANOSPEC_EAGLE, else the model's bundled head, else ngram."""
    name = head_of_environment(name)
    if name == "auto":
        return "eagle" if draft_model.bundled_head(model.name) else "ngram"
    return name


def load_draft(name: str, model: Model) -> tuple[str, ns.Draft | None]:
    """A draft by its --draft name, and that name with "auto" resolved."""
    name = draft_for(name, model)
    return name, ns.load_draft(name, model)

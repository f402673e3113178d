"""Files that are written whole or not at all: beside their place, synced, and renamed into it.

A kill leaves the old file or the new one; an error leaves the old one, and nothing beside it. And how names are looked
up that may be anything: one that no file can have names none.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LONGEST = 120  # characters of a name or value in a message


def is_file(name: str | os.PathLike[str]) -> bool:
    """Whether a file is there. `Path.is_file` raises for a name that is too long, or in a folder closed to us."""
    return os.path.isfile(name)


def is_folder(name: str | os.PathLike[str]) -> bool:
    """Whether a folder is there, as `is_file`."""
    return os.path.isdir(name)


def short(name: object, most: int = LONGEST) -> str:
    """A name or value for a message, its middle left out where it has more than `most` characters."""
    text, half = str(name), most // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A place to write a file to; when the block ends well it is synced and renamed to `path`.

    A link stays one, and a file keeps its mode. What is no file, such as a device, is written to as it is.

    Errors: OSError, and whatever the block raises.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    path = path.resolve()
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        if path.exists():
            shutil.copymode(path, part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name too is on the disk
    finally:
        os.close(folder)


def write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all. Errors: OSError."""
    with whole(path) as part:
        part.write_bytes(data)

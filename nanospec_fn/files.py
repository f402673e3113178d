"""Files that are written whole or not at all: beside their place, synced, and renamed into it.

A kill leaves the old file or the new one; an error leaves the old one, and nothing beside it.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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

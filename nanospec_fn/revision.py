"""Which code a row was measured with. Needs nothing installed, so that modal_app.py can ask too."""

import hashlib
import importlib.metadata
import os
import subprocess
from pathlib import Path


def commit() -> str | None:
    """$NANOSPEC_COMMIT, else the checkout's commit (with "-dirty-" and a hash of its changes, if any), else None."""
    if given := os.environ.get("NANOSPEC_COMMIT"):
        return given
    try:
        name = _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*").decode().strip()
        return f"{name}-{hashlib.sha256(_git('diff', 'HEAD')).hexdigest()[:8]}" if name.endswith("-dirty") else name
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*words: str) -> bytes:
    command = ["git", "-C", str(Path(__file__).parent), *words]
    return subprocess.run(command, capture_output=True, check=True).stdout


def version(engine: str) -> str | None:
    """The installed version of an engine; None for a checkout that is not installed."""
    try:
        return importlib.metadata.version({"nanospec": "nanospec-fn"}.get(engine, engine))
    except importlib.metadata.PackageNotFoundError:
        return None

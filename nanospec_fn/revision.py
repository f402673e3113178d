"""Which code a row was measured with. Needs nothing installed, so that modal_app.py can ask too."""

import importlib.metadata
import os
import subprocess
from pathlib import Path


def commit() -> str | None:
    """$NANOSPEC_COMMIT, else the checkout's commit ("-dirty" where it has changes), else None."""
    if given := os.environ.get("NANOSPEC_COMMIT"):
        return given
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def version(engine: str) -> str | None:
    """The installed version of an engine; None for a checkout that is not installed."""
    try:
        return importlib.metadata.version({"nanospec": "nanospec-fn"}.get(engine, engine))
    except importlib.metadata.PackageNotFoundError:
        return None

"""The commit that rows carry."""

import shutil
import subprocess

from nanospec_fn import revision
from tests.test_architecture import ROOT


def git(folder, *words):
    subprocess.run(["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e", *words], check=True)


def test_changes_that_are_not_committed_have_a_name_of_their_own(tmp_path, monkeypatch):
    """Bug: rows of one edit are taken for rows of the next, so that a run is skipped and a table mixes both."""
    monkeypatch.delenv("NANOSPEC_COMMIT", raising=False)
    package = tmp_path / "nanospec_fn"
    package.mkdir()
    shutil.copy(ROOT / "nanospec_fn" / "revision.py", package)
    monkeypatch.setattr(revision, "__file__", str(package / "revision.py"))
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    clean = revision.commit()
    assert len(clean) == 40
    names = []
    for text in ("# one\n", "# two\n"):
        (package / "revision.py").write_text(text)
        names.append(revision.commit())
        assert names[-1].startswith(f"{clean}-dirty-")
    assert names[0] != names[1]
    monkeypatch.setenv("NANOSPEC_COMMIT", "given")
    assert revision.commit() == "given"

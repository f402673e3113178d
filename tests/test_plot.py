"""Pictures and the table of reinforcement learning runs, from logs made by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rl import plot

pytestmark = pytest.mark.usefixtures("matplotlib")

OPTIONS = {"task": "toy", "draft": "frozen", "acceptance": "power", "alpha": 0.3, "correction": "exact", "seed": 0}


def write(folder: Path, rows: list[dict[str, Any]], tail: str = "", **options: Any) -> Path:
    """A run's folder; `tail` is appended to its log as it is."""
    folder.mkdir()
    lines = [{"header": {"options": OPTIONS | options | {"out": str(folder)}}}, *rows]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return folder


def rows(n: int, reward: float = 0.0, speed: float = 100.0, **more: Any) -> list[dict[str, Any]]:
    """n steps whose reward rises by 0.01; the first is a tenth as fast as the others."""
    return [
        {"step": i, "reward": reward + 0.01 * i, "tok_s": speed / 10 if i == 0 else speed, "accepted_len": 2.0} | more
        for i in range(n)
    ]


def test_torn_last_line_is_left_out(tmp_path):
    """Catches: a log that cannot be drawn while its run is being written, or after it was killed."""
    run = plot.read(write(tmp_path / "a", rows(3), tail='{"step": 3, "rew'))
    assert list(run.steps) == [0, 1, 2]
    assert list(run.values["reward"]) == [0.0, 0.01, 0.02]
    whole_but_for_its_newline = json.dumps(rows(4)[3])
    assert list(plot.read(write(tmp_path / "b", rows(3), tail=whole_but_for_its_newline)).steps) == [0, 1, 2]


def test_a_step_logged_twice_counts_once(tmp_path):
    """Catches: a resumed run whose curve runs back, or shows what was rolled back."""
    again = [{"step": 2, "reward": 0.7}, {"step": 3, "reward": 0.8}]
    run = plot.read(write(tmp_path / "a", [*rows(4), *again]))
    assert list(run.steps) == [0, 1, 2, 3]
    assert list(run.values["reward"]) == [0.0, 0.01, 0.7, 0.8]
    assert math.isnan(run.values["tok_s"][3])  # null and absent are no numbers


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "log.jsonl: empty, the first line of a log is its header"),
        ('{"step": 0}\n', "log.jsonl:1: the first line of a log is its header"),
        ('{"header": {}}\n', 'log.jsonl:1: the header has no "options"'),
        ('{"header": {"options": {}}}\n{"st\n{"step": 1}\n', "log.jsonl:2: not valid JSON"),
        ('{"header": {"options": {}}}\n[1]\n', "log.jsonl:2: not a JSON object"),
        (
            '{"header": {"options": {}}}\n{"reward": 1}\n',
            "log.jsonl:2: step must be an integer from 0 to 2147483647, got None",
        ),
        (
            '{"header": {"options": {}}}\n{"step": 1' + "0" * 400 + "}\n",
            "log.jsonl:2: step must be an integer from 0 to",
        ),
        ('{"header": {"options": {}}}\n{"step": "3"}\n', "log.jsonl:2: step must be an integer from 0 to"),
        ('{"header": {"options": {}}}\n{"step": 1, "ess": "x"}\n', "log.jsonl:2: ess must be a finite number or null"),
        ('{"header": {"options": {}}}\n{"step": 1, "reward": NaN}\n', "log.jsonl:2: not valid JSON: NaN is not JSON"),
        ('{"header": {"options": {}}}\n' + "[" * 50000 + "\n", "log.jsonl:2: not valid JSON"),
        ('{"header": {"options": {}}}\n{"step": 1, "reward": 1' + "0" * 400 + "}\n", "log.jsonl:2: reward must be a"),
    ],
)
def test_bad_logs_are_named(tmp_path, capsys, text, message):
    """Catches: a foreign or damaged file that is drawn, or ends in a traceback."""
    (tmp_path / "log.jsonl").write_text(text)
    good = write(tmp_path / "good", rows(2))
    with pytest.raises(SystemExit) as stopped:
        plot.main([str(good), str(tmp_path), "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_is_not_there_is_named(tmp_path, capsys, monkeypatch):
    """Catches: a missing run, an --out that is a file, no matplotlib, that end in a traceback or in half the files."""
    good = write(tmp_path / "good", rows(2))
    (tmp_path / "file").write_text("")
    out = ["--out", str(tmp_path / "out")]
    cases = {
        (str(tmp_path / "none"), *out): "none: no such file; a run is a folder that holds log.jsonl",
        (str(good), "--out", str(tmp_path / "file")): "argument --out",
        (str(write(tmp_path / "new", [])), *out): "no step is logged yet",
    }
    for words, message in cases.items():
        with pytest.raises(SystemExit):
            plot.main(list(words))
        assert message in capsys.readouterr().err
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        plot.main([str(good), *out])
    assert "matplotlib is not installed: pip install 'nanospec-fn[rl]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_dollar_sign_is_no_formula(tmp_path):
    """Bug: a folder's name, or an option in a log, that is read as mathematics and ends in a traceback."""
    runs = [plot.read(write(tmp_path / name, rows(2), correction=name)) for name in ("a $x^$-0", "$b^{")]
    for figure in (plot.curves(runs), plot.knee(runs)):
        assert plot.png(figure).startswith(b"\x89PNG")


def test_half_a_surrogate_pair_is_shown_somehow(tmp_path, capsys):
    """Bug: JSON may hold what no file and no font can, and the pictures end in a traceback."""
    path = write(tmp_path / "a", rows(10), correction="\ud800", draft="\udc80")
    assert plot.main([str(path), "--out", str(tmp_path / "out")]) == 0
    assert "| ? | ? |" not in capsys.readouterr().out.splitlines()[0]
    assert "| ? |" in (tmp_path / "out/table.md").read_text()


@pytest.mark.parametrize("name", ["curves.png", "knee.png", "table.md"])
def test_a_folder_in_the_place_of_a_file_is_named_before_anything_is_drawn(tmp_path, capsys, name):
    """Bug: a traceback, with some of the files written."""
    (tmp_path / "out" / name).mkdir(parents=True)
    with pytest.raises(SystemExit) as stopped:
        plot.main([str(write(tmp_path / "a", rows(10))), "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said == f"python -m rl.plot: error: argument --out: {tmp_path / 'out' / name} is a folder\n"
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]


def test_a_full_disk_is_told_in_a_line(tmp_path, capsys, monkeypatch):
    """Bug: a traceback."""

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plot.files, "write", full)
    with pytest.raises(SystemExit) as stopped:
        plot.main([str(write(tmp_path / "a", rows(10))), "--out", str(tmp_path / "out")])
    assert stopped.value.code == 1
    said = f"{tmp_path / 'out/curves.png'}: cannot be written (No space left on device)\n"
    assert capsys.readouterr().err == f"python -m rl.plot: error: {said}"


def test_many_runs_leave_room_for_what_they_did(tmp_path):
    """Bug: a legend of 45 lines, or of one long line, that squeezes the panels to nothing."""
    named = "a run whose name is long " * 6
    made = [write(tmp_path / f"{named}{i}", rows(3), lr=10.0**-i) for i in range(45)]
    few = plot.curves(drawn([write(tmp_path / "few", rows(3))]))
    runs = drawn(made)
    for figure, least in ((plot.curves(runs), 0.95), (plot.knee(runs), 0.4)):
        plot.png(figure)
        box = figure.axes[0].get_position()
        if least > 0.5:
            plot.png(few)
            assert box.height > least * few.axes[0].get_position().height
            assert box.width > least * few.axes[0].get_position().width
        assert min(box.height, box.width) > 0.2
    legend = plot.curves(runs).axes[-1].get_legend()
    assert len(legend.get_texts()) == plot.NAMED + 1
    assert legend.get_texts()[-1].get_text() == "and 29 more, see table.md"
    assert len(plot.knee(runs).legends[0].get_texts()) == plot.NAMED + 2


def test_smoothing():
    """Catches: a window that looks ahead, or a gap that makes everything after it a gap."""
    assert plot.smooth([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
    assert plot.smooth([1.0, math.nan, 5.0], 2) == [1.0, 1.0, 5.0]
    assert math.isnan(plot.smooth([math.nan], 3)[0])


def test_table_is_right(tmp_path, capsys):
    """Catches: a mean over the wrong steps, a first step in the speed, a name that breaks the table."""
    a = write(tmp_path / "a|b", rows(20, kl_mu_old=0.25, ess=None, w_max=3.0), correction="none")
    b = write(tmp_path / "b", rows(1, reward=0.5), acceptance="exact")
    assert plot.main([str(a), str(b), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "out" / "table.md").read_text()
    head, rule, *lines, blank, note = printed.splitlines()
    assert (blank, note) == (
        "",
        '"-": a run of fewer than 10 steps, whose first 5 and last 5 share some; the rest is over all steps.',
    )
    names = [cell.strip() for cell in head.strip("|").split("|")]
    assert rule == "|" + "---|" * len(names)
    cells = [
        dict(zip(names, (c.strip() for c in line.strip("|").replace("\\|", "/").split("|")), strict=True))
        for line in lines
    ]
    assert cells[0]["run"] == "a/b"
    assert cells[0]["reward, first 5"] == "0.020"  # of 0, 0.01 .. 0.04
    assert cells[0]["reward, last 5"] == "0.170"
    assert (cells[0]["tok/s"], cells[1]["tok/s"]) == ("100.0", "")
    assert (cells[0]["acceptance"], cells[1]["acceptance"]) == ("power, alpha 0.3", "exact")
    assert (cells[0]["correction"], cells[1]["correction"]) == ("none", "exact")
    assert (cells[0]["KL(mu, pi_old)"], cells[0]["ESS"], cells[0]["largest w"]) == ("0.2500", "", "3.00")
    assert (cells[0]["steps"], cells[1]["steps"]) == ("20", "1")


def test_ends_that_share_steps_are_not_compared(tmp_path):
    """Catches: the same steps shown as a run's first and as its last, as if nothing had been learned."""
    for n, first, last in ((9, "-", "-"), (10, "0.020", "0.070")):
        line = plot.summary(plot.read(write(tmp_path / str(n), rows(n))))
        assert (line["steps"], line["reward, first 5"], line["reward, last 5"]) == (str(n), first, last)


def drawn(runs: list[Path]) -> list[plot.Run]:
    return [plot.read(path) for path in runs]


def test_curves_say_what_they_show(tmp_path):
    """Catches: an axis without title or unit, a run that is not drawn, runs of different length forced to one."""
    short = write(tmp_path / "short", rows(1), draft="none")
    runs = drawn([write(tmp_path / "long", rows(40, kl_mu_old=0.1)), short])
    figure = plot.curves(runs)
    axes = figure.axes[: len(plot.PANELS)]
    assert [ax.get_title() for ax in axes] == [title for title, _ in plot.PANELS.values()]
    assert all(ax.get_xlabel() == "step (policy updates)" and ax.get_ylabel() for ax in axes)
    faint, bold, *_ = axes[0].lines
    assert list(faint.get_ydata()) == list(runs[0].values["reward"])
    assert bold.get_ydata()[10] == pytest.approx(0.01 * (6 + 7 + 8 + 9 + 10) / 5)  # a window of 40 / 8 steps
    assert list(axes[2].lines[0].get_xdata()) == list(range(1, 40))
    assert [text.get_text() for text in axes[4].texts] == ["not in these logs"]
    assert not axes[3].texts
    legend = figure.axes[-1].get_legend()
    assert [t.get_text() for t in legend.get_texts()] == ["long (power, alpha 0.3; exact)", "short (no draft; exact)"]
    assert "mean of the last 5 steps" in legend.get_title().get_text()
    assert plot.png(figure).startswith(b"\x89PNG")


def test_knee_joins_the_corrections_of_one_rule(tmp_path):
    """Catches: rules joined with each other, seeds that count as settings, one seed for the mean of all."""
    made = [
        write(tmp_path / "n", rows(10, 0.1, 200), correction="none"),
        write(tmp_path / "e0", rows(10, 0.2, 180)),
        write(tmp_path / "e1", rows(10, 0.4, 220), seed=1),
        write(tmp_path / "x", rows(10, 0.5, 90), acceptance="exact", alpha=1.0, correction="none"),
    ]
    runs = drawn(made)
    assert {name: [run.name for run in members] for name, members in plot.settings(runs).items()} == {
        "power, alpha 0.3": ["n", "e0", "e1"],
        "exact": ["x"],
    }
    figure = plot.knee(runs)
    (ax,) = figure.axes
    joined = [line for line in ax.lines if line.get_linestyle() == "-"]
    assert [list(line.get_xdata()) for line in joined] == [[200, 200], [90]]
    assert list(joined[0].get_ydata()) == pytest.approx([0.17, 0.37])  # none; the mean of both seeds of exact
    assert "tokens per second" in ax.get_xlabel()
    assert "reward" in ax.get_ylabel()
    texts = [t.get_text() for t in figure.legends[0].get_texts()]
    assert texts == ["power, alpha 0.3", "exact", "correction none", "correction exact"]
    assert "faint: each seed" in figure.legends[0].get_title().get_text()


def test_settings_are_told_apart_by_what_differs(tmp_path):
    """Catches: runs with another learning rate joined as if only the correction differed."""
    made = [write(tmp_path / "a", rows(2), lr=1e-5), write(tmp_path / "b", rows(2), lr=1e-4, correction="none")]
    assert list(plot.settings(drawn(made))) == ["power, alpha 0.3; lr 1e-05", "power, alpha 0.3; lr 0.0001"]


def test_runs_of_one_name_are_told_apart_and_new_ones_left_out(tmp_path, capsys):
    """Catches: two lines of a legend that read the same; a run that has just begun and hides the others."""
    for parent in ("x", "y", "z"):
        (tmp_path / parent).mkdir()
    made = [write(tmp_path / parent / "run", rows(2)) for parent in ("x", "y")]
    new = write(tmp_path / "z" / "new", [], tail='{"step"')
    assert plot.main([*map(str, made), str(new), "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr()
    assert all(f"| {path} |" in told.out for path in made)
    assert told.err == "new: no step is logged yet, left out\n"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["curves.png", "knee.png", "table.md"]

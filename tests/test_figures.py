"""Saved figures and tables: the same bytes each time, and no trace of the machine."""

import json
import subprocess
import sys
from pathlib import Path

import matplotlib
import pandas as pd
import pytest
from matplotlib.figure import Figure
from PIL import Image

from lossless_lab import figures, paths

matplotlib.use("agg")
FRAME = pd.DataFrame({"x": [1, 2], "y": [0.1, 1 / 3], "token": ["a\n|$_", "误"]})
FOUR = {"png", "svg", "csv", "json"}
SCRIPT = """
import sys
import pandas as pd
from matplotlib.figure import Figure
from lossless_lab import figures
figure = Figure(figsize=(3.35, 2.4))
figure.add_subplot().plot([1, 2], [3, 4], label="a")
print(figures.save(figure, "f", pd.DataFrame({"x": [1]}), {"n": 1}, folder=sys.argv[1]).changed)
"""


def figure(**options) -> Figure:
    made = Figure(**options)
    made.add_subplot(title="t").plot(FRAME["x"], FRAME["y"])
    return made


def save(folder: Path, **changes):
    given = {"fig": figure(), "name": "drift", "data": FRAME, "provenance": {"notebook": "00"}}
    return figures.save(**{**given, **changes}, folder=folder)


def test_four_files_data_and_provenance(tmp_path):
    saved = save(tmp_path)
    assert {path.suffix[1:] for path in tmp_path.iterdir()} == FOUR == set(saved.files)
    pd.testing.assert_frame_equal(pd.read_csv(saved.files["csv"]), FRAME)
    record = json.loads(saved.files["json"].read_text())
    assert record["notebook"] == "00" and record["preset"] == "single"
    assert record["versions"]["lossless_lab"]
    sha256sum = subprocess.check_output(["sha256sum", saved.files["csv"]], text=True).split()[0]
    assert record["data_sha256"] == saved.data_sha256 == sha256sum
    assert "drift" in str(saved) and len(saved.to_frame()) == 4


@pytest.mark.parametrize(
    "preset, pixels", [("single", (1005, 720)), ("double", (2070, 840)), ("slide", (1918, 1080))]
)
def test_presets_have_the_stated_size(tmp_path, preset, pixels):
    saved = save(tmp_path, preset=preset)
    assert Image.open(saved.files["png"]).size == pixels


def test_a_figure_that_has_the_width_keeps_its_height_and_all_keep_their_size(tmp_path):
    tall, other = figure(figsize=(3.35, 5)), figure(figsize=(4, 4))
    assert Image.open(save(tmp_path, fig=tall).files["png"]).size == (1005, 1500)
    save(tmp_path, fig=other)
    assert tuple(other.get_size_inches()) == (4, 4)


def test_another_process_writes_the_same_bytes_and_touches_nothing(tmp_path):
    changed = [
        subprocess.check_output(
            [sys.executable, "-c", SCRIPT, str(tmp_path)], text=True, env={"PYTHONHASHSEED": seed}
        ).strip()
        for seed in ("1", "2")
    ]
    assert changed == ["True", "False"]
    text = (tmp_path / "f.svg").read_text()
    assert "<dc:date>" not in text and "Matplotlib" not in text
    assert Image.open(tmp_path / "f.png").info.keys() <= {"dpi"}


def test_a_new_commit_alone_changes_no_file_but_new_parameters_do(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "git_commit", lambda: "a")
    assert save(tmp_path).changed
    monkeypatch.setattr(paths, "git_commit", lambda: "b")
    assert not save(tmp_path).changed
    assert json.loads((tmp_path / "drift.json").read_text())["git_commit"] == "a"
    assert save(tmp_path, provenance={"notebook": "01"}).changed
    assert json.loads((tmp_path / "drift.json").read_text())["git_commit"] == "b"
    (tmp_path / "drift.json").write_text("torn")
    assert save(tmp_path).changed


def test_the_commit_is_git_s_own_and_absent_outside_a_checkout(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.check_output(command, text=True).strip()

    monkeypatch.setattr(paths, "CHECKOUT", tmp_path)
    assert paths.git_commit() is None
    (tmp_path / "lossless_lab").mkdir()
    (tmp_path / "lossless_lab" / "a.py").write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    assert paths.git_commit() == git("rev-parse", "HEAD")
    (tmp_path / "lossless_lab" / "a.py").write_text("2")
    assert paths.git_commit() == git("rev-parse", "HEAD") + "+changes"
    monkeypatch.setattr(paths, "CHECKOUT", None)
    assert paths.git_commit() is None


@pytest.mark.parametrize(
    "given, kept",
    [
        ("/home/ann/models/llama", "llama"),
        (Path("/srv/a/b.txt"), "b.txt"),
        ("C:\\Users\\ann\\model", "model"),
        ("~/models/llama", "llama"),
        ("read /data/x/y and /data/z", "read y and z"),
        ("org/name", "org/name"),
        ("a/b ratio, 3/4", "a/b ratio, 3/4"),
        ("https://example.org/a/b", "https://example.org/a/b"),
        (["/a/b/c", 1, None, True], ["c", 1, None, True]),
    ],
)
def test_paths_of_the_machine_are_cut_to_their_last_part(tmp_path, given, kept):
    saved = save(tmp_path, provenance={"parameters": {"x": given}})
    assert json.loads(saved.files["json"].read_text())["parameters"]["x"] == kept


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"preset": "poster"}, "`preset` must be one of single, double, slide; got 'poster'"),
        ({"name": "../x"}, "`name` must be"),
        ({"name": ""}, "`name` must be"),
        ({"provenance": {"x": object()}}, "`provenance` must hold JSON values"),
        ({"provenance": {"x": float("nan")}}, "`provenance` must hold JSON values"),
    ],
)
def test_bad_arguments_are_named_and_leave_no_file(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        save(tmp_path, **changes)
    assert list(tmp_path.iterdir()) == []


def test_tables_in_markdown_and_latex_escape_what_would_break_them(tmp_path):
    saved = figures.save_table(FRAME, "table", {"notebook": "00"}, folder=tmp_path)
    assert set(saved.files) == {"md", "tex", "csv", "json"}
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert len(lines) == 4 and lines[2].startswith("| 1   | 0.1") and r"a\n\|$_" in lines[2]
    assert "0.3333" in lines[3] and "误" in lines[3]
    latex = (tmp_path / "table.tex").read_text()
    assert r"\toprule" in latex and r"a\textbackslash n|\$\_" in latex

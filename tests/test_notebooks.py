"""The notebook build, and the committed notebooks: fresh, clean, short-celled, runnable offline."""

import json
import re
import signal
import subprocess
import sys
import time
import warnings

import nbformat
import pytest

from notebooks import build, cleaning, report

SOURCES = build.sources()
EXECUTED = sorted(p for p in build.FOLDER.glob("[0-9][0-9]_*.ipynb") if "failed" not in p.name)
OFFLINE = [s for s in SOURCES if s.stem[:2] in ("00", "01")]
SMALL = """
# %% [markdown]
# # A question
# Is it so?

# %% tags=["parameters"]
MODEL = "smollm2"
N = 3
SCALE = 1.0
WIDTH = None

# %%
import ipywidgets
ipywidgets.IntSlider()

# %% [markdown]
# ## Verdict

# %%
print(f"{MODEL}: {N} <of> 3, 无损")
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A small notebook source in a folder of its own."""
    monkeypatch.setattr(build, "SOURCES", tmp_path / "src")
    path = tmp_path / "src" / "00_small.py"
    path.parent.mkdir()
    path.write_text(SMALL, encoding="utf-8")
    return path


def by_stem(path):
    return path.stem


# -- the build


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"model": "x"}, ValueError, "did you mean MODEL"),
        ({"MODLE": "x"}, ValueError, "there are MODEL, N, SCALE, WIDTH"),
        ({"N": "3"}, TypeError, r"N is a int \(default 3\); received '3'"),
        ({"N": True}, TypeError, "received True"),
    ],
)
def test_a_parameter_that_does_not_fit_fails_before_anything_runs(source, given, error, message):
    with pytest.raises(error, match=message):
        build.build(source, source.parent, given=given)
    assert not list(source.parent.glob("*.ipynb"))
    with pytest.raises(error, match=message):
        build.main(["report", *(x for k, v in given.items() for x in ("-p", k, repr(v)))])


def test_parameters_that_fit(source):
    known = build.parameters(build.read(source))
    assert known == {"MODEL": "smollm2", "N": 3, "SCALE": 1.0, "WIDTH": None}
    build.validate(known, {"SCALE": 2, "WIDTH": 7})


def test_without_a_network_the_report_goes_on_with_the_tiny_model(monkeypatch, capsys):
    def offline(name):
        raise OSError("no route")

    monkeypatch.setattr(build.models, "fetch", offline)
    assert build.with_a_model({"N": 1}) == {"N": 1, "MODEL": "tiny-target"}
    assert "no route" in capsys.readouterr().out
    assert build.with_a_model({"MODEL": "smollm2"}) == {"MODEL": "smollm2"}


def test_an_unknown_notebook_is_named(source):
    with pytest.raises(ValueError, match="there are 00_small"):
        build.main(["rebuild", "07"])


def test_stale_names_what_changed(source, monkeypatch):
    notebook = build.read(source)
    notebook.metadata["lossless_lab"] = build.stamp(source)
    nbformat.write(notebook, source.parent / "00_small.ipynb")
    assert build.stale(source, source.parent) == []
    monkeypatch.setattr(build.paths, "PACKAGE", source.parent)
    assert build.stale(source, source.parent) == ["package"]
    source.write_text(SMALL + "\n# more\n", encoding="utf-8")
    assert "source" in build.stale(source, source.parent)
    assert build.stale(source.with_name("01_none.py"), source.parent) == ["source"]


def test_cell_ids_do_not_change_from_build_to_build(source):
    assert [c.id for c in build.read(source).cells] == [c.id for c in build.read(source).cells]


@pytest.mark.slow
def test_build_runs_in_a_fresh_kernel_and_reports(source, tmp_path):
    out = build.build(source, tmp_path / "out", given={"N": 2})
    notebook = nbformat.read(out, 4)
    assert "widgets" not in notebook.metadata and cleaning.WIDGET_VIEW not in out.read_text()
    assert notebook.metadata["lossless_lab"]["parameters"] == {"N": 2}
    page = report.page({"00_small": notebook, "01_broken": ValueError("2 < 3")})
    assert page.count("smollm2: 2 &lt;of&gt; 3, 无损") == 2, "in the table and in the notebook"
    assert "2 &lt; 3" in page and "IntSlider(" not in page


@pytest.mark.slow
def test_an_error_in_one_notebook_leaves_the_others(source, tmp_path, monkeypatch, capsys):
    broken = source.with_name("01_broken.py")
    broken.write_text(SMALL.replace("ipywidgets.IntSlider()", "1 / 0"), encoding="utf-8")
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build.models, "fetch", lambda name: None)
    monkeypatch.setattr(report.paths, "FIGURES", tmp_path / "figures")
    assert build.main(["report"]) == 1
    page = (tmp_path / "figures" / "report.html").read_text(encoding="utf-8")
    assert "ZeroDivisionError" in page and "smollm2: 3 &lt;of&gt; 3" in page
    assert "01_broken failed" in capsys.readouterr().err
    failed = tmp_path / "build" / "notebooks" / "01_broken.failed.ipynb"
    assert "ZeroDivisionError" in failed.read_text(), "what did run is kept"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_signal_stops_the_build_rather_than_the_notebook(source):
    """One interrupt, and neither a later notebook nor a kernel is left running."""
    mark = source.parent / "started"
    waiting = f"open({str(mark)!r}, 'a').write('x')\nimport time; time.sleep(300)"
    for name in ("00_small.py", "01_next.py"):
        source.with_name(name).write_text(SMALL.replace("ipywidgets.IntSlider()", waiting))
    script = (
        "import pathlib, sys; from notebooks import build; "
        f"build.SOURCES = build.paths.FIGURES = pathlib.Path({str(source.parent)!r}); "
        "build.models.fetch, build.ROOT = str, build.SOURCES; "
        "sys.exit(build.main(['report']))"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=build.ROOT, text=True)
    try:
        while not mark.exists() and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) != 0
    finally:
        process.kill()
    assert mark.read_text() == "x", "the second notebook was started"


def output(text):
    return nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell(
                "x", outputs=[nbformat.v4.new_output("stream", name="stdout", text=text)]
            )
        ]
    )


def test_the_checkout_s_own_path_is_made_relative(tmp_path):
    notebook = output(f"saved {tmp_path}/figures/a.png")
    cleaning.clean(notebook, root=tmp_path)
    assert notebook.cells[0].outputs[0].text == "saved ./figures/a.png"


@pytest.mark.parametrize("text", ["/home/ann/x", "in '/root/.cache'", "C:\\Users\\Ann", "/tmp/a"])
def test_any_other_path_of_a_machine_is_an_error(text, tmp_path):
    with pytest.raises(ValueError, match="path of this machine"):
        cleaning.clean(output(text), root=tmp_path)


@pytest.mark.parametrize("text", ["https://example.org/home/x", "1/tmp/2", "layers/mlp/opt/1"])
def test_what_only_looks_like_a_path_is_kept(text, tmp_path):
    cleaning.clean(output(text), root=tmp_path)


def test_progress_bars_are_dropped(tmp_path):
    notebook = output("before\n  0%|   | 0/3\r100%|###| 3/3\nafter\n")
    cleaning.clean(notebook, root=tmp_path)
    assert notebook.cells[0].outputs[0].text == "before\nafter\n"


# -- the notebooks of this project


@pytest.mark.parametrize("source", SOURCES, ids=by_stem)
def test_the_committed_notebook_is_of_this_source(source):
    changed = build.stale(source)
    assert "source" not in changed, f"{source.stem} is older than its source: make notebooks"
    if changed:
        warnings.warn(f"{source.stem}: {' and '.join(changed)} changed since", stacklevel=1)


@pytest.mark.parametrize("path", EXECUTED, ids=by_stem)
def test_the_committed_notebook_is_clean(path):
    assert path.stem in {s.stem for s in SOURCES}, "no source"
    text = path.read_text(encoding="utf-8")
    notebook = nbformat.reads(text, 4)
    nbformat.validate(notebook)
    assert len(text.encode()) <= build.MAX_BYTES
    assert "widgets" not in notebook.metadata and cleaning.WIDGET_VIEW not in text
    assert notebook.metadata["lossless_lab"]["parameters"] == {}
    kinds = [o.output_type for c in notebook.cells for o in c.get("outputs", [])]
    assert "error" not in kinds
    assert '"image/png"' in text, "no figure"
    counts = [c.execution_count for c in notebook.cells if c.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "run in order, in a fresh kernel"
    for where, shown in cleaning.texts(notebook):
        assert not cleaning.MACHINE_PATH.search(shown), where


@pytest.mark.parametrize("source", SOURCES, ids=by_stem)
def test_the_template(source):
    notebook = build.read(source)
    prose = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    assert notebook.cells[0].source.startswith("# ")
    assert build.parameters(notebook)
    assert re.search("^#+ .*verdict", prose, re.I | re.M) and "<details>" in prose
    assert re.search("^#+ .*exercises", prose, re.I | re.M)
    assert re.search("^#+ .*sources", prose, re.I | re.M)
    shape = cleaning.shape(notebook)
    assert shape["max_lines"] <= 15 and shape["median_lines"] <= 5, shape
    assert 0.35 <= shape["prose_share"] <= 0.65, shape


@pytest.mark.slow
@pytest.mark.parametrize("source", OFFLINE, ids=by_stem)
def test_runs_offline_on_the_tiny_pair(source, tmp_path, monkeypatch):
    """00 and 01 afresh; their HTML holds the verdict's text and a picture for each panel (B43)."""
    monkeypatch.setenv("LOSSLESS_LAB_FIGURES", str(tmp_path / "figures"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    known = build.parameters(build.read(source))
    out = build.build(source, tmp_path, given={"MODEL": "tiny-target"} if "MODEL" in known else {})
    notebook = nbformat.read(out, 4)
    verdicts = report.verdicts(notebook)
    assert verdicts, "nothing is put out under the heading Verdict"
    page = report.page({source.stem: notebook})
    assert all(v in page for v in verdicts)
    assert "data:image/png;base64," in page and "Slider(" not in page
    assert not re.findall(r'src="(?!data:)', page), "the report is one file"
    figures = {p.suffix for p in (tmp_path / "figures").rglob("*") if p.is_file()}
    assert {".png", ".svg", ".csv"} <= figures


def test_the_executed_file_is_plain_json():
    for path in EXECUTED:
        assert json.loads(path.read_text(encoding="utf-8"))["nbformat"] == 4

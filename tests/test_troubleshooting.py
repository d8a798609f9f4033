"""Notebook 10: each check fails without its remedy and holds with it."""

import re

import pandas as pd
import pytest

from lossless_lab import paths
from notebooks import build

NOTEBOOK = build.read(build.SOURCES / "10_troubleshooting.py")
HEADING = re.compile(r"^## (\d) · ", re.M)


def sections():
    """Code cells of each symptom, by its number; 0 for those before the first."""
    found, number = {0: []}, 0
    for cell in NOTEBOOK.cells:
        if cell.cell_type == "markdown":
            number = max([number, *map(int, HEADING.findall(cell.source))])
            if "## Verdict" in cell.source:
                return found
        else:
            found.setdefault(number, []).append(cell)
    return found


def tagged(cells, tag):
    return [c for c in cells if tag in c.metadata.get("tags", [])]


@pytest.fixture(scope="module")
def setting():
    """The names that every section finds, on the tiny pair alone."""
    names = {}
    for cell in sections()[0]:
        exec(cell.source, names)
        if tagged([cell], "parameters"):
            names["LARGER"] = ""
    return names


SLOW = [pytest.param(n, marks=pytest.mark.slow) for n in (2, 5)]


@pytest.mark.parametrize("number", [1, 3, 4, 6, 7, *SLOW], ids="symptom-{}".format)
def test_the_check_fails_without_the_remedy_and_holds_with_it(
    number, setting, tmp_path, monkeypatch
):
    monkeypatch.setattr(paths, "FIGURES", tmp_path)
    names, cells = dict(setting), sections()[number]
    (remedy,), (check,) = tagged(cells, "remedy"), tagged(cells, "check")
    assert cells.index(remedy) < cells.index(check)
    for cell in cells:
        if cell is remedy:
            with pytest.raises(AssertionError) as fault:
                exec(check.source, names)
            assert str(fault.value), "says what is wrong"
        exec(cell.source, names)


MACHINES = {
    "batch-8": {"assisted-by-tiny-draft": 0.68, "prompt-lookup": 0.79, "batch-8": 3.8},
    "assisted-by-tiny-draft": {"assisted-by-tiny-draft": 1.9, "batch-8": 1.3},
    "plain": {"assisted-by-tiny-draft": 1.1, "prompt-lookup": 0.9},
}


@pytest.mark.parametrize("wanted", MACHINES)
@pytest.mark.parametrize("load", [0.85, 1.0, 1.2])
def test_what_is_served_is_what_was_clearly_faster_and_load_does_not_flip_it(wanted, load, setting):
    """Speeds that no machine measured; `load` multiplies the ratios of the second measurement."""

    def speed_up(model, candidates, prompts, decoding, *, repeats=5, now=load):
        gains = {"reference": 1.0} | {n: MACHINES[wanted][n] * now for n in candidates}
        return pd.DataFrame({"side": [*gains], "speed_up": [*gains.values()]})

    cells, names = sections()[5], setting | {"speed_up": speed_up}
    exec(cells[0].source, names)
    names["measured"] = speed_up(None, MACHINES[wanted], [], None, now=1)
    for cell in tagged(cells, "remedy") + tagged(cells, "check"):
        exec(cell.source, names)
    assert names["served"] == wanted


def test_every_symptom_has_a_row_a_diagnosis_and_a_remedy():
    prose = "\n".join(c.source for c in NOTEBOOK.cells if c.cell_type == "markdown")
    numbers = [int(n) for n in re.findall(r"^\| \*\*(\d)\*\* ", prose, re.M)]
    assert numbers == [n for n in sections() if n] == list(range(1, 8))
    for part in HEADING.split(prose)[2::2]:
        for mark in ("**Symptom.**", "**Diagnosis", "**Remedy.**"):
            assert part.count(mark) == 1, (mark, part[:60])
    for name in re.findall(r"\]\((\w+)\.ipynb\)", prose):
        assert (build.SOURCES / f"{name}.py").exists(), name


def test_the_helper_that_shows_a_failure_cannot_pass_over_one(setting):
    def wrong():
        raise AssertionError("two of three")

    assert setting["failure"](wrong) == "FAILS: two of three"
    with pytest.raises(RuntimeError, match="nothing is wrong"):
        setting["failure"](lambda: None)

"""Notebook 03's panel in real JupyterLab in Chromium: the layer slider moved by key."""

import hashlib
import time

import pytest
from lab import CHROMIUM, Notebook, chromium, server, write_notebook

pytestmark = [pytest.mark.browser, pytest.mark.slow]
PANEL = """
from lossless_lab import models, mutants, panels
from lossless_lab.pipeline import Inspection
model = models.load("tiny-draft", dtype="bfloat16")
broken = mutants.MUTANTS["attention-scale"].apply(model, dose=0.5, layer=2)
subjects = {"broken": broken, "float32": models.load("tiny-draft")}
rows = {"a": list(range(3, 40)), "b": list(range(40, 77))}
panel = panels.layer_difference(Inspection(model, subjects, rows, n_twins=2))
panel
"""


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is missing: apt-get install chromium")
    folder = tmp_path_factory.mktemp("lab")
    write_notebook(folder / "layers.ipynb", PANEL)
    with server(folder) as address, chromium() as browser:
        yield Notebook(browser, address.format("layers.ipynb"))


def settle(notebook):
    """The text on the page, once the picture on it is the kernel's last one."""
    ask = "import hashlib; print(hashlib.sha256(panel.png).hexdigest())"
    for _ in range(100):
        wanted = notebook.execute(ask).strip()
        if hashlib.sha256(notebook.picture(0)).hexdigest() == wanted:
            return notebook.output(0).inner_text()
        time.sleep(0.1)
    raise AssertionError("the picture on the page is not the one that the kernel drew last")


def test_layer_and_candidate_say_where_the_drift_starts_and_who_is_nearer(opened, tmp_path):
    first = settle(opened)
    assert "Layer 2, attention: relative RMS" in first, "it opens where the drift starts"
    assert "at layer 2 (attention) leaves the noise band" in first
    slider = opened.slider(0, 0)
    slider.focus()
    slider.press("ArrowLeft")
    slider.press("ArrowLeft")
    assert "Layer 0, residual: equal, bit by bit" in settle(opened)
    slider.press("ArrowRight")
    slider.press("ArrowRight")
    moved = settle(opened)
    assert "Layer 2, " in moved and "bit by bit" not in moved
    assert "farther" in moved
    opened.output(0).locator("select").nth(0).select_option("float32")
    assert "nearer the truth" in settle(opened)
    opened.page.screenshot(path=str(tmp_path / "layer_difference.png"))

"""Notebook 03's panel in real JupyterLab in Chromium: the layer slider moved by key."""

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


def test_layer_and_candidate_say_where_the_drift_starts_and_who_is_nearer(opened, tmp_path):
    first = opened.settled()
    assert "Layer 2, attention: relative RMS" in first, "it opens where the drift starts"
    assert "at layer 2 (attention) leaves the noise band" in first
    slider = opened.slider(0, 0)
    slider.focus()
    slider.press("ArrowLeft")
    slider.press("ArrowLeft")
    opened.until("Layer 0, residual: equal, bit by bit")
    slider.press("ArrowRight")
    slider.press("ArrowRight")
    moved = opened.until("Layer 2, ")
    assert "bit by bit" not in moved
    assert "farther" in moved
    opened.output(0).locator("select").nth(0).select_option("float32")
    opened.until("nearer the truth")
    opened.page.screenshot(path=str(tmp_path / "layer_difference.png"))

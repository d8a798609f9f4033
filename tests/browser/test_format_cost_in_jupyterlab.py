"""Notebook 04's panel in real JupyterLab in Chromium: format, position and layer by key."""

import time

import pytest
from lab import CHROMIUM, Notebook, chromium, server, write_notebook

pytestmark = [pytest.mark.browser, pytest.mark.slow]
PANEL = """
from dataclasses import replace
from lossless_lab import models, optimizations, panels
from lossless_lab.pipeline import FormatCosts
from lossless_lab.prompts import read_documents
draft = models.load("tiny-draft")
once = optimizations.find("q4_0").apply(draft).model
formats = ("int8-channel", "int4-group32", "int4-channel", "q4_0")
panel = panels.format_cost(FormatCosts(once, read_documents()[:32], formats=formats, max_tokens=24))
panel
"""
FORMAT, GROUP, DOCUMENT = range(3)
POSITION, LAYER = range(2)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is missing: apt-get install chromium")
    folder = tmp_path_factory.mktemp("lab")
    write_notebook(folder / "formats.ipynb", PANEL)
    with server(folder) as address, chromium() as browser:
        yield Notebook(browser, address.format("formats.ipynb"))


def test_keys_choose_format_position_and_layer(opened, tmp_path):
    """What it costs, where, and at one position: without a mouse."""
    first = opened.settled()
    assert "int8-channel, 8." in first and "mean KL" in first and "Layer 1: worst matrix" in first
    menu = opened.output(0).locator("select").nth(FORMAT)
    menu.focus()
    menu.press("ArrowDown")
    assert menu.evaluate("e => e === document.activeElement"), "keys stay in the menu"
    menu.press("Enter")
    opened.until("int4-channel, 4.2")  # the group that was chosen stays
    groups = opened.output(0).locator("select").nth(GROUP)
    groups.focus()
    groups.press("ArrowUp")
    groups.press("Enter")
    opened.until("int4-group32, 4.5 bits per weight")
    opened.press(LAYER, "ArrowRight")
    opened.until("Layer 2: worst matrix")
    pictures = {opened.picture(0)}
    opened.press(POSITION, "ArrowRight", 5)
    for _ in range(50):
        if opened.execute("print(panel.state['position'])").strip() == "5":
            break
        time.sleep(0.1)
    opened.settled()
    pictures.add(opened.picture(0))
    assert len(pictures) == 2
    opened.page.screenshot(path=str(tmp_path / "format_cost.png"))


def test_weights_that_lay_on_the_grid_are_warned_about_and_errors_stay_in_sight(opened, tmp_path):
    menu = opened.output(0).locator("select").nth(FORMAT)
    menu.select_option("q4_0")
    shown = opened.until("WARNING: ")
    assert "matrices lay on this very grid before" in shown
    opened.page.screenshot(path=str(tmp_path / "warned.png"))
    opened.output(0).locator("select").nth(DOCUMENT).select_option(index=3)
    opened.settled()
    assert opened.execute("print(panel.error)").strip() == "None"
    menu.select_option("int8")
    assert "WARNING" not in opened.until("int8-channel, 8.")

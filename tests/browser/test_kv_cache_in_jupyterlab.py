"""Notebook 02's panel in real JupyterLab in Chromium: keys move it, and it says what fits."""

import time

import pytest
from lab import CHROMIUM, Notebook, chromium, server, write_notebook

pytestmark = [pytest.mark.browser, pytest.mark.slow]
PANEL = """
from lossless_lab.panels.kv_cache import kv_cache_sizing
panel = kv_cache_sizing()
panel
"""
CONTEXT, BATCH, GPUS, MEMORY = range(4)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is missing: apt-get install chromium")
    folder = tmp_path_factory.mktemp("lab")
    write_notebook(folder / "kv.ipynb", PANEL)
    with server(folder) as address, chromium() as browser:
        yield Notebook(browser, address.format("kv.ipynb"))


def test_context_and_batch_change_what_fits(opened):
    first = opened.settled()
    assert "Fits: the cache takes 4.00 GiB" in first  # 4 requests of 8,192 tokens x 128 KiB
    assert "Fits: the cache takes 8.00 GiB" in opened.press(CONTEXT, "ArrowRight")
    assert "Fits: the cache takes 16.00 GiB" in opened.press(BATCH, "ArrowRight")
    assert "Does not fit: the cache takes 64.00 GiB" in opened.press(CONTEXT, "ArrowRight", 2)
    opened.press(CONTEXT, "ArrowLeft", 3)
    assert "Fits: the cache takes 4.00 GiB" in opened.press(BATCH, "ArrowLeft")


def test_another_model_and_more_gpus(opened):
    opened.output(0).locator("select").nth(0).select_option("deepseek-r1")
    assert "exceed" in opened.settled() or "Does not fit" in opened.settled()
    latent = "512 + 64"
    assert latent in opened.settled()
    assert latent in opened.press(GPUS, "ArrowRight", 3)
    opened.output(0).locator("select").nth(0).select_option("smollm2-135m")
    wait_for(opened, "`tensor_parallel` 8 does not divide the 9 attention heads")
    opened.press(GPUS, "ArrowLeft", 3)
    assert "Fits" in wait_for(opened, "smollm2-135m")
    assert opened.execute("print(panel.error, panel.state['n_gpus'])").split() == ["None", "1"]


def wait_for(notebook, text):
    """The panel's text once it contains `text`."""
    output = notebook.output(0)
    for _ in range(100):
        shown = output.inner_text() + notebook.execute("print(panel.state['model'])")
        if text in shown and ("tensor_parallel" in text) == ("tensor_parallel" in shown):
            return shown
        time.sleep(0.1)
    raise AssertionError(f"{text!r} did not appear: {shown[-500:]}")


def test_keys_typed_in_a_menu_stay_in_it(opened):
    """JupyterLab would move to the next cell at an arrow, and turn this one to Markdown at `m`."""
    menu = opened.output(0).locator("select").nth(0)
    menu.focus()
    before = menu.input_value()
    menu.press("ArrowDown")
    assert menu.evaluate("e => e === document.activeElement")
    menu.press("Enter")
    opened.settled()
    assert menu.input_value() != before
    cell = "window.jupyterapp.shell.currentWidget.content.activeCell.model.type"
    menu.press("m")
    menu.press("Enter")
    opened.settled()
    assert menu.input_value().startswith("m")
    assert opened.page.evaluate(cell) == "code"
    assert menu.evaluate("e => e === document.activeElement")
    handle = opened.slider(0, CONTEXT)
    handle.focus()
    handle.press("m")
    assert opened.page.evaluate(cell) == "code"


def test_a_screen_reader_hears_values_and_what_the_picture_is(opened):
    handle = opened.slider(0, CONTEXT)
    handle.focus()
    handle.press("ArrowRight")
    for _ in range(50):
        said = handle.get_attribute("aria-valuetext")
        shown = opened.output(0).locator(".widget-readout").nth(0).inner_text()
        if said == shown:
            break
        time.sleep(0.1)
    assert said == shown and "," in said  # 16,384 rather than 5.0
    assert handle.get_attribute("aria-label") == "context (tokens)"
    assert "Chart" in opened.image(0).get_attribute("alt")
    handle.press("ArrowLeft")

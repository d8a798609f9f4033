"""The panels in real JupyterLab in Chromium: real keys move real sliders, errors are seen (B43)."""

import hashlib

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.slow]
LEVELS, COMPARE, RAISING, TWO = range(4)
NAMES = ("levels", "compared", "raising", "two")


def settle(notebook, cell: int) -> str:
    """Wait until the picture on the page is the kernel's; its hash."""
    notebook.settled(cell, NAMES[cell])
    return hashlib.sha256(notebook.picture(cell)).hexdigest()


def focus(notebook, cell: int, place: int):
    notebook.image(cell).scroll_into_view_if_needed()
    slider = notebook.slider(cell, place)
    slider.focus()
    slider.press("Home")
    settle(notebook, cell)
    return slider


def words(notebook) -> dict[str, str]:
    rows = notebook.output(LEVELS).locator("tbody tr").all()
    cells = [row.locator("td").all_inner_texts() for row in rows]
    return {row[0]: row[2] for row in cells}


@pytest.fixture(autouse=True)
def screenshot(notebook, tmp_path, request):
    yield
    notebook.page.screenshot(path=str(tmp_path / f"{request.node.name}.png"))


def test_each_slider_of_which_level_breaks_breaks_another_level(notebook):
    notebook.output(LEVELS).get_by_role("button", name="Reset").click()
    before = settle(notebook, LEVELS)
    assert words(notebook) == dict.fromkeys(("1a", "1b", "2", "3"), "PROVEN")

    notebook.slider(LEVELS, 0).press("ArrowRight")
    scaled = settle(notebook, LEVELS)
    assert scaled != before
    assert words(notebook) == {
        "1a": "DIFFERENT", "1b": "EQUIVALENT", "2": "DIFFERENT", "3": "EQUIVALENT",
    }  # fmt: skip

    notebook.slider(LEVELS, 0).press("ArrowLeft")
    notebook.slider(LEVELS, 1).press("ArrowRight")
    settle(notebook, LEVELS)
    assert words(notebook) == {
        "1a": "DIFFERENT", "1b": "EQUIVALENT", "2": "EQUIVALENT", "3": "EQUIVALENT",
    }  # fmt: skip

    notebook.slider(LEVELS, 1).press("ArrowLeft")
    for rule in ("PROVEN", "DIFFERENT", "DIFFERENT"):
        notebook.slider(LEVELS, 2).press("ArrowRight")
        settle(notebook, LEVELS)
        assert words(notebook) == {"1a": "PROVEN", "1b": "PROVEN", "2": rule, "3": "PROVEN"}

    notebook.output(LEVELS).get_by_role("button", name="Reset").click()
    assert settle(notebook, LEVELS) == before


def test_compare_moves_position_and_layer_and_escapes_the_verdict(notebook):
    output = notebook.output(COMPARE)
    layer = focus(notebook, COMPARE, 1)
    before = settle(notebook, COMPARE)
    layer.press("ArrowRight")
    moved = settle(notebook, COMPARE)
    assert moved != before
    focus(notebook, COMPARE, 0).press("ArrowRight")
    assert settle(notebook, COMPARE) != moved
    shown = output.locator("tbody td").all_inner_texts()
    assert shown[0] == "1" and shown[5] == "1"  # position and layer
    assert output.get_by_text("bfloat16 against float32").inner_text().endswith("DIFFERENT <b>")
    output.locator("select").nth(1).select_option("float16")
    output.get_by_text("float16 against float32: 2").wait_for()
    assert notebook.execute("print(compared.error)").strip() == "None"


def test_an_error_is_shown_in_the_panel_and_goes_when_it_is_over(notebook):
    slider, output = focus(notebook, RAISING, 0), notebook.output(RAISING)
    output.get_by_role("button", name="Break").click()
    output.get_by_text("RuntimeError: the button is <broken>").wait_for()
    assert output.get_by_text("about to fail").is_visible()
    for _ in range(3):
        slider.press("ArrowRight")
    output.get_by_text("ZeroDivisionError: n must not be <3>").wait_for()
    slider.press("ArrowRight")
    output.get_by_text("n is 4", exact=True).wait_for()
    assert output.get_by_text("ZeroDivisionError").count() == 0


@pytest.mark.parametrize("cell", [RAISING, TWO])
def test_thirty_quick_moves_end_on_the_last_with_few_pictures(notebook, cell):
    focus(notebook, cell, 0)
    notebook.watch(cell)
    start = int(notebook.execute(f"print({NAMES[cell]}.state['n'])"))
    for _ in range(30):
        notebook.page.keyboard.press("ArrowRight")
    notebook.output(cell).get_by_text(f"n is {start + 30}", exact=True).wait_for()
    settle(notebook, cell)
    keys, pictures = notebook.times()
    assert len(keys) == 30
    assert 1 <= len(pictures) <= 15


def test_no_figures_are_left_after_500_moves_in_the_kernel(notebook):
    code = """
import gc
import matplotlib.pyplot as plt
from matplotlib.figure import Figure as Kind
def count():
    gc.collect()
    return sum(type(o) is Kind for o in gc.get_objects()), len(plt.get_fignums())
before = count()
for i in range(500):
    raising.controls["n"].value = 10 + i
    raising.refresh()
print(before == count(), raising.text)
"""
    assert notebook.execute(code).strip() == "True n is 509"

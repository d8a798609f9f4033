"""Notebook 05's panel in real JupyterLab in Chromium: quality, temperature and rule by key."""

import pytest
from lab import CHROMIUM, Notebook, chromium, server, write_notebook

pytestmark = [pytest.mark.browser, pytest.mark.slow]
PANEL = """
import torch
from lossless_lab import models, panels
from lossless_lab.mutants.speculative import SPECULATIVE_MUTANTS
from lossless_lab.statistical.speculative import RULES
target, draft = models.load("tiny-target"), models.load("tiny-draft")
ids = torch.tensor([target.tokenizer("def mean(values):\\n    return sum(values)")["input_ids"]])
with torch.no_grad():
    logits = [model.network(ids).logits[0] for model in (target, draft)]
broken = SPECULATIVE_MUTANTS["resample-from-target"].build(1.0)
rules = {**RULES, broken.name: broken}
panel = panels.speculation(*logits, rules=rules, decode=target.tokenizer.decode, position=4)
panel
"""
POSITION, TEMPERATURE, TOP_K, TOP_P, QUALITY, GAMMA = range(6)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is missing: apt-get install chromium")
    folder = tmp_path_factory.mktemp("lab")
    write_notebook(folder / "speculation.ipynb", PANEL)
    with server(folder) as address, chromium() as browser:
        yield Notebook(browser, address.format("speculation.ipynb"))


def tokens_per_step(text):
    return float(text.split(" tokens per step")[0].split()[-1])


def test_a_newcomer_sees_that_a_poor_draft_is_slow_and_not_wrong(opened, tmp_path):
    own = opened.settled()
    poor = opened.press(QUALITY, "Home")
    perfect = opened.press(QUALITY, "End")
    for text in (own, poor, perfect):
        assert "exactly the target's law, TV 0" in text
    assert tokens_per_step(poor) < tokens_per_step(own) < tokens_per_step(perfect) == 5
    opened.press(QUALITY, "ArrowLeft", 5)
    for place in (TEMPERATURE, TOP_K, TOP_P, POSITION):
        moved = opened.press(place, "ArrowLeft", 2)
        assert "exactly the target's law, TV 0" in moved
    assert "(at most 9)" in opened.press(GAMMA, "End")
    opened.page.screenshot(path=str(tmp_path / "speculation.png"))


def test_the_broken_rule_shows_its_distance(opened):
    rule = opened.output(0).locator("select")
    rule.focus()
    rule.press("ArrowDown")
    assert "NOT the target's law" in opened.settled()
    rule.press("ArrowUp")
    assert "exactly the target's law" in opened.settled()
    assert opened.execute("print(panel.error)").strip() == "None"


def test_a_move_by_key_settles_soon(opened):
    """Function only: the picture comes; how soon is for the benchmark."""
    opened.image(0).scroll_into_view_if_needed()
    opened.watch(0)
    slider = opened.slider(0, QUALITY)
    slider.focus()
    for _ in range(3):
        slider.press("ArrowLeft")
    opened.settled()
    keys, pictures = opened.times()
    assert len(keys) == 3 and pictures

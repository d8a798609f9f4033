"""The panels without a browser: pure functions, artists in place, bursts, errors (B43)."""

import asyncio
import base64
import gc
import io
import math
import re

import ipywidgets
import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pandas as pd
import pytest
from cells import COMPARE, RAISING, WHICH_LEVEL_BREAKS
from matplotlib.figure import Figure
from PIL import Image

from lossless_lab import panels
from lossless_lab.panels.which_level_breaks import RULES, disturb, levels, output_law

TARGET, DRAFT = np.array([0.7, 0.2, 0.1]), np.array([0.2, 0.5, 0.3])


def counting_panel(**options):
    """A panel whose text is its number, and the list of numbers that it has computed."""
    computed = []

    def compute(*, n):
        computed.append(n)
        if n == 13:
            raise ZeroDivisionError("13 is <bad>")
        return panels.Content(text=f"n is {n}", frames={})

    def draw(figure, content, state):
        if not figure.axes:
            figure.add_axes((0.1, 0.1, 0.8, 0.8)).set_axis_off()
            figure.axes[0].plot([0, 1], [0, 1])
        figure.axes[0].lines[0].set_ydata([0, state["n"] / 600])

    panel = panels.Panel(
        controls={"n": ipywidgets.IntSlider(max=600)},
        compute=compute,
        draw=draw,
        figure=Figure(figsize=(1, 1), dpi=50),
        **options,
    )
    return panel, computed


def html_values(panel) -> str:
    return " ".join(child.value for child in panel.children if isinstance(child, ipywidgets.HTML))


def test_a_move_in_a_script_changes_picture_and_text_at_once():
    panel, computed = counting_panel()
    before = panel.png
    panel.controls["n"].value = 300
    assert panel.png != before and panel.text == "n is 300" and panel.state == {"n": 300}
    assert computed == [0, 300]
    assert Image.open(io.BytesIO(panel.png)).size == (50, 50)


def test_a_burst_on_a_running_loop_computes_few_states_and_always_the_last():
    panel, computed = counting_panel()

    async def burst():
        for n in range(1, 31):
            panel.controls["n"].value = n
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.3)

    asyncio.run(burst())
    assert computed[-1] == 30 and len(computed) < 12
    assert "n is 30" in html_values(panel)


def test_asking_for_the_text_before_the_loop_is_idle_gives_the_present_state():
    panel, computed = counting_panel()

    async def ask():
        panel.controls["n"].value = 7
        text = panel.text
        await asyncio.sleep(0.1)
        return text

    assert asyncio.run(ask()) == "n is 7"
    assert computed == [0, 7]


def test_500_moves_leave_no_figure_and_no_artist_behind():
    panel, _ = counting_panel()

    def count():
        gc.collect()
        figures = sum(type(item) is Figure for item in gc.get_objects())
        return figures, len(panel.figure.findobj()), len(plt.get_fignums())

    before = count()
    for n in range(500):
        panel.controls["n"].value = n + 20
    assert count() == before


def test_the_layout_is_frozen_after_the_first_drawing():
    figure = Figure(figsize=(3, 2), layout="constrained")

    def draw(figure, content, state):
        ax = figure.axes[0] if figure.axes else figure.add_subplot()
        ax.set_ylabel("tall\n" * state["n"])

    panel = panels.Panel(
        controls={"n": ipywidgets.IntSlider(value=1)},
        compute=lambda n: panels.Content(text="", frames={}),
        draw=draw,
        figure=figure,
    )
    place = figure.axes[0].get_position().bounds
    panel.controls["n"].value = 5
    assert figure.axes[0].get_position().bounds == place


def test_an_error_is_shown_escaped_with_the_last_picture_and_goes_when_it_is_over():
    panel, _ = counting_panel()
    picture = panel.png
    panel.controls["n"].value = 13
    assert "ZeroDivisionError: 13 is &lt;bad&gt;" in html_values(panel)
    assert panel.text == "ZeroDivisionError: 13 is <bad>" and panel.png == picture
    bundle = panel._repr_mimebundle_()
    assert "13 is &lt;bad&gt;" in bundle["text/html"] and "image/png" not in bundle
    panel.controls["n"].value = 14
    assert panel.error is None and "Zero" not in html_values(panel)


def test_a_handler_that_prints_and_raises_shows_both_in_the_panel(capsys):
    def click(panel):
        print("half <way>")
        raise RuntimeError("broken")

    panel, _ = counting_panel(actions={"Break": click})
    button = panel.children[0].children[-1]
    button.click()
    assert "half &lt;way&gt;" in html_values(panel) and "RuntimeError: broken" in html_values(panel)
    assert capsys.readouterr().out == ""
    assert panel.text == "n is 0"
    panel.controls["n"].value = 1
    assert "broken" not in html_values(panel)


def test_a_handler_that_moves_a_control_and_raises_keeps_its_error_in_sight():
    def click(panel):
        panel.controls["n"].value = 5
        raise RuntimeError("broken")

    async def act():
        panel, computed = counting_panel(actions={"Break": click})
        panel.children[0].children[-1].click()
        await asyncio.sleep(0.1)
        return panel, computed

    panel, computed = asyncio.run(act())
    assert "RuntimeError: broken" in html_values(panel) and "n is 5" in html_values(panel)
    assert computed == [0, 5]


def test_the_bundle_has_widget_picture_html_and_text():
    panel, _ = counting_panel()
    panel.controls["n"].value = 5
    bundle = panel._repr_mimebundle_()
    assert base64.b64decode(bundle["image/png"]) == panel.png
    assert bundle["image/png"] in bundle["text/html"] and "n is 5" in bundle["text/html"]
    assert bundle["text/plain"] == "n is 5"
    assert "application/vnd.jupyter.widget-view+json" in bundle


@pytest.mark.slow
def test_a_notebook_run_without_a_browser_keeps_picture_and_verdict_in_its_html():
    from nbclient import NotebookClient
    from nbconvert import HTMLExporter

    shown = [WHICH_LEVEL_BREAKS, COMPARE, RAISING, 'raising.controls["n"].value = 3\nraising']
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in shown])
    NotebookClient(notebook, timeout=120, kernel_name="python3", store_widget_state=False).execute()
    page, _ = HTMLExporter().from_notebook_node(notebook)
    assert len(re.findall("<img[^>]*data:image/png;base64", page)) == 3  # the last has its error
    assert "Kept: 1a logits bitwise equal; 1b same greedy token ids" in page
    assert "bfloat16 against float32: 2 (same sampling distribution): DIFFERENT &lt;b&gt;" in page
    assert "ZeroDivisionError: n must not be &lt;3&gt;" in page
    assert all(len(cell.outputs) == 1 for cell in notebook.cells)


# which_level_breaks


def arrays(n=200, vocab_size=40, seed=1):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (n, vocab_size)).astype(np.float32)
    draft = (logits + rng.normal(0, 1, logits.shape)).astype(np.float32)
    return logits, draft, rng.permuted(np.argsort(-logits, axis=1)[:, :4], axis=1)


def words(content) -> dict[str, str]:
    return dict(zip(content.table["level"], content.table["answer"], strict=True))


@pytest.mark.parametrize(
    "setting, expected",
    [
        ({}, ["PROVEN"] * 4),
        ({"rule": "correct residual"}, ["PROVEN"] * 4),
        ({"scale": 1.2}, ["DIFFERENT", "EQUIVALENT", "DIFFERENT", "EQUIVALENT"]),
        ({"noise": 1e-6}, ["DIFFERENT", "EQUIVALENT", "EQUIVALENT", "EQUIVALENT"]),
        ({"noise": 3.0}, ["DIFFERENT"] * 4),
        ({"rule": "resample from target"}, ["PROVEN", "PROVEN", "DIFFERENT", "PROVEN"]),
        ({"rule": "greedy, judged soft"}, ["PROVEN", "PROVEN", "DIFFERENT", "PROVEN"]),
    ],
)
def test_each_setting_breaks_the_levels_it_should(setting, expected):
    assert list(words(levels(*arrays(), **setting)).values()) == expected


def test_few_prompts_are_inconclusive_and_say_how_many_are_needed():
    content = levels(*arrays(n=50), scale=1.2)
    assert words(content)["1b"] == words(content)["3"] == "INCONCLUSIVE"
    needed = [math.ceil(math.log(0.05) / math.log(1 - margin)) for margin in (0.05, 0.02)]
    assert needed == [59, 149]
    for row, n in zip((1, 3), needed, strict=True):
        assert f"about {n} items needed" in content.table["what was seen"][row]
    assert words(levels(*arrays(n=59), scale=1.2))["1b"] == "EQUIVALENT"
    assert words(levels(*arrays(n=58), scale=1.2))["1b"] == "INCONCLUSIVE"
    assert "Open: 1b same greedy token ids" in content.text


@pytest.mark.parametrize("rule", RULES)
def test_output_law_equals_a_simulation_of_the_rule(rule):
    law = output_law(TARGET[None], DRAFT[None], rule=rule)[0]
    rng, n, counts = np.random.default_rng(RULES.index(rule)), 20_000, np.zeros(3)
    residual = np.maximum(TARGET - DRAFT, 0) / np.maximum(TARGET - DRAFT, 0).sum()
    for _ in range(n):
        token = rng.choice(3, p=DRAFT)
        if rule == "greedy, judged soft":
            token = 1
        if rule == "no draft":
            token = rng.choice(3, p=TARGET)
        elif rng.random() > TARGET[token] / DRAFT[token]:
            token = rng.choice(3, p=TARGET if rule == "resample from target" else residual)
        counts[token] += 1
    assert abs(law.sum() - 1) < 1e-12
    np.testing.assert_allclose(counts / n, law, atol=5 * np.sqrt(0.25 / n))


def test_output_law_of_the_published_cases():
    def law(rule):
        return output_law(TARGET[None], DRAFT[None], rule=rule)[0]

    np.testing.assert_allclose(law("greedy, judged soft"), [0.6, 0.4, 0], atol=1e-15)
    np.testing.assert_allclose(law("resample from target"), [0.55, 0.3, 0.15], atol=1e-15)
    np.testing.assert_allclose(law("correct residual"), TARGET, atol=1e-15)
    # An impossible draft token, and a draft that equals the target: no division by zero.
    certain = np.array([[1.0, 0.0, 0.0]])
    for rule in RULES:
        np.testing.assert_allclose(output_law(certain, certain, rule=rule), certain)
    with pytest.raises(ValueError, match="`rule` must be one of no draft"):
        law("lenient")


def test_the_stated_total_variation_is_numpy_s_and_the_worst_prompt_is_drawn():
    logits, draft, options = arrays()

    def softmax(x):
        e = np.exp(x.astype(float) - x.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)

    p, q = softmax(logits), softmax(draft)
    output = np.minimum(p, q) + (1 - np.minimum(p, q).sum(1, keepdims=True)) * p
    tv = np.abs(p - output).sum(1) / 2
    content = levels(logits, draft, options, rule="resample from target")
    stated = content.table["what was seen"][2]
    assert f"mean {tv.mean():.2g}, worst {tv.max():.2g}" in stated
    frame = content.frames["distribution"]
    assert set(frame["row"]) == {tv.argmax()}
    best = frame.iloc[0]
    assert best["reference_logprob"] == pytest.approx(np.log(p[tv.argmax()].max()))
    unreachable = levels(logits, draft, options, rule="greedy, judged soft")
    assert "some token never comes" in unreachable.table["what was seen"][2]


def test_disturb_leaves_every_bit_alone_at_rest_and_repeats_its_noise():
    logits = np.float32([[-0.0, 1.5, -2.0]])
    assert disturb(logits, scale=1.0, noise=0.0, seed=0).tobytes() == logits.tobytes()
    a, b = (disturb(logits, scale=1.0, noise=0.1, seed=3) for _ in range(2))
    assert a.tobytes() == b.tobytes() and a.dtype == np.float32
    assert disturb(logits, scale=1.0, noise=0.1, seed=4).tobytes() != a.tobytes()


def test_the_panel_shows_what_the_function_says_and_reset_brings_it_back():
    panel = panels.which_level_breaks(*arrays(), decode=lambda ids: f"\n{ids[0]}")
    first = panel.png
    panel.controls["scale"].value = 1.2
    panel.controls["rule"].value = "resample from target"
    expected = levels(*arrays(), **panel.state, decode=lambda ids: f"\n{ids[0]}")
    pd.testing.assert_frame_equal(panel.content.table, expected.table)
    assert panel.text == expected.text and "Broken: 1a logits bitwise equal" in panel.text
    artists = panel.figure.axes[0].get_children()
    panel.children[0].children[-1].click()
    assert panel.png == first and panel.state == {"scale": 1.0, "noise": 0.0, "rule": "no draft"}
    assert panel.figure.axes[0].get_children() == artists


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a, d, o: (a, d[:, :3], o), "`draft_logits` must be float32"),
        (lambda a, d, o: (a.astype(float), d, o), "`logits` must be float32"),
        (lambda a, d, o: (a, d, o[:3]), r"`option_ids` must be \[200, m\]; got \(3, 4\)"),
        (lambda a, d, o: (a * np.float32(np.nan), d, o), r"`logits` must be finite; it is nan at"),
    ],
)
def test_bad_arrays_are_named_in_the_panel_too(change, message):
    bad = change(*arrays())
    with pytest.raises(ValueError, match=message) as raised:
        levels(*bad)
    assert str(raised.value) in panels.which_level_breaks(*bad).text


# compare


class Source:
    """Two references; the second one has one candidate, shorter outputs and no layers."""

    asked = 0

    def pairs(self):
        return [("fp32", "fp16"), ("fp32", "bf16"), ("eager", "compiled")]

    def prompts(self, pair):
        return ["p1", "p2"] if pair[0] == "fp32" else ["p2"]

    def frames(self, pair, prompt_id):
        n = 8 if pair[0] == "fp32" else 3
        kl = np.full(n, 1e-3 if pair[1] == "fp16" else 1e-2)
        frame = pd.DataFrame({"position": range(n), "top1_agree": True, "total_variation": kl})
        frame = frame.assign(kl_reference_candidate_nats=kl, kl_candidate_reference_nats=kl)
        layers = pd.DataFrame({"layer": range(4), "module": ["residual"] * 3 + ["logits"]})
        layers["relative_rms"] = [0.0, 1e-3, 2e-3, 5e-4]
        return {"divergences": frame, **({"layers": layers} if n == 8 else {})}

    def distribution(self, pair, prompt_id, position):
        logs = np.log(np.roll([0.5, 0.3, 0.2], position))
        token = [f"<i>{prompt_id}", "$", "\n"]
        return pd.DataFrame({"token": token, "reference_logprob": logs, "candidate_logprob": logs})

    def verdict(self, pair):
        return f"{pair[1]} against {pair[0]}: <DIFFERENT>"


def test_compare_starts_on_the_first_pair_and_follows_each_choice():
    panel = panels.compare(Source())
    start = {"reference": "fp32", "candidate": "fp16", "prompt": "p1", "position": 0, "layer": 0}
    assert panel.state == start and panel.error is None
    pictures = [panel.png]
    for name, value in (("candidate", "bf16"), ("prompt", "p2"), ("position", 7), ("layer", 3)):
        panel.controls[name].value = value
        pictures.append(panel.png)
    assert len(set(pictures)) == len(pictures)
    row = panel.content.table.iloc[0]
    assert (row["position"], row["layer"]) == ("7", "logits")
    assert row["relative RMS difference"] == "0.0005"
    assert row["total variation"] == "0.01" and row["top token"] == "same"
    panel.controls["reference"].value = "eager"
    assert panel.error is None
    chosen = {"candidate": "compiled", "prompt": "p2", "position": 2, "layer": 0}
    assert panel.state == {"reference": "eager", **chosen}
    assert "layer" not in panel.content.table and panel.controls["layer"].disabled
    panel.controls["reference"].value = "fp32"
    assert panel.state["candidate"] == "fp16" and not panel.controls["layer"].disabled


def test_compare_shows_what_the_function_says_and_escapes_it():
    panel = panels.compare(Source())
    content = panels.comparison(Source(), **panel.state)
    assert panel.text == content.text == "fp16 against fp32: <DIFFERENT>"
    pd.testing.assert_frame_equal(panel.content.table, content.table)
    assert set(content.frames) == {"divergences", "layers", "distribution"}
    assert "&lt;DIFFERENT&gt;" in html_values(panel) and "<DIFFERENT>" not in html_values(panel)


def test_compare_moves_its_artists_in_place():
    panel = panels.compare(Source())
    before = [id(artist) for artist in panel.figure.axes[0].get_children()]
    n_artists = len(panel.figure.findobj())
    for i in range(10):
        panel.controls["position"].value, panel.controls["layer"].value = i % 8, i % 4
    assert [id(artist) for artist in panel.figure.axes[0].get_children()] == before
    assert len(panel.figure.findobj()) == n_artists


def test_a_source_that_fails_shows_its_error_and_an_empty_one_is_refused():
    class Failing(Source):
        def distribution(self, pair, prompt_id, position):
            if position == 1:
                raise FileNotFoundError("logits of p1 were not kept")
            return super().distribution(pair, prompt_id, position)

    panel = panels.compare(Failing())
    panel.controls["position"].value = 1
    assert panel.text == "FileNotFoundError: logits of p1 were not kept"
    panel.controls["position"].value = 2
    assert panel.error is None

    class Empty(Source):
        def pairs(self):
            return []

    with pytest.raises(ValueError, match="at least one"):
        panels.compare(Empty())

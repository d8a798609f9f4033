"""Notebook cells with panels on made-up data: what the browser tests and the benchmark open."""

WHICH_LEVEL_BREAKS = """
import numpy as np
from lossless_lab import panels
rng = np.random.default_rng(0)
logits = rng.normal(0, 3, (200, 512)).astype("float32")
draft = (logits + rng.normal(0, 1, logits.shape)).astype("float32")
options = rng.permuted(np.argsort(-logits, axis=1)[:, :4], axis=1)
levels = panels.which_level_breaks(logits, draft, options, decode=lambda ids: f" t{ids[0]}")
levels
"""

COMPARE = """
import pandas as pd, torch
from lossless_lab.statistical.divergences import distribution, divergences

class Source:
    names = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    def __init__(self):
        self.logits = torch.randn(32, 512, generator=torch.Generator().manual_seed(0)) * 3
    def pairs(self):
        return [("float32", name) for name in self.names]
    def prompts(self, pair):
        return ["qa-01", "误差-02"]
    def rounded(self, pair):
        return self.logits.to(self.names[pair[1]]).float()
    def frames(self, pair, prompt_id):
        layer = range(32)
        layers = pd.DataFrame({"layer": layer, "module": ["residual"] * 31 + ["logits"],
                               "relative_rms": [0.0] + [1e-3 * (i + 1) for i in layer][1:]})
        kept = divergences(self.logits, self.rounded(pair), prompt_id=prompt_id)
        return {"divergences": kept.frame, "layers": layers}
    def distribution(self, pair, prompt_id, position):
        token = lambda ids: "误\\n" if ids[0] % 7 == 0 else f" <b>{ids[0]}$"
        pair = self.logits[position], self.rounded(pair)[position]
        return distribution(*pair, tokenizer_decode=token)
    def verdict(self, pair):
        return f"{pair[1]} against {pair[0]}: 2 (same sampling distribution): DIFFERENT <b>"

compared = panels.compare(Source())
compared
"""

RAISING = """
from matplotlib.figure import Figure
import ipywidgets

def compute(*, n):
    if n == 3:
        raise ZeroDivisionError("n must not be <3>")
    return panels.Content(text=f"n is {n}", frames={})

def draw(figure, content, state):
    if not figure.axes:
        figure.add_axes((0.2, 0.2, 0.7, 0.7))
        figure.axes[0].plot([0, 1], [0, 1])
    figure.axes[0].set_title(content.text)

def click(panel):
    print("about to fail")
    raise RuntimeError("the button is <broken>")

raising = panels.Panel(
    controls={"n": ipywidgets.IntSlider(min=0, max=600, description="n")},
    compute=compute, draw=draw, figure=Figure(figsize=(4, 3), dpi=100),
    actions={"Break": click},
)
raising
"""

TWO_AXES = """
def draw_two(figure, content, state):
    if not figure.axes:
        for ax in figure.subplots(1, 2):
            ax.plot([0, 1], [0, 1])
            ax.set(xlabel="x (tokens)", ylabel="y (nats)", ylim=(0, 600))
    for ax in figure.axes:
        ax.lines[0].set_ydata([0, state["n"]])
    figure.axes[0].set_title(content.text)

two = panels.Panel(
    controls={"n": ipywidgets.IntSlider(min=4, max=600, description="n")},
    compute=compute, draw=draw_two, figure=Figure(figsize=(8, 3), dpi=100, layout="constrained"),
)
two
"""

"""Tidy DataFrame in, matplotlib Axes out; the only room that draws."""

from .distributions import distribution_bars, distribution_scatter
from .divergences import divergence_by_position, divergence_by_prompt, first_divergence
from .labels import token_label
from .layers import layer_drift
from .theme import COLOURS, PRESETS, axes, style

__all__ = [
    "COLOURS",
    "PRESETS",
    "axes",
    "distribution_bars",
    "distribution_scatter",
    "divergence_by_position",
    "divergence_by_prompt",
    "first_divergence",
    "layer_drift",
    "style",
    "token_label",
]

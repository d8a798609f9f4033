"""Tidy DataFrame in, matplotlib Axes out; the only room that draws."""

from .distributions import distribution_dots, distribution_scatter
from .divergences import divergence_by_position, divergence_by_prompt, first_divergence
from .labels import token_label
from .layers import layer_drift
from .numerical import drift_by_stage, error_triangle, flips, local_error, survival, ulp_bars
from .theme import COLOURS, PRESETS, axes, style

__all__ = [
    "COLOURS",
    "PRESETS",
    "axes",
    "distribution_dots",
    "distribution_scatter",
    "divergence_by_position",
    "divergence_by_prompt",
    "drift_by_stage",
    "error_triangle",
    "first_divergence",
    "flips",
    "layer_drift",
    "local_error",
    "style",
    "survival",
    "token_label",
    "ulp_bars",
]

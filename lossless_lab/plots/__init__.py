"""Tidy DataFrame in, matplotlib Axes out; the only room that draws."""

from .divergences import (
    distribution_dots,
    divergence_by_position,
    divergence_by_prompt,
    first_divergence,
)
from .labels import token_label
from .layers import layer_drift
from .numerical import drift_by_stage, error_triangle, flips, local_error, survival, ulp_bars
from .quantization import format_ladder, kl_tail, sensitivity_map
from .speculation import acceptance_picture, convergence, power_curves
from .tasks import margin_by_items, task_changes
from .theme import COLOURS, PRESETS, axes, style

__all__ = [
    "COLOURS", "PRESETS", "acceptance_picture", "axes", "convergence", "distribution_dots",
    "divergence_by_position", "divergence_by_prompt", "drift_by_stage", "error_triangle",
    "first_divergence", "flips", "format_ladder", "kl_tail", "layer_drift", "local_error",
    "margin_by_items", "power_curves", "sensitivity_map", "style", "survival", "task_changes",
    "token_label", "ulp_bars",
]  # fmt: skip

"""ipywidgets around pure functions; the only room that imports ipywidgets."""

from .base import Content, Panel
from .compare import compare, comparison
from .format_cost import cost, format_cost
from .layer_difference import difference, layer_difference
from .speculation import speculation
from .which_level_breaks import which_level_breaks

__all__ = [
    "Content", "Panel", "compare", "comparison", "cost",
    "difference", "format_cost", "layer_difference", "speculation", "which_level_breaks",
]  # fmt: skip

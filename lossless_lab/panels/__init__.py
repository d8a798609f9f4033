"""ipywidgets around pure functions; the only room that imports ipywidgets."""

from .base import Content, Panel
from .compare import Comparisons, compare, comparison
from .which_level_breaks import which_level_breaks

__all__ = ["Comparisons", "Content", "Panel", "compare", "comparison", "which_level_breaks"]

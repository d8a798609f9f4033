"""Which model: the bundled tiny pair, SmolLM2, any Hub id or folder."""

from lossless_lab.models.fetching import fetch
from lossless_lab.models.loading import Model, load
from lossless_lab.models.places import available, folder, gguf_file, is_present
from lossless_lab.models.planning import Plan, plan

__all__ = [
    "Model", "Plan", "available", "fetch", "folder", "gguf_file", "is_present", "load", "plan",
]  # fmt: skip

"""The names a notebook imports; each is loaded on first use, so importing this costs nothing."""

from __future__ import annotations

import difflib
import importlib
import typing

__version__ = "0.1.0"

# name -> room that defines it
_NAMES = {
    "Study": "pipeline",
    "check": "pipeline",
    "compile_drift": "pipeline",
    "Inspection": "pipeline",
    "kv_cache_bytes": "kv_cache",
    "noise_floor": "numerical.noise",
    "load": "models",
    "Decoding": "engines.decoding",
    "TransformersEngine": "engines.transformers_engine",
    "harmless_variants": "engines.variants",
    "record": "runs",
    "compare_tokens": "numerical.tokens",
    "compare_layers": "numerical.layers",
    "tensor_difference": "numerical.tensors",
    "referee": "numerical.referee",
    "against_referee": "numerical.referee",
    "twin": "numerical.twins",
    "divergences": "statistical.divergences",
    "distribution": "statistical.divergences",
    "kl_divergence": "statistical.divergences",
    "total_variation": "statistical.divergences",
    "output_law": "statistical.speculative",
    "tv_upper_bound": "statistical.equivalence",
    "judge_sampler": "statistical.sampler_verdict",
}
_ROOMS = (
    "engines",
    "figures",
    "kv_cache",
    "models",
    "mutants",
    "number_formats",
    "numerical",
    "optimizations",
    "panels",
    "paths",
    "pipeline",
    "plots",
    "prompts",
    "runs",
    "semantic",
    "statistical",
    "stats",
    "verdict",
)

__all__ = sorted([*_NAMES, *_ROOMS])


def __getattr__(name: str) -> typing.Any:
    """Import the room that defines `name`, hand the name out and keep it."""
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _NAMES:
        near = difflib.get_close_matches(name, __all__, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    value = getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

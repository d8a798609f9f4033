"""What is done to a model: the catalogue of optimisations under test.

An entry is one `Optimization` object in the ENTRIES of its file.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module

from lossless_lab.models.places import nearest
from lossless_lab.number_formats import FORMATS
from lossless_lab.optimizations import activations, adapters, pruning
from lossless_lab.optimizations import kv_compression as kv
from lossless_lab.optimizations import speculation as drafts
from lossless_lab.optimizations.caches import batch
from lossless_lab.optimizations.entry import Candidate, Optimization
from lossless_lab.optimizations.precision import cast
from lossless_lab.optimizations.quantization import quantized

_FILES = "precision compilation caches quantization kv_compression pruning adapters activations"
CATALOGUE: dict[str, Optimization] = {
    entry.name: entry
    for name in [*_FILES.split(), "speculation"]
    for entry in import_module(f"{__name__}.{name}").ENTRIES
}


# How entries with a parameter are named, in the order tried, and what makes them of it.
_FAMILIES: dict[str, Callable[[str], Optimization]] = {
    r"(.+) \(poisoned\)": lambda name: find(name).poisoned(),
    r"prompt-lookup-(\d+)": lambda n: drafts.prompt_lookup(int(n)),
    r"early-exit-(.+)": lambda share: drafts.early_exit(float(share)),
    r"assisted-by-(.+)": drafts.assisted,
    r"magnitude-(.+)": lambda percent: pruning.magnitude(float(percent) / 100),
    r"top-neurons-(.+)": lambda percent: pruning.top_neurons(float(percent) / 100),
    r"drop-layers-([\d-]+)": lambda layers: pruning.drop_layers(*map(int, layers.split("-"))),
    r"merge-adapters-(.+)": adapters.merged,
    r"(.+)-act-int8-dynamic": activations.dynamic,
    r"(.+)-act-int8-static": lambda fmt: activations.static({}, fmt),  # scales are in no name
    r"kv-kivi-int(\d)": lambda bits: kv.kv_compressed(kv._kivi(int(bits))),
    r"kv-(.+)": lambda fmt: kv.kv_compressed(kv._by_token(fmt)),
    r"(b?float\d+)": cast,
}


def find(name: str) -> Optimization:
    """The entry called `name`, one with a parameter of its own and any number format included.

    Raises
    ------
    KeyError
        For an unknown name, with the nearest known one.

    >>> find("bfloat16").level, find("prompt-lookup-10").name, find("magnitude-30").name
    ('2', 'prompt-lookup-10', 'magnitude-30')
    """
    if name in CATALOGUE:
        return CATALOGUE[name]
    if name.startswith("batch-") and name[6:].isdecimal():
        return batch(int(name[6:]))
    if name in FORMATS:
        return quantized(name)
    for pattern, make in _FAMILIES.items():
        with suppress(KeyError, ValueError):
            match = re.fullmatch(pattern, name)
            if match and (made := make(match[1])).name == name:
                return made
    hint = nearest(name, {**CATALOGUE, **FORMATS}) or "."
    known = f"{', '.join(CATALOGUE)}, batch-N, and number formats such as int2-group32"
    raise KeyError(f"no optimisation {name!r}{hint} Known: {known}")


__all__ = ["CATALOGUE", "Candidate", "Optimization", "batch", "cast", "find", "quantized"]

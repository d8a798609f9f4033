"""What is done to a model: the catalogue of optimisations under test.

An entry is one `Optimization` object in the ENTRIES of its file.
"""

from importlib import import_module

from lossless_lab.models.places import nearest
from lossless_lab.number_formats import FORMATS
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


def find(name: str) -> Optimization:
    """The entry called `name`; "batch-N" for any N, and any format of `number_formats`.

    Raises
    ------
    KeyError
        For an unknown name, with the nearest known one.

    >>> find("bfloat16").level
    '2'
    """
    if name in CATALOGUE:
        return CATALOGUE[name]
    if name.startswith("batch-") and name[6:].isdecimal():
        return batch(int(name[6:]))
    if name in FORMATS:
        return quantized(name)
    hint = nearest(name, {**CATALOGUE, **FORMATS}) or "."
    known = f"{', '.join(CATALOGUE)}, batch-N, and number formats such as int2-group32"
    raise KeyError(f"no optimisation {name!r}{hint} Known: {known}")


__all__ = ["CATALOGUE", "Candidate", "Optimization", "batch", "cast", "find", "quantized"]

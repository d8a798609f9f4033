"""HOW MUCH MEMORY a KV cache takes: geometry from the config, engine allocators, capacity."""

from lossless_lab.kv_cache.capacity import (
    Capacity,
    alternatives,
    capacity,
    compare,
    sweep,
    weights_bytes,
)
from lossless_lab.kv_cache.configs import CannotEstimate, models
from lossless_lab.kv_cache.geometry import Geometry, Layer, geometry
from lossless_lab.kv_cache.sizing import ENGINES, KVCacheSize, binary, engine, kv_cache_bytes

__all__ = [
    "ENGINES",
    "CannotEstimate",
    "Capacity",
    "Geometry",
    "KVCacheSize",
    "Layer",
    "alternatives",
    "binary",
    "capacity",
    "compare",
    "engine",
    "geometry",
    "kv_cache_bytes",
    "models",
    "sweep",
    "weights_bytes",
]

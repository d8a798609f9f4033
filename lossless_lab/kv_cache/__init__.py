"""HOW MUCH MEMORY a KV cache takes: geometry from the config, engine allocators, capacity."""

from .capacity import Capacity, activation_bytes, capacity, compare, sweep, weights_bytes
from .configs import models
from .engines import ENGINES, engine
from .geometry import Geometry, Layer, geometry
from .sizes import CannotEstimate
from .sizing import KVCacheSize, binary, kv_cache_bytes

__all__ = [
    "ENGINES", "CannotEstimate", "Capacity", "Geometry", "KVCacheSize", "Layer", "activation_bytes",
    "binary", "capacity", "compare", "engine", "geometry", "kv_cache_bytes", "models", "sweep",
    "weights_bytes",
]  # fmt: skip

"""What fits: requests and tokens in a memory budget, what would make it fit, and large sweeps."""

import bisect
import itertools
from dataclasses import asdict, dataclass, replace

import numpy as np
import pandas as pd

from lossless_lab.kv_cache.allocators import Request
from lossless_lab.kv_cache.checks import Count, Positive, Share, checks_options, counts, require
from lossless_lab.kv_cache.configs import bundled, names
from lossless_lab.kv_cache.engines import engine
from lossless_lab.kv_cache.formats import storage_format
from lossless_lab.kv_cache.geometry import geometry
from lossless_lab.kv_cache.sizes import CannotEstimate
from lossless_lab.kv_cache.sizing import binary, kv_cache_bytes
from lossless_lab.results import Result

LONGEST = 1 << 24  # tokens; a model that fits so many has no limit here


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity(Result):
    """One GPU's memory, split; and how many requests of this length, or tokens, are left room."""

    model: str
    memory_bytes: int
    weights_bytes: int
    overhead_bytes: int  # activations, framework, and what utilisation leaves unused
    cache_bytes: int  # of the requests asked for
    max_requests: int  # of this length
    max_seq_len: int | None  # at this batch size; None: longer than any limit
    seq_len: int

    @property
    def available_bytes(self) -> int:
        """What is left for the cache; negative where the weights alone do not fit."""
        return self.memory_bytes - self.weights_bytes - self.overhead_bytes

    @property
    def headroom_bytes(self) -> int:
        """What the requests leave free; negative where they do not fit."""
        return self.available_bytes - self.cache_bytes

    def to_frame(self) -> pd.DataFrame:
        """One row, with the two derived columns."""
        derived = {"available_bytes": self.available_bytes, "headroom_bytes": self.headroom_bytes}
        return pd.DataFrame([{**asdict(self), **derived}])

    def __str__(self):
        if self.available_bytes <= 0:
            return f"{self.model}: weights and overhead exceed {binary(self.memory_bytes)}"
        longest = "any" if self.max_seq_len is None else f"{self.max_seq_len:,}"
        return (
            f"{self.model}: {self.max_requests:,} requests of {self.seq_len:,} tokens;"
            f" longest at this batch {longest}; headroom {binary(self.headroom_bytes)}"
        )


@checks_options
def weights_bytes(config, *, dtype="bfloat16", tensor_parallel: Positive = 1) -> int:
    """Bytes of a bundled model's weights on one GPU: parameters x bytes / GPUs.

    Examples
    --------
    >>> weights_bytes("llama-3.1-8b")   # 8,030,261,248 parameters x 2 B
    16060522496
    """
    if config not in names():
        raise CannotEstimate("`weights` is needed: only a bundled name says how many parameters")
    elements = bundled()[config]["parameters"]
    return int(elements * storage_format(dtype).bits / 8 / tensor_parallel)


@checks_options
def activation_bytes(
    config, *, batch_size: Positive, prefill_tokens: Positive = 2048, dtype="bfloat16"
) -> int:
    """A rough peak: 20 hidden vectors per prefilled token, and float32 logits per request.

    No config determines it, since it depends on the kernels. It stands in until it is measured;
    notebook 02 shows how far off it was on a CPU.
    """
    model = geometry(config).outline
    hidden = 20 * prefill_tokens * model.hidden_size * storage_format(dtype).bits / 8
    return int(hidden) + 4 * batch_size * model.vocab_size


@checks_options
def capacity(
    config,
    *,
    memory_bytes: Positive,
    seq_len: Positive,
    batch_size: Positive = 1,
    weights: Count | None = None,
    weights_dtype="bfloat16",
    activations: Count | None = None,
    framework_bytes: Count = 1 << 30,
    utilization: Share = 0.9,
    tensor_parallel: Positive = 1,
    **cache,
) -> Capacity:
    """How much fits: memory x utilisation - weights - activations - framework >= cache.

    Parameters
    ----------
    config
        As for `geometry`; a bundled name also gives the weights.
    memory_bytes : int
        Memory of one GPU.
    seq_len, batch_size : int
        Tokens per request and requests at the same time.
    weights, activations, framework_bytes : int, optional
        Bytes on one GPU; activations are estimated where not given.
    utilization : float
        Share of the memory that the engine may use, in (0, 1].
    **cache
        Further arguments of `kv_cache_bytes`: dtype, engine, encoder_len, options.

    Examples
    --------
    >>> room = capacity("smollm2-135m", memory_bytes=2**31, seq_len=1024, weights=0, activations=0,
    ...                 framework_bytes=0, utilization=1.0, dtype="fp32", engine="vllm",
    ...                 block_size=128)
    >>> room.max_seq_len   # 2^31 B / 46,080 B per token, in whole blocks of 128
    46592
    """
    if weights is None:
        weights = weights_bytes(config, dtype=weights_dtype, tensor_parallel=tensor_parallel)
    if activations is None:
        activations = activation_bytes(config, batch_size=batch_size)
    shape = geometry(config)
    overhead = activations + framework_bytes + memory_bytes - int(memory_bytes * utilization)
    room = memory_bytes - weights - overhead

    def cache_bytes(n_tokens, n_requests):
        asked = {"seq_len": n_tokens, "batch_size": n_requests, "tensor_parallel": tensor_parallel}
        return kv_cache_bytes(shape, **asked, **cache).bytes

    longest = _largest(lambda n: cache_bytes(n, batch_size) <= room)
    return Capacity(
        model=config if isinstance(config, str) else shape.model_type, seq_len=seq_len,
        memory_bytes=memory_bytes, weights_bytes=weights, overhead_bytes=overhead,
        cache_bytes=cache_bytes(seq_len, batch_size),
        max_requests=_largest(lambda n: cache_bytes(seq_len, n) <= room),
        max_seq_len=None if longest == LONGEST else longest,
    )  # fmt: skip


def _largest(fits) -> int:
    """The largest n up to LONGEST for which a monotone condition holds; 0 if none."""
    return bisect.bisect_left(range(1, LONGEST + 1), True, key=lambda n: not fits(n))


def compare(configs, *, dtypes=("bfloat16",), tensor_parallels=(1,), **options) -> pd.DataFrame:
    """What would fit: `capacity` of each model with each dtype and number of GPUs, one row each.

    A combination that is not possible has the reason in its last column. `options` are those of
    `capacity`.
    """
    rows = []
    for config, dtype, n_gpus in itertools.product(configs, dtypes, tensor_parallels):
        row = {"model": str(config), "dtype": str(dtype), "tensor_parallel": n_gpus, "reason": ""}
        try:
            found = capacity(config, dtype=dtype, tensor_parallel=n_gpus, **options)
            row |= found.to_frame().iloc[0].to_dict() | {"fits": found.headroom_bytes >= 0}
        except ValueError as error:
            row |= {"fits": False, "reason": str(error)}
        rows.append(row)
    frame = pd.DataFrame(rows).reindex(columns=[*_COLUMNS])
    return frame.astype(_COLUMNS)


_COLUMNS = (
    dict.fromkeys(("model", "dtype"), "str")
    | {"tensor_parallel": int, "fits": bool}
    | dict.fromkeys(("max_requests", "max_seq_len", "weights_bytes", "cache_bytes"), "Int64")
    | {"headroom_bytes": "Int64", "reason": "str"}
)


@checks_options
def sweep(
    configs,
    *,
    seq_lens,
    batch_sizes,
    dtypes,
    engine_name=None,
    tensor_parallel: Positive = 1,
    encoder_len: Positive | None = None,
    **options,
) -> pd.DataFrame:
    """Cache bytes of every combination, as one frame: models x dtypes x lengths x batches.

    Parameters
    ----------
    configs : sequence
        Bundled names, or anything `geometry` takes.
    seq_lens, batch_sizes : sequences of int
    dtypes : sequence of str
    engine_name, tensor_parallel, encoder_len, **options
        As in `kv_cache_bytes`, where the first is called `engine`.

    Returns
    -------
    DataFrame
        model, dtype (categorical), seq_len, batch_size (int32), cache_bytes (int64).
    """
    lengths = counts("seq_lens", seq_lens)[:, None]
    batches = counts("batch_sizes", batch_sizes)[None, :]
    rules = engine(engine_name, **options)
    models = [c if isinstance(c, str) else geometry(c).model_type for c in configs]
    distinct = len(set(models)) == len(models)
    require(distinct, f"`configs` must have distinct names; received {', '.join(models)}")
    formats = [rules.formats_of(dtype) for dtype in dtypes]
    cells = lengths.size * batches.size
    total = np.zeros((len(models), len(formats), cells), dtype=np.int64)
    for i, config in enumerate(configs):
        (shape,) = rules.with_draft(geometry(config), None)
        for j, (key, value) in enumerate(formats):
            request = Request(
                seq_len=lengths, n_sequences=batches, tensor_parallel=tensor_parallel,
                key_format=key, value_format=value,
                encoder_len=encoder_len or shape.outline.encoder_len,
            )  # fmt: skip
            most = replace(request, seq_len=int(lengths.max()), n_sequences=int(batches.max()))
            largest = sum(part.bytes for part in rules.parts(shape, most))
            require(largest < 2**63, f"the largest cache of {models[i]} exceeds int64")
            for part in rules.parts(shape, request):
                total[i, j] += np.broadcast_to(part.bytes, (lengths.size, batches.size)).ravel()
    blocks = len(models) * len(formats)
    codes = np.repeat(np.arange(blocks, dtype=np.int32), cells)
    return pd.DataFrame(
        {
            "model": pd.Categorical.from_codes(codes // len(formats), models),
            "dtype": pd.Categorical.from_codes(codes % len(formats), [str(d) for d in dtypes]),
            "seq_len": np.tile(np.repeat(lengths.ravel().astype(np.int32), batches.size), blocks),
            "batch_size": np.tile(batches.ravel().astype(np.int32), blocks * lengths.size),
            "cache_bytes": total.ravel(),
        }
    )

"""What a model will need on this machine, in memory and time, before anything long starts."""

import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import psutil

from lossless_lab.models import places
from lossless_lab.models.fetching import HUB_TEXT_FILES, fetch_from_hub
from lossless_lab.results import Result

GIB = 2**30
SPARE = 0.9  # share of the free memory that weights and cache may take


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Result):
    """Memory and time of a generation job; its sizes are those asked for, or the ones that fit."""

    weights_bytes: int
    cache_bytes: int
    available_bytes: int
    time_s: float  # inf where nothing fits
    batch_size: int
    n_prompts: int
    n_tokens: int
    warning: str  # "" where everything fits as asked

    def __str__(self) -> str:
        size = f"{self.n_prompts} prompts x {self.n_tokens} tokens, batch {self.batch_size}"
        memory = (
            f"weights {self.weights_bytes / GIB:.2f} GiB + cache {self.cache_bytes / GIB:.2f} GiB "
            f"of {self.available_bytes / GIB:.1f} GiB free"
        )
        text = f"{size}: about {self.time_s:.0f} s; {memory}"
        return f"{text}. {self.warning}" if self.warning else text


def plan(
    model, n_prompts, n_tokens, batch_size=1, *, prompt_len=64, dtype="float32", limit_s=600.0
) -> Plan:
    """Memory and time that a job will take here, and a smaller one where it would not fit.

    Memory comes from the config alone: the network is built without storage and asked for its
    cache; activations and kept logits come on top, for which a tenth of the free memory is left.
    Time comes from a short probe: one matrix product in that dtype, on that device, with as many
    rows, taken for the speed of all weights.

    Parameters
    ----------
    model : Model, str, Path or transformers config
        A loaded model, or a name, folder or config whose weights are not loaded.
    n_prompts, n_tokens, batch_size, prompt_len : int
        Prompts in all, new tokens per prompt, prompts per batch, tokens per prompt.
    dtype : str
        The dtype to load in; a loaded model's own is used instead.
    limit_s : float
        Seconds above which fewer prompts, then fewer tokens, are proposed.

    Returns
    -------
    Plan

    Warns
    -----
    UserWarning
        With `Plan.warning`, where the job does not fit as asked.
    """
    for parameter, value in (("n_prompts", n_prompts), ("n_tokens", n_tokens)):
        if value < 1:
            raise ValueError(f"`{parameter}` must be at least 1; got {value}")
    network = getattr(model, "network", None)
    config = _config(model) if network is None else network.config
    dtype = str(dtype if network is None else network.dtype).removeprefix("torch.")
    weights_bytes, row_bytes = memory(config, dtype, 1, prompt_len + n_tokens)
    device = "cpu" if network is None else network.device
    free = free_bytes(device)
    room = SPARE * free - (weights_bytes if network is None else 0)
    fits = min(batch_size, int(room // max(row_bytes, 1)))
    notes, time_s = [], float("inf")
    if fits < 1:
        fits = n_prompts = n_tokens = 0
        notes = [f"not even one prompt fits: {_too_large(weights_bytes, free, dtype)}"]
    else:
        if fits < batch_size:
            notes = [f"the cache of batch {batch_size} does not fit, that of batch {fits} does"]
        prefill_s, step_s = _matrix_times(weights_bytes, dtype, device, fits, prompt_len)

        def seconds(n_prompts, n_tokens):
            return -(-n_prompts // fits) * (prefill_s + n_tokens * step_s)

        if (asked_s := seconds(n_prompts, n_tokens)) > limit_s:
            n_prompts = max(min(n_prompts, fits), int(n_prompts * limit_s / asked_s) // fits * fits)
            per_batch_s = limit_s / -(-n_prompts // fits)
            n_tokens = max(1, min(n_tokens, int((per_batch_s - prefill_s) / step_s)))
            notes.append(
                f"as asked it takes about {asked_s:.0f} s, over the limit of {limit_s:.0f} s: "
                f"{n_prompts} prompts x {n_tokens} tokens are proposed"
            )
        time_s = seconds(n_prompts, n_tokens)
    if notes:
        warnings.warn("; ".join(notes), stacklevel=2)
    return Plan(
        weights_bytes=weights_bytes,
        cache_bytes=max(fits, 1) * row_bytes,
        available_bytes=free,
        time_s=time_s,
        batch_size=fits,
        n_prompts=n_prompts,
        n_tokens=n_tokens,
        warning="; ".join(notes),
    )


def memory(config, dtype, batch_size, seq_len) -> tuple[int, int]:
    """Bytes of the weights and of the KV cache, from the network itself built without storage.

    Examples
    --------
    The cache of a default Llama-2-7B in float16 takes 2 x 32 x 4,096 x 2 B = 512 KiB a token.

    >>> from transformers import LlamaConfig
    >>> weights_bytes, cache_bytes = memory(LlamaConfig(), "float16", 2, 10)
    >>> cache_bytes // 2**10 // 20, weights_bytes // 2**20
    (512, 12852)
    """
    import torch

    network = _without_storage(config, dtype)
    ids = torch.zeros(batch_size, seq_len, dtype=torch.long, device="meta")
    with torch.no_grad():
        output = network(input_ids=ids, use_cache=True)
    layers = output["cache" if "cache" in output else "past_key_values"].layers
    states = (getattr(layer, name, None) for layer in layers for name in ("keys", "values"))
    held = sum(state.nbytes for state in states if isinstance(state, torch.Tensor))
    return network.get_memory_footprint(), held


def free_bytes(device="cpu") -> int:
    """Memory that can still be taken: the GPU's, or the system's within a container's limit.

    Parameters
    ----------
    device : str or torch.device
        "auto" adds all GPUs and the system together.
    """
    import torch

    if device != "auto" and torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    gpus = range(torch.cuda.device_count()) if device == "auto" else ()
    on_gpus = sum(torch.cuda.mem_get_info(gpu)[0] for gpu in gpus)
    return on_gpus + min(psutil.virtual_memory().available, _container_rest())


def refuse_if_too_large(folder, dtype, device) -> None:
    """Raise MemoryError before loading weights that exceed the free memory of the device."""
    needed = _without_storage(_config(folder), dtype).get_memory_footprint()
    free = free_bytes(device)
    if needed > SPARE * free:
        raise MemoryError(_too_large(needed, free, dtype))


def refuse_if_beyond(needed_bytes, what) -> None:
    """Raise ValueError where `what` takes more than half of the memory that is free."""
    free = free_bytes()
    if needed_bytes > free / 2:
        raise ValueError(
            f"{what} take {needed_bytes / GIB:,.1f} GiB, more than half of the "
            f"{free / GIB:.1f} GiB at hand; use fewer prompts, samples or tokens"
        )


def _without_storage(config, dtype):
    """The network on torch's meta device: shapes and dtypes, no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def _too_large(weights_bytes, free, dtype) -> str:
    half = "" if dtype.endswith("16") else f"; dtype='bfloat16' takes {weights_bytes / 2 / GIB:.1f}"
    return (
        f"the weights take {weights_bytes / GIB:.1f} GiB in {dtype} and {free / GIB:.1f} GiB are "
        f"free{half}; smollm2 takes 0.5 GiB"
    )


def _config(source):
    """The config of a name, folder or Hub id (fetched alone); a config is handed back."""
    from transformers import AutoConfig

    if not isinstance(source, str | Path):
        return source
    try:
        folder = places.folder(source)
    except FileNotFoundError:  # a Hub id without a snapshot here
        folder = fetch_from_hub(source, HUB_TEXT_FILES)
    return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def _matrix_times(weights_bytes, dtype, device, batch_size, prompt_len) -> tuple[float, float]:
    """Seconds of a prefill and a step if all weights multiplied as fast as one 2,048 x 2,048."""
    import torch

    matrix = torch.ones(2048, 2048, dtype=getattr(torch, dtype), device=device)

    def seconds(n_rows):
        rows = torch.ones(min(n_rows, 32), 2048, dtype=matrix.dtype, device=device)
        (rows[:1] @ matrix).sum().item()  # warm-up
        started = time.perf_counter()
        (rows @ matrix).sum().item()  # waits for the device
        elapsed = time.perf_counter() - started
        return elapsed * n_rows / len(rows) * weights_bytes / matrix.nbytes

    return seconds(batch_size * prompt_len), seconds(batch_size)


def _container_rest() -> float:
    """What a Linux container's limit leaves to this process; inf where there is none."""
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):  # not Linux, no group, or "max"
        return float("inf")
    return limit - psutil.Process().memory_info().rss

"""How far twins and other re-orderings move bf16 logits, and which roundings make them differ."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lossless_lab import models, paths
from lossless_lab.numerical.capture import forward, model_inputs
from lossless_lab.numerical.noise import centred_rms
from lossless_lab.numerical.twins import twin

TABLE = paths.DATA / "calibration" / "twins.csv"
TEXT = paths.DATA / "models" / "held_out.txt"
LEVELS = (0.5, 0.9, 0.99)
# Attentions in float32 that round nothing but what is named, and their output.
ROUNDED = {"float32 attention": (), "scores rounded": ("scores",), "weights rounded": ("weights",)}


def attention(rounded: tuple[str, ...]) -> Callable:
    """Causal attention without pads, in float32; what is named is rounded to the model's dtype."""

    def forward(module, query, key, value, attention_mask, scaling=None, **_):
        def stage(name: str, x: torch.Tensor) -> torch.Tensor:
            return x.to(query.dtype).float() if name in rounded else x

        each = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(each, 1).float() for x in (key, value))
        scores = stage("scores", stage("scores", query.float() @ key.transpose(2, 3)) * scaling)
        n, m = scores.shape[-2:]
        seen = torch.ones(n, m, dtype=torch.bool).tril(m - n)
        weights = stage("weights", scores.masked_fill(~seen, -torch.inf).softmax(-1))
        return (weights @ value).to(query.dtype).transpose(1, 2).contiguous(), None

    return forward


for _name, _rounded in ROUNDED.items():
    ALL_ATTENTION_FUNCTIONS.register(_name, attention(_rounded))
    ALL_MASK_ATTENTION_FUNCTIONS.register(_name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def cached(network: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Logits of decoding one token at a time."""
    given, steps = {}, []
    with torch.no_grad():
        for t in range(ids.shape[1]):
            out = network(input_ids=ids[:, t : t + 1], use_cache=True, **given)
            given = {"cache": out["cache"]}
            steps.append(out.logits)
    return torch.cat(steps, 1)


def split_sums(network: nn.Module, ids: torch.Tensor, pieces: int = 3) -> torch.Tensor:
    """Every nn.Linear as a sum of partial products, rounded once at its end as before."""
    network = copy.deepcopy(network)

    def hook(module, args, output):
        parts = zip(args[0].chunk(pieces, -1), module.weight.chunk(pieces, -1), strict=True)
        return sum(x.float() @ w.float().T for x, w in parts).to(output.dtype)

    for module in network.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(hook)
    return forward(network, model_inputs(ids, None))


def with_kernel(network: nn.Module, kernel: str) -> nn.Module:
    """A copy with another attention."""
    network = copy.deepcopy(network)
    network.set_attn_implementation(kernel)
    return network


def quantiles(network: nn.Module, ids: torch.Tensor, *, n_twins: int) -> pd.DataFrame:
    """Quantiles over positions of the centred RMS, and their multiples of those of twins.

    Of each re-ordering against the fused kernel, and, within the float32 attention, of twins and
    of decoding with a cache: there nothing but the order differs.
    """
    inputs, exact = model_inputs(ids, None), with_kernel(network, "float32 attention")
    family = [twin(network, seed=seed) for seed in range(n_twins)]

    def run(subject: nn.Module) -> torch.Tensor:
        return forward(subject, inputs).flatten(0, 1)

    base, same = run(network), run(exact)
    moved = {
        "twins": np.concatenate([centred_rms(base, run(x)) for x in family]),
        "split sums": centred_rms(base, split_sums(network, ids).flatten(0, 1)),
        "eager": centred_rms(base, run(with_kernel(network, "eager"))),
        **{name: centred_rms(base, run(with_kernel(network, name))) for name in ROUNDED},
        "cached": centred_rms(base, cached(network, ids).flatten(0, 1)),
        "float32 attention: twins": np.concatenate(
            [centred_rms(same, run(with_kernel(x, "float32 attention"))) for x in family]
        ),
        "float32 attention: cached": centred_rms(same, cached(exact, ids).flatten(0, 1)),
    }
    rows = {name: np.quantile(x, LEVELS) for name, x in moved.items()}
    frame = pd.DataFrame(rows, index=[f"q{100 * level:.0f}" for level in LEVELS]).T
    ratios = (frame / frame.loc["twins"]).add_suffix("_over_twins")
    return frame.join(ratios).rename_axis("compared").reset_index()


def code() -> str:
    """Hash of what was run."""
    parts = (attention, cached, split_sums, quantiles, twin, centred_rms)
    return hashlib.sha256("".join(map(inspect.getsource, parts)).encode()).hexdigest()[:12]


def ids_of(model: models.Model, n_rows: int, seq_len: int) -> torch.Tensor:
    """[n_rows, seq_len] of held-out text."""
    ids = model.tokenizer(TEXT.read_text(encoding="utf-8"), verbose=False)["input_ids"]
    return torch.tensor(ids[: n_rows * seq_len]).view(n_rows, seq_len)


def calibrate() -> pd.DataFrame:
    """The tiny model, 16 rows of 128 tokens, six twins."""
    model = models.load("tiny-target", dtype="bfloat16")
    table = quantiles(model.network, ids_of(model, 16, 128), n_twins=6).assign(code=code())
    table.to_csv(TABLE, index=False, float_format="%.4g")
    return table

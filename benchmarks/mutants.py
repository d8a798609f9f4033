"""Smallest dose of each numerical mutant that is told apart from the reference's own noise."""

from __future__ import annotations

import copy
import hashlib
import inspect
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from scipy.special import softmax
from torch import nn
from transformers import MistralConfig, MistralForCausalLM

from lossless_lab import models, paths, prompts
from lossless_lab.engines.decoding import Decoding
from lossless_lab.engines.padding import pad
from lossless_lab.engines.protocol import Completion
from lossless_lab.engines.transformers_engine import TransformersEngine
from lossless_lab.mutants import (
    MUTANTS,
    Mutant,
    NotApplicable,
    masks,
    mutant,
    numerical,
    positions,
)
from lossless_lab.numerical.capture import capture, decoder_layers
from lossless_lab.numerical.layers import compare_layers
from lossless_lab.numerical.noise import NoiseFloor, centred_rms, noise_floor, ulp_of
from lossless_lab.pipeline.controls import measured_floor
from lossless_lab.pipeline.recognition import as_subject
from tests.conftest import build_g0, build_t0

TABLE = paths.DATA / "calibration" / "mutants.csv"
LENGTHS = (4, 6, 7, 8, 9, 10, 12, 14)  # of the prompts, around the window of 8
N_TOKENS = 8
N_VARIANTS = 24  # of them at least 19 are distinct in float32
DTYPES = ("float32", "bfloat16")
LAYER_VARIANTS = tuple((rows, extra, kernel) for rows in (1, 2, 4, 8) for extra in (0, 1, 3, 8)
                       for kernel in ("sdpa", "eager"))[1:20]  # fmt: skip


def build_window(dtype: torch.dtype = torch.float32) -> nn.Module:
    """T0's sizes as a Mistral with a sliding window of 8 keys."""
    config = {k: v for k, v in build_t0().config.to_dict().items() if k != "model_type"}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MistralForCausalLM(MistralConfig(**config | {"sliding_window": 8}))
    return model.eval().to(dtype)


SUBJECTS: dict[str, Callable[[torch.dtype], nn.Module]] = {
    "T0": build_t0,
    "T0, window 8": build_window,
    "G0": lambda dtype: build_g0().to(dtype),
    "tiny-target": lambda dtype: models.load("tiny-target", dtype=dtype).network,
    "smollm2": lambda dtype: models.load("smollm2", dtype=dtype).network,
}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A reference with its outputs, its floor, and the noise of each of its layers."""

    network: nn.Module
    completions: list[Completion]
    logits: torch.Tensor  # [positions, vocab_size]
    floor: NoiseFloor
    layer_noise: np.ndarray  # [n_layers], RMS after each block

    def detects(self, network: nn.Module) -> tuple[bool, float]:
        """Does some position pass max(floor, 1 ULP), as level 1c asks? And the largest multiple."""
        rms = centred_rms(self.logits, along(network, self.completions))
        ulp = ulp_of(self.logits.amax(-1).numpy(), self.network.dtype)
        multiple = float(np.max(rms / np.maximum(ulp, self.floor.level)))
        return not multiple <= 1, multiple

    def first_noisy_layer(self, network: nn.Module) -> int | None:
        """First block after which the drift passes the noise of that block; None if none does."""
        ids, mask = rectangle(self.completions)
        drift = compare_layers(self.network, network, ids, attention_mask=mask).frame
        passed = ~(drift["rms_difference"].to_numpy()[1:-1] <= self.layer_noise)
        return 1 + int(passed.argmax()) if passed.any() else None


def engine_of(network: nn.Module) -> TransformersEngine:
    """All prompts in one ragged batch, decoded with a cache: every mutant's path is taken."""
    return TransformersEngine(network, batch_size=len(LENGTHS), keep_logits=True)


def rows_for(name: str, network: nn.Module) -> list[list[int]]:
    """Random ids for random models; the beginnings of the evaluation prompts for trained ones."""
    if not models.places.is_named(name):
        rng = np.random.default_rng(0)
        return [rng.integers(3, network.config.vocab_size, n).tolist() for n in LENGTHS]
    asked = prompts.tokenize(prompts.read(), models.load(name))
    long = [p.ids for p in asked if len(p.ids) >= max(LENGTHS)]
    return [list(ids[:n]) for ids, n in zip(long, LENGTHS, strict=False)]


def subject(name: str, dtype: str) -> Subject:
    """Build a reference and measure its floor and the noise of its layers."""
    network = SUBJECTS[name](getattr(torch, dtype))
    decoding = Decoding(max_new_tokens=N_TOKENS, stop_token_ids=())
    rows = rows_for(name, network)[:: 2 if name == "smollm2" else 1]  # half of them, for time
    completions = engine_of(network).generate(rows, decoding, seed=0)
    return Subject(
        network=network,
        completions=completions,
        logits=torch.cat([c.logits for c in completions]),
        floor=measured_floor(as_subject(engine_of(network)), completions, n_variants=N_VARIANTS),
        layer_noise=layer_noise(network, completions),
    )


def along(network: nn.Module, completions: Sequence[Completion]) -> torch.Tensor:
    """Logits of a network along given outputs, through generate with its cache."""
    inputs, outputs = ([getattr(c, n) for c in completions] for n in ("prompt_ids", "output_ids"))
    return torch.cat(engine_of(network).score(inputs, outputs))


def rectangle(completions: Sequence[Completion]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts and outputs as one left-padded batch, and its mask."""
    return pad([[*c.prompt_ids, *c.output_ids[:-1]] for c in completions], 0)


def layer_noise(network: nn.Module, completions: Sequence[Completion]) -> np.ndarray:
    """Largest RMS, over 19 batch shapes and kernels, of the stream after each block."""
    rows = [[*c.prompt_ids, *c.output_ids[:-1]] for c in completions]
    given = streams(network, rows, len(rows), 0, "sdpa")
    found = [streams(network, rows, *variant) for variant in LAYER_VARIANTS]
    rms = [[(a - b).square().mean().sqrt() for a, b in zip(given, x, strict=True)] for x in found]
    return np.max(np.array(rms, dtype=float), axis=0)


def streams(
    network: nn.Module, rows: Sequence[Sequence[int]], size: int, extra: int, kernel: str
) -> list[torch.Tensor]:
    """The residual stream after each block at every real position, in float64."""
    kept: list[list[torch.Tensor]] = [[] for _ in range(len(decoder_layers(network)) + 1)]
    before = network.config._attn_implementation
    network.set_attn_implementation(kernel)
    for start in range(0, len(rows), size):
        ids, mask = pad(rows[start : start + size], 0, extra=extra)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)

        def see(layer: int, x: torch.Tensor, mask: torch.Tensor = mask) -> None:
            kept[layer].append(x[mask.bool()].double())

        with torch.no_grad(), capture(network, see):
            network(ids, attention_mask=mask, position_ids=positions, use_cache=False)
    network.set_attn_implementation(before)
    return [torch.cat(x) for x in kept[1:]]


def oracle(
    reference: nn.Module, broken: nn.Module, completions: Sequence[Completion]
) -> tuple[float, float]:
    """Largest centred logit RMS and mean total variation, by numpy, in float32 arithmetic.

    Owes nothing to the engine, the floor or the checks: a hand-written decoding loop of float32
    copies of both networks, and numpy in float64. NaN where the mutant's logits are no numbers.
    """
    x, y = (_decoded(copy.deepcopy(n).float(), completions) for n in (reference, broken))
    d = y - x
    rms = np.sqrt(np.mean((d - d.mean(-1, keepdims=True)) ** 2, axis=-1))
    tv = np.abs(softmax(y, -1) - softmax(x, -1)).sum(-1) / 2
    return float(np.max(rms)), float(np.mean(tv))


@torch.no_grad()
def _decoded(network: nn.Module, completions: Sequence[Completion]) -> np.ndarray:
    width = max(len(c.prompt_ids) for c in completions)
    ids = torch.tensor([[0] * (width - len(c.prompt_ids)) + [*c.prompt_ids] for c in completions])
    mask = torch.tensor([[0] * (width - len(c.prompt_ids)) + [1] * len(c.prompt_ids)
                         for c in completions])  # fmt: skip
    outputs = torch.tensor([c.output_ids for c in completions])
    found, cache = [], {}
    for step in range(outputs.shape[1]):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = network(ids, attention_mask=mask, position_ids=positions, use_cache=True, **cache)
        found.append(out.logits[:, -1].double().numpy())
        ids, cache = outputs[:, step : step + 1], {"cache": out["cache"]}
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
    return np.stack(found)


def sweep(given: Mutant, on: Subject) -> dict[str, object]:
    """One row of the table: the smallest dose that is detected, and where the layer is named.

    By bisection over the doses, so that both are taken to hold at every larger dose.
    """
    try:
        broken = given.apply(on.network, dose=given.natural)
    except NotApplicable:
        return {"answer": "not applicable"}
    multiples = {given.natural: on.detects(broken)[1]}
    rms, tv = oracle(on.network, broken, on.completions)
    row: dict[str, object] = {"natural_multiple": multiples[given.natural]}
    row |= {"oracle_rms": rms, "oracle_tv": tv}

    def detected(dose: float) -> bool:
        if dose not in multiples:
            try:
                multiples[dose] = on.detects(given.apply(on.network, dose=dose))[1]
            except NotApplicable:  # an eps swapped for itself
                multiples[dose] = 0.0
        return not multiples[dose] <= 1

    def located(dose: float) -> bool:
        middle = (len(decoder_layers(on.network)) + 1) // 2
        try:
            return on.first_noisy_layer(given.apply(on.network, dose=dose)) == middle
        except NotApplicable:
            return False

    row["smallest_detected"] = smallest(given.doses, detected)
    if given.kind == "layer-local":
        row["smallest_located"] = smallest(given.doses, located)
    if np.isfinite(row["smallest_detected"]):
        return row | {"answer": "detected"}
    return row | {"answer": "below the floor" if any(multiples.values()) else "inert"}


def smallest(doses: Sequence[float], holds: Callable[[float], bool]) -> float:
    """Smallest of the falling doses at which a monotone `holds` is true; NaN where none is.

    >>> smallest([8, 4, 2, 1], lambda dose: dose > 1.5), smallest([2, 1], lambda dose: False)
    (2, nan)
    """
    index = bisect_left(doses, True, key=lambda dose: not holds(dose))
    return doses[index - 1] if index else np.nan


def code() -> str:
    """Hash of what was swept and of how."""
    parts = (
        masks,
        mutant,
        numerical,
        positions,
        centred_rms,
        ulp_of,
        noise_floor,
        Subject,
        along,
        streams,
        layer_noise,
        sweep,
        smallest,
    )
    return hashlib.sha256("".join(map(inspect.getsource, parts)).encode()).hexdigest()[:12]


def calibrate(names: Sequence[str] = tuple(SUBJECTS)) -> pd.DataFrame:
    """Sweep every mutant over every subject in fp32 and bf16; SmolLM2 in fp32 alone, for time."""
    rows, key = [], code()
    for name in names:
        for dtype in DTYPES[:1] if name == "smollm2" else DTYPES:
            on = subject(name, dtype)
            about = {"subject": name, "dtype": dtype, "floor": on.floor.unit, "rate": on.floor.rate}
            for given in MUTANTS.values():
                described = {"mutant": given.name, "kind": given.kind, "unit": given.unit}
                row = described | about | {"natural_dose": given.natural} | sweep(given, on)
                rows.append(row | {"code": key})
    table = pd.DataFrame(rows)
    table.insert(len(table.columns) - 1, "code", table.pop("code"))
    TABLE.parent.mkdir(exist_ok=True)
    table.to_csv(TABLE, index=False, float_format="%.4g")
    return table

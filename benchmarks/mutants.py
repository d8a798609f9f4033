"""Numerical mutants at every dose: from which one on they are caught, and what `check` says."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

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
from lossless_lab.numerical.noise import (
    NoiseFloor,
    centred_peak,
    centred_rms,
    noise_floor,
    ulp_of,
)
from lossless_lab.pipeline.answers import answered, default_margins, multiples, within_floor
from lossless_lab.pipeline.controls import measured_floor
from lossless_lab.pipeline.evidence import gather
from lossless_lab.pipeline.recognition import as_subject
from lossless_lab.prompts import Prompt
from lossless_lab.verdict import Answer
from tests.conftest import build_g0, build_t0

TABLE = paths.DATA / "calibration" / "mutants.csv"
LENGTHS = (4, 6, 7, 8, 9, 10, 12, 14)  # of the prompts, around the window of 8
DECODING = Decoding(max_new_tokens=8, stop_token_ids=())
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
    floor: NoiseFloor
    layer_noise: np.ndarray  # [n_layers], RMS after each block

    @cached_property
    def logits(self) -> torch.Tensor:
        """[positions, vocab_size]"""
        return torch.cat([c.logits for c in self.completions])

    @cached_property
    def exact_logits(self) -> np.ndarray:
        """The same by the oracle."""
        return _decoded(copy.deepcopy(self.network).float(), self.completions)

    def answers(self, network: nn.Module) -> dict[str, Answer]:
        """What `check` answers of a network, level by level, on these prompts and this floor."""
        evidence = gather(
            as_subject(engine_of(self.network)),
            as_subject(engine_of(network)),
            [Prompt(id=f"p{i}", ids=c.prompt_ids) for i, c in enumerate(self.completions)],
            self.completions,
            decodings=(DECODING, DECODING),
        )
        margins = default_margins((str(self.network.dtype).removeprefix("torch."),) * 2)
        given = answered(evidence, None, margins=margins, floor=self.floor)
        return {answer.level: answer for answer in given}

    def multiples(self, logits: torch.Tensor, floor: NoiseFloor | None = None) -> dict[str, float]:
        """How far these logits lie, by each measure of level 1c: at most 1 is within the floor."""
        top = ulp_of(self.logits.amax(-1).numpy(), self.network.dtype)
        frame = {"logit_rms": centred_rms(self.logits, logits), "ulp": top}
        frame["logit_peak"] = centred_peak(self.logits, logits)
        return multiples(pd.DataFrame(frame), floor or self.floor)

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
    rows = rows_for(name, network)[:: 2 if name == "smollm2" else 1]  # half of them, for time
    completions = engine_of(network).generate(rows, DECODING, seed=0)
    return Subject(
        network=network,
        completions=completions,
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


def oracle(on: Subject, broken: nn.Module) -> tuple[float, float]:
    """Largest centred logit RMS and mean total variation, by numpy, in float32 arithmetic.

    Owes nothing to the engine, the floor or the checks: a hand-written decoding loop of float32
    copies of both networks, and numpy in float64. NaN where the mutant's logits are no numbers.
    """
    x, y = on.exact_logits, _decoded(copy.deepcopy(broken).float(), on.completions)
    d = y - x
    rms = np.sqrt(np.mean((d - d.mean(-1, keepdims=True)) ** 2, axis=-1))
    tv = np.abs(softmax(y, -1) - softmax(x, -1)).sum(-1) / 2
    return float(np.max(rms)), float(np.mean(tv))


@torch.no_grad()
def _decoded(network: nn.Module, completions: Sequence[Completion]) -> np.ndarray:
    width, pad_id = max(len(c.prompt_ids) for c in completions), engine_of(network).pad_id
    ids = torch.tensor(
        [[pad_id] * (width - len(c.prompt_ids)) + [*c.prompt_ids] for c in completions]
    )
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
    """One row of the table: each dose is judged by `check`, by the oracle and layer by layer.

    Down to the first dose that nothing sees and the oracle says is within every margin.
    """
    judged: dict[float, dict | None] = {}
    for dose in given.doses:
        judged[dose] = found = judge(given, dose, on)
        if found and not (found["caught"] or found["beyond"] or found["located"]):
            break
    natural = judged[given.natural]
    if natural is None:
        return {"answer": "not applicable"}
    applied = [x for x in judged.values() if x is not None]
    caught = any(x["caught"] for x in applied)
    row = {
        "natural_multiple": natural["multiple"],
        "oracle_rms": natural["rms"],
        "oracle_tv": natural["tv"],
        "smallest_detected": smallest(judged, "caught"),
        "n_doses": len(applied),
        "n_beyond": sum(bool(x["beyond"]) for x in applied),
        "n_called_same": sum(bool(x["beyond"] & x["same"]) for x in applied),
        "answer": "detected" if caught else "below the floor" if natural["multiple"] else "inert",
    }
    if given.kind == "layer-local":
        row["smallest_located"] = smallest(judged, "located")
    return row


def judge(given: Mutant, dose: float, on: Subject) -> dict | None:
    """What `check` says at one dose, and how far the mutant really is; None: not applicable."""
    try:
        broken = given.apply(on.network, dose=dose)
    except NotApplicable:
        return None
    answers = on.answers(broken)
    rms, tv = oracle(on, broken)
    beyond = {"1a", "1c"} if not rms <= on.floor.unit else set()  # NaN is beyond any margin
    beyond |= {"2"} if not tv <= answers["2"].margin else set()
    middle = (len(decoder_layers(on.network)) + 1) // 2
    return {
        "rms": rms,
        "tv": tv,
        "multiple": answers["1c"].estimate,
        "caught": answers["1c"].word == "DIFFERENT",
        "beyond": beyond,
        "same": {a.level for a in answers.values() if a.word in ("EQUIVALENT", "PROVEN")},
        "located": given.kind == "layer-local" and on.first_noisy_layer(broken) == middle,
    }


def smallest(judged: dict[float, dict | None], what: str) -> float:
    """The smallest of the falling doses down to which all have it; NaN where the first has not.

    >>> smallest({4: {"caught": True}, 2: {"caught": False}, 1: {"caught": True}}, "caught")
    4
    """
    held = takewhile(lambda item: item[1] is not None and item[1][what], judged.items())
    return min((dose for dose, _ in held), default=np.nan)


def code() -> str:
    """Hash of what was swept and of how."""
    parts = (
        masks,
        mutant,
        numerical,
        positions,
        centred_rms,
        centred_peak,
        ulp_of,
        noise_floor,
        multiples,
        within_floor,
        Subject,
        along,
        streams,
        layer_noise,
        sweep,
        judge,
        oracle,
        _decoded,
        smallest,
    )
    return hashlib.sha256("".join(map(inspect.getsource, parts)).encode()).hexdigest()[:12]


def rows(name: str, dtype: str) -> list[dict]:
    """The table's rows of one subject."""
    on, key = subject(name, dtype), code()
    about = {"subject": name, "dtype": dtype, "floor": on.floor.unit, "rate": on.floor.rate}
    return [
        {"mutant": m.name, "kind": m.kind, "unit": m.unit, **about, "natural_dose": m.natural}
        | sweep(m, on)
        | {"code": key}
        for m in MUTANTS.values()
    ]


def calibrate(names: Sequence[str] = tuple(SUBJECTS)) -> pd.DataFrame:
    """Sweep every mutant over every subject in fp32 and bf16."""
    return written([row for name in names for dtype in DTYPES for row in rows(name, dtype)])


def written(found: list[dict]) -> pd.DataFrame:
    """The table, as it is committed."""
    table = pd.DataFrame(found)
    table.insert(len(table.columns) - 1, "code", table.pop("code"))
    TABLE.parent.mkdir(exist_ok=True)
    table.to_csv(TABLE, index=False, float_format="%.4g")
    return table

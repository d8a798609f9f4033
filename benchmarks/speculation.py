"""transformers' own samplers against the exact law, on the tiny pair; many samples of SmolLM2."""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import time
from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from torch.nn.functional import one_hot
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    generation,
)

from benchmarks import Measurement, interleaved
from lossless_lab import Decoding, TransformersEngine, load, models, paths, prompts
from lossless_lab.engines import drawing, speculative
from lossless_lab.engines.padding import forward_logits
from lossless_lab.optimizations import pruning, speculation
from lossless_lab.pipeline import sampling
from lossless_lab.pipeline import speculation as speed
from lossless_lab.statistical.goodness_of_fit import sampler_fit
from lossless_lab.statistical.sampler_laws import sampler_probs
from lossless_lab.statistical.sampler_verdict import judge_sampler

FOLDER = paths.DATA / "calibration"
TABLE, COUNTS = FOLDER / "speculation.csv", FOLDER / "speculation_counts.csv"
EXACT, SPEED = FOLDER / "speculation_exact.csv", FOLDER / "speculation_speed.csv"
PROMPT = "for i in range(n):\n    for i in range("  # repeats itself, so that a lookup finds drafts
MARGIN, OFF = 0.05, "no filters"
FILTERS = {
    "top-k 4": {"temperature": 1.0, "top_k": 4},
    "top-k 16": {"temperature": 1.0, "top_k": 16},
    "T .8, top-k 16, top-p .9": {"temperature": 0.8, "top_k": 16, "top_p": 0.9},
    OFF: {"temperature": 1.0},
}
ENTRIES = {
    "draft model": lambda: speculation.assisted("tiny-draft"),
    "prompt lookup": lambda: speculation.prompt_lookup(4),
    "early exit": lambda: speculation.early_exit(0.5),
}
ROUND = "_speculative_sampling"  # one call of it, on fixed laws
ROUNDS, CALLS, BATCHED, CONTINUOUS = 200_000, 8000, 20_000, 10_000
TEXTS, TOKENS = 48, 96  # of the long generations


def asked(model) -> list[int]:
    """The prompt's ids."""
    return model.tokenizer(PROMPT).input_ids


def decoding(settings: dict, n_tokens: int, seed: int) -> Decoding:
    """These settings without end ids, so that all samples have one length."""
    return Decoding(max_new_tokens=n_tokens, stop_token_ids=(), seed=seed, **settings)


def engine(target, kind: str, **options) -> TransformersEngine:
    """Assisted generation as the catalogue applies it, with transformers' own defaults."""
    return TransformersEngine(target, **ENTRIES[kind]().transform(target.network)[1], **options)


def by_rounds(n_draft: int) -> Callable:
    """Through `_speculative_sampling` on the laws of the pair; γ = 1 takes bonus tokens in."""

    def draw(target, draft, settings: dict, n: int, seed: int) -> np.ndarray:
        laws = [
            speculative.processed_logits(m, asked(target), decoding(settings, 2, seed))
            for m in (target, draft)
        ]
        return speculative.speculative_rounds(*laws, n, n_draft=n_draft, seed=seed)

    return draw


def by_calls(kind: str) -> Callable:
    """Through whole calls of assisted `generate`, three tokens each, the first two kept."""

    def draw(target, draft, settings: dict, n: int, seed: int) -> np.ndarray:
        wanted = decoding(settings, 3, seed)
        return drawing.drawn(engine(target, kind), asked(target), n, wanted)[:, :2]

    return draw


def batched(target, draft, settings: dict, n: int, seed: int) -> np.ndarray:
    """Plain `generate`, 512 rows at a time."""
    plain = TransformersEngine(target, batch_size=512)
    return drawing.drawn(plain, asked(target), n, decoding(settings, 2, seed))


def continuous(target, draft, settings: dict, n: int, seed: int) -> np.ndarray:
    """`generate_batch`, 2,000 requests at a time."""
    parts = [
        drawing.continuously_batched(target, asked(target), 2000, decoding(settings, 2, seed + i))
        for i in range(n // 2000)
    ]
    return np.concatenate(parts)


# road -> (how it draws, how many)
ROADS = {
    **{f"{ROUND}, γ = {n}": (by_rounds(n), ROUNDS) for n in (1, 2)},
    **{f"generate, {kind}": (by_calls(kind), CALLS) for kind in ENTRIES},
    "generate, batches of 512": (batched, BATCHED),
    "generate_batch": (continuous, CONTINUOUS),
}


def code() -> str:
    """Hash of what was run and of how."""
    rounds = speculative.processed_logits, speculative.speculative_rounds
    parts = (*rounds, drawing, sampling, by_rounds, by_calls, batched, continuous, engine)
    text = "".join(map(inspect.getsource, parts)) + json.dumps([PROMPT, FILTERS, MARGIN])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def judged(law: sampling.JointLaw, counts: np.ndarray) -> dict:
    """The verdict on counts [n_outcomes + 1], and what this n can say at all."""
    verdict = judge_sampler(counts, np.append(law.probs, 0.0), margin=MARGIN)
    bound = verdict.bound
    return {
        "n": bound.n,
        "n_outcomes": len(law.ids),
        "word": verdict.word,
        "tv": bound.corrected,
        "tv_low": bound.low,
        "tv_high": bound.high,
        "tv_high_if_perfect": bound.perfect_high,
        "n_needed": verdict.n_needed,
        "pvalue": verdict.pvalue,
        "n_impossible": verdict.n_impossible,
    }


def subjects() -> list[tuple[str, str]]:
    """(road, filters); whole calls under two of them."""
    return [(r, f) for f in FILTERS for r in ROADS if ROUND in r or f in ("top-k 16", OFF)]


def run(road: str, filters: str, scale: float = 1.0) -> tuple[list[dict], pd.DataFrame]:
    """Rows of the table (two tokens jointly, and the first alone) and the counts behind them."""
    target, draft = load("tiny-target"), load("tiny-draft")
    law = sampling.next_tokens_law(target, asked(target), **FILTERS[filters])
    draw, n = ROADS[road]
    seed = int.from_bytes(hashlib.sha256(f"{road}/{filters}".encode()).digest()[:4], "big")
    counts, _ = law.counted(draw(target, draft, FILTERS[filters], int(n * scale), seed))
    names = {"road": road, "filters": filters}
    rows = [names | {"tokens": "two jointly"} | judged(law, counts)]
    first = law.first()
    where = np.searchsorted(first.ids[:, 0], law.ids[:, 0])
    alone = np.append(np.bincount(where, counts[:-1]), counts[-1]).astype(int)
    rows.append(names | {"tokens": "first"} | judged(first, alone))
    seen = law.to_frame().assign(count=counts[:-1], **names).query("count > 0")
    return rows, seen[["road", "filters", "token_1", "token_2", "count"]]


def long_texts(kind: str, filters: str, n_texts: int = TEXTS) -> dict:
    """Randomised-PIT uniformity of long assisted texts under the laws of plain forwards."""
    target = load("tiny-target")
    rows = [p.ids[:64] for p in prompts.tokenize(prompts.read(), target)]
    rows = [rows[i % len(rows)] for i in range(n_texts)]
    wanted = decoding(FILTERS[filters], TOKENS, n_texts)
    found = engine(target, kind) if kind else TransformersEngine(target, batch_size=16)
    outputs = [c for i in drawing.complete(found, rows, wanted) for c in i[1]]
    pieces = (
        (forward_logits(target.network, [[*c.prompt_ids, *c.output_ids][:-1]])[0][
            len(c.prompt_ids) - 1 :], c.output_ids)
        for c in outputs
    )  # fmt: skip
    fit = sampler_fit(pieces, **FILTERS[filters], rng=np.random.default_rng(n_texts))
    return {
        "road": f"long texts, {kind or 'plain'}",
        "filters": filters,
        "tokens": f"{n_texts} texts of {TOKENS}",
        "n": fit.n_tokens,
        "word": "DIFFERENT" if fit.rejected else "INCONCLUSIVE",
        "pvalue": fit.pvalue,
        "n_impossible": fit.n_impossible,
    }


def gemma_pair() -> tuple:
    """A Gemma 4 and its assistant with random weights and 24 tokens."""
    sizes = {
        "vocab_size": 24, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "global_head_dim": 16,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "sliding_window": 64,
        "max_position_embeddings": 128, "initializer_range": 0.15, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": None,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    own = Gemma4TextConfig(**sizes, num_kv_shared_layers=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = Gemma4ForCausalLM(Gemma4TextConfig(**sizes))
        config = Gemma4AssistantConfig(text_config=own, backbone_hidden_size=32)
        assistant = Gemma4AssistantForCausalLM(config)
    assistant.generation_config.num_assistant_tokens = 1
    return target.eval(), assistant.eval()


def gemma(n: int) -> tuple[sampling.JointLaw, sampling.JointLaw, np.ndarray]:
    """Right law of two tokens, the law that the installed generator really has, and n samples.

    The first token is sampled plainly, the second drafted as the argmax of the assistant's raw
    logits and judged by their softmax: read off the calls of the acceptance step.
    """
    target, assistant = gemma_pair()
    settings, ids, handed = FILTERS["top-k 4"], [1, 5, 9, 13], {}
    step = generation.utils._speculative_sampling

    def watched(drafted, draft_logits, n_drafted, target_logits, **kwargs):
        handed[int(drafted[0, -2])] = (drafted[0, -1], draft_logits[0, 0], target_logits[0, 0])
        return step(drafted, draft_logits, n_drafted, target_logits, **kwargs)

    generation.utils._speculative_sampling = watched
    try:
        assisted = TransformersEngine(target, assistant=assistant)
        drawn_ids = drawing.drawn(assisted, ids, n, decoding(settings, 3, 0))
    finally:
        generation.utils._speculative_sampling = step
    law = sampling.next_tokens_law(target, ids, **settings)
    probs, first = np.zeros(len(law.ids)), law.first()
    for token, share in zip(first.ids[:, 0].tolist(), first.probs, strict=True):
        drafted, shown, truth = handed[token]
        greedy = one_hot(drafted, len(shown)).float()
        second = speculative.exact_output_law(truth, shown, greedy).numpy()
        here = law.ids[:, 0] == token
        probs[here] = share * second[law.ids[here, 1]]
    real = sampling.JointLaw(ids=law.ids, probs=probs / probs.sum())
    return law, real, drawn_ids


# generator -> the law that a draft is drawn from, and the one that the acceptance step is shown
CONTRACTS = {
    "draft model, early exit (5.24)": ("processed", "processed"),
    "MTP, DFlash before pull 47961": ("processed", "raw"),
    "Gemma 4 assistant (5.24)": ("greedy", "raw"),
}


def exact(pair: str, filters: dict, n_positions: int) -> pd.DataFrame:
    """TV of the installed acceptance step's exact output to the target, generator by generator."""
    if pair == "tiny pair":
        target, draft = load("tiny-target"), load("tiny-draft").network
    else:
        target = load("smollm2")
        n_layers = target.network.config.num_hidden_layers
        dropped = range(int(pair.split()[-2]) + 1, n_layers + 1)
        draft = pruning.drop_layers(*dropped).transform(target.network)[0]
    rows = [p.ids[:64] for p in prompts.tokenize(prompts.read(), target)]
    frames = []
    for row in rows:
        both = [forward_logits(getattr(m, "network", m), [row])[0][7::8] for m in (target, draft)]
        processed = [sampler_probs(x.double(), **filters).log().float() for x in both]
        for t, q, raw in zip(*processed, both[1], strict=True):
            laws = {"processed": q.double().softmax(-1)}
            laws["greedy"] = one_hot(raw.argmax(), len(raw)).double()
            truth, tv = t.double().softmax(-1), {}
            for name, (drawn_from, shown) in CONTRACTS.items():
                seen = q if shown == "processed" else raw
                law = speculative.exact_output_law(t, seen, laws[drawn_from])
                tv[name] = float((law - truth).abs().sum() / 2)
            frames.append(tv)
        if len(frames) >= n_positions:
            break
    table = pd.DataFrame(frames[:n_positions])
    shown = table.quantile([0.5, 0.95, 1.0]).T.set_axis(["tv_median", "tv_p95", "tv_worst"], axis=1)
    settings = ", ".join(f"{k} {v:g}" for k, v in filters.items())
    named = {"pair": pair, "filters": settings, "n_positions": len(table)}
    return shown.rename_axis("generator").reset_index().assign(**named)


def speeds(pair: str, n_prompts: int, n_tokens: int, n_drafts=(1, 2, 3, 5, 8)) -> pd.DataFrame:
    """Predicted tokens per pass and acceptance beside what assisted `generate` did."""
    if pair == "tiny pair":
        target, draft = load("tiny-target"), load("tiny-draft")
    else:
        target = load("smollm2")
        dropped = range(int(pair.split()[-2]) + 1, target.network.config.num_hidden_layers + 1)
        draft = pruning.drop_layers(*dropped).transform(target.network)[0]
    rows = [p.ids[:64] for p in prompts.tokenize(prompts.read()[:n_prompts], target)]
    wanted = decoding({"temperature": 1.0}, n_tokens, 1)
    plain = TransformersEngine(target, batch_size=8)
    texts = [
        (c.prompt_ids, c.output_ids) for _, r in drawing.complete(plain, rows, wanted) for c in r
    ]
    acceptance = speed.acceptance_along(target, draft, texts, temperature=1.0)
    one = speed.pass_ms(target, rows[0], 1)
    costs = {g + 1: speed.pass_ms(target, rows[0], g + 1) / one for g in n_drafts}
    ratio = speed.pass_ms(draft, rows[0], 1) / one
    model = speed.speed_model(acceptance, cost_ratio=ratio, pass_costs=costs, n_drafts=n_drafts)
    told = [speed.measured_drafts(target, draft, rows, wanted, n_draft=g) for g in n_drafts]
    measured = pd.DataFrame(told).add_prefix("measured_")
    began = time.perf_counter()
    list(drawing.complete(TransformersEngine(target, batch_size=1), rows, wanted))
    measured["measured_speed_up"] = (time.perf_counter() - began) / measured.pop("measured_seconds")
    alpha = acceptance["acceptance"]
    return pd.concat([model, measured], axis=1).assign(
        pair=pair, mean_alpha=alpha.mean(), sd_alpha=alpha.std(), cost_ratio=ratio
    )


def publish(rows: list[dict], counts: list[pd.DataFrame]) -> pd.DataFrame:
    """Write the verdicts and the counts behind them."""
    table = pd.DataFrame(rows).assign(code=code())
    table.to_csv(TABLE, index=False, float_format="%.4g")
    pd.concat(counts).to_csv(COUNTS, index=False)
    return table


def calibrate() -> pd.DataFrame:
    """Every road under every filter, at full length; counts of what was filtered are kept."""
    rows, counts = [], []
    for road, filters in subjects():
        told, seen = run(road, filters)
        rows += told
        counts += [seen] if filters != OFF else []
    law, real, drawn_ids = gemma(1000)
    named = {"road": "generate, Gemma 4 assistant", "filters": "top-k 4"}
    for tokens, own in (("two jointly", law), ("two jointly, against its own exact law", real)):
        rows.append(named | {"tokens": tokens} | judged(own, own.counted(drawn_ids)[0]))
    for filters in ("top-k 16", OFF):
        rows += [long_texts(kind, filters) for kind in ("", *ENTRIES)]
    table = publish(rows, counts)
    pairs = {"tiny pair": 477, "SmolLM2, 27 layers": 96, "SmolLM2, 20 layers": 96}
    found = [exact(pair, {"temperature": 1.0, "top_k": 50}, n) for pair, n in pairs.items()]
    pd.concat(found).to_csv(EXACT, index=False, float_format="%.4g")
    found = [speeds("tiny pair", 48, 96), speeds("SmolLM2, 27 layers", 8, 32)]
    pd.concat(found).to_csv(SPEED, index=False, float_format="%.4g")
    return table


def bench() -> list[Measurement]:
    """1e4 continuations of two tokens, from SmolLM2 where it is there, filtered and not.

    The alternatives' cost is proportional to the samples: a tenth and a five-hundredth are drawn.
    """
    model = load("smollm2" if models.is_present("smollm2") else "tiny-target")
    ids, n = model.tokenizer("The capital of France is a city that").input_ids, 10_000
    network = model.network

    def draw(settings: dict) -> None:
        sampling.draw(model, ids, n, rng=np.random.default_rng(0), **settings)

    @torch.no_grad()
    def one_prefill(settings: dict) -> None:
        """The best alternative: the prompt once, its cache repeated for every sample."""
        first = network(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        probs = sampler_probs(first.logits[:, -1], **settings)
        for part in torch.multinomial(probs[0], n // 10, replacement=True).split(64):
            cache = copy.deepcopy(first.cache)
            cache.batch_repeat_interleave(len(part))
            out = network(part[:, None], cache=cache, use_cache=True)
            torch.multinomial(sampler_probs(out.logits[:, -1], **settings), 1)

    def per_sample(settings: dict) -> None:
        drawing.drawn(TransformersEngine(model), ids, n // 500, decoding(settings, 2, 0))

    found = []
    for name, settings in (("top-k 50", {"temperature": 1.0, "top_k": 50}), (OFF, FILTERS[OFF])):
        calls = {f.__name__: lambda f=f, s=settings: f(s) for f in (draw, one_prefill, per_sample)}
        took = interleaved(calls, repeats=3, warm_up=0)
        alternatives = (("one prefill, then all samples", "one_prefill", 10, 1.0),
                        ("generate per sample", "per_sample", 500, 1 / 20))  # fmt: skip
        found += [
            Measurement(
                name=f"1e4 samples of 2 tokens, {name}, {model.name}",
                seconds=took["draw"],
                alternative=told,
                alternative_seconds=took[call] * times,
                limit=limit,
            )
            for told, call, times, limit in alternatives
        ]
    return found

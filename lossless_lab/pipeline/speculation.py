"""How fast speculative decoding is: acceptance by position, tokens per pass, the best γ."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import pandas as pd
import torch

from lossless_lab.engines.decoding import Decoding
from lossless_lab.engines.padding import forward_logits
from lossless_lab.engines.protocol import complete
from lossless_lab.engines.transformers_engine import TransformersEngine
from lossless_lab.statistical.sampler_laws import sampler_probs


def acceptance_along(
    target: Any, draft: Any, texts: Sequence[tuple[Sequence[int], Sequence[int]]], **sampler: float
) -> pd.DataFrame:
    """α = Σ min(target, draft) = 1 − TV at each position of texts that the target sampled.

    Parameters
    ----------
    target, draft : networks or results of `load`, with one vocabulary.
    texts : (prompt ids, output ids) of each.
    **sampler : temperature, top_k, top_p, min_p, as in `sampler_probs`; those of the texts.

    Returns
    -------
    DataFrame
        text, position, acceptance (α), and kept = min(1, draft/target) of the token that stands
        there: the probability that it stands there as an accepted draft, where one was made.

    Raises
    ------
    ValueError
        For no texts, an empty prompt or output, or a token that the target cannot have written.

    Notes
    -----
    E(kept) over tokens of the target is α: Σ target · min(1, draft/target) = Σ min(target, draft).
    """
    networks = [getattr(side, "network", side) for side in (target, draft)]
    sizes = [network.config.get_text_config().vocab_size for network in networks]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"`target` and `draft` must share a vocabulary; got {sizes[0]}, {sizes[1]}"
        )
    if not texts:
        raise ValueError("`texts` must hold at least one (prompt ids, output ids); got none")
    frames = []
    for i, (prompt, output) in enumerate(texts):
        if not (len(prompt) and len(output)):
            sizes = f"{len(prompt)} and {len(output)} ids"
            raise ValueError(f"`texts[{i}]` must have a prompt and an output; got {sizes}")
        row, at = [*prompt, *output][:-1], slice(len(prompt) - 1, None)
        logits = (forward_logits(n, [row], padding="none")[0][at].double() for n in networks)
        p, q = (sampler_probs(x, **sampler) for x in logits)
        here, there = (x.gather(1, torch.tensor(output)[:, None])[:, 0] for x in (p, q))
        if not (here > 0).all():
            place = int((~(here > 0)).nonzero()[0])
            raise ValueError(
                f"`texts[{i}]` is not the target's own under these settings: output token "
                f"{place}, id {output[place]}, has probability {float(here[place]):g}"
            )
        each = {
            "position": range(len(output)),
            "acceptance": torch.minimum(p, q).sum(1),
            "kept": (there / here).clamp(max=1),
        }
        frames.append(pd.DataFrame({k: np.asarray(v) for k, v in each.items()}).assign(text=i))
    return pd.concat(frames, ignore_index=True)


def passes_along(kept: np.ndarray, n_draft: int) -> tuple[float, float]:
    """Expected passes of the target, and tokens drafted, to write one given text.

    Given the text, each of its tokens is an accepted draft with probability `kept`, independently:
    so the places where rounds start are a Markov chain, which is followed here.

    Parameters
    ----------
    kept : [n_tokens], as from `acceptance_along`.
    n_draft : γ; fewer at the end, where a pass must not write beyond it.

    >>> passes_along(np.array([1.0, 1.0, 1.0, 1.0]), 3)  # one pass writes 3 drafts and a bonus
    (1.0, 3.0)
    >>> passes_along(np.array([0.5, 0.5]), 1)  # one pass if the draft is kept, else two
    (1.5, 1.0)
    """
    n, drafted = len(kept), 0.0
    starts = np.zeros(n + 1)
    starts[0] = 1.0
    for s in range(n):
        n_here = min(n_draft, n - s - 1)
        reach = np.append(1.0, np.cumprod(kept[s : s + n_here]))
        starts[s + 1 : s + 1 + n_here] += starts[s] * (reach[:-1] - reach[1:])
        starts[s + 1 + n_here] += starts[s] * reach[-1]
        drafted += starts[s] * n_here
    return float(starts[:n].sum()), float(drafted)


def speed_model(
    acceptance: pd.DataFrame,
    *,
    cost_ratio: float,
    pass_costs: Mapping[int, float] | None = None,
    n_drafts: Sequence[int] = range(1, 11),
) -> pd.DataFrame:
    """Tokens per pass for each γ, exactly and by rule of thumb, and the speed that follows.

    Parameters
    ----------
    acceptance : from `acceptance_along`.
    cost_ratio : time of a draft's step over that of a target's pass over one token.
    pass_costs : tokens in a pass -> its time over that of one token; 1 by default, as where a pass
        only waits for weights.
    n_drafts : the γ to compare.

    Returns
    -------
    DataFrame
        n_draft; tokens_per_pass, from `passes_along`; rule, (1 − α^(γ+1)) / (1 − α) with the mean
        α; rule_error, rule / tokens_per_pass − 1; accepted_share, of the drafted tokens; speed_up
        = tokens_per_pass / (γ · cost_ratio + pass cost); best, true for the fastest.
    """
    if not cost_ratio >= 0:
        raise ValueError(f"`cost_ratio` must be at least 0; got {cost_ratio}")
    if acceptance.empty:
        raise ValueError("`acceptance` must have a row per position; it has none")
    if pass_costs and (missing := [n + 1 for n in n_drafts if n + 1 not in pass_costs]):
        raise ValueError(
            "`pass_costs` must have n_draft + 1 tokens for each of `n_drafts`; "
            f"not there: {missing}"
        )
    texts = [group["kept"].to_numpy() for _, group in acceptance.groupby("text", sort=False)]
    alpha, n_tokens, rows = acceptance["acceptance"].mean(), len(acceptance), []
    for n_draft in n_drafts:
        passes, drafted = np.sum([passes_along(kept, n_draft) for kept in texts], axis=0)
        per_pass, rule = n_tokens / passes, float(np.sum(alpha ** np.arange(n_draft + 1)))
        cost = n_draft * cost_ratio + (pass_costs[n_draft + 1] if pass_costs else 1)
        share = (n_tokens - passes) / drafted if drafted else np.nan
        rows.append((n_draft, per_pass, rule, rule / per_pass - 1, share, per_pass / cost))
    names = ["n_draft", "tokens_per_pass", "rule", "rule_error", "accepted_share", "speed_up"]
    frame = pd.DataFrame(rows, columns=names)
    return frame.assign(best=frame["speed_up"] == frame["speed_up"].max())


@torch.no_grad()
def pass_ms(network: Any, prompt_ids: Sequence[int], n_tokens: int, *, repeats: int = 15) -> float:
    """Least milliseconds of a pass over `n_tokens` after a prompt in the cache; load only adds."""
    network = getattr(network, "network", network)
    cache = network(torch.tensor([list(prompt_ids)], device=network.device), use_cache=True).cache
    ids = torch.tensor([list(prompt_ids)[-1:] * n_tokens], device=network.device)
    taken = []
    for _ in range(repeats):
        own, began = copy.deepcopy(cache), time.perf_counter()
        network(ids, cache=own, use_cache=True)
        taken.append(time.perf_counter() - began)
    return 1e3 * min(taken)


@contextlib.contextmanager
def fixed_drafts(draft: Any, n_draft: int) -> Iterator[Any]:
    """The draft model made to propose exactly γ tokens per round, whatever its confidence."""
    config = getattr(getattr(draft, "network", draft), "generation_config", None)
    if config is None:
        raise ValueError(f"`draft` must be a network or result of `load`; got {draft!r}")
    if not (isinstance(n_draft, Integral) and n_draft >= 1):
        raise ValueError(f"`n_draft` must be a whole number of at least 1; got {n_draft!r}")
    names = (
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
    )
    before = {name: getattr(config, name, None) for name in names}
    try:
        config.update(**dict(zip(names, (n_draft, "constant", 0.0), strict=True)))
        yield draft
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def measured_drafts(
    target: Any, draft: Any, prompts: Sequence[Sequence[int]], decoding: Decoding, *, n_draft: int
) -> dict[str, float]:
    """What assisted `generate` did: tokens_per_pass, accepted_share, passes, seconds and so on."""
    with fixed_drafts(draft, n_draft):
        engine, began = TransformersEngine(target, assistant=draft), time.perf_counter()
        done = [c for _, rows in complete(engine, prompts, decoding) for c in rows]
        seconds = time.perf_counter() - began
    total = {
        name: sum(c.timings.get(name, 0) for c in done)
        for name in ("rounds", "drafted", "accepted", "rejections")
    }
    return {
        "tokens_per_pass": sum(len(c.output_ids) for c in done) / total["rounds"],
        "accepted_share": total["accepted"] / max(1, total["drafted"]),
        "passes": total["rounds"],
        "rejections": total["rejections"],
        "seconds": seconds,
    }

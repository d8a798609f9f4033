"""Broken rules of speculative decoding, by what can see them, and rules that only look broken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from lossless_lab.statistical.sampler_laws import sampler_probs
from lossless_lab.statistical.speculative import Position, Roles, Rule, joint_law, processed

KINDS = ("sampling", "exact law only", "lossless")  # what sees the fault; nothing may see the last
_SHARE = "share of calls"
_VOCAB, _STOP = 16, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeMutant:
    """One fault of an acceptance step.

    Parameters
    ----------
    name : how it is called in `SPECULATIVE_MUTANTS` and in published tables.
    kind : one of KINDS.
    imitates : the fault in one sentence, with where it was reported, if known.
    build : dose -> Rule.
    doses : the natural one, then smaller ones, falling.
    unit : what a dose counts; a share of calls mixes the fault with the correct sampler.
    settings : of the sampler, under which the fault shows.
    """

    name: str
    kind: str
    imitates: str
    build: Callable[[float], Rule]
    doses: tuple[float, ...] = (1.0, 0.3, 0.1, 0.03, 0.01)
    unit: str = _SHARE
    settings: Mapping[str, float] = field(default_factory=dict)

    @property
    def natural(self) -> float:
        """The dose at which the fault is met in the wild."""
        return self.doses[0]

    def joint_law(
        self, positions: Sequence[Position], *, gamma: int = 1, dose: float | None = None
    ) -> np.ndarray:
        """What it writes instead of the target's law of the next tokens; see `joint_law`."""
        dose = self.natural if dose is None else dose
        law = joint_law(positions, gamma=gamma, rule=self.build(dose))
        if self.unit != _SHARE:
            return law
        return dose * law + (1 - dose) * target_law(positions)

    def total_variation(
        self, positions: Sequence[Position] | None = None, *, gamma: int = 1, dose=None
    ) -> float:
        """Exact TV to the target's law of the next tokens; on `named` laws by default."""
        positions = named(**self.settings) if positions is None else positions
        law = self.joint_law(positions, gamma=gamma, dose=dose)
        return float(np.abs(law - target_law(positions)).sum() / 2)


def target_law(positions: Sequence[Position]) -> np.ndarray:
    """Law of the next tokens if the target alone writes them: the product of its laws."""
    law = np.ones(())
    for at in positions:
        law = law[..., None] * at.target_probs
    return law


def named(**settings: float) -> list[Position]:
    """Two tokens of a vocabulary of 16: Zipf's law in another order after each first token.

    >>> [at.target_probs.shape for at in named(top_k=4)]
    [(16,), (16, 16)]
    """
    token, context = np.arange(_VOCAB), np.arange(_VOCAB)[:, None]
    ranks = [(5 * token) % _VOCAB, (5 * token + 3 * context) % _VOCAB]
    drafted = [(5 * token + 2) % _VOCAB, (5 * token + 3 * context + 2 + context % 3) % _VOCAB]
    logits = zip(ranks, drafted, strict=True)
    return [processed(-np.log1p(t), -0.7 * np.log1p(d), **settings) for t, d in logits]


def _rule(target=None, draft=None, **parts: Callable[[Position], np.ndarray]):
    """Roles as in the standard rule, of other laws for target and draft, then with other parts."""

    def roles(at: Position) -> Roles:
        p = at.target_probs if target is None else target(at)
        q = at.draft_probs if draft is None else draft(at)
        made = Roles(drawn=at.draft_probs, draft=q, target=p, rest=np.maximum(p - q, 0), bonus=p)
        return replace(made, **{name: law(at) for name, law in parts.items()})

    return roles


def _probs(at: Position, side: str, *, times: float = 1.0, bf16: bool = False, **changes):
    """The side's law made anew from its logits · times, with some settings changed."""
    logits = torch.from_numpy(np.array(at.logits(side), dtype=float)) * times
    logits = logits.bfloat16().double() if bf16 else logits
    return sampler_probs(logits, **{**at.settings, **changes}).numpy()


def _raw(at: Position, side: str) -> np.ndarray:
    return _probs(at, side, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def _favourite(at: Position) -> np.ndarray:
    q = at.draft_probs
    return np.eye(q.shape[-1])[q.argmax(-1)]


def _twice(at: Position) -> np.ndarray:
    return _probs(at, "target", times=1 / at.settings.get("temperature", 1.0))


def _without_stop(at: Position) -> np.ndarray:
    rest = np.maximum(at.target_probs - at.draft_probs, 0)
    return rest * (np.arange(rest.shape[-1]) != _STOP)


def _bf16(probs: np.ndarray) -> np.ndarray:
    return torch.from_numpy(probs.copy()).bfloat16().double().numpy()


_TOP_P_FIRST = ("temperature", "top_p", "top_k", "min_p")
_WARM, _TOP, _BOTH = {"temperature": 0.7}, {"top_k": 6}, {"top_k": 8, "top_p": 0.8}


def _mutant(name: str, kind: str, imitates: str, *, roles=None, settings=None, **rule):
    """A mutant without a dose of its own."""
    parts = {"roles": roles} if roles else {}
    made = Rule(name=name, note=imitates, lossless=kind == "lossless", **parts, **rule)
    return SpeculativeMutant(
        name=name, kind=kind, imitates=imitates, build=lambda _: made, settings=settings or {}
    )


def _dosed(name: str, imitates: str, unit: str, doses: tuple[float, ...], rule: Callable):
    """A mutant whose dose is a number in the rule."""

    def build(dose: float) -> Rule:
        return Rule(name=name, note=imitates, **rule(dose))

    return SpeculativeMutant(
        name=name, kind="sampling", imitates=imitates, build=build, doses=doses, unit=unit
    )


SPECULATIVE_MUTANTS = {
    mutant.name: mutant
    for mutant in (
        _mutant(
            "resample-from-target", "sampling", "after a rejection the target is drawn from",
            roles=_rule(rest=lambda at: at.target_probs),
        ),
        _mutant(
            "target-but-not-the-rejected", "sampling",
            "after a rejection the target is drawn from, the rejected token barred",
            roles=_rule(rest=lambda at: at.target_probs), strikes=True,
        ),
        _mutant(
            "greedy-judged-soft", "sampling",
            "greedy draft judged by its softmax (transformers issue 32867)",
            roles=_rule(drawn=_favourite),
        ),
        _mutant(
            "raw-for-processed", "sampling",
            "draft filtered when drawn, raw when judged (transformers issue 47932)",
            roles=_rule(draft=lambda at: _raw(at, "draft")), settings=_TOP,
        ),
        _dosed(
            "other-temperature", "draft judged at another temperature than it was drawn at",
            "temperature − 1", (1.0, 0.3, 0.1, 0.03, 0.01),
            lambda dose: {"roles": _rule(
                draft=lambda at: _probs(at, "draft", times=1 / (1 + dose))
            )},
        ),
        _mutant(
            "residual-of-raw-target", "sampling", "replacement from the unprocessed target",
            roles=_rule(rest=lambda at: np.maximum(_raw(at, "target") - at.draft_probs, 0)),
            settings=_TOP,
        ),
        _dosed(
            "ratio-capped", "ratio clipped below 1", "1 − cap", (0.1, 0.03, 0.01, 0.003),
            lambda dose: {"accept": lambda p, q, u: u <= np.minimum(p / q, 1 - dose)},
        ),
        _dosed(
            "ensemble", "verification relaxed towards the draft, by design (arXiv 2604.07622)",
            "weight of the draft", (0.3, 0.1, 0.03, 0.01),
            lambda dose: {"accept": lambda p, q, u: u <= dose + (1 - dose) * p / q},
        ),
        _mutant(
            "bonus-from-draft", "sampling", "the token after γ accepted ones is the draft's",
            roles=_rule(bonus=lambda at: at.draft_probs),
        ),
        _mutant(
            "one-uniform", "sampling", "the number that rejected also draws the replacement",
            one_uniform=True,
        ),
        _mutant(
            "one-position-late", "sampling", "judged by the target's law one position earlier",
            roles=_rule(target=lambda at: at.previous_probs),
        ),
        _mutant(
            "tree-not-pruned", "sampling",
            "a second candidate judged as if the first had not been rejected",
            n_candidates=2, then=lambda at, roles: at,
        ),
        _mutant(
            "temperature-twice", "sampling", "the target's temperature applied twice",
            roles=_rule(target=_twice), settings=_WARM,
        ),
        _mutant(
            "top-p-first", "sampling", "the target's top-p before its top-k, not after",
            roles=_rule(target=lambda at: _probs(at, "target", order=_TOP_P_FIRST)), settings=_BOTH,
        ),
        _mutant(
            "stop-token-barred", "sampling", "the stop token is never a replacement",
            roles=_rule(rest=_without_stop),
        ),
        _mutant(
            "bf16-probs-drawn", "exact law only", "drawn from bf16 probabilities, judged in fp32",
            roles=_rule(drawn=lambda at: _bf16(at.draft_probs)),
        ),
        _mutant(
            "bf16-logits-drawn", "exact law only", "drawn from bf16 logits, judged in fp32",
            roles=_rule(drawn=lambda at: _probs(at, "draft", bf16=True)),
        ),
        _mutant(
            "strict", "lossless", "accepted where u < ratio, not ≤",
            accept=lambda p, q, u: u < p / q,
        ),
        _mutant(
            "no-bonus", "lossless", "no token after γ accepted ones: slower",
            roles=_rule(bonus=lambda at: None),
        ),
        _mutant(
            "residual-not-normalised", "lossless", "weights not summing to 1, drawn in proportion",
            roles=_rule(rest=lambda at: 7 * np.maximum(at.target_probs - at.draft_probs, 0)),
        ),
        _mutant(
            "temperature-twice-at-1", "lossless", "the temperature applied twice, and it is 1",
            roles=_rule(target=_twice), settings={"temperature": 1.0},
        ),
        _mutant(
            "accept-if-equal", "lossless",
            "a token drawn from the target, the draft's counted as accepted if equal: slow",
            roles=_rule(rest=lambda at: at.target_probs), strikes=True,
            accept=lambda p, q, u: u < p,
        ),
        _mutant(
            "two-candidates", "lossless", "a second candidate, judged by what the first left",
            n_candidates=2,
        ),
    )
}  # fmt: skip

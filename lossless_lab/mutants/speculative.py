"""Broken rules of speculative decoding, by what can see them, and rules that only look broken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

import numpy as np
import torch
from scipy import special

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
        if not 0 < dose <= 1:
            raise ValueError(f"`dose` of {self.name} must be above 0 and at most 1; got {dose}")
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


def _roles(target=None, draft=None, **parts: Callable[[Position], np.ndarray | None]):
    """Roles as in the standard rule, of other laws for target and draft, then with other parts."""

    def roles(at: Position) -> Roles:
        p = at.target_probs if target is None else target(at)
        q = at.draft_probs if draft is None else draft(at)
        made = Roles(drawn=at.draft_probs, draft=q, target=p, rest=np.maximum(p - q, 0), bonus=p)
        return replace(made, **{name: law(at) for name, law in parts.items()})

    return {"roles": roles}


def _probs(at: Position, side: str, *, times: float = 1.0, bf16: bool = False, **changes):
    """The side's law made anew from its logits · times, with some settings changed."""
    logits = torch.from_numpy(np.array(at.logits(side), dtype=float)) * times
    logits = logits.bfloat16().double() if bf16 else logits
    return sampler_probs(logits, **{**at.settings, **changes}).numpy()


def _raw(at: Position, side: str) -> np.ndarray:
    return _probs(at, side, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def _favourite(at: Position) -> np.ndarray:
    q = at.draft_probs
    return (np.arange(q.shape[-1]) == q.argmax(-1, keepdims=True)).astype(float)


def _twice(at: Position) -> np.ndarray:
    return _probs(at, "target", times=1 / at.settings.get("temperature", 1.0))


def _rest(at: Position) -> np.ndarray:
    return np.maximum(at.target_probs - at.draft_probs, 0)


def _bf16(probs: np.ndarray) -> np.ndarray:
    return torch.from_numpy(probs.copy()).bfloat16().double().numpy()


def _typical(at: Position) -> np.ndarray:
    """Target's probabilities over the least one kept: min(.09, .3 e^−entropy)."""
    p = at.target_probs
    entropy = special.entr(p).sum(-1, keepdims=True)
    return p / np.minimum(0.09, 0.3 * np.exp(-entropy))


def _mutant(name: str, kind: str, imitates: str, rule: Mapping | Callable, **options):
    """A mutant whose rule has these parts, or those that the function makes of a dose."""
    parts = rule if callable(rule) else lambda dose: rule
    stated = {"name": name, "note": imitates, "lossless": kind == "lossless"}

    def build(dose: float) -> Rule:
        return Rule(**stated, **parts(dose))

    return SpeculativeMutant(name=name, kind=kind, imitates=imitates, build=build, **options)


_target, _draft = attrgetter("target_probs"), attrgetter("draft_probs")
_SEEN, _EXACT, _FINE = KINDS
_P_FIRST = ("temperature", "top_p", "top_k", "min_p")
_MUTANTS = (
    _mutant("resample-from-target", _SEEN, "after a rejection the target is drawn from",
            _roles(rest=_target)),
    _mutant("target-but-not-the-rejected", _SEEN,
            "after a rejection the target is drawn from, the rejected token barred",
            {**_roles(rest=_target), "strikes": True}),
    _mutant("greedy-judged-soft", _SEEN,
            "greedy draft judged by its softmax (transformers issue 32867)",
            _roles(drawn=_favourite)),
    _mutant("raw-for-processed", _SEEN,
            "draft filtered when drawn, raw when judged (transformers issue 47932)",
            _roles(draft=lambda at: _raw(at, "draft")), settings={"top_k": 6}),
    _mutant("other-temperature", _SEEN, "draft judged at another temperature than drawn at",
            lambda dose: _roles(draft=lambda at: _probs(at, "draft", times=1 / (1 + dose))),
            unit="temperature − 1"),
    _mutant("residual-of-raw-target", _SEEN, "replacement from the unprocessed target",
            _roles(rest=lambda at: np.maximum(_raw(at, "target") - at.draft_probs, 0)),
            settings={"top_k": 6}),
    _mutant("ratio-capped", _SEEN, "ratio clipped below 1",
            lambda dose: {"accept": lambda p, q, u: u <= np.minimum(p / q, 1 - dose)},
            unit="1 − cap", doses=(0.1, 0.03, 0.01, 0.003)),
    _mutant("ensemble", _SEEN, "verification relaxed towards the draft, by design (2604.07622)",
            lambda dose: {"accept": lambda p, q, u: u <= dose + (1 - dose) * p / q},
            unit="weight of the draft", doses=(0.3, 0.1, 0.03, 0.01)),
    _mutant("typical-acceptance", _SEEN,
            "any draft kept that the target finds typical, by design (2401.10774)",
            {**_roles(target=_typical, rest=_target), "accept": lambda p, q, u: (p > 1) | (u < 0)}),
    _mutant("bonus-from-draft", _SEEN, "the token after γ accepted ones is the draft's",
            _roles(bonus=_draft)),
    _mutant("one-uniform", _SEEN, "the number that rejected also draws the replacement",
            {"one_uniform": True}),
    _mutant("one-position-late", _SEEN, "judged by the target's law one position earlier",
            _roles(target=attrgetter("previous_probs"))),
    _mutant("tree-not-pruned", _SEEN,
            "a second candidate judged as if the first had not been rejected",
            {"n_candidates": 2, "then": lambda at, roles: at}),
    _mutant("temperature-twice", _SEEN, "the target's temperature applied twice",
            _roles(target=_twice), settings={"temperature": 0.7}),
    _mutant("top-p-first", _SEEN, "the target's top-p before its top-k, not after",
            _roles(target=lambda at: _probs(at, "target", order=_P_FIRST)),
            settings={"top_k": 8, "top_p": 0.8}),
    _mutant("stop-token-barred", _SEEN, "the stop token is never a replacement",
            _roles(rest=lambda at: _rest(at) * (np.arange(at.target_probs.shape[-1]) != _STOP))),
    _mutant("bf16-probs-drawn", _EXACT, "drawn from bf16 probabilities, judged in fp32",
            _roles(drawn=lambda at: _bf16(at.draft_probs))),
    _mutant("bf16-logits-drawn", _EXACT, "drawn from bf16 logits, judged in fp32",
            _roles(drawn=lambda at: _probs(at, "draft", bf16=True))),
    _mutant("strict", _FINE, "accepted where u < ratio, not ≤",
            {"accept": lambda p, q, u: u < p / q}),
    _mutant("no-bonus", _FINE, "no token after γ accepted ones: slower",
            _roles(bonus=lambda at: None)),
    _mutant("residual-not-normalised", _FINE, "weights not summing to 1, drawn in proportion",
            _roles(rest=lambda at: 7 * _rest(at))),
    _mutant("temperature-twice-at-1", _FINE, "the temperature applied twice, and it is 1",
            _roles(target=_twice), settings={"temperature": 1.0}),
    _mutant("accept-if-equal", _FINE,
            "a token drawn from the target, the draft's counted as accepted if equal: slow",
            {**_roles(rest=_target), "strikes": True, "accept": lambda p, q, u: u < p}),
    _mutant("two-candidates", _FINE, "a second candidate, judged by what the first left",
            {"n_candidates": 2}),
)  # fmt: skip
SPECULATIVE_MUTANTS = {mutant.name: mutant for mutant in _MUTANTS}

"""Speculative decoding: the acceptance step, simulated, and the exact law of what it emits.

A draft proposes tokens, a rule accepts or replaces them. The law is that of the rule's own accept
function, integrated over its uniform number, so that a broken rule shows the law it really has.
Greedy and n-gram drafts are laws with all mass on one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .acceptance_integral import accepted, replaced_with_one_uniform
from .speculative_rules import RULES, STANDARD, Position, Roles, Rule, normalised, processed

__all__ = [
    "RULES", "STANDARD", "Position", "Roles", "Rule", "acceptance", "emitted", "expected_tokens",
    "joint_law", "joint_tv_limits", "output_law", "processed", "speculate",
]  # fmt: skip


def output_law(target_probs: Any, draft_probs: Any, *, rule: Rule = STANDARD) -> np.ndarray:
    """Law of the token emitted: Σ over proposals of draft · [P(accept), P(reject) · replacement].

    Parameters
    ----------
    target_probs, draft_probs : [..., vocab_size], rows sum to 1.

    Returns
    -------
    [..., vocab_size] float64; a lossless rule returns target_probs.

    >>> output_law([0.7, 0.2, 0.1], [0.2, 0.5, 0.3]).round(12).tolist()
    [0.7, 0.2, 0.1]
    """
    return sum(emitted(Position(target_probs=target_probs, draft_probs=draft_probs), rule))


def acceptance(target_probs: Any, draft_probs: Any, *, rule: Rule = STANDARD) -> np.ndarray:
    """Probability that the draft's token is kept: Σ min(target, draft) = 1 − TV if standard.

    >>> float(acceptance([0.7, 0.2, 0.1], [0.2, 0.5, 0.3]))
    0.5
    """
    at = Position(target_probs=target_probs, draft_probs=draft_probs)
    return emitted(at, rule)[0].sum(-1)


def expected_tokens(acceptances: Sequence[float]) -> float:
    """Tokens per step 1 + α₁ + α₁α₂ + …, which is (1 − α^(γ+1)) / (1 − α) where all α are equal.

    Raises
    ------
    ValueError
        When one is no probability.

    >>> round(expected_tokens([0.75] * 7), 2)
    3.6
    """
    alphas = np.asarray(acceptances, dtype=float)
    if alphas.ndim != 1 or not ((alphas >= 0) & (alphas <= 1 + 1e-9)).all():
        raise ValueError(f"`acceptances` must be a list of probabilities; got {acceptances}")
    return 1.0 + float(np.cumprod(alphas).sum())


def emitted(at: Position, rule: Rule = STANDARD) -> tuple[np.ndarray, np.ndarray]:
    """Probability of each token as an accepted proposal, and as a replacement; they sum to 1."""
    accepted = np.zeros(at.target_probs.shape)
    reach = np.ones((*accepted.shape[:-1], 1))  # probability that a candidate is tried at all
    for here, roles in _candidates(rule, at):
        kept, replaced = _stage(rule, roles, here.target_probs)
        accepted += reach * kept
        replaced, reach = reach * replaced, reach * (1 - kept.sum(-1, keepdims=True))
    return accepted, replaced


def joint_law(positions: Sequence[Position], *, gamma: int, rule: Rule = STANDARD) -> np.ndarray:
    """Law of the next n tokens, written by rounds of `gamma` proposals and a bonus token.

    Parameters
    ----------
    positions : n of them; [k] holds the laws of token k after each k tokens before it, arrays of
        shape (vocab_size,) · (k + 1).

    Returns
    -------
    [vocab_size, …], n axes.

    >>> p, q = np.array([0.5, 0.5]), np.array([0.9, 0.1])
    >>> after = Position(target_probs=[p, q], draft_probs=[q, p])
    >>> first = Position(target_probs=p, draft_probs=q)
    >>> joint_law([first, after], gamma=1).round(12).tolist()
    [[0.25, 0.25], [0.45, 0.05]]
    """
    if gamma < 1 or gamma % 1:
        raise ValueError(f"`gamma` must be a whole number of at least 1; got {gamma}")
    before = [x.target_probs[..., None, :] for x in positions[:-1]]
    later = [
        replace(at, previous_probs=np.broadcast_to(b, at.target_probs.shape))
        for at, b in zip(positions[1:], before, strict=True)
    ]
    parts = [(*emitted(at, rule), _bonus(rule, at)) for at in (positions[0], *later)]

    def law(k: int, left: int) -> np.ndarray:
        """Law of tokens k to n after every context, with `left` proposals still to be judged."""
        if k == len(parts):
            return np.ones(())
        accepted, replaced, bonus = parts[k]
        if left == 0 and bonus is not None:
            return _times(bonus, law(k + 1, gamma))
        left = left or gamma
        return _times(accepted, law(k + 1, left - 1)) + _times(replaced, law(k + 1, gamma))

    return law(0, gamma)


def joint_tv_limits(at: Position, rule: Rule = STANDARD, parts: Any = None) -> tuple[float, float]:
    """Least and most TV of the next γ + 1 tokens' joint law to the target's, at fixed laws.

    At least that of any one token's law; at most Σ of each token's TV given those before it. Both
    0 if the rule is lossless, bonus and late positions included.

    Parameters
    ----------
    at : [γ + 1, vocab_size], the laws of a round as in `speculate`, whatever its tokens are.
    parts : what `emitted` gives, where it is known already.

    >>> at = Position(target_probs=[[0.5, 0.5]] * 2, draft_probs=[[0.75, 0.25]] * 2)
    >>> joint_tv_limits(at)
    (0.0, 0.0)
    """
    kept, replaced = parts or emitted(at, rule)
    anew, bonus, all_kept = kept + replaced, _bonus(rule, at), kept[:-1].sum(-1).prod()
    last = anew[-1:] if bonus is None else bonus[-1:]
    laws = np.concatenate([anew, last, all_kept * last + (1 - all_kept) * anew[-1:]])
    target = at.target_probs[[*range(len(anew)), -1, -1]]
    *early, late, after_all_kept, marginal = np.abs(laws - target).sum(-1) / 2
    most = sum(early) + all_kept * after_all_kept + (1 - all_kept) * late
    return float(max(*early, marginal)), float(min(most, 1))


def speculate(
    target_probs: Any,
    draft_probs: Any,
    n: int,
    *,
    rule: Rule = STANDARD,
    rng: np.random.Generator,
) -> np.ndarray:
    """Tokens of n rounds at fixed laws, each round γ proposals and a bonus; −1 after its end.

    Parameters
    ----------
    target_probs, draft_probs : [γ + 1, vocab_size]; the draft's last row is for rules that draw
        the bonus from it.

    Returns
    -------
    [n, γ + 1] token ids.

    >>> speculate([[0, 1.0]] * 3, [[0, 1.0]] * 3, 2, rng=np.random.default_rng(0)).tolist()
    [[1, 1, 1], [1, 1, 1]]
    """
    positions = Position(target_probs=target_probs, draft_probs=draft_probs)
    rows = zip(positions.target_probs, positions.draft_probs, strict=True)
    steps = [Position(target_probs=p, draft_probs=q) for p, q in rows]
    tokens = np.full((n, len(steps)), -1)
    alive = np.arange(n)
    for i, at in enumerate(steps[:-1]):
        tokens[alive, i], kept = _judge(rule, at, len(alive), rng)
        alive = alive[kept]
    if (bonus := _bonus(rule, steps[-1])) is not None:
        tokens[alive, -1] = _draw(bonus, rng.random(len(alive)))
    return tokens


def _judge(rule: Rule, at: Position, n: int, rng: np.random.Generator):
    """n tokens at one position, and whether each is an accepted proposal."""
    tokens, kept, open_ = np.empty(n, dtype=int), np.zeros(n, dtype=bool), np.arange(n)
    stages = _candidates(rule, at)
    for _, roles in stages:
        proposed, u = _draw(roles.drawn, rng.random(len(open_))), rng.random(len(open_))
        with np.errstate(divide="ignore", invalid="ignore"):
            taken = np.asarray(rule.accept(roles.target[proposed], roles.draft[proposed], u), bool)
        tokens[open_], kept[open_] = proposed, taken
        open_, proposed, u = open_[~taken], proposed[~taken], u[~taken]
    v = u if rule.one_uniform else rng.random(len(open_))
    rest = normalised(roles.rest, stages[-1][0].target_probs)
    if rule.strikes:  # leave a hole where the rejected token lies
        hole, start = rest[proposed], (rest.cumsum() - rest)[proposed]
        v = v * (1 - hole)
        v = v + hole * (v >= start)
    tokens[open_] = _draw(rest, v)
    return tokens, kept


def _draw(weights: np.ndarray, u: np.ndarray) -> np.ndarray:
    edges = weights.cumsum()
    last = np.flatnonzero(weights)[-1]
    return np.minimum(np.searchsorted(edges, u * edges[-1], side="right"), last)


def _stage(rule: Rule, roles: Roles, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Accepted and replaced mass of one candidate."""
    drawn = roles.drawn / roles.drawn.sum(-1, keepdims=True)
    place, low, high = accepted(rule.accept, roles.target, roles.draft)
    share = np.bincount(place, high - low, minlength=drawn.size).reshape(drawn.shape)
    kept, rest = drawn * share, normalised(roles.rest, target)
    lost = drawn - kept
    if rule.one_uniform:
        row, weight, n = place // drawn.shape[-1], drawn.ravel()[place], drawn.shape[-1]
        flat = [
            replaced_with_one_uniform(w, *(x[row == i] for x in (weight, low, high)))
            for i, w in enumerate(rest.reshape(-1, n))
        ]
        return kept, np.reshape(flat, drawn.shape)
    if rule.strikes:
        with np.errstate(divide="ignore", invalid="ignore"):
            lost = np.where(lost > 0, lost / (1 - rest), 0)
        return kept, rest * (lost.sum(-1, keepdims=True) - lost)
    return kept, rest * lost.sum(-1, keepdims=True)


def _candidates(rule: Rule, at: Position) -> list[tuple[Position, Roles]]:
    """Each candidate's position and the laws that it is judged by."""
    found = [(at, _checked(rule, at))]
    while len(found) < rule.n_candidates:
        at = rule.then(*found[-1])
        found.append((at, _checked(rule, at)))
    return found


def _checked(rule: Rule, at: Position) -> Roles:
    """The rule's laws, none of which may hold weights below 0 or NaN."""
    roles = rule.roles(at)
    for name in ("drawn", "rest", "bonus"):
        weights = getattr(roles, name)
        if weights is not None and not (weights >= 0).all():
            raise ValueError(
                f"rule {rule.name!r}: the weights of `{name}` must be at least 0; "
                f"the smallest is {weights.min():.3g}"
            )
    return roles


def _bonus(rule: Rule, at: Position) -> np.ndarray | None:
    bonus = rule.roles(at).bonus
    return None if bonus is None else normalised(bonus, at.target_probs)


def _times(law: np.ndarray, later: np.ndarray) -> np.ndarray:
    """law [context…, token] · later [context…, token, …]."""
    return law.reshape(law.shape + (1,) * (later.ndim - law.ndim)) * later

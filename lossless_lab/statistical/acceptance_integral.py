"""Over which uniform numbers an accept function accepts: tried at many, bisected between them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_FIRST, _LAST = np.nextafter(0, 1), np.nextafter(1, 0)
_COARSE = np.linspace(0, 1, 6)[1:-1] + 1 / 257  # where acceptance is tried, off round numbers
_FINE = np.concatenate([[0.0], (np.arange(255) + 0.6) / 255, [_LAST]])
_CHUNK, _SEARCHED = 1 << 14, 1 << 12  # tokens guessed, searched together
_EVERY, _HEAVIEST, _SAMPLE = 1024, 256, 64  # tried finely: up to that vocabulary all of them
_BISECTIONS = 54

Accept = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def accepted(accept: Accept, target: np.ndarray, draft: np.ndarray):
    """Intervals of u in [0, 1) that accept a token: place in the flattened arrays, low, high.

    The guess is u ≤ target/draft. A token that answers otherwise at 4 numbers, or next to the
    guess, is searched at 257 numbers and by bisection between them. Those 257 are tried for every
    token too, up to a vocabulary of 1,024; beyond, for the 256 likeliest drafts of each law and 64
    tokens of all, and where one answers otherwise all are searched. What can be missed: pieces
    narrower than 1/255, and beyond 1,024 tokens pieces of single unlikely drafts.

    Parameters
    ----------
    accept : (target, draft, u) -> bool, elementwise; u an array or one number for all.
    target, draft : [..., vocab_size] probabilities of the proposed tokens, one shape.

    >>> place, low, high = accepted(lambda p, q, u: u * q < p, np.array([0.1]), np.array([0.4]))
    >>> float(high[0] - low[0])
    0.25
    """
    some = _tried_finely(np.asarray(draft))
    target, draft = np.ravel(target), np.ravel(draft)
    with np.errstate(divide="ignore", invalid="ignore"):
        slices = [slice(i, i + _CHUNK) for i in range(0, len(target), _CHUNK)]
        each = [_guessed(accept, target[part], draft[part]) for part in slices]
        guess, wrong = map(np.concatenate, zip(*each, strict=True))
        u, odd = _FINE[1:, None], []
        for part in np.split(some, range(_SEARCHED, len(some), _SEARCHED)):
            answers = accept(target[part], draft[part], u) != (u < guess[part])
            odd.append(part[answers.any(0) & ~wrong[part]])
        odd = np.concatenate(odd)
        if len(some) == len(guess):
            wrong[odd] = True
        elif len(odd):
            wrong[:] = True
        odd = np.flatnonzero(wrong)
        guess[odd] = 0
        found = [(np.arange(len(guess)), np.zeros(len(guess)), guess)]
        if not len(odd):
            return found[0]
        for part in np.split(odd, range(_SEARCHED, len(odd), _SEARCHED)):
            found.append(_searched(accept, target[part], draft[part], part))
    return tuple(map(np.concatenate, zip(*found, strict=True)))


def _tried_finely(draft: np.ndarray) -> np.ndarray:
    """Places of the tokens that are tried at all 257 numbers."""
    if draft.shape[-1] <= _EVERY:
        return np.arange(draft.size)
    rows = draft.reshape(-1, draft.shape[-1])
    heaviest = rows.argpartition(-_HEAVIEST, axis=1)[:, -_HEAVIEST:]
    heaviest += np.arange(len(rows))[:, None] * rows.shape[1]
    spread = np.linspace(0, draft.size - 1, _SAMPLE).astype(int)
    return np.union1d(heaviest, spread)


def _guessed(accept: Accept, target: np.ndarray, draft: np.ndarray):
    """The guessed end of what is accepted, and whether any answer speaks against it."""
    guess = target / draft
    guess[~(guess > 0)] = 0  # NaN too
    np.minimum(guess, 1, out=guess)
    near = np.maximum(np.nextafter(guess, 0), _FIRST), np.minimum(np.nextafter(guess, 1), _LAST)
    wrong = np.zeros(len(guess), dtype=bool)
    for u in (*_COARSE, *near):
        wrong |= accept(target, draft, u) != (u < guess)
    return guess, wrong


def _searched(accept: Accept, target: np.ndarray, draft: np.ndarray, places: np.ndarray):
    """The accepted part between each number tried and the next one, where there is any."""
    holds = accept(target, draft, np.broadcast_to(_FINE[:, None], (len(_FINE), len(places))))
    gap, token = np.nonzero(holds[:-1] | holds[1:])
    left, right = holds[gap, token], holds[gap + 1, token]
    start, stop = _FINE[gap], np.append(_FINE[:-1], 1.0)[gap + 1]
    low, high = start, stop
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        same = accept(target[token], draft[token], middle) == left
        low, high = np.where(same, middle, low), np.where(same, high, middle)
    return places[token], np.where(left, start, high), np.where(right, stop, high)


def replaced_with_one_uniform(
    rest: np.ndarray, drawn: np.ndarray, low: np.ndarray, high: np.ndarray
):
    """Law of the replacement where the u that rejects also draws: rejected mass over each token.

    Parameters
    ----------
    rest : [vocab_size] law of the replacement, drawn by its running sum.
    drawn, low, high : one for each interval: the proposal's probability, and where it is kept.

    >>> half = np.array([0.5, 0.5])
    >>> replaced_with_one_uniform(half, half, np.zeros(2), np.array([1.0, 0.5])).tolist()
    [0.0, 0.25]
    """
    knots, slopes = np.concatenate([low, high]), np.concatenate([drawn, -drawn])
    order = knots.argsort()
    knots, slopes = np.append(knots[order], 1.0), slopes[order].cumsum()
    kept = np.concatenate([[0.0], (slopes * np.diff(knots)).cumsum()])
    edges = np.concatenate([[0.0], rest.cumsum()])
    edges /= edges[-1]
    return np.diff(edges - np.interp(edges, knots, kept))

"""Over which uniform numbers an accept function accepts: exact, whatever the function."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_FIRST, _LAST = np.nextafter(0, 1), np.nextafter(1, 0)
_COARSE = np.linspace(0, 1, 6)[1:-1] + 1 / 257  # where acceptance is tried, off round numbers
_FINE = np.concatenate([[0.0], (np.arange(255) + 0.6) / 255, [_LAST]])
_CHUNK, _SEARCHED, _SAMPLE = 1 << 14, 1 << 12, 64  # tokens guessed, searched, tried finely
_BISECTIONS = 54

Accept = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def accepted(accept: Accept, target: np.ndarray, draft: np.ndarray):
    """Intervals of u in [0, 1) that accept a token: place in the flattened arrays, low, high.

    The guess is u ≤ target/draft. A token that answers otherwise at some numbers tried, or next
    to the guess, is searched at 257 numbers and by bisection between them; so are all tokens where
    one of a sample answers otherwise at the 257. Pieces narrower than 1/255 can be missed.

    Parameters
    ----------
    accept : (target, draft, u) -> bool, elementwise; u an array or one number for all.
    target, draft : probabilities of the proposed tokens, one shape.

    >>> place, low, high = accepted(lambda p, q, u: u * q < p, np.array([0.1]), np.array([0.4]))
    >>> float(high[0] - low[0])
    0.25
    """
    target, draft = np.ravel(target), np.ravel(draft)
    with np.errstate(divide="ignore", invalid="ignore"):
        slices = [slice(i, i + _CHUNK) for i in range(0, len(target), _CHUNK)]
        each = [_guessed(accept, target[part], draft[part]) for part in slices]
        guess, wrong = map(np.concatenate, zip(*each, strict=True))
        some = np.unique(np.linspace(0, len(guess) - 1, _SAMPLE).astype(int))
        some, u = some[~wrong[some]], _FINE[1:, None]
        if (accept(target[some], draft[some], u) != (u < guess[some])).any():
            wrong[:] = True
        odd = np.flatnonzero(wrong)
        guess[odd] = 0
        found = [(np.arange(len(guess)), np.zeros(len(guess)), guess)]
        if not len(odd):
            return found[0]
        for part in np.split(odd, range(_SEARCHED, len(odd), _SEARCHED)):
            found.append(_searched(accept, target[part], draft[part], part))
    return tuple(map(np.concatenate, zip(*found, strict=True)))


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

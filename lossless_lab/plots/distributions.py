"""Charts of level 2 at one position: two laws over the same vocabulary."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from .artists import chart, legend, line
from .labels import token_label
from .theme import COLOURS

_LAW = ("token", "reference_logprob", "candidate_logprob")


@chart(*_LAW)
def distribution_dots(frame: pd.DataFrame, *, ax: Axes | None = None, n_tokens: int = 12) -> Axes:
    """Logprobs of the likeliest tokens: a dot for the reference inside a ring for the candidate.

    Parameters
    ----------
    frame : columns `token` (text), `reference_logprob`, `candidate_logprob` (nats).
    ax : axes to draw on; a second call moves the dots drawn before.
    n_tokens : number of tokens to show, those likeliest under either law.

    Returns
    -------
    Axes; a dot in the middle of its ring is an equal probability, a token that lacks one of them
    has probability 0 there.
    """
    likeliest = frame[list(_LAW[1:])].max(axis=1).sort_values(ascending=False, kind="stable")
    frame = frame.loc[likeliest.index[:n_tokens]]
    values = frame[list(_LAW[1:])].to_numpy(dtype=float)
    for row, side in np.argwhere(np.isnan(values)):
        token = frame["token"].iloc[row]
        raise ValueError(f"`{_LAW[1 + side]}` must be a number; it is NaN for token {token!r}")
    finite = np.isfinite(values)
    y = np.arange(len(frame))
    rings = {"markersize": 8, "markerfacecolor": "none", "markeredgewidth": 1.4}
    for side, (name, look) in enumerate({"reference": {}, "candidate": rings}.items()):
        x = np.where(finite[:, side], values[:, side], np.nan)
        line(ax, name, x, y, color=COLOURS[name], marker="o", linestyle="", label=name, **look)
    ax.set_yticks(y, [token_label(str(token)) for token in frame["token"]])
    ax.tick_params(axis="y", length=0)
    left = np.floor(np.min(values, initial=0.0, where=finite) * 1.05 - 0.2)
    right = max(np.ceil(np.max(values, initial=-np.inf)), left + 1)
    ax.set(xlim=(left, right + 0.03 * (right - left)), ylim=(len(frame) - 0.4, -0.6))
    ax.set_xlabel("log-probability (nats)")
    legend(ax, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return ax

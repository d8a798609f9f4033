"""Padded batches done right: masks, positions, a plain forward scorer, naming a padding fault."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Rows = Sequence[Sequence[int]]


def pad(
    rows: Rows, pad_id: int, *, side: str = "left", extra: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of ids as one rectangle, and its mask (1 = real token).

    Parameters
    ----------
    rows : sequences of token ids
    pad_id : id written into the pad columns
    side : "left" or "right"
    extra : pad columns beyond those that the longest row needs

    Returns
    -------
    input_ids, attention_mask : LongTensor [batch_size, seq_len]

    Examples
    --------
    >>> ids, mask = pad([[5, 6], [7]], 0)
    >>> ids.tolist(), mask.tolist()
    ([[5, 6], [0, 7]], [[1, 1], [0, 1]])
    """
    if side not in ("left", "right"):
        raise ValueError(f'`side` must be "left" or "right", got {side!r}')
    width = max(map(len, rows)) + extra
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, place] = torch.tensor(list(row), dtype=torch.long)
        mask[i, place] = 1
    return ids, mask


def positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Position of each token in its own row: max(cumsum(mask) - 1, 0).

    Examples
    --------
    >>> positions(torch.tensor([[0, 0, 1, 1]])).tolist()
    [[0, 0, 0, 1]]
    """
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


@torch.no_grad()
def forward_logits(
    network: Any, rows: Rows, *, padding: str = "left", extra: int = 0, pad_id: int = 0
) -> list[torch.Tensor]:
    """Logits at every real position by one plain forward, with mask and positions passed.

    Parameters
    ----------
    network : causal language model
    rows : sequences of token ids
    padding : "left", "right", or "none" (one row at a time, nothing padded)
    extra, pad_id : as in `pad`

    Returns
    -------
    list of Tensor [n_tokens, vocab_size] float32, on the CPU; row t is the law of token t + 1
    """
    if padding == "none":
        return [forward_logits(network, [row], padding="left")[0] for row in rows]
    ids, mask = pad(rows, pad_id, side=padding, extra=extra)
    logits = _forward(network, ids, mask, positions(mask))
    return [logits[i][mask[i].bool()] for i in range(len(rows))]


def _forward(network: Any, ids: Any, mask: Any, position_ids: Any) -> torch.Tensor:
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": position_ids}
    given = {name: value.to(network.device) for name, value in given.items()}
    return network(**given, use_cache=False).logits.float().cpu()


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingFault:
    """What a logits path does wrong with padding, judged against the unpadded truth.

    `fault` is "none", "rounding only", "mask missing", "pad ids of the text masked", "positions
    wrong", "read at a pad column" or "unexplained"; `row` is the worst row; `max_abs_difference`
    its distance to the truth; `unexplained_difference` what the named fault leaves over.
    """

    fault: str
    row: int
    max_abs_difference: float
    unexplained_difference: float
    reference_top_id: int
    candidate_top_id: int

    def __str__(self) -> str:
        return (
            f"{self.fault}: row {self.row} is {self.max_abs_difference:.2g} from the unpadded truth"
            f", top id {self.reference_top_id} -> {self.candidate_top_id}; "
            f"{self.unexplained_difference:.2g} left unexplained"
        )


def padding_fault(
    path: Callable[[Rows], torch.Tensor], network: Any, rows: Rows, *, pad_id: int = 0
) -> PaddingFault:
    """Name the padding fault of a logits path by re-enacting each known fault.

    Parameters
    ----------
    path : callable
        Rows of ids to logits after the last token of each row, [n_rows, vocab_size]; pads as it
        likes.
    network : causal language model
    rows : sequences of token ids, of different lengths (or nothing is padded)
    pad_id : id that the path pads with

    Raises
    ------
    ValueError
        Where all rows have one length, so that nothing would be tested.

    Notes
    -----
    Learned absolute positions suffer from wrong positions; rotary ones are relative and only
    round differently. Source: huggingface/transformers pull 29583.
    """
    if len({len(row) for row in rows}) < 2:
        raise ValueError("`rows` must differ in length, else no row is padded")
    truth = torch.stack([r[-1] for r in forward_logits(network, rows, padding="none")])
    seen = path(rows).detach().float().cpu()
    if seen.shape != truth.shape:
        raise ValueError(f"`path` must return {tuple(truth.shape)}, got {tuple(seen.shape)}")
    distance = _distance(seen, truth)
    row = int(distance.argmax())
    tolerance = 32 * torch.finfo(network.dtype).eps * float(truth.abs().max())
    fault, rest = "rounding only", float(distance[row])
    if torch.equal(seen, truth):
        fault = "none"
    elif not rest <= tolerance:
        acted = _reenacted(network, rows, pad_id)
        left = {name: float(_distance(seen, logits).max()) for name, logits in acted.items()}
        name = min(left, key=left.get)
        fault, rest = (name[0], left[name]) if left[name] <= tolerance else ("unexplained", rest)
    return PaddingFault(
        fault=fault,
        row=row,
        max_abs_difference=float(distance[row]),
        unexplained_difference=rest,
        reference_top_id=int(truth[row].argmax()),
        candidate_top_id=int(seen[row].argmax()),
    )


def _distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Largest absolute difference per row; inf where either side has a NaN."""
    return (a - b).abs().nan_to_num(nan=torch.inf).amax(-1)


@torch.no_grad()
def _reenacted(network: Any, rows: Rows, pad_id: int) -> dict[tuple[str, ...], torch.Tensor]:
    acted = {}
    for side, masked, counted in itertools.product(("left", "right"), range(3), range(3)):
        ids, mask = pad(rows, pad_id, side=side)
        masks = {"": mask, "mask missing": torch.ones_like(mask)}
        masks["pad ids of the text masked"] = (ids != pad_id).long()  # inferred from the ids
        missed, used = [*masks.items()][masked]
        where = positions([mask, used, torch.ones_like(mask)][counted])
        wrong = "" if counted == 0 or (missed and counted == 1) else "positions wrong"
        if fault := ("read at a pad column" if side == "right" else missed or wrong):
            acted[fault, side, masked, counted] = _forward(network, ids, used, where)[:, -1]
    return acted

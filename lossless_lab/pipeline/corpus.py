"""Two models read the same documents in lockstep: nothing of tokens × vocabulary is kept."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn
from tqdm.auto import tqdm

from lossless_lab.pipeline.heads import Side, states_and_head
from lossless_lab.pipeline.sampling import draw
from lossless_lab.prompts import Document, read_documents
from lossless_lab.statistical.divergences import MEASURES, divergences

_LOGITS = 1 << 22  # of one side in one call of the head: 16 MiB in float32
_TOKENS = 1024  # of one batch of documents, padding included


def compare_on(
    reference: Any,
    candidate: Any,
    documents: Sequence[Document | str] | None = None,
    *,
    max_tokens: int = 256,
    progress: bool = True,
) -> pd.DataFrame:
    """Distances between two models' next-token laws at every token of the documents.

    Both models read each batch in turn; their heads are applied to a few rows at a time, and only
    the distances stay. The first token of a document is read, not predicted. `distance_summary`
    turns the table into statistics with intervals by document.

    Parameters
    ----------
    reference, candidate : as `models.load` returns them, or transformers networks
        The reference brings the tokenizer; a candidate's own must give the same ids. Either may be
        a `hidden_record.HiddenRecord`, of a model that read the documents before or elsewhere.
    documents : texts, or as from `prompts.read_documents`; None reads the bundled corpus.
    max_tokens : a document is read up to here; how many were longer is printed.
    progress : show a bar and print what was compared, and the reference's distance from itself.

    Returns
    -------
    DataFrame
        The columns of `divergences` with correct_ids, document in place of prompt_id, and
        unreachable_id: the likeliest token that the candidate cannot produce, where its KL is inf.

    Raises
    ------
    ValueError
        For no documents, one of fewer than two tokens or of more than a model has positions, ids or
        vocabularies that differ, or a network in training mode.

    Warns
    -----
    UserWarning
        For a compressed cache of which no token reads anything compressed.

    Examples
    --------
    >>> from lossless_lab import models
    >>> draft = models.load("tiny-draft")
    >>> frame = compare_on(draft, draft, ["def f(x):", "return x"], progress=False)
    >>> len(frame), float(frame["total_variation"].max())
    (9, 0.0)
    """
    if max_tokens < 2:
        raise ValueError(f"`max_tokens` must be 2 or more; got {max_tokens}")
    tokens, n_cut = read_tokens(reference, candidate, documents, max_tokens)
    frame = _read_in_lockstep(reference, candidate, tokens, progress)
    if progress:
        print(f"{len(frame)} tokens of {len(tokens)} documents, {n_cut} cut at {max_tokens} tokens")
    return frame


def compare_sequences(
    reference: Any,
    candidate: Any,
    prompt_ids: Sequence[int],
    *,
    n_tokens: int = 32,
    n_sequences: int = 128,
    rng: np.random.Generator,
) -> pd.DataFrame:
    """`compare_on` over continuations drawn from the reference, where KL adds up.

    `statistical.sequences.sequence_distance` makes the KL of whole sequences of it.

    Parameters
    ----------
    prompt_ids : ids that all sequences follow; they are read, not judged.
    n_tokens : of each sequence, drawn at temperature 1 from the whole law; none ends early.

    Returns
    -------
    DataFrame
        As `compare_on`, document numbering the sequences, with drawn_from = "reference".
    """
    start = list(prompt_ids)
    drawn = draw(reference, start, n_sequences, n_tokens=n_tokens, rng=rng)
    tokens = {str(i): [*start, *row] for i, row in enumerate(drawn.tolist())}
    frame = _read_in_lockstep(reference, candidate, tokens, progress=False)
    frame = frame[frame["position"] >= len(start) - 1]
    return frame.assign(drawn_from="reference").reset_index(drop=True)


def _read_in_lockstep(
    reference: Any, candidate: Any, tokens: dict[str, list[int]], progress: bool
) -> pd.DataFrame:
    """Distances at every predicted token of all texts, in their order."""
    networks = [getattr(model, "network", model) for model in (reference, candidate)]
    for side, network in zip(("reference", "candidate"), networks, strict=True):
        if not (isinstance(network, nn.Module) or hasattr(network, "reads")):
            rule = "a network or result of `load` or a record of hidden states"
            raise TypeError(f"`{side}` must be {rule}; got {network!r}")
        if getattr(network, "training", False):
            raise ValueError(f"`{side}` must not be in training mode, with dropout: call eval()")
        cache, n = getattr(network, "compression", None), max(map(len, tokens.values()))
        if cache and not cache.n_compressed((n - 2) // network.step * network.step):
            warnings.warn(f"`{side}`: {cache.name} leaves {n} cached tokens alone", stacklevel=3)
        room = getattr(network.config.get_text_config(), "max_position_embeddings", np.inf)
        if long := [name for name, ids in tokens.items() if len(ids) > room]:
            where = f"document {long[0]!r} has {len(tokens[long[0]])} tokens"
            raise ValueError(f"{where}; `{side}` has {room} positions: lower `max_tokens`")
    sizes = [network.config.get_text_config().vocab_size for network in networks]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"`candidate` must have the reference's vocabulary, {sizes[0]} tokens; got {sizes[1]}"
        )
    frames, batches = [], batched(tokens)
    with torch.inference_mode():
        sides = [states_and_head(network, tokens) for network in networks]
        if progress:
            again = _compared(batches[0], tokens, [sides[0], sides[0]])
            print(f"reference against itself: largest KL {again[MEASURES[0]].max():g}")
        for names in tqdm(batches, disable=not progress, unit="batch"):
            frames.append(_compared(names, tokens, sides))
    frame = pd.concat(frames)
    order = {name: i for i, name in enumerate(tokens)}
    frame = frame.sort_values("document", key=lambda d: d.map(order), kind="stable")
    return frame.reset_index(drop=True)


def read_tokens(
    reference: Any,
    candidate: Any,
    documents: Sequence[Document | str] | None,
    max_tokens: int | None = None,
) -> tuple[dict[str, list[int]], int]:
    """Ids by document, cut at max_tokens, and how many were cut."""
    if isinstance(documents, str):
        raise TypeError("`documents` must be a list of texts; got one str")
    given = read_documents() if documents is None else documents
    items = [(str(i), d) if isinstance(d, str) else (d.id, d.text) for i, d in enumerate(given)]
    if not items or len(dict(items)) < len(items):
        raise ValueError(f"`documents` must be one or more, of distinct ids; got {len(items)}")
    tokenizers = [getattr(model, "tokenizer", None) for model in (reference, candidate)]
    if tokenizers[0] is None:
        raise ValueError("`reference` must have a tokenizer: give it as `models.load` returns it")
    found, n_cut = {}, 0
    for name, text in items:
        ids, *others = [t(text, verbose=False)["input_ids"] for t in tokenizers if t is not None]
        if others and others[0] != ids:
            raise ValueError(f"document {name!r}: the tokenizers of both sides give different ids")
        found[name] = ids[:max_tokens]
        if len(found[name]) < 2:
            raise ValueError(f"document {name!r} must have 2 tokens or more to predict; got {ids}")
        n_cut += len(ids) > len(found[name])
    return found, n_cut


def batched(tokens: dict[str, list[int]]) -> list[list[str]]:
    """Names of documents, alike in length, that together stay within _TOKENS."""
    batches: list[list[str]] = []
    for name in sorted(tokens, key=lambda name: len(tokens[name])):
        if not batches or (len(batches[-1]) + 1) * len(tokens[name]) > _TOKENS:
            batches.append([])
        batches[-1].append(name)
    return batches


def padded(
    names: list[str], tokens: dict[str, list[int]]
) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """Names, ids and mask of one batch of documents."""
    longest = max(len(tokens[name]) for name in names)
    ids, mask = torch.zeros(2, len(names), longest, dtype=torch.long)
    for i, name in enumerate(names):
        ids[i, : len(tokens[name])] = torch.tensor(tokens[name])
        mask[i, : len(tokens[name])] = 1
    return names, ids, mask


def _compared(names: list[str], tokens: dict[str, list[int]], sides: list[Side]) -> pd.DataFrame:
    """Distances at every predicted token of one batch of documents."""
    names, ids, mask = padded(names, tokens)
    row, position = torch.nonzero(mask[:, 1:], as_tuple=True)
    found = []
    states = [read(names, ids, mask) for read, _ in sides]
    for where, logits in chunks(states, [head for _, head in sides]):
        at = position[where]
        part = divergences(*logits, correct_ids=ids[row[where], at + 1].tolist())
        lost = {i: token for i, way, token in part.infinite if way == "reference‖candidate"}
        frame = part.frame.drop(columns="prompt_id").assign(
            position=at.numpy(),
            unreachable_id=pd.array([lost.get(i, pd.NA) for i in range(len(at))], dtype="Int64"),
        )
        frame.insert(0, "document", [names[i] for i in row[where].tolist()])
        found.append(frame)
    return pd.concat(found)


def chunks(
    states: list[torch.Tensor], heads: list[Callable[[torch.Tensor], torch.Tensor]]
) -> Iterator[tuple[slice, list[torch.Tensor]]]:
    """Logits of both sides for as many rows as _LOGITS holds."""
    size = max(1, _LOGITS // heads[0](states[0][:1]).shape[-1])
    for start in range(0, len(states[0]), size):
        where = slice(start, start + size)
        yield where, [head(x[where]) for x, head in zip(states, heads, strict=True)]

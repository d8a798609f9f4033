"""Where a candidate fails on a corpus: kinds of tokens, worst places in context, their export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from lossless_lab.pipeline.corpus import read_tokens
from lossless_lab.prompts import Document, read_documents
from lossless_lab.runs.folder import json_line
from lossless_lab.statistical.distances import MEASURES

PLACES = ((0, "first 4"), (4, "5 to 16"), (16, "17 to 64"), (64, "beyond 64"))


def token_class(text: str) -> str:
    """Sort of token by its text: digits, Chinese, word, punctuation, space, part of a character.

    Examples
    --------
    >>> [token_class(text) for text in (" 12", "中文", " the", "):", "\\n", "\\ufffd")]
    ['digits', 'Chinese', 'word', 'punctuation', 'space', 'part of a character']
    """
    tests = {
        "part of a character": "\ufffd" in text,
        "digits": any(c.isdigit() for c in text),
        "Chinese": any("\u4e00" <= c <= "\u9fff" for c in text),
        "word": any(c.isalpha() for c in text),
        "space": not text.strip(),
    }
    return next((name for name, holds in tests.items() if holds), "punctuation")


def described(
    frame: pd.DataFrame, reference: Any, documents: Sequence[Document | str] | None = None
) -> pd.DataFrame:
    """The table of `compare_on` with what each token is, for `slices` and `concentration`.

    Returns
    -------
    DataFrame with language and kind of the document, and token, token_class, frequency and place
        of the token that followed. Frequent are the likeliest ids that make up half of all tokens
        here, rare those that occur once or twice.
    """
    given = read_documents() if documents is None else documents
    about = {d.id: (d.kind, d.language) for d in given if isinstance(d, Document)}
    pairs = [about.get(name, (None, None)) for name in frame["document"]]
    texts = {i: reference.tokenizer.decode([i]) for i in frame["token_id"].unique().tolist()}
    counts = frame["token_id"].value_counts()
    before = (counts.cumsum() - counts).reindex(frame["token_id"]).to_numpy()
    times = counts.reindex(frame["token_id"]).to_numpy()
    frequency = np.select([times <= 2, before < len(frame) / 2], ["rare", "frequent"], "between")
    starts, names = zip(*PLACES, strict=True)
    where = np.searchsorted(starts, frame["position"], side="right") - 1
    token = frame["token_id"].map(texts)
    return frame.assign(
        kind=[kind for kind, _ in pairs],
        language=[language for _, language in pairs],
        token=token,
        token_class=token.map(token_class),
        frequency=frequency,
        place=np.array(names, dtype=object)[where],
    )


def worst_tokens(
    frame: pd.DataFrame,
    reference: Any,
    documents: Sequence[Document | str] | None = None,
    *,
    n: int = 10,
    measure: str = MEASURES[0],
    n_before: int = 12,
) -> pd.DataFrame:
    """The n tokens with the largest measure: where, after what, and what either side expected.

    Of a frame of each document's worst row alone, `frame.loc[frame.groupby("document")[measure]
    .idxmax()]`, it lists the worst documents; their means are in `divergences.by_prompt`.
    """
    tokens, _ = read_tokens(reference, reference, documents)
    decode = reference.tokenizer.decode
    worst = _ranked(frame, measure, tokens).head(n)
    ids = [tokens[row.document][: row.position + 1] for row in worst.itertuples()]
    texts = {
        "context": [decode(one[-n_before:], skip_special_tokens=True) for one in ids],
        "token": [decode([i]) for i in worst["token_id"]],
        "reference_top": [decode([i]) for i in worst["reference_top_id"]],
        "candidate_top": [decode([i]) for i in worst["candidate_top_id"]],
    }
    return worst[["document", "position", measure]].assign(**texts).reset_index(drop=True)


def _ranked(frame: pd.DataFrame, measure: str, tokens: Mapping[str, list[int]]) -> pd.DataFrame:
    """The rows by falling measure, NaN among the infinite, once they are seen to be of `tokens`."""
    if frame[measure].isna().all():
        raise ValueError(f"`frame` has no value of {measure} besides NaN: nothing to rank")
    for row in frame[["document", "position", "token_id"]].itertuples(index=False):
        if tokens.get(row.document, ())[row.position + 1 : row.position + 2] != [row.token_id]:
            place = f"token {row.token_id} after position {row.position} of {row.document!r}"
            raise ValueError(f"`documents` must be those of `frame`; they lack its {place}")
    order = np.argsort(-frame[measure].fillna(np.inf).to_numpy(np.float64), kind="stable")
    return frame.iloc[order]


@torch.inference_mode()
def export_failures(
    path: str | Path,
    frame: pd.DataFrame,
    reference: Any,
    candidate: Any,
    documents: Sequence[Document | str] | None = None,
    *,
    n: int = 32,
    n_tokens: int = 32,
    measure: str = MEASURES[0],
) -> pd.DataFrame:
    """Write the worst token of each of the n worst documents, and what both sides go on with.

    One JSON object a line: prompt (the text up to that token), completion (the reference's greedy
    continuation) and rejected (the candidate's), the names that libraries for fine-tuning expect,
    each with its ids; document, position and the measure. Strict JSON: a measure that is inf or NaN
    is null, and `not_finite` tells which. Where both go on alike there is nothing to prefer: that
    line is left out, and their number is printed.

    Returns
    -------
    DataFrame of the same lines
    """
    if n < 1:
        raise ValueError(f"`n` must be 1 or more; got {n}")
    tokens, _ = read_tokens(reference, reference, documents)
    worst = _ranked(frame, measure, tokens).drop_duplicates("document").head(n)
    rows = []
    for place in worst.itertuples():
        parts = {"prompt": tokens[place.document][: place.position + 1]}
        given = torch.tensor([parts["prompt"]])
        for name, model in (("completion", reference), ("rejected", candidate)):
            if not hasattr(network := getattr(model, "network", model), "generate"):
                raise ValueError(f"{name}: a {type(network).__name__} cannot `generate` tokens")
            inputs = given.to(network.device)
            out = network.generate(
                inputs, attention_mask=torch.ones_like(inputs), do_sample=False,
                max_new_tokens=n_tokens, pad_token_id=0,
            )  # fmt: skip
            parts[name] = out[0, given.shape[1] :].tolist()
        if parts["completion"] == parts["rejected"]:
            continue
        decode = reference.tokenizer.decode
        row = {name: decode(ids, skip_special_tokens=True) for name, ids in parts.items()}
        row |= {f"{name}_ids": ids for name, ids in parts.items()}
        row |= {"document": place.document, "position": int(place.position)}
        value = float(getattr(place, measure))
        told = (value, None) if np.isfinite(value) else (None, str(value))
        rows.append(row | dict(zip((measure, "not_finite"), told, strict=True)))
    Path(path).write_bytes(b"".join(map(json_line, rows)))
    if len(rows) < len(worst):
        print(f"{len(worst) - len(rows)} of {len(worst)} left out: both sides go on alike")
    return pd.DataFrame(rows)

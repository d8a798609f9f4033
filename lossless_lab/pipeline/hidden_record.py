"""Final hidden states on file, for a model judged elsewhere or later; its head makes the logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from lossless_lab.models.loading import DTYPES, state_sha256
from lossless_lab.pipeline.corpus import batched, chunks, padded, read_tokens
from lossless_lab.pipeline.heads import Side, head_of, states_and_head
from lossless_lab.prompts import Document
from lossless_lab.statistical.divergences import MEASURES, divergences


class HiddenRecord:
    """What a model's last norm put out on documents, which `compare_on` takes in its place.

    Exact logits come back through the head: a token takes hidden size × 2 bytes in 16 bits, where
    its logits take vocabulary × 4.

    Parameters
    ----------
    path : file of `record_states`.
    model : result of `load`, or a network, with the head of the model that was recorded: itself,
        or one that shares it, as a quantised copy does whose head was left as it is.

    Raises
    ------
    ValueError
        For a file that is no record, or a model whose head does not make its logits.
    """

    def __init__(self, path: str | Path, model: Any) -> None:
        network = getattr(model, "network", model)
        self.config, self.tokenizer = network.config, getattr(model, "tokenizer", None)
        try:
            self._stored = safe_open(path, framework="pt")
            states, logits = map(self._stored.get_tensor, ("probe/states", "probe/logits"))
        except SafetensorError as error:
            raise ValueError(f"`path` {path} holds no hidden states: {error}") from None
        self.facts = self._stored.metadata() or {}
        if "head" not in self.facts:
            raise ValueError(f"`path` {path} does not tell of which model and head its states are")
        there, head = tuple(network.get_output_embeddings().weight.shape), head_of(network)
        if there != (needed := (logits.shape[1], states.shape[1])):
            rule = f"a head of {needed} as in {path}, vocabulary and hidden size"
            raise ValueError(f"`model` must have {rule}; got {there}")
        rule = f"the head of {self.facts['model']}, which made the logits in {path}"
        if state_sha256(network.get_output_embeddings()) != self.facts["head"]:
            raise ValueError(f"`model` must have {rule}; its weights or their dtype are others")
        with torch.inference_mode():
            off = (head(states).cpu() - logits).abs().nan_to_num().max() / logits.abs().max()
        if off > 4 * max(torch.finfo(states.dtype).eps, 1e-5):
            raise ValueError(f"`model` must have {rule}; it is off by {off:.2g} of the largest")
        self._side = self._read, lambda x: head(x.to(states.dtype))

    def reads(self, tokens: dict[str, list[int]]) -> Side:
        """Recorded states in place of forward passes, once the ids are seen to be as recorded."""
        names = set(self._stored.keys())
        for name, ids in tokens.items():
            held = self._stored.get_tensor(f"ids/{name}").tolist() if f"ids/{name}" in names else []
            if held[: len(ids)] != ids:
                told = f"{len(held)} ids that are others or too few" if held else "no such document"
                raise ValueError(f"document {name!r} must be as it was recorded; got {told}")
            n = self._stored.get_slice(f"states/{name}").get_shape()[0]
            if n != (due := len(held) - 1):
                raise ValueError(f"document {name!r} must have {due} states; the file holds {n}")
        return self._side

    def _read(self, names: list[str], _: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        stored, lengths = [self._stored.get_slice(f"states/{name}") for name in names], mask.sum(1)
        return torch.cat([x[: n - 1] for x, n in zip(stored, lengths.tolist(), strict=True)])

    def __str__(self) -> str:
        return "hidden states of {model}, {size}; storage floor: {floor}".format(**self.facts)


@torch.inference_mode()
def record_states(
    path: str | Path,
    model: Any,
    documents: Sequence[Document | str] | None = None,
    *,
    max_tokens: int = 256,
    dtype: str | None = None,
) -> HiddenRecord:
    """Write what the model's last norm puts out at every token of the documents but their last.

    Parameters
    ----------
    path : a .safetensors file, written over.
    model : result of `load`, or anything with `network` and `tokenizer`.
    documents, max_tokens : as in `compare_on`.
    dtype : float32, float64, float16 or bfloat16; None keeps the states' own, which loses nothing.
        What another loses is measured: the KL of the laws that the head makes of either.

    Returns
    -------
    HiddenRecord
        What was written; its line tells sizes and that floor.
    """
    if dtype not in (None, *DTYPES):
        raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}; got {dtype!r}")
    tokens, _ = read_tokens(model, model, documents, max_tokens)
    read, head = states_and_head(getattr(model, "network", model), tokens)
    if isinstance(head, nn.Identity):
        raise ValueError("`model` must make its logits of its last hidden states; got other code")
    kept, moved = {f"ids/{name}": torch.tensor(ids) for name, ids in tokens.items()}, []
    for names in batched(tokens):
        states = read(*padded(names, tokens))
        stored = states.to(getattr(torch, dtype) if dtype else states.dtype)
        if bool((stored.isinf() & states.isfinite()).any()):
            raise ValueError(
                f"`dtype` {dtype} is too small for states up to {states.abs().max():g}"
            )
        for _, pair in chunks([states, again := stored.to(states.dtype)], [head, head]):
            moved.append(divergences(*pair).frame[MEASURES[0]])
        parts = stored.cpu().split([len(tokens[name]) - 1 for name in names])
        kept |= {f"states/{n}": part.clone() for n, part in zip(names, parts, strict=True)}
    kept |= {"probe/states": again[:2].cpu(), "probe/logits": head(again[:2]).cpu()}
    floor, name = np.concatenate(moved), getattr(model, "name", "a network")
    size = f"{len(floor)} tokens of {stored[0].nbytes} bytes"
    lost = f"mean KL {floor.mean():.2g} nats, at most {floor.max():.2g}"
    own = state_sha256(getattr(model, "network", model).get_output_embeddings())
    save_file(kept, path, {"model": name, "size": size, "floor": lost, "head": own})
    return HiddenRecord(path, model)

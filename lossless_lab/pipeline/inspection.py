"""One reference and several candidates, looked into layer by layer on the same prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from lossless_lab.numerical.capture import capture, forward, kept, model_inputs
from lossless_lab.numerical.layers import compare_layers
from lossless_lab.numerical.parts import Place, decoder_layers, parts_of
from lossless_lab.numerical.referee import Refereed, against_referee, referee
from lossless_lab.numerical.twins import twin

_SAME_STREAM = ("mlp", "kv_groups")  # kinds of twins whose residual stream keeps its order


class Inspection:
    """Answers for the panel `layer_difference` and for notebooks; each is computed once.

    Parameters
    ----------
    reference : network or result of `load`, in eval mode.
    candidates : name -> network or result of `load`.
    rows : prompt id -> token ids, all of one length.
    n_twins : equivalent twins of the reference whose drift is the noise band of every layer.

    Raises
    ------
    ValueError
        For a candidate without a name, rows of unequal length or none, or no twins.
    """

    def __init__(
        self,
        reference: Any,
        candidates: Mapping[str, Any],
        rows: Mapping[str, Sequence[int]],
        *,
        n_twins: int = 4,
    ) -> None:
        lengths = {name: len(ids) for name, ids in rows.items()}
        if not lengths or len(set(lengths.values())) > 1 or not min(lengths.values()):
            raise ValueError(f"`rows` must be prompts of one length, at least one; got {lengths}")
        if n_twins < 1:
            raise ValueError(f"`n_twins` must be at least 1; got {n_twins}")
        if "" in candidates:
            raise ValueError('`candidates` must have names; got ""')
        self.reference = getattr(reference, "network", reference)
        self.candidates = {n: getattr(m, "network", m) for n, m in candidates.items()}
        self.rows = {name: torch.tensor([list(ids)]) for name, ids in rows.items()}
        self.ids = torch.cat(list(self.rows.values()))
        self._n_twins = n_twins
        self._kept: dict[tuple, Any] = {}

    @cached_property
    def truth(self) -> nn.Module:
        """The reference's true float64 run."""
        return referee(self.reference)

    @cached_property
    def floor(self) -> pd.DataFrame:
        """Largest relative RMS of the reference's equivalent twins, by layer and module."""
        frames = []
        for seed in range(self._n_twins):
            other = twin(self.reference, seed=seed, kinds=_SAME_STREAM)
            frames.append(compare_layers(self.reference, other, self.ids, modules=True).frame)
        largest = pd.concat(frames).groupby(["layer", "module"], sort=False)["relative_rms"].max()
        return largest.rename("floor_relative_rms").reset_index()

    def drift(self, candidate: str, prompt: str | None = None) -> pd.DataFrame:
        """`compare_layers` with its parts and the noise band, on one prompt or on all."""
        ids = self.ids if prompt is None else self.rows[prompt]
        return self._once(
            ("drift", candidate, prompt),
            lambda: compare_layers(
                self.reference, self.candidates[candidate], ids, modules=True
            ).frame.merge(self.floor, on=["layer", "module"], how="left"),
        )

    def first_above(self, candidate: str, prompt: str | None = None) -> tuple[int, str] | None:
        """(layer, module) of the first row whose drift passes the noise band; None for none."""
        frame = self.drift(candidate, prompt)
        floor = frame["floor_relative_rms"].fillna(np.inf)
        above = frame[(frame["max_abs_difference"] != 0) & ~(frame["relative_rms"] <= floor)]
        return None if above.empty else (int(above.iloc[0]["layer"]), str(above.iloc[0]["module"]))

    def refereed(self, candidate: str) -> Refereed:
        """Which of the two is nearer to float64, over all prompts."""
        return self._once(
            ("referee", candidate),
            lambda: against_referee(
                self.reference, self.candidates[candidate], self.ids, truth=self.truth
            ),
        )

    def tensors(
        self, candidate: str, prompt: str, layer: int, module: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both sides' output [positions, size] of one module of one layer, on one prompt."""
        place = layer if module in ("residual", "logits") else (layer, module)
        ids = self.rows[prompt]
        return tuple(
            self._once((side, prompt, place), lambda network=network: _output(network, ids, place))
            for side, network in (
                ("", self.reference), (candidate, self.candidates[candidate]),
            )
        )  # fmt: skip

    def _once(self, key: tuple, compute: Any) -> Any:
        if key not in self._kept:
            self._kept[key] = compute()
        return self._kept[key]


def _output(network: nn.Module, ids: torch.Tensor, place: Place) -> torch.Tensor:
    """Output of the module at `place` in one pass; the logits after the last layer."""
    inputs, seen = model_inputs(ids, None), {}

    def see(at: Place, x: torch.Tensor) -> None:
        if at == place:
            seen[at] = x.clone()

    parts = {place: parts_of(network)[place]} if isinstance(place, tuple) else {}
    with capture(network, see, parts=parts):
        logits = forward(network, inputs)
    seen[len(decoder_layers(network)) + 1] = logits
    return kept(seen[place], inputs)

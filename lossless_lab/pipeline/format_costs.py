"""What number formats and other entries cost one model: over a corpus, by matrix, at a position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from torch import nn

from lossless_lab.number_formats import FORMATS, number_format
from lossless_lab.numerical.capture import forward, model_inputs
from lossless_lab.numerical.weights import weight_errors
from lossless_lab.optimizations import Optimization, find
from lossless_lab.optimizations.kv_compression import ThroughCache
from lossless_lab.optimizations.quantization import matrices, mean_over_weights, quantized
from lossless_lab.pipeline.corpus import compare_on
from lossless_lab.prompts import Document, read_documents
from lossless_lab.statistical.one_position import distribution
from lossless_lab.statistical.summary import DistanceSummary, distance_summary

_STATISTICS = ["mean KL(reference‖candidate)", "mean TV", "same top token"]


class FormatCosts:
    """Answers for the panel `format_cost` and for notebook 04; each is computed once.

    Parameters
    ----------
    model : result of `load`.
    documents : as from `prompts.read_documents`; None reads the bundled corpus.
    formats : names in number_formats.FORMATS that the panel offers.
    max_tokens : a document is read up to here.
    """

    def __init__(
        self,
        model: Any,
        documents: Sequence[Document] | None = None,
        *,
        formats: Sequence[str] = ("int8-channel", "int4-group64"),
        max_tokens: int = 128,
    ) -> None:
        self.model = model
        self.documents = list(read_documents() if documents is None else documents)
        if {type(d) for d in self.documents} != {Document}:
            raise ValueError(f"`documents` must be one or more Documents; got {self.documents[:1]}")
        self.formats = tuple(number_format(name).name for name in formats)
        self.max_tokens = max_tokens
        self._kept: dict[tuple, Any] = {}
        self._entries: dict[str, Optimization] = {}

    def add(self, entry: Optimization) -> str:
        """Make an entry of one's own known by its name, which is returned.

        What was answered under that name before is forgotten.
        """
        self._entries[entry.name] = entry
        self._kept = {key: kept for key, kept in self._kept.items() if entry.name not in key}
        return entry.name

    def network(self, name: str) -> nn.Module:
        """The model with a format or an entry of the catalogue applied; kept.

        An entry that changes the cache is read through it, token by token.
        """

        def compute() -> nn.Module:
            entry = self._entries.get(name) or (quantized(name) if name in FORMATS else find(name))
            made = entry.apply(self.model)
            cache = made.settings.get("cache")
            return ThroughCache(made.network, cache) if hasattr(cache, "build") else made.network

        return self._once(("network", name), compute)

    def positions(self, fmt: str) -> pd.DataFrame:
        """`compare_on` over all documents, with the kind and language of each."""

        def compute() -> pd.DataFrame:
            about = pd.DataFrame([(d.id, d.kind, d.language) for d in self.documents])
            about.columns = ["document", "kind", "language"]
            frame = self._compared(self.network(fmt), self.documents)
            return frame.merge(about, on="document", how="left")

        return self._once(("positions", fmt), compute)

    def summary(self, fmt: str) -> DistanceSummary:
        """Every statistic over the corpus, with intervals by document."""
        return self._once(("summary", fmt), lambda: distance_summary(self.positions(fmt)))

    def weights(self, fmt: str) -> pd.DataFrame:
        """Error of each matrix: `weight_errors`, with the bits that the format takes."""
        bits = number_format(fmt).bits_per_weight
        return self._once(
            ("weights", fmt),
            lambda: weight_errors(self.model, self.network(fmt), bits_per_weight=bits),
        )

    def table(self, names: Sequence[str]) -> pd.DataFrame:
        """One row per format or entry: mean KL with its interval, mean TV, same top token.

        n_exercised counts the tokens whose law could move: those that read anything compressed of a
        cache; else those whose law did. 0: the row is no evidence, as nothing was changed or read.
        """
        rows = []
        for name in names:
            table = self.summary(name).frame.set_index("statistic")
            kl, others = table.loc[_STATISTICS[0]], table.loc[_STATISTICS[1:], "value"]
            rows.append((name, *kl[["value", "low", "high"]], *others, self._n_exercised(name)))
        columns = ["format", "mean_kl_nats", "low", "high", "mean_tv", "same_top", "n_exercised"]
        return pd.DataFrame(rows, columns=columns)

    def _n_exercised(self, name: str) -> int:
        frame, network = self.positions(name), self.network(name)
        if isinstance(network, ThroughCache):
            return sum(network.compression.n_compressed(p) > 0 for p in frame["position"])
        before = getattr(network, "on_grid_before", {}).get(name, ())
        nothing = before and len(before) == len(dict(matrices(network)))
        return 0 if nothing else int((frame["total_variation"] != 0).sum())

    def ladder(self, formats: Sequence[str] | None = None) -> pd.DataFrame:
        """`table` of formats with their bits per weight, what the weights lost, the share of them
        that saturates, and how many matrices lay on that grid before, whose cost is not seen."""
        found = self.table(formats or self.formats)
        names, plain = found["format"], self.model.network
        weights = [self.weights(fmt) for fmt in names]
        sqnr = [w.loc[w["relative_rms"] > 0, "sqnr_db"].mean() for w in weights]
        before = [len(self.network(fmt).on_grid_before[fmt]) for fmt in names]
        cut = [mean_over_weights(plain, fmt, lambda f, w: f.saturated(w)) for fmt in names]
        found.insert(1, "bits_per_weight", [mean_over_weights(plain, fmt) for fmt in names])
        return found.assign(weights_sqnr_db=sqnr, saturated=cut, on_grid_before=before)

    def sensitivity(self, fmt: str, *, n_documents: int = 24) -> pd.DataFrame:
        """Mean KL of one matrix quantised alone, and KL saved by restoring it alone.

        Returns
        -------
        DataFrame with layer, module, mean_kl_nats (alone), restored_kl_nats (the rest quantised),
        and saved_nats, the whole cost less that.
        """
        documents = self.documents[:n_documents]

        def cost(network: nn.Module) -> float:
            return float(self._compared(network, documents)["kl_reference_candidate_nats"].mean())

        def compute() -> pd.DataFrame:
            plain, rounded = (dict(matrices(n)) for n in (self.model.network, self.network(fmt)))
            alone, rest = quantized(fmt).apply(self.model).network, self.network(fmt)
            work = dict(matrices(alone))
            for name, weight in work.items():
                weight.copy_(plain[name])
            whole, rows = cost(rest), []
            for name in plain:
                work[name].copy_(rounded[name])
                one = cost(alone)
                work[name].copy_(plain[name])
                kept = rounded[name].clone()
                rounded[name].copy_(plain[name])
                without = cost(rest)
                rounded[name].copy_(kept)
                layer = next((int(p) + 1 for p in name.split(".") if p.isdigit()), 0)
                module = ".".join(name.split(".")[-2:])
                rows.append((layer, module, one, without, whole - without))
            columns = ["layer", "module", "mean_kl_nats", "restored_kl_nats", "saved_nats"]
            return pd.DataFrame(rows, columns=columns)

        return self._once(("sensitivity", fmt, n_documents), compute)

    def distribution(self, fmt: str, document: str, position: int) -> pd.DataFrame:
        """Both laws of the token after `position`, the likeliest tokens first."""
        ids = self.ids(document)
        if not 0 <= position < len(ids):
            raise ValueError(f"`position` must be 0 to {len(ids) - 1}; got {position}")

        def law(network: nn.Module, name: str) -> torch.Tensor:
            return self._once(
                (name, document, position),
                lambda: forward(network, model_inputs([ids[: position + 1]], None))[0, -1].float(),
            )

        pair = law(self.model.network, ""), law(self.network(fmt), fmt)
        return distribution(*pair, tokenizer_decode=self.model.tokenizer.decode)

    def ids(self, document: str) -> list[int]:
        """Token ids of a document, as they are read."""
        texts = {d.id: d.text for d in self.documents}
        if document not in texts:
            raise ValueError(f"`document` must be the id of one of `documents`; got {document!r}")
        return self.model.tokenizer(texts[document])["input_ids"][: self.max_tokens]

    def _compared(self, network: nn.Module, documents: Sequence[Document]) -> pd.DataFrame:
        reading = {"max_tokens": self.max_tokens, "progress": False}
        return compare_on(self.model, network, documents, **reading)

    def _once(self, key: tuple, compute: Any) -> Any:
        if key not in self._kept:
            self._kept[key] = compute()
        return self._kept[key]

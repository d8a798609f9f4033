"""Transformers in this process: generate and score one batch, with nothing left to defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig

from . import describe as facts
from .conditions import (
    CACHES,
    ForcedTokens,
    generation_fields,
    kernels,
    neutral_settings,
    own_cache,
    random_state,
)
from .decoding import Decoding, declared, stop_token_ids
from .padding import pad
from .protocol import Completion
from .readout import Clock, chosen_logprobs, likeliest, true_length
from .speculative import counted_drafts, draft_counts

_LEAST = {"batch_size": 1, "extra_padding": 0, "companions": 0, "top_logprobs": 0}
Rows = Sequence[Sequence[int]]


@dataclass(frozen=True, eq=False)
class TransformersEngine:
    """`generate` of transformers, with every setting stated and the model left as it was.

    Parameters
    ----------
    model : models.Model or a causal language model
    tokenizer : optional
        Decodes outputs and contributes its end id; that of `model` by default.
    batch_size : int
        Rows per batch, for whoever partitions the work.
    cache : "dynamic", "static" or "none"; or an object whose `build(config)` gives an empty cache
        for each batch, and whose `name` is recorded
    extra_padding, companions : int
        Pad columns, and copies of the first row, added to every batch and thrown away: harmless.
    threads, attention : int, str
        Intra-op threads and attention kernel for the length of each call; None leaves them.
    assistant : models.Model or network
        Draft model for assisted decoding; batches of one row only.
    top_logprobs : int
        How many of the likeliest ids to report per position.
    keep_logits : bool
        Completions carry their raw logits.
    generate_options : mapping
        Further fields of a GenerationConfig, such as prompt_lookup_num_tokens=4; none that
        Decoding or this engine states.

    Notes
    -----
    Raw logits of a batch are held until it ends: n_tokens * batch_size * vocab_size * 4 bytes.
    """

    model: Any = field(repr=False)
    _: KW_ONLY
    tokenizer: Any = field(default=None, repr=False)
    batch_size: int = 1
    cache: Any = "dynamic"
    extra_padding: int = 0
    companions: int = 0
    threads: int | None = None
    attention: str | None = None
    assistant: Any = field(default=None, repr=False)
    top_logprobs: int = 0
    keep_logits: bool = False
    generate_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not hasattr(self.network, "generate"):
            raise TypeError(
                "`model` must be a transformers model with `generate`, got "
                f"{type(self.model).__name__}"
            )
        if self.network.training:
            raise ValueError("`model` must be in evaluation mode, dropout off: call `eval()`")
        if self.tokenizer is None:
            object.__setattr__(self, "tokenizer", getattr(self.model, "tokenizer", None))
        if self.cache not in CACHES and not hasattr(self.cache, "build"):
            raise ValueError(f"`cache` must be one of {', '.join(CACHES)}, got {self.cache!r}")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}, got {getattr(self, name)}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"`threads` must be at least 1 or None, got {self.threads}")
        if self.assistant is not None and self.batch_size + self.companions > 1:
            raise ValueError(
                f"`assistant` needs batches of one row, got `batch_size` {self.batch_size} and "
                f"`companions` {self.companions}"
            )
        stated = generation_fields(Decoding(temperature=1.0), self.cache, pad_id=0, slots=1).keys()
        if clash := sorted(stated & set(self.generate_options)):
            raise ValueError(f"`generate_options` may not set {', '.join(clash)}")

    @property
    def network(self) -> Any:
        """The causal language model itself."""
        return getattr(self.model, "network", self.model)

    @property
    def pad_id(self) -> int:
        """Id for pad columns and for rows that have ended; masked out or thrown away."""
        sources = (self.network.generation_config, self.network.config, self.tokenizer)
        given = [getattr(source, "pad_token_id", None) for source in sources]
        n = self.network.get_input_embeddings().num_embeddings  # a declared id may lie outside
        found = (*given, *self.resolve(Decoding()).stop_token_ids)
        return next((int(i) for i in found if i is not None and 0 <= i < n), 0)

    def resolve(self, decoding: Decoding) -> Decoding:
        """The same settings with the end ids filled in: the union of all that are declared."""
        if decoding.stop_token_ids is not None:
            return decoding
        network = self.network
        ids = stop_token_ids(network.generation_config, network.config, self.tokenizer)
        return dataclasses.replace(decoding, stop_token_ids=ids)

    def describe(self) -> dict[str, Any]:
        """Manifest fields: model, versions, kernels, cache, batch and device."""
        network = self.network
        launch = {n: getattr(self, n) for n in ("extra_padding", "companions") if getattr(self, n)}
        if self.assistant is not None:
            launch["assistant"] = facts.model(self.assistant)
        return {
            **facts.model(self.model, self.tokenizer),
            **facts.versions(),
            "dtype": str(network.dtype).removeprefix("torch."),
            "attention": self.attention or network.config._attn_implementation,
            "engine": "transformers",
            "launch_arguments": launch | dict(self.generate_options),
            "cache": getattr(self.cache, "name", self.cache),
            "prefix_cache": "none",
            "scheduler": "static batches",
            "parallel": {"devices": len({str(p.device) for p in network.parameters()})},
            "batch_size": self.batch_size,
            "threads": self.threads or torch.get_num_threads(),
            "device": facts.device(network.device),
            "logprobs_kind": "raw",
            "checkpoint_decoding": declared(network.generation_config),
        }

    def validate(self, prompts: Rows, decoding: Decoding) -> None:
        """Raise ValueError for prompts that cannot be run, before anything runs."""
        facts.refuse_prompts(self.network, prompts, decoding.max_new_tokens)

    def generate(self, prompts: Rows, decoding: Decoding, *, seed: int) -> list[Completion]:
        """Run one batch.

        Parameters
        ----------
        prompts : sequences of token ids
        decoding : Decoding
            `n_samples` completions are returned per prompt, prompt by prompt.
        seed : int
            Seed of this batch; the global random state is not touched. Ignored under greedy.

        Returns
        -------
        list of Completion, len(prompts) * n_samples
        """
        self.validate(prompts, decoding)
        decoding = self.resolve(decoding)
        stop = decoding.stop_token_ids
        rows = [row for row in prompts for _ in range(decoding.n_samples)]
        clock = Clock()
        with random_state(self.network, seed), counted_drafts(self.network) as rounds:
            sequences, logits = self._run(rows, decoding, streamer=clock)
        logprobs, top = chosen_logprobs(logits, sequences), likeliest(logits, self.top_logprobs)
        completions = []
        for i, row in enumerate(rows):
            n = true_length(sequences[i], stop)
            ids = sequences[i][:n]
            kept = torch.stack([step[i] for step in logits[:n]]) if self.keep_logits else None
            completions.append(
                Completion(
                    prompt_ids=tuple(map(int, row)),
                    output_ids=tuple(ids),
                    text=self._text(ids),
                    finish_reason="stop" if ids[-1] in stop else "length",
                    logprobs=tuple(logprobs[i][:n]),
                    top_logprobs=tuple(step[i] for step in top[:n]) if top else None,
                    timings=clock.timings(n, n_rows=len(rows)) | draft_counts(rounds),
                    logits=kept,
                )
            )
        return completions

    def score(
        self, prompts: Rows, outputs: Rows, *, max_new_tokens: int | None = None
    ) -> list[torch.Tensor]:
        """Raw logits along given outputs, by forcing them through `generate` itself.

        Parameters
        ----------
        prompts, outputs : sequences of token ids
        max_new_tokens : int, optional
            That of the run to be repeated: a static cache is sized by it. Longest output by
            default.

        Returns
        -------
        list of Tensor [n_output, vocab_size] float32
            Row t is the law of output t; bitwise those of `generate` when the outputs are its own
            (with a sampling assistant only up to rounding, as its drafts differ).
        """
        if len(outputs) != len(prompts):
            raise ValueError(
                f"`outputs` must be as many as `prompts`, got {len(outputs)} and {len(prompts)}"
            )
        if empty := [i for i, output in enumerate(outputs) if len(output) == 0]:
            raise ValueError(f"`outputs[{empty[0]}]` must hold at least one token id, got none")
        decoding = Decoding(max_new_tokens=max(map(len, outputs)), stop_token_ids=())
        self.validate(prompts, decoding)
        forced, _ = pad(outputs, self.pad_id, side="right")
        _, logits = self._run(prompts, decoding, forced=forced, slots=max_new_tokens)
        return [
            torch.stack([step[i] for step in logits[: len(output)]])
            for i, output in enumerate(outputs)
        ]

    @torch.no_grad()
    def _run(
        self,
        rows: Rows,
        decoding: Decoding,
        *,
        streamer: Clock | None = None,
        forced: torch.Tensor | None = None,
        slots: int | None = None,
    ) -> tuple[list[list[int]], list[torch.Tensor]]:
        """One call of generate: new ids [row][step], and raw logits [row, vocab] per step."""
        n_rows, rows = len(rows), [*rows, *[rows[0]] * self.companions]
        ids, mask = pad(rows, self.pad_id, extra=self.extra_padding)
        width = ids.shape[1]
        slots = width + (slots or decoding.max_new_tokens) - 1
        fields = generation_fields(decoding, self.cache, pad_id=self.pad_id, slots=slots)
        processors = []
        if forced is not None:
            companions = forced[:1].expand(self.companions, -1)
            processors = [ForcedTokens(torch.cat([forced, companions]), width)]
        network, assistant = self.network, getattr(self.assistant, "network", self.assistant)
        owners = [n for n in (network, assistant) if n is not None]
        in_effect = kernels(network, threads=self.threads, attention=self.attention)
        with neutral_settings(*owners), in_effect:
            result = network.generate(
                ids.to(network.device),
                attention_mask=mask.to(network.device),
                generation_config=GenerationConfig(**fields, **self.generate_options),
                logits_processor=processors,
                assistant_model=assistant,
                streamer=streamer,
                **own_cache(network, self.cache),
            )
        sequences = result.sequences[:n_rows, width:].tolist()
        return sequences, [step[:n_rows] for step in result.logits]

    def _text(self, ids: Sequence[int]) -> str:
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

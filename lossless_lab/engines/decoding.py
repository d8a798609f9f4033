"""Decoding settings: every sampling field, stated; what a checkpoint declares and would leak."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# What `generate` imposes when a checkpoint is silent and sampling is on (transformers 5).
_LIBRARY_TOP_K = 50
# Fields of a generation config that change which tokens come out, with the value that does nothing.
_NEUTRAL = {
    name: value
    for value, names in (
        (False, "do_sample remove_invalid_values renormalize_logits token_healing use_mtp"),
        (True, "use_cache"),
        (1, "num_beams num_beam_groups"),
        (0, "top_k no_repeat_ngram_size encoder_no_repeat_ngram_size min_length min_new_tokens"),
        (0.0, "min_p epsilon_cutoff eta_cutoff diversity_penalty penalty_alpha"),
        (1.0, "temperature top_p typical_p repetition_penalty encoder_repetition_penalty"),
        (1.0, "length_penalty guidance_scale"),
        (None, "top_h max_time stop_strings bad_words_ids sequence_bias suppress_tokens"),
        (None, "begin_suppress_tokens forced_bos_token_id forced_eos_token_id"),
        (None, "exponential_decay_length_penalty watermarking_config dola_layers"),
        (None, "prompt_lookup_num_tokens assistant_early_exit assistant_ensemble_weight"),
        (None, "cache_implementation"),
    )
    for name in names.split()
}
_OURS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """How tokens are chosen; nothing here is ever filled in by a checkpoint.

    Parameters
    ----------
    max_new_tokens : int
        Tokens written at most per sample.
    temperature : float
        Divides the logits; 0 means greedy (argmax) and is recorded as 0, never as a small number.
    top_k, top_p, min_p : int, float, float
        Filters after temperature; 0, 1.0 and 0.0 switch them off.
    repetition_penalty : float
        Over prompt and output, pads excluded; 1.0 is off.
    seed : int
        Seed of the run; each batch derives its own from it. Without effect under greedy.
    n_samples : int
        Samples per prompt.
    stop_token_ids : tuple of int or None
        End ids. None: the union of those the checkpoint declares; (): never stop.

    Raises
    ------
    ValueError
        Naming the field, its rule and the value.

    Examples
    --------
    >>> Decoding().greedy, Decoding(temperature=0.7).greedy
    (True, False)
    """

    max_new_tokens: int = 32
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    n_samples: int = 1
    stop_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _whole("max_new_tokens", self.max_new_tokens, at_least=1)
        _whole("top_k", self.top_k, at_least=0)
        _whole("seed", self.seed, at_least=0)
        _whole("n_samples", self.n_samples, at_least=1)
        if self.seed >= 2**63:
            raise ValueError(f"`seed` must be below 2**63, got {self.seed}")
        _within("temperature", self.temperature, "at least 0", 0 <= self.temperature < math.inf)
        _within("top_p", self.top_p, "above 0 and at most 1", 0 < self.top_p <= 1)
        _within("min_p", self.min_p, "at least 0 and at most 1", 0 <= self.min_p <= 1)
        penalty = self.repetition_penalty
        _within("repetition_penalty", penalty, "above 0", 0 < penalty < math.inf)
        if self.stop_token_ids is not None:
            ids = self.stop_token_ids
            _within("stop_token_ids", ids, "a list of ids", isinstance(ids, Iterable))
            for index, token_id in enumerate(self.stop_token_ids):
                _whole(f"stop_token_ids[{index}]", token_id, at_least=0)
            object.__setattr__(self, "stop_token_ids", tuple(sorted(set(self.stop_token_ids))))

    @property
    def greedy(self) -> bool:
        """True where temperature is 0: the seed and the filters then have no effect."""
        return self.temperature == 0

    @classmethod
    def from_checkpoint(cls, generation_config: Any, **overrides: Any) -> Decoding:
        """The settings that the checkpoint's own generation_config asks for, stated openly.

        Parameters
        ----------
        generation_config : transformers.GenerationConfig, mapping or a model that carries one
        **overrides
            Fields of Decoding that win over the checkpoint.

        Raises
        ------
        ValueError
            Where the checkpoint sets something that Decoding has no field for.

        Examples
        --------
        >>> Decoding.from_checkpoint({"do_sample": True, "temperature": 0.7, "top_p": 0.9}).top_k
        50
        >>> Decoding.from_checkpoint({"do_sample": False, "temperature": 0.7}).greedy
        True
        """
        stated = declared(generation_config)
        known = (*_OURS, "do_sample", "use_cache", "cache_implementation")
        if odd := [name for name in stated if name not in known]:
            raise ValueError(
                f"`generation_config` sets {', '.join(f'{n}={stated[n]!r}' for n in odd)}, for "
                "which Decoding has no field; write out a Decoding that leaves it out on purpose"
            )
        fields = {name: stated[name] for name in _OURS if name in stated}
        if stated.get("do_sample"):
            fields.setdefault("temperature", 1.0)
            top_k = _as_mapping(generation_config).get("top_k")
            fields["top_k"] = _LIBRARY_TOP_K if top_k is None else top_k
        else:
            fields = {k: v for k, v in fields.items() if k == "repetition_penalty"}
        length = _as_mapping(generation_config).get("max_new_tokens")
        return cls(**({"max_new_tokens": length} if length else {}) | fields | overrides)


def declared(generation_config: Any) -> dict[str, Any]:
    """Fields that the checkpoint sets to something other than their neutral value.

    Examples
    --------
    >>> declared({"repetition_penalty": 1.5, "temperature": 1.0, "eos_token_id": 2})
    {'repetition_penalty': 1.5}
    """
    stated = _as_mapping(generation_config)
    return {
        name: stated[name]
        for name, neutral in _NEUTRAL.items()
        if stated.get(name) is not None and stated[name] != neutral
    }


def leaks(generation_config: Any, decoding: Decoding | None = None) -> Any:
    """What the checkpoint would have imposed silently, beside what is in effect.

    Parameters
    ----------
    generation_config : transformers.GenerationConfig, mapping or a model that carries one
    decoding : Decoding, optional
        Settings in effect; greedy by default.

    Returns
    -------
    DataFrame
        field, effective, checkpoint; one row per field on which the two differ.

    Examples
    --------
    >>> leaks({"repetition_penalty": 1.5, "top_p": 1.0}).to_dict("records")
    [{'field': 'repetition_penalty', 'effective': 1.0, 'checkpoint': 1.5}]
    """
    import pandas as pd

    decoding = decoding or Decoding()
    effective = _NEUTRAL | {name: getattr(decoding, name) for name in _OURS}
    effective["do_sample"] = not decoding.greedy
    rows = [
        {"field": name, "effective": effective[name], "checkpoint": value}
        for name, value in declared(generation_config).items()
        if value != effective[name]
    ]
    return pd.DataFrame(rows, columns=["field", "effective", "checkpoint"], dtype=object)


def stop_token_ids(*sources: Any) -> tuple[int, ...]:
    """Union of the end ids that generation config, model config and tokenizer declare.

    Parameters
    ----------
    *sources : objects or mappings with `eos_token_id` (an id, a list of ids or None)

    Examples
    --------
    >>> stop_token_ids({"eos_token_id": [77, 96]}, {"eos_token_id": 2}, None)
    (2, 77, 96)
    """
    found: set[int] = set()
    for source in sources:
        if source is None:
            continue
        mapped = isinstance(source, Mapping)
        ids = source.get("eos_token_id") if mapped else getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, (list, tuple, set)) else [] if ids is None else [ids])
    return tuple(sorted(int(i) for i in found))


def _as_mapping(generation_config: Any) -> Mapping[str, Any]:
    config = getattr(generation_config, "generation_config", generation_config)
    if config is None:
        return {}
    return config if isinstance(config, Mapping) else config.to_dict()


def _whole(name: str, value: Any, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"`{name}` must be a whole number of at least {at_least}, got {value!r}")


def _within(name: str, value: Any, rule: str, holds: bool) -> None:
    if not holds:
        raise ValueError(f"`{name}` must be {rule}, got {value!r}")

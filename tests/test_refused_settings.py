"""Settings that mean nothing are refused in one sentence, by name, rule and value."""

import math

import pytest
import torch
from conftest import build_t0

from lossless_lab.mutants.speculative import SPECULATIVE_MUTANTS, named
from lossless_lab.optimizations.activations import calibrate
from lossless_lab.optimizations.kv_compression import EvictingKV
from lossless_lab.pipeline.speculation import fixed_drafts
from lossless_lab.statistical.sampler_laws import sampler_probs


@pytest.mark.parametrize("dose", [0, -0.1, 1.5, math.nan])
@pytest.mark.parametrize("name", ["resample-from-target", "ratio-capped"])
def test_a_dose_is_a_share(name, dose):
    mutant = SPECULATIVE_MUTANTS[name]
    for call in (mutant.joint_law, mutant.total_variation):
        with pytest.raises(ValueError, match=f"`dose` of {name} must be above 0 and at most 1"):
            call(named(), dose=dose)


@pytest.mark.parametrize("percentile", [200, 0, -1, math.nan])
def test_a_percentile_ends_at_100(t0, percentile):
    with pytest.raises(ValueError, match="`percentile` must be above 0 and at most 100; got"):
        calibrate(t0, [[1, 2, 3]], percentile=percentile)


@pytest.mark.parametrize("kept", [{"sinks": -1}, {"window": -1}, {"window": 2.5},
                                  {"sinks": 0, "window": 0}])  # fmt: skip
def test_a_window_is_a_number_of_tokens(kept):
    with pytest.raises(ValueError, match="`sinks` and `window` must be whole numbers"):
        EvictingKV(name="", **kept)
    assert EvictingKV(name="", sinks=0, window=1).n_compressed(5) == 4


def test_drafts_have_a_whole_length():
    draft = build_t0(num_hidden_layers=1)
    before = draft.generation_config.to_dict()
    for n_draft in (0, 2.5, "4", None):
        said = "`n_draft` must be a whole number of at least 1; got"
        with pytest.raises(ValueError, match=said), fixed_drafts(draft, n_draft):
            pass
    said = r"`draft` must be a network .* got 'tiny-draft'"
    with pytest.raises(ValueError, match=said), fixed_drafts("tiny-draft", 4):
        pass
    assert draft.generation_config.to_dict() == before
    with fixed_drafts(draft, 3) as made:
        assert made.generation_config.num_assistant_tokens == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_smallest_temperatures_are_all_but_greedy(dtype):
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, -2.0, 5.0, 4.9]], dtype=dtype)
    law = sampler_probs(logits, temperature=1e-40)
    assert law.tolist() == [[0, 0.5, 0.5, 0], [0, 0, 1, 0]]

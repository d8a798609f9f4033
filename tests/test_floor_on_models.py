"""The noise floor on real models: what hides under it, and the flips that it predicts."""

import copy

import numpy as np
import pytest
import torch

from lossless_lab import Decoding, check, models, prompts
from lossless_lab.numerical import flips, twins
from lossless_lab.numerical.capture import forward, model_inputs
from lossless_lab.numerical.noise import centred_rms, noise_floor
from lossless_lab.numerical.referee import against_referee, referee

N_TOKENS = 48


@pytest.fixture(scope="module")
def half():
    return models.load("tiny-target", dtype="bfloat16")


@pytest.fixture(scope="module")
def asked(half):
    read = prompts.tokenize(prompts.read(), half, max_prompt_tokens=4000)
    return [p.ids[:N_TOKENS] for p in read if len(p.ids) >= N_TOKENS][:24]


@pytest.fixture(scope="module")
def by_twin(half, asked):
    """Logits [24 · 48, vocab_size] of the model and of nineteen twins."""
    inputs = model_inputs(asked, None)
    family = [twins.twin(half, seed=seed) for seed in range(19)]
    return [forward(n, inputs).flatten(0, 1) for n in (half.network, *family)]


def int8_weights(network):
    """Every matrix rounded to 255 steps a row, and kept in the model's dtype."""
    rounded = copy.deepcopy(network)
    with torch.no_grad():
        for module in rounded.modules():
            if isinstance(module, torch.nn.Linear):
                w = module.weight.float()
                step = w.abs().amax(1, keepdim=True) / 127
                module.weight.copy_((w / step).round() * step)
    return rounded


def test_int8_weights_hide_under_the_bf16_floor_and_are_not_called_lossless(half, asked, by_twin):
    quantised = int8_weights(half.network)
    own, *others = by_twin
    floor = noise_floor(
        {str(i): centred_rms(own, x) for i, x in enumerate(others)},
        top_logits=own.amax(-1).float().numpy(),
        dtype="bfloat16",
    )
    moved = centred_rms(own, forward(quantised, model_inputs(asked, None)).flatten(0, 1))
    assert 0 < np.median(moved) < floor.unit, "most of it lies under the floor"
    verdict = check(
        half, quantised, asked[:8], decoding=Decoding(max_new_tokens=8), n_variants=2,
        progress=False,
    )  # fmt: skip
    assert verdict["1a"].word == "DIFFERENT"
    assert verdict["numerical"].word in ("DIFFERENT", "INCONCLUSIVE")
    assert "numerically lossless" not in str(verdict)


def test_two_referees_tell_the_format_s_error_from_the_arithmetic_s(half, asked):
    quantised = int8_weights(half.network)
    ids = torch.tensor(asked)
    by_format = against_referee(half, quantised, ids)
    assert by_format.word == "farther", "the original weights are the truth"
    arithmetic = against_referee(half, quantised, ids, truth=referee(quantised))
    own = arithmetic.frame["candidate_rms"].mean()
    plain = by_format.frame["reference_rms"].mean()
    assert own == pytest.approx(plain, rel=0.2), "its own bf16 arithmetic is as good as any"
    assert by_format.frame["candidate_rms"].mean() > 1.2 * own


def test_first_flips_of_other_twins_lie_in_the_predicted_band(half, asked, by_twin):
    own, *others = by_twin
    parts = {str(i): slice(i * N_TOKENS, (i + 1) * N_TOKENS) for i in range(len(asked))}
    tops = {name: flips.top_two(own[part]) for name, part in parts.items()}
    changes = [{n: tops[n].change(x[part]) for n, part in parts.items()} for x in others]
    risk = flips.flip_risk(tops, changes[:10])
    curve = risk.survival()
    inside = []
    for moves in changes[10:]:
        flipped = np.array([tops[n].flipped(moves[n]) for n in parts])
        alive = (~flipped).cumprod(axis=1).mean(0)
        inside.append(((curve["low"] <= alive) & (alive <= curve["high"])).mean())
    assert np.mean(inside) > 0.95
    seen = np.mean([[tops[n].flipped(moves[n]) for n in parts] for moves in changes[10:]])
    assert seen <= risk.frame["flip_probability"].mean(), "few ties here: on the safe side"


@pytest.mark.slow
@pytest.mark.smollm2
def test_the_predicted_rate_of_flips_is_that_of_other_twins_on_smollm2():
    """Each twin predicted by the others: about 2 % of tokens, as published for bf16.

    Twins differ among themselves (.9 to 3.7 % in one measurement), so only their mean is held.
    """
    model = models.load("smollm2", dtype="bfloat16")
    read = prompts.tokenize(prompts.read(), model, max_prompt_tokens=4000)
    inputs = model_inputs([p.ids[:32] for p in read if len(p.ids) >= 32][:8], None)
    top = flips.top_two(forward(model.network, inputs).flatten(0, 1))
    changes = [
        top.change(forward(twins.twin(model, seed=seed), inputs).flatten(0, 1)) for seed in range(6)
    ]
    predicted = [
        flips.flip_risk({"all": top}, [{"all": c} for j, c in enumerate(changes) if j != i])
        for i in range(len(changes))
    ]
    rate = np.mean([risk.frame["flip_probability"].mean() for risk in predicted])
    seen = np.mean([top.flipped(change) for change in changes])
    assert 0.01 < rate < 0.04
    assert seen == pytest.approx(rate, rel=0.5)

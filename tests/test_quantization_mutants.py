"""Broken quantization, pruning and distances are caught at their natural dose, and by what."""

import dataclasses

import pytest
import torch
from conftest import PROMPT_L, PROMPT_S, build_g0, build_t0
from scipy.special import log_softmax, rel_entr

from lossless_lab import check
from lossless_lab.engines import Decoding
from lossless_lab.mutants import NotApplicable
from lossless_lab.mutants.quantization import KL_MUTANTS, quantization_mutants, unpruned
from lossless_lab.number_formats import number_format, round_to
from lossless_lab.optimizations.pruning import magnitude
from lossless_lab.optimizations.quantization import matrices, quantized, unlike_rounding
from lossless_lab.statistical.divergences import divergences

FORMATS = ("int4-group32", "int4-group32-asym", "int8-group32", "int4-channel")
NAMES = tuple(quantization_mutants(number_format("int4-group32")))
GREEDY = Decoding(max_new_tokens=6, stop_token_ids=())


def broken(name, fmt, network, dose=None):
    mutant = quantization_mutants(number_format(fmt))[name]
    return mutant.apply(network, dose=dose or mutant.natural)


def logits(network):
    with torch.no_grad():
        return network(torch.tensor([PROMPT_L])).logits[0]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_honest_rounding_is_never_accused(fmt, dtype):
    """Also after a cast; a network that was cast and then rounded is its own reference."""
    network = build_t0()
    made = quantized(fmt).apply(network).network.to(dtype)
    found = unlike_rounding(network, made, fmt)
    assert len(found) == 21 and found["unlike_share"].max() == 0
    assert found["error_ratio"].between(0.9, 1.15).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_each_is_caught_in_every_matrix_by_comparison_with_rounding(name, fmt):
    network = build_t0()
    found = unlike_rounding(network, broken(name, fmt, network), fmt)
    assert (found["unlike_share"] > 0).all(), "by unlike_rounding"
    assert found["error_ratio"].max() > 1.02
    assert unlike_rounding(network, network, fmt)["unlike_share"].min() > 0.9


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dose", [0.1, 0.01])
def test_smaller_doses_are_caught_too(name, dose):
    network = build_t0()
    found = unlike_rounding(network, broken(name, "int4-group32", network, dose), "int4-group32")
    assert (found["unlike_share"] > 0).mean() > 0.9
    assert found["unlike_share"].mean() < 3 * dose


@pytest.mark.parametrize("name", NAMES)
def test_check_never_calls_one_the_same_as_the_right_one(name):
    network = build_t0()
    right = quantized("int8-group32").apply(network).network
    prompts = [[1 + i, *PROMPT_S] for i in range(4)]
    found = check(right, broken(name, "int8-group32", network), prompts, decoding=GREEDY,
                  n_variants=19, progress=False)  # fmt: skip
    assert found["1a"].word == found["1c"].word == "DIFFERENT", "by check, against the floor"
    assert found["2"].word not in ("PROVEN", "EQUIVALENT")


def test_faults_are_what_they_are_called():
    """One matrix by hand: two groups of four weights on 4-bit steps of 0.1 and 0.2."""
    fmt = dataclasses.replace(number_format("int4-group32"), group=4, scale=None)
    weight = torch.tensor([[0.7, -0.3, 0.1, 0.0, 1.4, 0.6, -0.2, 0.0]])
    expected = {
        "zero-off-by-one": [0.7, -0.3, 0.1, 0.0, 1.6, 0.8, 0.0, 0.2],
        "clipped-step": [0.7, -0.3, 0.1, 0.0, 1.2, 0.6, -0.2, 0.0],
        "group-boundary": [0.7, -0.3, 0.1, 0.0, 0.7, 0.6, -0.2, 0.0],
    }
    for name, row in expected.items():
        network = torch.nn.ModuleDict({"only": torch.nn.Linear(8, 1, bias=False)})
        network.get_output_embeddings = lambda: None
        with torch.no_grad():
            network["only"].weight.copy_(weight)
            quantization_mutants(fmt)[name].edit(network, 0.5)  # the second group
        torch.testing.assert_close(network["only"].weight.detach(), torch.tensor([row]))


def test_the_original_stays_and_what_cannot_be_is_not_applicable(t0):
    before = logits(t0)
    broken("fp8-scale", "int4-group32", t0)
    assert torch.equal(logits(t0), before)
    with pytest.raises(NotApplicable, match="no part that zero-off-by-one could break"):
        broken("zero-off-by-one", "int4-group32", build_g0())
    odd = build_t0(intermediate_size=40)
    with pytest.raises(NotApplicable, match=r"gate_proj`: `fmt` int4-group32 has groups"):
        broken("wrong-axis", "int4-group32", odd)


# ---- pruning -------------------------------------------------------------------------------------


def halve(module):
    with torch.no_grad():
        flat = module.weight.view(-1)
        flat[flat.abs().argsort()[: len(flat) // 2]] = 0


@pytest.mark.parametrize(("dose", "seen"), [(1.0, ""), (0.5, "11 of 21"), (0.05, "20 of 21")])
def test_pruning_that_prunes_nothing_or_not_all_is_seen_by_the_witness(t0, dose, seen):
    mutant, entry = unpruned(halve), magnitude(0.5)
    faulty = dataclasses.replace(
        entry, transform=lambda network: (mutant.apply(network, dose=dose), {})
    )
    found = check(t0, faulty, [[1, *PROMPT_S]], decoding=GREEDY, n_variants=0, progress=False)
    if seen:
        assert found.witness.startswith(f"{seen} matrices 50 % zero")
    else:
        assert {a.word for a in found.answers} == {"VACUOUS"}


# ---- distances -----------------------------------------------------------------------------------


def test_the_wrong_kl_is_caught_by_enumeration_and_by_its_own_laws():
    """Against scipy's sum over the vocabulary, as the room's own figures are."""
    rng = torch.Generator().manual_seed(0)
    a = torch.randn(32, 50, generator=rng) * 3
    b = a + torch.randn(32, 50, generator=rng)
    p, q = (torch.from_numpy(log_softmax(x.double().numpy(), axis=-1)).exp() for x in (a, b))
    truth = torch.from_numpy(rel_entr(p.numpy(), q.numpy()).sum(-1))
    ours = divergences(a, b).frame["kl_reference_candidate_nats"]
    assert torch.allclose(torch.from_numpy(ours.to_numpy()), truth, rtol=1e-5)
    for name, mutant in KL_MUTANTS.items():
        assert float(((mutant(a, b) - truth).abs() / truth).median()) > 0.05, name
    # and by what must hold whatever the truth: KL(x‖x + 1) is 0, and none is negative
    assert float(divergences(a, a + 1).frame["kl_reference_candidate_nats"].abs().max()) < 1e-9
    assert float(KL_MUTANTS["not-renormalised"](a, a + 1).max()) == pytest.approx(-1)
    swapped = KL_MUTANTS["swapped-direction"]
    masked = a.clone()
    masked[:, 7] = -torch.inf  # the candidate cannot say token 7: infinite, and only one way round
    assert divergences(a, masked).frame["kl_reference_candidate_nats"].eq(torch.inf).all()
    assert swapped(masked, a).isinf().all() and not swapped(a, masked).isinf().any()


def test_rounded_weights_equal_those_of_the_entry():
    """The mutants round rightly where they are not told to break."""
    network, fmt = build_t0(), "int4-group32-asym"
    made = dict(matrices(broken("zero-off-by-one", fmt, network, 1e-9)))
    for name, weight in matrices(network):
        apart = (made[name] - round_to(weight, fmt)).abs() > 0
        assert int(apart.sum()) <= 32, name

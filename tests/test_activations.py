"""Activations in 8 bits against torchao's and torch's own; calibration shown for what it is."""

import dataclasses

import pytest
import torch
from conftest import PROMPT_L, PROMPT_S, build_g0, build_t0

from lossless_lab import check, optimizations
from lossless_lab.engines import Decoding, TransformersEngine
from lossless_lab.models.loading import state_sha256
from lossless_lab.number_formats import round_to
from lossless_lab.optimizations.activations import calibrate, dynamic, static, torchao
from lossless_lab.optimizations.quantization import linears
from lossless_lab.optimizations.witness import observe
from lossless_lab.prompts import read_documents

GREEDY = Decoding(max_new_tokens=2, stop_token_ids=())
ROWS = [[1 + i, *PROMPT_L] for i in range(6)]
KERNELS = ("int8-weight-only", "int8-dynamic", "int4-weight-only")
GATES_DB = {"int8-weight-only": 43, "int8-dynamic": 40}


def witnessed(entry, made):
    engine = TransformersEngine(made)
    return entry.witness(observe(made, lambda: engine.generate([PROMPT_S], GREEDY, seed=0)))


def logits(network, ids=PROMPT_L):
    with torch.no_grad():
        return network(torch.tensor([ids])).logits[0].float()


def sqnr_db(x, y):
    return float(20 * torch.log10(x.norm() / (x - y).norm()))


class OneLayer(torch.nn.Module):
    """The least that an entry's `transform` takes: one linear layer of Gaussian weights."""

    dtype = torch.float32

    def __init__(self, width=64):  # as in torchao's own tests
        super().__init__()
        self.layer = torch.nn.Linear(width, width, bias=False)
        rng = torch.Generator().manual_seed(0)
        torch.nn.init.normal_(self.layer.weight, std=0.02, generator=rng)
        self.x = torch.randn(64, width, generator=rng)

    @torch.no_grad()
    def forward(self):
        return self.layer(self.x)


@pytest.mark.parametrize("kind", GATES_DB)
def test_kernels_pass_torchaos_own_gates_on_gaussian_data(kind):
    plain = OneLayer()
    made, _ = torchao(kind).transform(plain)
    assert sqnr_db(plain(), made()) > GATES_DB[kind]


def test_the_simulation_is_what_torchaos_dynamic_kernel_computes():
    """Both round weights by row and inputs by token; torchao divides by 127.5 to use code -128."""
    plain = OneLayer()
    ours, kernel = (e.transform(plain)[0]() for e in (dynamic(), torchao("int8-dynamic")))
    between, apart = sqnr_db(ours, kernel), sqnr_db(plain(), ours)
    assert apart > 38 and between > apart - 3
    by_hand = round_to(plain.x, "int8-channel") @ round_to(plain.layer.weight, "int8-channel").T
    torch.testing.assert_close(ours, by_hand.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [*(f"torchao-{k}" for k in KERNELS), *(d.name for d in (
    dynamic(), dynamic("int4-group32")))])  # fmt: skip
def test_the_witness_sees_the_entry_and_not_its_absence(name):
    entry, network = optimizations.find(name), build_t0(torch.bfloat16, hidden_size=128)
    made = entry.apply(network)
    assert made.reference_intact
    said = witnessed(entry, made.network)
    if name.startswith("torchao"):
        assert said.startswith("21 of 21 layers")
        bits = float(said.split(", ")[1].split()[0])
        assert 8 <= bits < 9 if "int8" in name else 4.5 <= bits <= 5.1
        assert state_sha256(made.network) != state_sha256(network)
    else:
        assert "inputs of 21 layers rounded, 0 % of them saturated; 21 of 21 matrices" in said
    idle = dataclasses.replace(entry, transform=lambda network: (network, {}))
    assert witnessed(entry, idle.apply(network).network) == ""
    poisoned = entry.poisoned().apply(network).network
    assert float((logits(made.network) - logits(poisoned)).abs().max()) > 0.05


def test_check_takes_a_network_of_packed_weights(t0):
    prompts = [[1 + i, *PROMPT_S] for i in range(3)]
    found = check(t0, torchao("int8-dynamic"), prompts, decoding=GREEDY, n_variants=0,
                  progress=False)  # fmt: skip
    assert found["1a"].word == "DIFFERENT" and "bits per weight stored" in found.witness


@pytest.mark.parametrize("build", [build_t0, build_g0])
def test_scales_by_min_max_percentile_and_least_error(build):
    network = build()
    table = calibrate(network, ROWS, percentile=99)
    name, layer = next(linears(network))
    seen = []
    handle = layer.register_forward_pre_hook(lambda m, a: seen.append(a[0].abs().flatten()))
    for row in ROWS:
        logits(network, row)
    handle.remove()
    x = torch.cat(seen)
    assert table.loc[name, "min-max"] == pytest.approx(float(x.max()) / 127)
    quantile = float(torch.quantile(x, 0.99, interpolation="lower"))
    assert table.loc[name, "percentile"] == pytest.approx(quantile / 127, rel=0.03)
    assert (table["percentile"] < table["min-max"]).all()

    def error(scale):
        return float((x - (x / scale).round().clamp(-127, 127) * scale).square().sum())

    best = min(error(float(x.max()) / 127 * c) for c in torch.linspace(0.02, 1, 400))
    assert error(table.loc[name, "least error"]) <= 1.1 * best
    assert len(table) == len(dict(linears(network)))


def test_static_scales_saturate_what_they_did_not_see(t0):
    scales = calibrate(t0, ROWS)["min-max"]
    entry = static(scales)
    inside = entry.apply(t0).network
    logits(inside, ROWS[0])
    counts = [m.rounded for _, m in linears(inside)]
    assert all(n > 0 and beyond == 0 for n, beyond in counts)
    tight = static(scales / 4).apply(t0).network
    assert "% of them saturated" in witnessed(static(scales / 4), tight)
    assert sum(m.rounded[1] for _, m in linears(tight)) > 0
    plain = logits(t0, ROWS[0])
    error = [float((logits(n, ROWS[0]) - plain).norm()) for n in (inside, tight)]
    assert error[0] < 0.5 * error[1]


def test_the_calibration_documents_of_another_domain_cost_more(tiny_draft):
    """By least error on the layer inputs themselves: scales of code are wrong for Chinese."""
    parts = {}
    for document in read_documents(part="calibration"):
        ids = tiny_draft.tokenizer(document.text)["input_ids"][:64]
        parts.setdefault(document.language, []).append(ids)
    own = calibrate(tiny_draft, parts["zh"])["least error"]
    other = calibrate(tiny_draft, parts["code"])["least error"]
    assert float((other / own - 1).abs().max()) > 0.05


def test_refusals(t0):
    with pytest.raises(ValueError, match=r"one for each layer; model\.layers\.0"):
        static({}).apply(t0)
    with pytest.raises(ValueError, match=r"bfloat16 for int4-weight-only; it is in torch\.float32"):
        torchao("int4-weight-only").apply(t0)
    with pytest.raises(ValueError, match=r"no torch\.nn\.Linear besides its head"):
        torchao("int8-dynamic").apply(build_g0())

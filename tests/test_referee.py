"""The referee against Llama in numpy's extended precision; words decided by a paired test."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from architectures import ARCHITECTURES, build
from conftest import PROMPT_L, PROMPT_S, build_g0, build_t0
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode

from lossless_lab.numerical import referee as room
from lossless_lab.numerical.capture import forward, model_inputs, observer_effect
from lossless_lab.numerical.float64 import exact_logits
from lossless_lab.numerical.layers import compare_layers
from lossless_lab.numerical.referee import against_referee, narrow_operations, referee

IDS = torch.tensor([PROMPT_L])


def plain(network, ids=IDS):
    return forward(network, model_inputs(ids, None))[0]


def llama_by_numpy(network, ids):
    """Logits [n, vocab_size] in np.longdouble, from the weights and the config alone."""
    config, real = network.config, np.longdouble
    weights = {k: v.detach().double().numpy().astype(real) for k, v in network.named_parameters()}
    n, dim, eps = len(ids), config.head_dim, real(config.rms_norm_eps)
    inv_freq = network.model.rotary_emb.inv_freq.numpy().astype(real)  # fp32: the definition
    angles = np.arange(n, dtype=real)[:, None] * inv_freq
    cos, sin = (np.tile(f(angles), 2)[:, None] for f in (np.cos, np.sin))

    def norm(x, name):
        return weights[name] * x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)

    def heads(x, name):
        return (x @ weights[name].T).reshape(n, -1, dim)

    def rotate(x):
        return x * cos + np.concatenate([-x[..., dim // 2 :], x[..., : dim // 2]], -1) * sin

    x = weights["model.embed_tokens.weight"][np.array(ids)]
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}."
        y = norm(x, at + "input_layernorm.weight")
        q, k, v = (heads(y, f"{at}self_attn.{p}_proj.weight") for p in "qkv")
        repeats = config.num_attention_heads // config.num_key_value_heads
        k, v = (np.repeat(z, repeats, axis=1) for z in (rotate(k), v))
        scores = np.einsum("qhd,khd->hqk", rotate(q), k) / np.sqrt(real(dim))
        scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", probs / probs.sum(-1, keepdims=True), v)
        x = x + mixed.reshape(n, -1) @ weights[at + "self_attn.o_proj.weight"].T
        y = norm(x, at + "post_attention_layernorm.weight")
        gate, up = (y @ weights[f"{at}mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[at + "mlp.down_proj.weight"].T
    x = norm(x, "model.norm.weight")
    return x @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T


def models(tiny_target, tiny_draft):
    return {"T0": build_t0(), "target": tiny_target.network, "draft": tiny_draft.network}


def test_logits_agree_with_extended_precision(tiny_target, tiny_draft):
    """And the error of a float32 run is the one that numpy sees; a double model stays behind."""
    for name, network in models(tiny_target, tiny_draft).items():
        exact = llama_by_numpy(network, PROMPT_L)
        scale = float(abs(exact).max())
        found = plain(referee(network)).numpy()
        assert found.dtype == np.float64
        assert abs(found - exact).max() < 1e-13 * max(scale, 1), name
        double = plain(copy.deepcopy(network).double()).numpy()
        assert abs(double - exact).max() > 1e-8, name  # the mutant: fp64 that is not
        d = (plain(network).numpy() - exact).astype(np.float64)
        rms = d.std(axis=1)  # centred over the vocabulary
        frame = against_referee(network, network, IDS).to_frame()
        assert np.allclose(frame["reference_rms"], rms, rtol=1e-6), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_narrow_operation_inside_on_any_architecture(architecture):
    network = build(architecture)
    double = copy.deepcopy(network).double()
    if double._can_set_experts_implementation():
        double.set_experts_implementation("eager")  # grouped kernels know no float64 at all
    exact = referee(network)
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    assert narrow_operations(exact, IDS).empty
    assert narrow_operations(exact, IDS, attention_mask=mask).empty
    unrepaired = {"GPT2"}  # its code casts nothing: a double GPT-2 is a referee already
    assert narrow_operations(double, IDS).empty == (architecture in unrepaired)
    assert (plain(network) - plain(exact)).abs().max() < 1e-4
    assert torch.equal(plain(exact), plain(referee(build(architecture))))


def test_narrow_operations_names_what_casts():
    frame = narrow_operations(build_t0().double(), IDS)
    assert frame.columns.tolist() == ["operation", "dtypes", "n_calls"]
    counts = frame.set_index("operation")["n_calls"]
    assert counts["aten.rsqrt.default"] == 7  # 2 norms in each of 3 layers, and the last
    assert counts["aten.cos.default"] == 1 and set(frame["dtypes"]) == {"float32"}
    half = narrow_operations(build_t0(torch.bfloat16), IDS)
    assert {"bfloat16", "bfloat16, float32"} <= set(half["dtypes"])


class Careless(torch.nn.Module):
    """Code that slips into float32 wherever a list of casts would not look."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.config = inner, inner.config
        self.attribute = torch.full((), 1 / 3)  # a float32 tensor that is no buffer

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, input_ids, use_cache=False):
        out = self.inner(input_ids=input_ids, use_cache=use_cache)
        n = input_ids.shape[1]
        x = out.logits.half().type(torch.float32).to(torch.bfloat16).float()
        x = torch.nn.functional.softmax(x, -1, dtype=torch.float32)
        x = x * (torch.arange(1, n + 1) / 3)[:, None]  # integers divided: the default dtype
        x = x + torch.full((n, 1), 0.1) + torch.zeros(n, 1, dtype=torch.float32).add_(0.1)
        x = x + self.attribute + torch.arange(n, dtype=torch.float32).pow(0.5)[:, None]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = x @ torch.eye(x.shape[-1], dtype=torch.float32)
        return SimpleNamespace(logits=x)


def test_every_way_into_float32_is_closed():
    network = Careless(build_t0()).eval()
    exact = referee(network)
    assert narrow_operations(exact, IDS).empty and torch.get_default_dtype() == torch.float32
    logits = plain(referee(build_t0())).numpy()
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    i = np.arange(len(PROMPT_L))[:, None]
    rest = 0.2 + float(torch.full((), 1 / 3)) + np.sqrt(i)
    expected = probs / probs.sum(-1, keepdims=True) * (i + 1) / 3 + rest
    assert abs(plain(exact).numpy() - expected).max() < 1e-14


def test_frequencies_are_part_of_the_model():
    """Kept at float32 as the code makes them, rounded where the model was cast as a whole."""
    network = build_t0()
    exact = referee(network)
    assert torch.equal(exact.model.rotary_emb.inv_freq, network.model.rotary_emb.inv_freq.double())
    rounded = referee(build_t0(torch.bfloat16))
    assert torch.equal(
        rounded.model.rotary_emb.inv_freq, network.model.rotary_emb.inv_freq.bfloat16().double()
    )


def test_the_model_itself_stays_as_it_was():
    network = build_g0()
    before, logits = copy.deepcopy(network.state_dict()), plain(network)
    exact = referee(SimpleNamespace(network=network))
    assert network.transformer.wte.weight.dtype == torch.float32
    assert all(torch.equal(before[k], v) for k, v in network.state_dict().items())
    assert torch.equal(plain(network), logits)
    assert exact.lm_head.weight is exact.transformer.wte.weight  # tied, still
    assert torch.equal(plain(copy.deepcopy(exact)), plain(referee(exact)))
    assert observer_effect(exact, IDS) == 0 and not isinstance(network, type(exact))


def test_a_referee_walks_in_lockstep_and_leaves_the_other_side_alone():
    network = build_t0()
    drift = compare_layers(referee(network), network, IDS)
    assert torch.equal(drift.candidate_logits, plain(network))
    assert drift.candidate_logits.dtype == torch.float32
    assert drift.frame["relative_rms"].between(0, 1e-5).all()


def forbidden(graph, inputs):
    raise AssertionError("compiled code ran inside the referee")


def test_compiled_code_is_undone():
    parts, method = build_t0(), build_t0()
    for layer in parts.model.layers:
        layer.mlp.forward = torch.compile(layer.mlp.forward, backend=forbidden)
    method.compile(backend=forbidden)
    whole = torch.compile(build_t0(), backend=forbidden)
    nested = build_t0()
    nested.model.layers[0] = torch.compile(nested.model.layers[0], backend=forbidden)
    nested.model.layers[1].mlp = torch.compile(nested.model.layers[1].mlp, backend=forbidden)
    for compiled in (parts, method, whole, nested):
        assert torch.equal(plain(referee(compiled)), plain(referee(build_t0())))
    with pytest.raises(Exception, match="compiled code ran inside"):
        plain(parts)


def test_patched_code_is_no_truth():
    """A copy of the network would run the original's weights, in float32."""
    for compiled in (False, True):
        network = build_t0()
        mlp = network.model.layers[1].mlp
        run = mlp.forward
        mlp.forward = lambda x, run=run: 1.01 * run(x)
        if compiled:
            mlp.forward = torch.compile(mlp.forward, backend=forbidden)
        with pytest.raises(ValueError, match=r"`model.layers.1.mlp` carries a method of its own"):
            referee(network)


def test_a_half_read_referee_answers_other_questions(monkeypatch):
    monkeypatch.setattr("lossless_lab.numerical.float64._CHUNK", 97 * 4)
    exact, other = referee(build_t0()), torch.tensor([PROMPT_L[::-1]])
    alone, reverse = plain(exact), plain(exact, other)
    one, two = exact_logits(exact, IDS[0]), exact_logits(exact, other[0])
    for (start, x), (_, y) in zip(one, two, strict=True):
        assert torch.equal(plain(exact, other), reverse) and "forward" not in vars(exact.model)
        assert torch.allclose(x, alone[start : start + 4], rtol=0, atol=1e-13)
        assert torch.allclose(y, reverse[start : start + 4], rtol=0, atol=1e-13)


def test_a_double_mixture_of_experts_can_be_looked_into():
    network = build("Mixtral").double()
    before = network.config._experts_implementation
    assert not narrow_operations(network, IDS).empty  # its norms cast
    assert network.config._experts_implementation == before


def test_a_row_of_pads_alone_is_named():
    mask = torch.tensor([[1] * 9, [0] * 9])
    with pytest.raises(ValueError, match="must keep a token in each row; row 1 has none"):
        against_referee(build_t0(), build_t0(), IDS.repeat(2, 1), attention_mask=mask)


def test_quantised_weights_are_no_truth():
    network = build_t0()
    head = network.lm_head
    head.weight = torch.nn.Parameter(head.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"`lm_head.weight` is Tensor of torch.int8: pass the deq"):
        referee(network)


@pytest.mark.parametrize("make", [build_t0, build_g0, lambda: build("Gemma2")])
@pytest.mark.parametrize("rows", [1, 4, 9])
def test_the_head_in_pieces_gives_the_same_logits(make, rows, monkeypatch):
    monkeypatch.setattr("lossless_lab.numerical.float64._CHUNK", 97 * rows)
    exact = referee(make())
    pieces = list(exact_logits(exact, IDS[0]))
    assert [start for start, _ in pieces] == list(range(0, 9, rows))
    assert all(len(x) <= rows for _, x in pieces)
    whole = plain(exact)
    assert torch.allclose(torch.cat([x for _, x in pieces]), whole, rtol=0, atol=1e-13)
    assert torch.equal(plain(exact), whole)  # and it is whole again


class Sizes(TorchDispatchMode):
    """Keeps the largest number of float64 logits in one tensor."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float64:
            logits = out.shape[-1:] == (97,) and out.shape != (64, 97)  # the head's own weights
            self.largest = max(self.largest, out.numel() * logits)
        return out


@pytest.mark.parametrize("rows", [2, 64])
def test_logits_in_float64_come_in_small_pieces(rows, monkeypatch):
    monkeypatch.setattr("lossless_lab.numerical.float64._CHUNK", 97 * rows)
    network, ids = build_t0(), prompts(3)
    whole = against_referee(network, network, ids, truth=network).to_frame()
    with Sizes() as sizes:
        frame = against_referee(network, network, ids, truth=referee(network)).to_frame()
    assert sizes.largest == 97 * min(rows, 12)  # the mutant: a head that takes a row at once
    pd.testing.assert_frame_equal(frame, whole, rtol=1e-6)


def test_pads_are_left_out():
    pad = len(PROMPT_L) - len(PROMPT_S)
    ids = torch.tensor([[0] * pad + list(PROMPT_S), PROMPT_L])
    mask = torch.tensor([[0] * pad + [1] * len(PROMPT_S), [1] * len(PROMPT_L)])
    for network in (build_t0(), build_g0()):
        frame = against_referee(network, network, ids, attention_mask=mask).to_frame()
        places = list(zip(frame["row"], frame["position"], strict=True))
        assert places == [(0, i) for i in range(pad, 9)] + [(1, i) for i in range(9)]
        assert frame["reference_rms"].max() < 1e-5  # the same function, pads or none


def prompts(n, length=12):
    generator = torch.Generator().manual_seed(n)
    return torch.randint(1, 97, (n, length), generator=generator)


def test_words_for_float32_bfloat16_and_exact_sides():
    network, half = build_t0(), build_t0().to(torch.bfloat16)
    exact = referee(network)
    ids = prompts(10)
    assert against_referee(half, network, ids, truth=network).word == "nearer the truth"
    assert against_referee(network, half, ids).word == "farther"
    assert against_referee(network, copy.deepcopy(network), ids).word == "equally far"
    found = against_referee(network, exact, ids)
    assert found.word == "nearer the truth" and found.ratio < 1e-6
    assert against_referee(exact, exact, ids).ratio == 1
    assert found.unit == "row" and found.n_units == 10
    assert str(found).startswith("nearer the truth: RMS error to fp64 ")


def test_few_rows_fall_back_to_positions_and_say_so():
    found = against_referee(build_t0(), build_t0().to(torch.bfloat16), IDS)
    assert found.unit == "position" and found.n_units == 9
    assert "9 positions that share their context, so the interval is too narrow" in str(found)
    assert against_referee(build_t0(), build_t0(), IDS[:, :1]).word == "undecided"  # one position


def test_two_truths_tell_the_format_from_the_arithmetic():
    """Rounded weights: far from the original fp64 run, as near as float32 is to their own."""
    network = build_t0()
    rounded = build_t0().to(torch.bfloat16).float()
    rounded.model.rotary_emb.inv_freq = network.model.rotary_emb.inv_freq  # no part of the format
    ids = prompts(12)
    of_format = against_referee(network, rounded, ids)
    of_arithmetic = against_referee(network, rounded, ids, truth=rounded).to_frame()
    assert of_format.word == "farther" and of_format.ratio > 1e3
    own = against_referee(network, network, ids).to_frame()["reference_rms"].mean()
    assert 0.5 < of_arithmetic["candidate_rms"].mean() / own < 2


def test_callables_take_the_same_ids():
    network = build_t0()
    found = against_referee(lambda ids: plain(network, ids)[None], network, IDS, truth=network)
    assert found.ratio == 1 and found.word == "equally far"
    with pytest.raises(ValueError, match="`truth` must be a network where `reference` is none"):
        against_referee(lambda ids: None, network, IDS)
    with pytest.raises(ValueError, match=r"logits must be \[1, 9, vocab_size\].*got \(9, 97\)"):
        against_referee(network, lambda ids: plain(network, ids), IDS)
    with pytest.raises(ValueError, match="must both be"):
        against_referee(network, lambda ids: plain(network, ids)[None, :, :50], IDS)


def test_nan_is_counted_and_decides():
    network = build_t0()

    def poisoned(ids):
        logits = forward(network, model_inputs(ids, None)).clone()
        logits[0, 2:4, 5] = math.nan
        return logits

    found = against_referee(network, poisoned, IDS)
    assert found.word == "farther" and found.nonfinite == {"reference": 0, "candidate": 2}
    assert math.isnan(found.ratio) and "NaN or inf at positions: candidate 2" in str(found)
    swapped = against_referee(poisoned, network, IDS, truth=network)
    assert swapped.word == "nearer the truth"
    assert against_referee(poisoned, poisoned, IDS, truth=network).word == "undecided"


def simulated(rng, n_rows, ratio=1.0):
    """Errors of 6 positions in each row: a part that both sides share, and a part of their own."""
    shared, own = rng.normal(0, 0.5, (n_rows, 1, 1)), rng.normal(0, 0.4, (n_rows, 1, 2))
    rms = np.exp(shared + own + rng.normal(0, 0.3, (n_rows, 6, 2))) * [1, ratio]
    row, position = np.divmod(np.arange(6 * n_rows), 6)
    names = {"reference_rms": rms[..., 0].ravel(), "candidate_rms": rms[..., 1].ravel()}
    return pd.DataFrame({"row": row, "position": position} | names)


def test_false_alarms_and_power_of_the_paired_test(monkeypatch):
    """Equal sides get an interval off 1 in 5 % of runs; positions as units are far worse."""
    rng = np.random.default_rng(0)
    n = 400
    found = [room._judged(simulated(rng, room.MIN_ROWS)) for _ in range(n)]
    alarms = sum(not low <= 1 <= high for low, high in (f.confidence_interval for f in found))
    assert stats.binomtest(alarms, n).proportion_ci(0.998).low < 0.05
    assert sum(f.word in ("nearer the truth", "farther") for f in found) <= alarms
    half = [room._judged(simulated(rng, room.MIN_ROWS, 0.4)).word for _ in range(200)]
    assert half.count("nearer the truth") > 150 and "farther" not in half
    many = [room._judged(simulated(rng, 200)).word for _ in range(100)]
    assert many.count("equally far") > 90  # an answer that is not always "undecided"
    monkeypatch.setattr(room, "MIN_ROWS", 99)  # the mutant: tokens of one prompt as independent
    naive = [room._judged(simulated(rng, 8)).confidence_interval for _ in range(200)]
    assert np.mean([not low <= 1 <= high for low, high in naive]) > 0.1


@pytest.mark.smollm2
@pytest.mark.slow
def test_the_trap_on_smollm2(smollm2):
    """A double model is off by a third of what the float32 run is; two fp64 orders agree."""
    network, ids = smollm2.network, torch.arange(100, 132)[None]
    exact = referee(network)
    assert narrow_operations(exact, ids).empty
    truth = plain(exact, ids)
    double = (plain(copy.deepcopy(network).double(), ids) - truth).abs().max()
    single = (plain(network, ids).double() - truth).abs().max()
    assert 1e-7 < double < single < 1e-3
    exact.set_attn_implementation("eager")
    assert (plain(exact, ids) - truth).abs().max() < 1e-11
    print(f"double {double:.2e}, float32 {single:.2e}")


def test_more_rows_never_weaken_a_word():
    """A true ratio of .83: said as soon as it can be told, and never taken back."""
    rng = np.random.default_rng(4)
    words = []
    for n in (8, 16, 64, 256, 1024):
        own = rng.lognormal(0, 0.1, n)
        frame = pd.DataFrame({"row": range(n), "position": 0, "reference_rms": own})
        frame["candidate_rms"] = 0.83 * own * rng.lognormal(0, 0.1, n)
        words.append(room._judged(frame).word)
    assert words == ["nearer the truth"] * 5
    assert "by luck" in str(room._judged(frame))
    frame["candidate_rms"] = own * rng.lognormal(0, 0.1, n)
    frame["candidate_rms"] /= np.exp(np.log(frame["candidate_rms"] / own).mean())
    assert room._judged(frame).word == "equally far"

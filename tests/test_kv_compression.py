"""Compressed caches against transformers' own, masks by hand, and the sizes of the cache room."""

import dataclasses

import pytest
import torch
from conftest import PROMPT_L, PROMPT_S, build_g0, build_t0
from transformers import DynamicCache
from transformers.cache_utils import Fp8QuantizedLayer, QuantoQuantizedLayer

from lossless_lab import check, models, optimizations
from lossless_lab.engines import Decoding, TransformersEngine
from lossless_lab.kv_cache import kv_cache_bytes
from lossless_lab.number_formats import number_format, round_to
from lossless_lab.optimizations.kv_compression import (
    COMPRESSIONS,
    EvictingKV,
    QuantizedKV,
    QuantizedRows,
    ThroughCache,
    kv_compressed,
)
from lossless_lab.optimizations.witness import observe
from lossless_lab.pipeline import compare_on

GREEDY = Decoding(max_new_tokens=6, stop_token_ids=())
QUIET = {"n_variants": 0, "progress": False}


def both(name, **fields):
    fmt = number_format(name)
    return QuantizedKV(name=f"kv-{name}", keys=fmt, values=fmt, **fields)


def states(n_tokens, head_dim=64, heads=2, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return (torch.randn(2, 1, heads, n_tokens, head_dim, generator=rng) * 3).unbind(0)


def logits(network, ids, cache=None, step=None):
    """Logits of one row fed `step` tokens at a time."""
    ids, found = torch.tensor([ids]), []
    with torch.no_grad():
        for start in range(0, ids.shape[1], step or ids.shape[1]):
            end = start + (step or ids.shape[1])
            found.append(network(ids[:, start:end], cache=cache, use_cache=True).logits)
    return torch.cat(found, 1)[0]


# ---- what a quantised cache holds ----------------------------------------------------------------


def test_it_holds_what_transformers_own_quanto_cache_holds():
    """Groups of 64 along a head of 64 are the same groups; quanto keeps float32 scales and shifts.

    Its shift is no integer code, so every group ranges from -7 to 8 steps, where both are one.
    """
    fmt = dataclasses.replace(number_format("int4-group64-asym"), scale=None)
    ours = QuantizedRows(QuantizedKV(name="", keys=fmt, values=fmt))
    theirs = QuantoQuantizedLayer(nbits=4, q_group_size=64, residual_length=1)
    first, second = states(40), states(1, seed=1)
    for x in first:
        step = x.abs().amax(-1) / 7
        x[..., 3], x[..., 4] = -7 * step, 8 * step
    for layer in (ours, theirs):
        read = layer.update(*first)
        assert torch.equal(read[0], first[0]), "a pass reads its own tokens as they are"
    for x, y in zip(ours.update(*second), theirs.update(*second), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=2e-5)
        assert float((x[..., :40, :] - first[0]).abs().max()) > 0.01


def test_it_holds_what_transformers_own_fp8_cache_holds_of_a_prompt():
    """One scale for the keys of a pass; what is new is read as it is here, and rounded there."""
    ours, theirs = QuantizedRows(both("fp8-e4m3")), Fp8QuantizedLayer()
    first, second = states(40), states(1, seed=1)
    for layer in (ours, theirs):
        layer.update(*first)
    for x, y in zip(ours.update(*second), theirs.update(*second), strict=True):
        torch.testing.assert_close(x[..., :40, :], y[..., :40, :], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["int8-channel", "q4_0", "mxfp4", "int4-group32-asym"])
def test_rows_are_tokens_and_keys_may_go_by_channel(name):
    keys, values = states(64)
    by_token, by_channel = both(name), both(name, block=32)
    rounded = by_token.round(keys, values)
    assert torch.equal(rounded[0], round_to(keys, name))
    assert torch.equal(rounded[1], round_to(values, name))
    columns = by_channel.round(keys, values)[0]
    for start in (0, 32):  # one block of tokens of one channel of one head
        block = keys[0, 1, start : start + 32, 5]
        assert torch.equal(columns[0, 1, start : start + 32, 5], round_to(block[None], name)[0])
    assert torch.equal(by_channel.round(keys, values)[1], rounded[1])


def test_channels_suit_keys_with_outlier_channels():
    keys, values = states(64)
    keys[..., 7] *= 50
    rounded = (both("int4-group32-asym", block=b).round(keys, values)[0] for b in (1, 32))
    error = [float((x - keys)[..., :7].norm()) for x in rounded]
    assert error[1] < 0.2 * error[0]


def test_only_whole_blocks_before_the_residual_are_rounded():
    layer = QuantizedRows(both("int4-channel", block=8, residual=10))
    keys, values = states(40)
    for i in range(40):
        layer.update(keys[..., i : i + 1, :], values[..., i : i + 1, :])
        same = (layer.keys == keys[..., : i + 1, :]).all(-1).all(0).all(0)
        assert same.tolist() == [j >= max(0, i + 1 - 10) // 8 * 8 for j in range(i + 1)]
    layer.reset()
    assert (layer.get_seq_length(), layer.count) == (0, 0)


@pytest.mark.parametrize("build", [build_t0, build_g0])
def test_a_residual_beyond_the_text_changes_nothing_and_none_changes_much(build):
    network = build()
    ids = [*PROMPT_L, *PROMPT_S]
    plain = logits(network, ids, DynamicCache(config=network.config), step=1)
    wide = logits(network, ids, both("int4-channel", residual=13).build(network.config), step=1)
    narrow = logits(network, ids, both("int4-channel").build(network.config), step=1)
    assert torch.equal(plain, wide)
    assert torch.equal(plain[0], narrow[0])  # read before anything was rounded
    assert float((plain[1:] - narrow[1:]).abs().amax(-1).min()) > 1e-3


# ---- eviction ------------------------------------------------------------------------------------


def test_eviction_is_a_mask_over_the_whole_text(t0):
    """The same tokens hidden by an attention mask, all in one pass."""
    ids, sinks, window = [*PROMPT_L, *PROMPT_S, *PROMPT_L], 2, 5
    n = len(ids)
    ours = logits(t0, ids, EvictingKV(name="", sinks=sinks, window=window).build(t0.config), step=1)
    query, key = torch.arange(n)[:, None], torch.arange(n)
    seen = (key <= query) & ((key < sinks) | (key >= query - window))
    mask = torch.zeros(1, 1, n, n).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        theirs = t0(torch.tensor([ids]), attention_mask=mask).logits[0]
    # from the second layer on, a key also depends on what its own token had seen: the same there
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


def test_evicted_tokens_are_counted_and_dropped(t0):
    how = EvictingKV(name="", sinks=2, window=5)
    cache = how.build(t0.config)
    logits(t0, PROMPT_L, cache)
    layer = cache.layers[0]
    assert (layer.keys.shape[-2], layer.get_seq_length(), how.n_compressed(9)) == (7, 9, 2)
    assert how.bits_per_value(16, 9) == 16 * 7 / 9
    sinks_alone = EvictingKV(name="", sinks=3, window=0).build(t0.config)
    logits(t0, PROMPT_L, sinks_alone)
    assert sinks_alone.layers[0].keys.shape[-2] == 3


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stored"),
    [("q8_0", "q8_0"), ("q4_0", "q4_0"), ("int8-channel", "int8_per_token_head"),
     ("int4-channel", "int4_per_token_head")],
)  # fmt: skip
@pytest.mark.parametrize("n_tokens", [1, 96, 1000])
def test_bits_are_those_of_the_cache_room(name, stored, n_tokens):
    config = models.load("tiny-target").network.config
    sizes = [kv_cache_bytes(config, seq_len=n_tokens, dtype=d).bytes for d in (stored, "float16")]
    bits = both(name).bits_per_value(config.head_dim, n_tokens)
    assert 16 * sizes[0] / sizes[1] == pytest.approx(bits, rel=1e-12)


def test_the_residual_counts_at_its_full_width():
    kivi = COMPRESSIONS["kv-kivi-int4"]
    assert kivi.bits_per_value(64, 128) == 16.0
    # 4 bits, a float16 scale and a 4-bit zero point for 32: 4.625; half of 256 tokens stays wide
    assert kivi.bits_per_value(64, 256) == pytest.approx((4.625 + 16) / 2)
    assert kivi.bits_per_value(64, 256, wide_bits=32) == pytest.approx((4.625 + 32) / 2)


# ---- the entries ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_the_witness_sees_the_entry_and_not_its_absence(name):
    entry, t0 = optimizations.find(name), build_t0(head_dim=32)
    said = {}
    for which in (entry, dataclasses.replace(entry, transform=lambda network: (network, {}))):
        made = which.apply(t0)
        engine = TransformersEngine(made.network, **made.settings)
        said[which] = entry.witness(
            observe(made.network, lambda engine=engine: engine.generate([PROMPT_L], GREEDY, seed=0))
        )
    assert [bool(text) for text in said.values()] == [True, False]
    assert "no memory is saved here" in said[entry]


@pytest.mark.parametrize(
    ("compression", "n", "expected"),
    [
        (both("int8-channel"), 4, [False] + [True] * 5),
        (both("int8-channel", residual=6), 4, [False, False, False, False, True, True]),
        (both("int8-channel", block=4, residual=2), 4, [False, False, False, True, True, True]),
        (EvictingKV(name="", sinks=2, window=5), 4, [False] * 5 + [True]),
    ],
)
def test_a_position_depends_on_what_was_compressed_before_it(t0, compression, n, expected):
    entry = kv_compressed(compression)
    assert [entry.depends(n, i) for i in range(6)] == expected
    # the same seen from outside: those logits differ from an exact cache's, and no others
    engines = (TransformersEngine(t0, keep_logits=True, cache=c) for c in ("dynamic", compression))
    given = [[5, 9, 13, 33, 41, 50]]
    plain, other = (engine.score([PROMPT_S], given)[0] for engine in engines)
    assert (plain != other).any(-1).tolist() == expected


def test_no_word_is_said_for_tokens_that_never_read_from_it(t0):
    """A residual window that no prompt passes: the logits are equal, and that shows nothing."""
    prompts = [[i, *PROMPT_L] for i in range(2, 6)]
    found = check(t0, "kv-kivi-int4", prompts, decoding=GREEDY, **QUIET)
    assert {a.word for a in found.answers if a.level != "3"} == {"NOT EXERCISED"}
    assert found.supporting["exercised"] == "0 of 24 positions"
    short = kv_compressed(both("int4-channel", residual=12))
    found = check(t0, short, prompts, decoding=GREEDY, **QUIET)
    assert found.supporting["exercised"] == "8 of 24 positions"
    assert found["1a"].word == "DIFFERENT"


def test_a_cache_whose_rounding_changes_no_value_is_vacuous(t0):
    class Idle(QuantizedKV):
        def round(self, keys, values):
            return keys, values

    fmt = number_format("int4-channel")
    for kind, words in ((Idle, {"VACUOUS"}), (QuantizedKV, {"DIFFERENT"})):
        entry = kv_compressed(kind(name="kv-mine", keys=fmt, values=fmt))
        found = check(t0, entry, [[1, *PROMPT_L]], decoding=GREEDY, **QUIET)
        assert {a.word for a in found.answers if a.level == "1a"} == words
    layer = QuantizedRows(Idle(name="", keys=fmt, values=fmt))
    assert layer.altered is None and layer.update(*states(4)) and layer.altered is False


@pytest.mark.parametrize("name", ["kv-int8-channel", "kv-sinks"])
def test_the_poisoned_twin_computes_something_else(t0, name):
    entry = optimizations.find(name)
    good, bad = (e.apply(t0) for e in (entry, entry.poisoned()))
    found = [
        TransformersEngine(c.network, keep_logits=True, **c.settings)
        .generate([PROMPT_L], GREEDY, seed=0)[0].logits
        for c in (good, bad)
    ]  # fmt: skip
    assert float((found[0][-1] - found[1][-1]).abs().max()) > 0.05


def test_the_run_record_names_the_cache():
    t0 = build_t0(head_dim=32)
    engine = TransformersEngine(t0, cache=COMPRESSIONS["kv-q8_0"])
    assert engine.describe()["cache"] == "kv-q8_0"
    first, again = (engine.generate([PROMPT_L], GREEDY, seed=0)[0].output_ids for _ in range(2))
    assert first == again, "each batch begins with an empty cache"


# ---- over documents ------------------------------------------------------------------------------


def test_documents_are_read_through_the_cache(tiny_draft):
    """Token by token as in generation; an exact cache costs what the order of sums costs."""
    texts = ["def f(x):\n    return x + 1", "The river was high, and the bridge was closed."]
    cost = {
        name: compare_on(tiny_draft, ThroughCache(tiny_draft, how), texts, progress=False)
        for name, how in (
            ("exact", None), ("q8_0", COMPRESSIONS["kv-q8_0"]), ("int2", both("int2-channel")),
        )
    }  # fmt: skip
    kl = {n: f["kl_reference_candidate_nats"].mean() for n, f in cost.items()}
    assert kl["exact"] < 1e-9 < kl["q8_0"] < 0.02 * kl["int2"]
    ids = tiny_draft.tokenizer(texts[0])["input_ids"]
    direct = logits(
        tiny_draft.network, ids, both("int2-channel").build(tiny_draft.network.config), 1
    )
    law = torch.log_softmax(direct[3].double(), -1)
    plain = torch.log_softmax(logits(tiny_draft.network, ids)[3].double(), -1)
    expected = float((plain.exp() * (plain - law)).sum())
    frame = cost["int2"]
    row = frame[(frame["document"] == "0") & (frame["position"] == 3)].iloc[0]
    assert row["kl_reference_candidate_nats"] == pytest.approx(expected, rel=1e-3)


def test_models_with_windows_are_refused():
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, sliding_window=8,
    )  # fmt: skip
    network = MistralForCausalLM(config).eval()
    with pytest.raises(ValueError, match="full attention in all layers"):
        COMPRESSIONS["kv-q8_0"].build(network.config)
    with pytest.raises(ValueError, match="do not divide a row of 16"):
        both("q8_0").round(*states(2, head_dim=16))

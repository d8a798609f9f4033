"""The transformers engine against generate itself, and against a loop that shares nothing."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from conftest import PROMPT_L, PROMPT_S, T0_GREEDY_S, build_g0, build_t0

from lossless_lab.engines import (
    Decoding,
    TransformersEngine,
    batch_seed,
    complete,
    forward_logits,
    harmless_variants,
    padding_fault,
    score_batches,
)
from lossless_lab.engines.padding import pad, positions

RAGGED = [PROMPT_S, PROMPT_L, (3,), (1, 2), tuple(range(1, 13)), (9, 8, 7), (5,) * 6, (1, 96, 2)]
GREEDY_20 = Decoding(max_new_tokens=20)


@torch.no_grad()
def uncached_loop(network, prompt, n_tokens, stop=()):
    """Greedy ids by whole forwards over one unpadded row, positions written out, no cache."""
    row = list(prompt)
    while len(row) < len(prompt) + n_tokens:
        where = torch.arange(len(row))[None]
        logits = network(torch.tensor([row]), position_ids=where, use_cache=False).logits
        row.append(int(logits[0, -1].argmax()))
        if row[-1] in stop:
            break
    return row[len(prompt) :]


def bare_generate(network, prompts, n_tokens, stop=(), **settings):
    """`generate` called directly on a left-padded batch; rows cut after the first end id."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    settings = {"do_sample": False, "repetition_penalty": 1.0, "pad_token_id": 0} | settings
    eos = list(stop) or None
    out = network.generate(
        ids, attention_mask=mask, max_new_tokens=n_tokens, eos_token_id=eos, **settings
    )
    rows = out[:, width:].tolist()
    cut = [next((i + 1 for i, t in enumerate(row) if t in stop), len(row)) for row in rows]
    return [row[:n] for row, n in zip(rows, cut, strict=True)]


def outputs(completions):
    return [list(c.output_ids) for c in completions]


# Greedy ids, against two oracles


def test_t0_gives_the_known_ids(t0):
    (done,) = TransformersEngine(t0).generate([PROMPT_S], GREEDY_20, seed=0)
    assert done.output_ids == T0_GREEDY_S
    assert done.finish_reason == "length" and done.text == "" and done.logits is None


@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
@pytest.mark.parametrize("make", [build_t0, build_g0])
def test_ragged_batch_equals_generate_and_the_uncached_loop(make, cache):
    network = make()
    engine = TransformersEngine(network, batch_size=8, cache=cache)
    stop = engine.resolve(Decoding()).stop_token_ids
    ours = outputs(engine.generate(RAGGED, GREEDY_20, seed=0))
    assert ours == bare_generate(network, RAGGED, 20, stop)
    assert ours == [uncached_loop(network, p, 20, stop) for p in RAGGED]
    single = [engine.generate([p], GREEDY_20, seed=0)[0] for p in RAGGED]
    assert outputs(single) == ours


def test_tiny_target_equals_both_oracles(tiny_target):
    engine = TransformersEngine(tiny_target, batch_size=8)
    texts = [
        "def ",
        "import os\n",
        "class A:\n    ",
        "return x",
        "for i in",
        "#",
        "\n\n",
        "if a and b",
    ]
    prompts = [tiny_target.tokenizer(t)["input_ids"] for t in texts]
    stop = engine.resolve(Decoding()).stop_token_ids
    ours = outputs(engine.generate(prompts, GREEDY_20, seed=0))
    assert ours == bare_generate(tiny_target.network, prompts, 20, stop)
    assert ours == [uncached_loop(tiny_target.network, p, 20, stop) for p in prompts]
    for prompt, output in zip(prompts, ours, strict=True):
        assert outputs(engine.generate([prompt], GREEDY_20, seed=0)) == [output]


@pytest.mark.smollm2
@pytest.mark.slow
def test_smollm2_equals_both_oracles(smollm2):
    engine = TransformersEngine(smollm2, batch_size=8)
    texts = [
        "The capital of France is",
        "def is_palindrome(s):",
        "1, 1, 2, 3, 5,",
        "什么是键值缓存？",
        "Water",
        "The quick brown fox jumps over the lazy dog and then",
        "{",
        "In 1969",
    ]
    prompts = [smollm2.tokenizer(text)["input_ids"] for text in texts]
    decoding = Decoding(max_new_tokens=32)
    stop = engine.resolve(decoding).stop_token_ids
    ours = outputs(engine.generate(prompts, decoding, seed=0))
    assert ours == bare_generate(smollm2.network, prompts, 32, stop)
    assert ours == [uncached_loop(smollm2.network, p, 32, stop) for p in prompts]
    for prompt, output in zip(prompts, ours, strict=True):
        assert outputs(engine.generate([prompt], decoding, seed=0)) == [output]


# Sampling


def test_sampling_equals_generate_with_the_same_seed(t0):
    decoding = Decoding(
        max_new_tokens=12, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2
    )
    ours = TransformersEngine(t0).generate(RAGGED, decoding, seed=7)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        bare = bare_generate(
            t0, RAGGED, 12, do_sample=True, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01,
            repetition_penalty=1.2,
        )  # fmt: skip
    assert outputs(ours) == bare


def test_samples_come_prompt_by_prompt_and_differ(t0):
    decoding = Decoding(max_new_tokens=8, temperature=1.5, n_samples=3)
    done = TransformersEngine(t0).generate([PROMPT_S, PROMPT_L], decoding, seed=1)
    assert [c.prompt_ids for c in done] == [PROMPT_S] * 3 + [PROMPT_L] * 3
    assert len({c.output_ids for c in done}) == 6
    again = TransformersEngine(t0).generate([PROMPT_S, PROMPT_L], decoding, seed=1)
    assert outputs(again) == outputs(done)
    other = TransformersEngine(t0).generate([PROMPT_S, PROMPT_L], decoding, seed=2)
    assert outputs(other) != outputs(done)


def test_global_random_state_and_model_are_left_alone(t0):
    torch.manual_seed(11)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    kernel, config = t0.config._attn_implementation, t0.generation_config
    engine = TransformersEngine(t0, threads=1, attention="eager", keep_logits=True)
    engine.generate([PROMPT_S], Decoding(temperature=1.0), seed=5)
    with pytest.raises(ZeroDivisionError):  # put back after a failure too
        engine_with_fault(engine).generate([PROMPT_S], Decoding(), seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert t0.config._attn_implementation == kernel and t0.generation_config is config


def engine_with_fault(engine):
    network = build_t0()

    def broken(*args, **kwargs):
        raise ZeroDivisionError

    network.model.layers[1].forward = broken
    return dataclasses.replace(engine, model=network)


def test_batch_seeds_depend_on_seed_and_index_alone(t0):
    assert len({batch_seed(s, i) for s in range(20) for i in range(20)}) == 400
    assert all(0 <= batch_seed(s, 0) < 2**63 for s in (0, 2**62))
    engine = TransformersEngine(t0, batch_size=2)
    decoding = Decoding(max_new_tokens=4, temperature=1.0, n_samples=2)
    whole = list(complete(engine, RAGGED, decoding))
    assert [len(rows) for _, rows in whole] == [2] * 8
    later = list(complete(engine, RAGGED, decoding, start=5))
    assert [i for i, _ in later] == [5, 6, 7]
    assert [outputs(r) for _, r in later] == [outputs(r) for _, r in whole[5:]]


# B26: temperature 0


def test_b26_zero_is_greedy_and_small_is_sampling(t0):
    engine = TransformersEngine(t0)
    (zero,) = engine.generate([PROMPT_S], Decoding(max_new_tokens=20, temperature=0.0), seed=0)
    (small,) = engine.generate([PROMPT_S], Decoding(max_new_tokens=20, temperature=1e-7), seed=0)
    assert zero.output_ids == small.output_ids == T0_GREEDY_S
    with pytest.raises(ValueError, match="temperature"):  # what generate itself makes of it
        t0.generate(torch.tensor([PROMPT_S]), do_sample=True, temperature=0.0, max_new_tokens=2)


# B03: several end ids, pad tails


@pytest.mark.parametrize("pad_id", [0, 77])
def test_b03_rows_end_at_the_union_of_end_ids(pad_id):
    network = build_t0()
    network.generation_config.eos_token_id = [77]
    network.config.eos_token_id = 96
    network.generation_config.pad_token_id = pad_id
    engine = TransformersEngine(network, keep_logits=True, top_logprobs=3)
    assert engine.resolve(Decoding()).stop_token_ids == (77, 96)
    short, long = engine.generate([PROMPT_S, PROMPT_L], Decoding(max_new_tokens=12), seed=0)
    assert short.output_ids == (17, 22, 71, 77) and short.finish_reason == "stop"
    assert len(long.output_ids) == 12 and long.finish_reason == "length"
    for row in (short, long):
        n = len(row.output_ids)
        assert len(row.logprobs) == len(row.top_logprobs) == len(row.logits) == n
    only_96 = dataclasses.replace(Decoding(max_new_tokens=12), stop_token_ids=(96,))
    (other,) = engine.generate([PROMPT_S], only_96, seed=0)
    assert other.output_ids == T0_GREEDY_S[:12]


def test_the_tokenizer_contributes_its_end_id(t0):
    tokenizer = SimpleNamespace(eos_token_id=71, pad_token_id=0, decode=lambda ids, **_: "x")
    (done,) = TransformersEngine(t0, tokenizer=tokenizer).generate([PROMPT_S], GREEDY_20, seed=0)
    assert done.output_ids == (17, 22, 71) and done.text == "x"


# Logprobs, logits and timings


def test_logprobs_are_raw_and_match_a_plain_forward(t0):
    decoding = Decoding(max_new_tokens=6, temperature=0.5, top_k=5)
    engine = TransformersEngine(t0, keep_logits=True, top_logprobs=97)
    for done in engine.generate([PROMPT_S, PROMPT_L], decoding, seed=0):
        row = torch.tensor([[*done.prompt_ids, *done.output_ids]])
        with torch.no_grad():
            logits = t0(row).logits[0, len(done.prompt_ids) - 1 : -1].double()
        law = logits.log_softmax(-1)
        chosen = law[range(6), list(done.output_ids)]
        torch.testing.assert_close(torch.tensor(done.logprobs).double(), chosen, rtol=0, atol=1e-5)
        torch.testing.assert_close(done.logits.double(), logits, rtol=0, atol=5e-5)
        first = dict(done.top_logprobs[0])
        assert list(first.values()) == sorted(first.values(), reverse=True)
        assert first[done.output_ids[0]] == pytest.approx(done.logprobs[0], abs=1e-6)
        assert sum(torch.tensor(list(first.values())).exp()) == pytest.approx(1, abs=1e-5)


def test_timings_are_in_order(t0):
    stop = Decoding(max_new_tokens=12, stop_token_ids=(77,))
    short, long = TransformersEngine(t0).generate([PROMPT_S, PROMPT_L], stop, seed=0)
    for done in (short, long):
        t = done.timings
        assert 0 < t["first_token_ms"] <= t["latency_ms"] <= t["batch_ms"]
    assert short.timings["latency_ms"] < long.timings["latency_ms"]
    assert short.timings["batch_rows"] == 2


SETTINGS = [
    {},
    {"cache": "static"},
    {"cache": "none"},
    {"extra_padding": 3},
    {"companions": 2},
    {"attention": "eager"},
    {"threads": 1},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("make", [build_t0, build_g0])
def test_score_repeats_generate_bitwise(make, settings):
    engine = TransformersEngine(make(), keep_logits=True, **settings)
    (first, *_) = engine.generate(RAGGED, Decoding(max_new_tokens=5, stop_token_ids=()), seed=0)
    decoding = Decoding(max_new_tokens=14, stop_token_ids=first.output_ids[-1:])
    done = engine.generate(RAGGED, decoding, seed=0)
    assert len({len(c.output_ids) for c in done}) > 1  # some rows end early and are padded on
    scored = engine.score(RAGGED, [c.output_ids for c in done], max_new_tokens=14)
    for own, again in zip(done, scored, strict=True):
        assert torch.equal(own.logits, again)


def test_score_repeats_sampled_and_half_precision_runs_bitwise():
    engine = TransformersEngine(build_t0(torch.bfloat16), keep_logits=True)
    decoding = Decoding(max_new_tokens=10, temperature=1.3, repetition_penalty=1.3)
    done = engine.generate(RAGGED, decoding, seed=4)
    scored = engine.score(RAGGED, [c.output_ids for c in done])
    assert all(torch.equal(a.logits, b) for a, b in zip(done, scored, strict=True))
    assert scored[0].dtype == torch.float32


def test_score_follows_foreign_outputs(t0):
    given = [(4, 8, 15), (16, 23), (42,)]
    engine = TransformersEngine(t0, batch_size=2)
    scored = score_batches(engine, RAGGED[:3], given)
    for prompt, output, logits in zip(RAGGED, given, scored, strict=False):
        (plain,) = forward_logits(t0, [[*prompt, *output]], padding="none")
        torch.testing.assert_close(logits, plain[len(prompt) - 1 : -1], rtol=0, atol=5e-5)


def test_plain_forward_agrees_with_the_decode_path(t0, g0):
    for network in (t0, g0):
        truth = forward_logits(network, RAGGED, padding="none")
        for padding in ("left", "right"):
            rows = forward_logits(network, RAGGED, padding=padding, extra=2)
            for row, expected in zip(rows, truth, strict=True):
                torch.testing.assert_close(row, expected, rtol=0, atol=5e-5)


# Assistant


@pytest.mark.parametrize("layers", [1, 3])
def test_an_assistant_changes_nothing_in_float32(t0, layers):
    draft = build_t0(num_hidden_layers=layers)
    draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.repetition_penalty = 3.0  # must not reach the target either
    engine = TransformersEngine(t0, assistant=draft, keep_logits=True)
    before = draft.generation_config.to_dict()
    (done,) = engine.generate([PROMPT_S], GREEDY_20, seed=0)
    assert done.output_ids == T0_GREEDY_S
    assert draft.generation_config.to_dict() == before
    assert torch.equal(engine.score([PROMPT_S], [done.output_ids])[0], done.logits)
    foreign = [(4, 8, 15, 16, 23, 42)]
    forced = engine.score([PROMPT_S], foreign)[0]
    plain = TransformersEngine(t0).score([PROMPT_S], foreign)[0]
    torch.testing.assert_close(forced, plain, rtol=0, atol=5e-5)


def test_an_assistant_needs_single_rows(t0):
    with pytest.raises(
        ValueError, match="`assistant` needs batches of one row, got `batch_size` 2"
    ):
        TransformersEngine(t0, assistant=t0, batch_size=2)


def test_prompt_lookup_passes_through(t0):
    engine = TransformersEngine(t0, generate_options={"prompt_lookup_num_tokens": 4})
    (done,) = engine.generate([PROMPT_S], GREEDY_20, seed=0)
    assert done.output_ids == T0_GREEDY_S
    assert engine.describe()["launch_arguments"] == {"prompt_lookup_num_tokens": 4}


# Harmless variants


def test_variants_are_many_and_harmless(t0):
    engine = TransformersEngine(t0, batch_size=2, keep_logits=True)
    variants = harmless_variants(engine)
    assert len(variants) >= 19
    assert "batches of 2" not in variants
    rows = RAGGED[:4]
    own = outputs(c for _, done in complete(engine, rows, Decoding(max_new_tokens=6)) for c in done)
    own_logits = score_batches(engine, rows, own)
    moved = 0
    for name, make in variants.items():
        pairs = list(zip(own_logits, score_batches(make(), rows, own), strict=True))
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4, msg=name)
        moved += any(not torch.equal(a, b) for a, b in pairs)
    assert moved >= 15  # they are re-orderings, not repetitions


def test_variants_with_an_assistant_keep_one_row(t0):
    engine = TransformersEngine(t0, assistant=build_t0(num_hidden_layers=1))
    for make in harmless_variants(engine).values():
        assert make().batch_size == 1 and make().companions == 0


# B01: padding faults are named


def path_of(network, *, side, mask, where):
    def path(rows):
        ids, real = pad(rows, 0, side=side)
        given = {"attention_mask": real} if mask else {}
        given |= {"position_ids": positions(real)} if where else {}
        return network(ids, **given).logits[:, -1]

    return path


B01 = [
    ("g0", "left", True, True, "rounding only"),
    ("g0", "left", True, False, "positions wrong"),
    ("g0", "left", False, False, "mask missing"),
    ("t0", "left", True, False, "rounding only"),  # rotary positions are relative: no fault
    ("t0", "left", False, False, "mask missing"),
    ("t0", "right", True, False, "read at a pad column"),
    ("g0", "right", True, True, "read at a pad column"),
]


@pytest.mark.parametrize(("model", "side", "mask", "where", "fault"), B01)
def test_b01_padding_faults_are_named(request, model, side, mask, where, fault):
    network = request.getfixturevalue(model)
    rows = [PROMPT_S, (2, 4, 6, 8, 10, 12, 14)]  # three pad columns beside PROMPT_S
    found = padding_fault(path_of(network, side=side, mask=mask, where=where), network, rows)
    assert found.fault == fault, str(found)
    if fault == "rounding only":
        assert found.max_abs_difference < 1e-4 and found.reference_top_id == found.candidate_top_id
    else:
        assert found.max_abs_difference > 1
    if (model, fault) == ("g0", "positions wrong"):
        assert (found.reference_top_id, found.candidate_top_id) == (44, 56)


def test_b01_anything_else_is_unexplained(t0):
    rows = [PROMPT_S, PROMPT_L]
    good = path_of(t0, side="left", mask=True, where=True)
    assert padding_fault(lambda r: good(r) * 1.2, t0, rows).fault == "unexplained"
    assert padding_fault(lambda r: good(r) * torch.nan, t0, rows).fault == "unexplained"
    own = lambda r: torch.stack([f[-1] for f in forward_logits(t0, r, padding="none")])  # noqa: E731
    assert padding_fault(own, t0, rows).fault == "none"
    with pytest.raises(ValueError, match="`rows` must differ in length"):
        padding_fault(good, t0, [PROMPT_S, PROMPT_S])


def test_b01_generate_itself_is_right(g0):
    def path(rows):
        engine = TransformersEngine(g0, keep_logits=True)
        return torch.stack([c.logits[0] for c in engine.generate(rows, Decoding(), seed=0)])

    assert padding_fault(path, g0, [PROMPT_S, PROMPT_L]).fault in ("rounding only", "none")


# B09: the length asked for must not matter


def greedy(engine, n):
    """Ids of both prompts, n tokens each."""
    decoding = Decoding(max_new_tokens=n)
    return [c.output_ids for _, rows in complete(engine, [PROMPT_S, PROMPT_L], decoding)
            for c in rows]  # fmt: skip


@pytest.mark.parametrize(
    "settings", [{}, {"cache": "static"}, {"cache": "static", "batch_size": 2}]
)
def test_b09_shorter_runs_are_prefixes_and_static_equals_dynamic(t0, settings):
    engine = TransformersEngine(t0, **settings)
    longest = greedy(engine, 30)
    for n in (10, 20):
        assert greedy(engine, n) == [row[:n] for row in longest]
    assert longest == greedy(TransformersEngine(t0), 30)


class AttendsEmptySlots:
    """Stand-in for a static cache without a mask: unfilled slots dilute the attention."""

    batch_size = 1

    def __init__(self, network):
        self.network = network

    def generate(self, prompts, decoding, *, seed):
        from lossless_lab.engines import Completion

        (prompt,) = prompts
        row, size = list(prompt), len(prompt) + decoding.max_new_tokens
        while len(row) < size:
            empty = min(2, size - 1 - len(row))  # zero keys that are attended while they are empty
            ids = torch.tensor([[0] * empty + row])
            where = torch.tensor([[0] * empty + list(range(len(row)))])
            with torch.no_grad():
                row.append(int(self.network(ids, position_ids=where).logits[0, -1].argmax()))
        return [
            Completion(
                prompt_ids=tuple(prompt),
                output_ids=tuple(row[len(prompt) :]),
                text="",
                finish_reason="length",
            )
        ]


def test_b09_attending_empty_slots_is_caught(t0):
    broken = AttendsEmptySlots(t0)
    longest = greedy(broken, 30)
    assert any(greedy(broken, n) != [row[:n] for row in longest] for n in (10, 20))
    pairs = zip(longest, greedy(TransformersEngine(t0), 30), strict=True)
    assert all(ours != theirs for ours, theirs in pairs)


# Bad input, before anything runs


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "`prompts` must hold at least one prompt"),
        ([PROMPT_S, ()], r"`prompts\[1\]` must hold at least one token id"),
        ([(1, 97)], r"`prompts\[0\]\[1\]` must be an id from 0 to 96, got 97"),
        ([(1, -2)], r"`prompts\[0\]\[1\]` must be an id from 0 to 96, got -2"),
        ([(1,) * 250], r"`prompts\[0\]` has 250 tokens .* at most 256"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(t0, prompts, message):
    engine = TransformersEngine(t0)
    never = dataclasses.replace(engine, model=t0)
    object.__setattr__(never, "_run", None)
    with pytest.raises(ValueError, match=message):
        never.generate(prompts, Decoding(), seed=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache": "quantised"}, "`cache` must be one of dynamic, static, none, got 'quantised'"),
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        ({"extra_padding": -1}, "`extra_padding` must be at least 0"),
        ({"threads": 0}, "`threads` must be at least 1"),
        ({"generate_options": {"temperature": 0.5}}, "`generate_options` may not set temperature"),
        ({"generate_options": {"use_cache": False}}, "`generate_options` may not set use_cache"),
    ],
)
def test_bad_settings_name_what_is_allowed(t0, settings, message):
    with pytest.raises(ValueError, match=message):
        TransformersEngine(t0, **settings)


def test_score_refuses_what_does_not_fit(t0):
    engine = TransformersEngine(t0)
    with pytest.raises(ValueError, match="`outputs` must be as many as `prompts`, got 1 and 2"):
        engine.score([PROMPT_S, PROMPT_L], [(1,)])
    with pytest.raises(ValueError, match=r"`outputs\[1\]` must hold at least one"):
        engine.score([PROMPT_S, PROMPT_L], [(1,), ()])


def test_describe_holds_no_path_and_no_environment(t0, tmp_path):
    import json

    from transformers import LlamaForCausalLM

    t0.save_pretrained(tmp_path / "my-model")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "my-model")
    told = TransformersEngine(loaded).describe()
    assert told["model_id"] == "my-model" and told["vocab_size"] == 97
    assert told["weights_sha256"] == TransformersEngine(t0).describe()["weights_sha256"]
    assert str(tmp_path) not in json.dumps(told)
    keys = {"kind", "name", "capability", "memory_bytes", "driver", "cuda"}
    assert set(told["device"]) == keys
    with torch.no_grad():
        loaded.lm_head.weight[0, 0] += 1
    assert TransformersEngine(loaded).describe()["weights_sha256"] != told["weights_sha256"]

"""Each catalogue entry is seen to run, counts what depends on it, and leaves the model alone."""

import copy
import dataclasses
import inspect

import pytest
import torch
from conftest import PROMPT_L, PROMPT_S, build_g0, build_t0

from lossless_lab import models, optimizations
from lossless_lab.engines import Decoding, TransformersEngine
from lossless_lab.models.loading import state_sha256
from lossless_lab.optimizations import compilation
from lossless_lab.optimizations.entry import copied, fingerprint, patched
from lossless_lab.optimizations.faults import ignore_padding
from lossless_lab.optimizations.precision import cast
from lossless_lab.optimizations.witness import observe

ROWS = [PROMPT_S, PROMPT_L, PROMPT_S[:2], PROMPT_L[:5]]
GREEDY = Decoding(max_new_tokens=4, stop_token_ids=())
CHEAP = ("bfloat16", "float16", "static-cache", "batch-8")


def eager(graph, inputs):
    """A backend that compiles to what it was given: cheap, and bit for bit the same."""
    return graph


COMPILED = {
    "compile": compilation.whole(eager),
    "compile-mlp": compilation.mlps(eager),
    "compile-static-cache": compilation.whole(eager, cache="static"),
}


def entry_of(name):
    return COMPILED.get(name) or optimizations.find(name)


def generated(candidate, n=4):
    engine = TransformersEngine(candidate.network, keep_logits=True, **candidate.settings)
    return engine, engine.generate(ROWS[: min(n, engine.batch_size)], GREEDY, seed=0)


def seen_by(candidate):
    engine = TransformersEngine(candidate.network, **candidate.settings)
    rows = ROWS[: engine.batch_size]
    return observe(candidate.network, lambda: engine.generate(rows, GREEDY, seed=0))


@pytest.mark.parametrize("name", [*CHEAP, *COMPILED])
def test_the_witness_sees_the_entry_and_not_its_absence(t0, name):
    entry = entry_of(name)
    assert entry.witness(seen_by(entry.apply(t0)))
    untouched = dataclasses.replace(entry, transform=lambda network: (network, {}))
    assert entry.witness(seen_by(untouched.apply(t0))) == ""


def test_compiling_the_module_object_leaves_no_trace(t0):
    entry = compilation.ineffective(compilation.zeros)
    candidate = entry.apply(t0)
    assert entry.witness(seen_by(candidate)) == ""
    plain = TransformersEngine(t0).generate([PROMPT_S], GREEDY, seed=0)
    assert generated(candidate)[1][0].output_ids == plain[0].output_ids  # zeros never ran


@pytest.mark.parametrize("name", [*CHEAP, *COMPILED])
def test_applying_leaves_the_original_as_it_was(name):
    network = build_t0()
    before = {k: v.clone() for k, v in network.state_dict().items()}
    with torch.no_grad():
        logits = network(torch.tensor([PROMPT_L])).logits
    candidate = entry_of(name).apply(network)
    generated(candidate)
    assert candidate.reference_intact
    assert not any("forward" in vars(module) for module in network.modules())
    assert all(torch.equal(before[k], v) for k, v in network.state_dict().items())
    with torch.no_grad():
        assert torch.equal(network(torch.tensor([PROMPT_L])).logits, logits)


def halve(network):
    return network.half(), {}


def one_weight(network):
    with torch.no_grad():
        network.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-3
    return network, {}


def one_forward(network):
    network.model.layers[0].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    return network, {}


@pytest.mark.parametrize("transform", [halve, one_weight, one_forward])
def test_a_change_in_place_is_caught(transform):
    entry = dataclasses.replace(optimizations.find("float16"), transform=transform)
    assert not entry.apply(build_t0()).reference_intact


def test_fingerprints_tell_weights_and_code_apart(t0):
    assert fingerprint(t0) == fingerprint(build_t0())
    changed = copy.deepcopy(t0)
    one_weight(changed)
    assert fingerprint(changed) != fingerprint(t0)


@pytest.mark.parametrize("name", [*CHEAP, *COMPILED])
def test_the_poisoned_twin_computes_something_else(t0, name):
    entry = entry_of(name)
    twin = entry.poisoned()
    assert twin.name == f"{entry.name} (poisoned)"
    before = fingerprint(t0)
    logits = []
    for each in (entry, twin):
        candidate = each.apply(t0)
        assert candidate.reference_intact
        logits.append([c.logits.float() for c in generated(candidate)[1]])
    assert fingerprint(t0) == before
    apart = max(float((a[-1] - b[-1]).abs().max()) for a, b in zip(*logits, strict=True))
    assert apart > 0.05  # far beyond rounding, even in half precision


@pytest.mark.parametrize(
    ("name", "lengths", "rows", "expected"),
    [
        ("bfloat16", [3, 2], [1, 1], 5),
        ("compile", [3, 2], [1, 1], 5),
        ("static-cache", [1, 1], [1, 1], 0),
        ("static-cache", [4, 1, 0], [1, 1, 1], 3),
        ("batch-8", [3, 2, 4], [2, 2, 1], 5),
        ("batch-8", [3], [1], 0),
    ],
)
def test_exercised_positions_counted_by_hand(name, lengths, rows, expected):
    assert optimizations.find(name).exercised(lengths, rows) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_cast_equals_loading_in_that_dtype(tiny_target, dtype):
    """Rotary frequencies stay float32, as in a model that was loaded so: bit for bit the same."""
    loaded = models.load("tiny-target", dtype=dtype).network
    made = optimizations.find(dtype).apply(tiny_target)
    ids = torch.arange(1, 257)[None]
    with torch.no_grad():
        assert torch.equal(made.network(ids).logits, loaded(ids).logits)
    assert made.model.name == "tiny-target"  # a Model stays a Model
    assert made.network.dtype == getattr(torch, dtype)


def test_a_cast_keeps_tied_weights_tied_and_other_architectures_running(g0):
    made = optimizations.find("bfloat16").apply(g0).network
    assert made.lm_head.weight is made.transformer.wte.weight
    assert made(torch.tensor([PROMPT_S])).logits.isfinite().all()
    assert g0.lm_head.weight.dtype == torch.float32


def test_a_static_cache_and_batches_give_the_ids_of_plain_greedy(t0):
    alone = [TransformersEngine(t0).generate([row], GREEDY, seed=0)[0].output_ids for row in ROWS]
    batched = [c.output_ids for c in generated(optimizations.find("batch-8").apply(t0))[1]]
    static = generated(optimizations.find("static-cache").apply(t0))[1]
    assert batched == alone
    assert static[0].output_ids == alone[0]


def test_changed_weights_have_an_identity_of_their_own(tiny_target):
    """A record must not name the original's weights; a cast is what loading in that dtype gives."""
    made = {name: entry_of(name).apply(tiny_target).model for name in ("nf4", *CHEAP, *COMPILED)}
    hashes = {name: model.weights_sha256 for name, model in made.items()}
    assert hashes.pop("nf4") == state_sha256(made["nf4"].network) != tiny_target.weights_sha256
    assert set(hashes.values()) == {tiny_target.weights_sha256}


def test_every_entry_says_what_it_is():
    for name, entry in optimizations.CATALOGUE.items():
        assert entry.name == name
        assert entry.level in ("1a", "1b", "1c", "2", "3")
        assert entry.changes
        assert str(entry).startswith(f"{name}: claims level {entry.level}, changes ")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("bflat16", "bfloat16"), ("BF16", "bfloat16"), ("fp16", "float16"),
     ("torch.compile", "compile"), ("static", "static-cache"), ("batch8", "batch-8"),
     ("batch-", "batch-8")],
)  # fmt: skip
def test_an_unknown_name_suggests_the_nearest(typed, meant):
    with pytest.raises(KeyError, match=f"did you mean '{meant}'"):
        optimizations.find(typed)


def test_names_without_a_neighbour_and_sizes_that_make_no_batch():
    with pytest.raises(KeyError, match=r"no optimisation 'xyzzy'\. Known: bfloat16"):
        optimizations.find("xyzzy")
    with pytest.raises(ValueError, match="at least 2 to be a batch; got 1"):
        optimizations.find("batch-1")
    with pytest.raises(ValueError, match="floating-point dtype of torch; got 'int8'"):
        cast("int8")
    assert optimizations.find("batch-3").apply(build_t0()).settings == {"batch_size": 3}


def test_observing_leaves_the_network_as_it_was(t0):
    own = set(vars(t0))
    seen_by(optimizations.find("batch-8").apply(t0))
    assert set(vars(t0)) == own
    with pytest.raises(ZeroDivisionError):
        observe(t0, lambda: 1 / 0)
    assert set(vars(t0)) == own


def test_an_mlp_is_asked_for_where_there_is_none():
    with pytest.raises(ValueError, match="no submodule named `mlp`"):
        compilation.mlps(eager).transform(torch.nn.Linear(2, 2))


def wrapped(network):
    """The network with a closure for its forward, as debugging code leaves it."""
    original = network.forward
    network.forward = lambda *args, **kwargs: original(*args, **kwargs)
    return network


def hidden(network):
    """The same one level down, in a method that is not forward."""
    layer = network.model.layers[1].mlp
    layer.extra_repr = lambda: ""
    return network


PATCHES = {
    "wrapped": wrapped,
    "compiled in place": lambda network: (network.compile(backend=eager), network)[1],
    "compiled region": lambda network: compilation.mlps(eager).apply(network).network,
    "compiled object": lambda network: torch.compile(network, backend=eager),
    "faulty": ignore_padding,
    "deep": hidden,
}


@pytest.mark.parametrize("patch", PATCHES)
@pytest.mark.parametrize(
    "entry",
    [cast("bfloat16"), cast("float16").poisoned(), optimizations.find("batch-8").poisoned(),
     compilation.mlps(eager)],
    ids=str,
)  # fmt: skip
def test_a_network_whose_copy_would_run_the_original_is_refused(entry, patch):
    network = PATCHES[patch](build_t0())
    with pytest.raises(ValueError, match="a copy would run the original's"):
        entry.apply(network)


@pytest.mark.parametrize("build", [build_t0, build_g0])
def test_an_honest_network_is_copied_and_computes_with_its_own_weights(build):
    network = build()
    assert patched(network) == ""
    other = copied(network)
    with torch.no_grad():
        next(other.parameters()).zero_()
    assert fingerprint(other) != fingerprint(network) == fingerprint(build())


def test_the_witness_of_a_cast_looks_at_what_was_computed(t0):
    """Parameters in bfloat16 prove nothing where the forward runs another network."""
    entry = cast("bfloat16")

    class Elsewhere(type(t0)):
        def forward(self, *args, **kwargs):
            return t0(*args, **kwargs)

    Elsewhere.forward.__signature__ = inspect.signature(type(t0).forward)
    made = entry.apply(t0)
    made.network.__class__ = Elsewhere
    assert entry.witness(seen_by(made)) == ""


def test_any_number_format_is_an_entry():
    assert optimizations.find("int2-group32").level == "3"
    with pytest.raises(KeyError, match="did you mean 'int2-group32'"):
        optimizations.find("int2-group3")

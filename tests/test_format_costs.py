"""Costs of number formats on a model: against direct comparison, and the panel on top."""

import dataclasses

import pandas as pd
import pytest
import torch

from lossless_lab import models, optimizations, panels
from lossless_lab.number_formats import round_to
from lossless_lab.optimizations.quantization import matrices, quantized
from lossless_lab.panels.format_cost import _choices, _groups
from lossless_lab.pipeline import FormatCosts, compare_on
from lossless_lab.prompts import read_documents


@pytest.fixture(scope="module")
def costs():
    model = models.load("tiny-draft")
    formats = ("int8-channel", "int4-group32", "int2-group32")
    return FormatCosts(model, read_documents()[:36], formats=formats, max_tokens=32)


def by_hand(model, fmt, only=None):
    """A copy whose linear layers (or one of them) are rounded, made without the catalogue."""
    copy = models.load("tiny-draft").network
    with torch.no_grad():
        for name, module in copy.named_modules():
            chosen = "lm_head" not in name and only in (None, name)
            if chosen and isinstance(module, torch.nn.Linear):
                module.weight.copy_(round_to(module.weight, fmt))
    return copy


def test_positions_and_ladder_equal_a_comparison_by_hand(costs):
    direct = compare_on(
        costs.model, by_hand(costs.model, "int4-group32"), costs.documents, max_tokens=32,
        progress=False,
    )  # fmt: skip
    ours = costs.positions("int4-group32")
    pd.testing.assert_frame_equal(ours[direct.columns], direct)
    row = costs.ladder().set_index("format").loc["int4-group32"]
    assert row["mean_kl_nats"] == pytest.approx(direct["kl_reference_candidate_nats"].mean())
    assert row["bits_per_weight"] == pytest.approx(4.5)
    assert row["low"] < row["mean_kl_nats"] < row["high"]


def test_fewer_bits_cost_more(costs):
    assert costs.ladder()["mean_kl_nats"].is_monotonic_increasing


def test_sensitivity_is_one_matrix_alone_and_leaves_everything_as_it_was(costs):
    before = {k: v.clone() for k, v in costs.network("int2-group32").state_dict().items()}
    found = costs.sensitivity("int2-group32", n_documents=4)
    after = costs.network("int2-group32").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    name = "model.layers.0.mlp.down_proj"
    alone = compare_on(
        costs.model, by_hand(costs.model, "int2-group32", only=name), costs.documents[:4],
        max_tokens=32, progress=False,
    )  # fmt: skip
    row = found[(found["layer"] == 1) & (found["module"] == "mlp.down_proj")].iloc[0]
    assert row["mean_kl_nats"] == pytest.approx(alone["kl_reference_candidate_nats"].mean())


def test_the_panel_follows_format_position_and_layer(costs):
    panel = panels.format_cost(costs)
    assert panel.error is None and panel.text.startswith("int8-channel, 8.")
    pictures = {panel.png}
    assert panel.state["group"] == "channel"
    for name, value in (("format", "int2"), ("position", 5), ("layer", 2)):
        panel.controls[name].value = value
        assert panel.error is None
        pictures.add(panel.png)
    assert panel.state["group"] == "group32" and panel.text.startswith("int2-group32")
    content = panels.cost(costs, **panel.state)
    assert panel.text == content.text and "Layer 2: worst matrix by its weights" in panel.text
    assert len(pictures) == 3, "the layer changes the table, not the picture"
    with pytest.raises(ValueError, match="at least one format"):
        panels.format_cost(FormatCosts(costs.model, costs.documents, formats=()))


def test_other_entries_stand_beside_formats_and_caches_are_read_through(costs):
    """A row of the table equals a comparison made directly."""
    from lossless_lab.optimizations.kv_compression import COMPRESSIONS, ThroughCache
    from lossless_lab.optimizations.pruning import magnitude

    names = ["2:4", "kv-q8_0", costs.add(magnitude(0.25))]
    table = costs.table(names).set_index("format")
    assert costs.network("2:4").zeros_before == 0
    assert isinstance(costs.network("kv-q8_0"), ThroughCache)
    for name, candidate in (
        ("magnitude-25", magnitude(0.25).apply(costs.model.network).network),
        ("kv-q8_0", ThroughCache(costs.model, COMPRESSIONS["kv-q8_0"])),
    ):
        frame = compare_on(costs.model, candidate, costs.documents, max_tokens=32, progress=False)
        mean = frame["kl_reference_candidate_nats"].mean()
        assert table.loc[name, "mean_kl_nats"] == pytest.approx(mean), name
    with pytest.raises(KeyError, match="no optimisation 'int9'"):
        costs.network("int9")


def test_weights_that_lay_on_the_grid_before_are_warned_about_in_ladder_and_panel():
    model = models.load("tiny-draft")
    once = optimizations.find("q4_0").apply(model).model
    costs = FormatCosts(once, read_documents()[:32], formats=("q4_0", "nf4"), max_tokens=16)
    ladder = costs.ladder().set_index("format")
    n = len(dict(matrices(model.network)))
    assert ladder["on_grid_before"].to_dict() == {"q4_0": n, "nf4": 0}
    assert ladder.loc["q4_0", "bits_per_weight"] == 4.5
    panel = panels.format_cost(costs)
    assert f"WARNING: {n} matrices lay on this very grid before" in panel.text
    panel.controls["format"].value = "nf4"
    assert "WARNING" not in panel.text


def test_formats_and_group_sizes_are_chosen_apart():
    class Source:
        formats = ("int4-group32-asym", "int4-channel-asym", "int4-group32", "nf4", "fp8-e4m3")

    found = _choices(Source)
    assert found == {
        ("int4-asym", "group32"): "int4-group32-asym",
        ("int4-asym", "channel"): "int4-channel-asym",
        ("int4", "group32"): "int4-group32",
        ("nf4", "its own"): "nf4",
        ("fp8-e4m3", "its own"): "fp8-e4m3",
    }
    assert _groups(Source, "int4-asym") == ["group32", "channel"]


def test_a_row_without_evidence_says_so(costs):
    """A cache that is never read, weights on the grid before, zeros before; and what is read."""
    longest = max(len(costs.ids(d.id)) for d in costs.documents)
    with pytest.warns(UserWarning, match=f"kv-kivi-int4 leaves {longest} cached tokens alone"):
        unread = costs.table(["kv-kivi-int4"])
    assert unread["n_exercised"].tolist() == [0] and unread["same_top"].tolist() == [1]
    n_tokens = sum(len(costs.ids(d.id)) - 1 for d in costs.documents)
    read = costs.table(["kv-q8_0", "2:4"])["n_exercised"].tolist()
    assert read == [n_tokens - len(costs.documents), n_tokens]  # a first token reads no other
    for name in ("q4_0", "magnitude-50"):
        once = optimizations.find(name).apply(costs.model).model
        again = FormatCosts(once, costs.documents[:30], max_tokens=8).table([name, "nf4"])
        assert again.loc[0, "n_exercised"] == 0 < again.loc[1, "n_exercised"], name


def test_an_entry_under_a_name_again_forgets_the_first_one_s_answers():
    costs = FormatCosts(models.load("tiny-draft"), read_documents()[:30], max_tokens=8)
    found = []
    for fmt in ("int8-channel", "int2-group32"):
        costs.add(dataclasses.replace(quantized(fmt), name="mine"))
        found.append(costs.summary("mine").value("mean KL(reference‖candidate)"))
        assert found[-1] == costs.summary(fmt).value("mean KL(reference‖candidate)")
    assert found[1] > 100 * found[0]


def test_documents_and_places_that_are_not_there_are_named(costs):
    for given in ([], ["a text"], [*costs.documents, "a text"]):
        with pytest.raises(ValueError, match="`documents` must be one or more Documents"):
            FormatCosts(costs.model, given)
    with pytest.raises(ValueError, match=r"`document` must be the id of .*; got 'none'"):
        costs.distribution("int8-channel", "none", 0)
    for position in (-1, 10**6):
        with pytest.raises(ValueError, match=f"`position` must be 0 to .*; got {position}"):
            costs.distribution("int8-channel", costs.documents[0].id, position)

"""The error table of weights against numpy, and what it refuses."""

import copy

import numpy as np
import pytest
import torch
from conftest import build_g0, build_t0

from lossless_lab.number_formats import FORMATS
from lossless_lab.numerical.weights import weight_errors
from lossless_lab.optimizations.quantization import quantized


@pytest.mark.parametrize("build", [build_t0, build_g0])
def test_the_table_is_that_of_numpy(build):
    network = build()
    made = quantized("int4-group32").apply(network).network
    table = weight_errors(network, made)
    ours = {n: p for n, p in network.named_parameters() if p.ndim > 1}
    assert len(table) == len(ours)
    for (name, weight), row in zip(ours.items(), table.itertuples(), strict=True):
        x = weight.detach().double().numpy()
        d = made.get_parameter(name).detach().double().numpy() - x
        rms = np.linalg.norm(d) / np.linalg.norm(x)
        assert row.relative_rms == pytest.approx(rms, rel=1e-9)
        assert row.max_abs_difference == pytest.approx(np.abs(d).max(), rel=1e-9)
        if rms:
            assert row.sqnr_db == pytest.approx(-20 * np.log10(rms), rel=1e-9)
        assert (row.rows, row.width) == x.shape
        assert name.endswith(f"{row.module}.weight")
    layers = table["layer"].dropna()
    assert sorted(set(layers)) == [1, 2, 3]
    assert table.loc[table["layer"].isna(), "relative_rms"].eq(0).all()  # embeddings, head


def test_bits_outliers_and_tied_weights():
    network = build_t0(tie_word_embeddings=True)
    made = quantized("q4_0").apply(network).network
    with torch.no_grad():
        network.model.layers[1].mlp.up_proj.weight[0, :3] = 50.0
    table = weight_errors(network, made, bits_per_weight=FORMATS["q4_0"].bits_per_weight)
    assert len(table) == 22  # the tied head once, as the embedding
    changed = table["relative_rms"] > 0
    assert (table.loc[changed, "bits_per_weight"] == 4.5).all()
    assert (table.loc[~changed, "bits_per_weight"] == 32).all()
    worst = table.loc[table["outlier_share"].idxmax()]
    assert (worst["layer"], worst["module"]) == (2, "mlp.up_proj")
    assert worst["outlier_share"] == pytest.approx(3 / (128 * 64), rel=1e-6)


def test_one_wrong_matrix_is_named_and_nan_is_not_averaged_away():
    network = build_t0()
    other = copy.deepcopy(network)
    with torch.no_grad():
        other.model.layers[2].self_attn.o_proj.weight[0, 0] = torch.nan
    table = weight_errors(network, other)
    wrong = table[table["relative_rms"] != 0]
    assert wrong[["layer", "module"]].to_numpy().tolist() == [[3, "self_attn.o_proj"]]
    assert wrong["relative_rms"].isna().all()


def test_networks_that_do_not_pair_are_refused():
    with pytest.raises(ValueError, match=r"layers\.2.* is on one side only"):
        weight_errors(build_t0(), build_t0(num_hidden_layers=2))
    with pytest.raises(ValueError, match=r"`model\.layers\.0\.mlp\.gate_proj\.weight` has shape"):
        weight_errors(build_t0(), build_t0(intermediate_size=64))

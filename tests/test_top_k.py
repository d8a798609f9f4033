"""What two runs with top-k log-probabilities still prove: against the full laws of both models."""

import json
import math

import numpy as np
import pytest
import scipy.special
import torch
from conftest import build_t0

from lossless_lab.cli import main
from lossless_lab.engines import Decoding, TransformersEngine
from lossless_lab.pipeline.top_k import compare_top_k
from lossless_lab.runs import record

PROMPTS = {f"p{i}": [3 + i, 7, 11 + i] for i in range(6)}
DECODING = Decoding(max_new_tokens=5)


@pytest.fixture(scope="module")
def networks(t0):
    other, noise = build_t0(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=noise)
    return t0, other


def stored(folder, network, k, prompts=PROMPTS):
    engine = TransformersEngine(network, batch_size=3, top_logprobs=k)
    return record(folder, engine, prompts, DECODING, progress=False).folder


def true_kl(networks, ids):
    """In float64 numpy, of both models' whole laws after `ids`."""
    with torch.no_grad():
        p, q = (
            scipy.special.log_softmax(n(torch.tensor([ids])).logits[0, -1].double().numpy())
            for n in networks
        )
    return float((np.exp(p) * (p - q)).sum())


@pytest.mark.parametrize("k", [1, 5, 97])
def test_the_bound_is_below_the_kl_of_the_full_laws(networks, tmp_path, capsys, k):
    folders = [stored(tmp_path / str(i), n, k) for i, n in enumerate(networks)]
    found = compare_top_k(*folders)
    lines = [json.loads(x) for x in (folders[0] / "outputs.jsonl").read_text().splitlines()]
    theirs = [json.loads(x) for x in (folders[1] / "outputs.jsonl").read_text().splitlines()]
    place = 0
    for own, other in zip(lines, theirs, strict=True):
        same = next((i for i, (a, b) in enumerate(
            zip(own["output_ids"], other["output_ids"], strict=True)) if a != b), 4)  # fmt: skip
        for i in range(same + 1):
            row = found.iloc[place]
            kl = true_kl(networks, own["prompt_ids"] + own["output_ids"][:i])
            assert (row["prompt_id"], row["position"]) == (own["prompt_id"], i)
            assert 0 <= row["kl_at_least_nats"] <= kl * (1 + 1e-4) + 1e-7
            if k == 97:
                assert row["kl_at_least_nats"] == pytest.approx(kl, rel=1e-3)
            place += 1
    assert place == len(found) > len(PROMPTS)
    assert k == 1 or found["kl_at_least_nats"].max() > 0
    said = capsys.readouterr().out
    assert f"at least {found['kl_at_least_nats'].mean():.2g} nats over {len(found)} tokens" in said
    assert f"name {found['covered_mass'].mean():.3f} of the reference's mass" in said


def test_a_sum_over_shared_tokens_goes_negative_and_the_bound_does_not(networks, tmp_path):
    """The mutant: Σ p ln(p/q) over tokens that both lists hold, as if they were all."""
    folders = [stored(tmp_path / str(i), n, 5) for i, n in enumerate(networks[::-1])]
    sides = [
        {r["prompt_id"]: r for r in map(json.loads, (f / "outputs.jsonl").read_text().splitlines())}
        for f in folders
    ]
    found = compare_top_k(*folders).set_index(["prompt_id", "position"])["kl_at_least_nats"]
    naive = {}
    for name, i in found.index:
        p, q = (dict(map(tuple, s[name]["top_logprobs"][i])) for s in sides)
        naive[name, i] = sum(math.exp(p[t]) * (p[t] - q[t]) for t in p if t in q)
    assert min(naive.values()) < -1e-3 and found.min() >= 0


def test_runs_that_prove_nothing_are_named(networks, tmp_path):
    both = stored(tmp_path / "a", networks[0], 3)
    without = stored(tmp_path / "b", networks[1], 0)
    others = stored(tmp_path / "c", networks[1], 3, {"p0": [5, 6]})
    for other in (without, others):
        with pytest.raises(ValueError, match=r"prompt 'p0', sample 0 must be in both runs"):
            compare_top_k(both, other)
    manifest = others / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"raw"', '"processed"'))
    with pytest.raises(ValueError, match="must have raw logprobs as `reference`; got processed"):
        compare_top_k(both, others)
    alike = compare_top_k(both, both)
    assert (alike["kl_at_least_nats"] == 0).all()


def test_compare_prints_the_bound_where_no_logits_were_kept(networks, tmp_path, capsys):
    folders = [str(stored(tmp_path / str(i), n, 5)) for i, n in enumerate(networks)]
    mean = compare_top_k(*folders)["kl_at_least_nats"].mean()
    said = capsys.readouterr().out
    main(["compare", *folders])
    assert said in capsys.readouterr().out and f"at least {mean:.2g} nats" in said
    main(["compare", *folders, "--format", "json"])
    assert json.loads(capsys.readouterr().out)

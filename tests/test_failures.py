"""Where a candidate fails: slices against statsmodels, concentration by permutation, exports."""

import json
import zlib
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import statsmodels.api as sm
import torch
from statsmodels.stats.multitest import multipletests

from lossless_lab import models, number_formats, prompts
from lossless_lab.optimizations.kv_compression import ThroughCache
from lossless_lab.optimizations.quantization import linears, quantized
from lossless_lab.pipeline import failures
from lossless_lab.pipeline.corpus import compare_on
from lossless_lab.statistical.divergences import by_prompt
from lossless_lab.statistical.slices import concentration, slices
from lossless_lab.stats.intervals import cluster_mean_interval
from notebooks import build

KL = "kl_reference_candidate_nats"


@pytest.fixture
def rng(request):
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


def table(rng, n_documents=60, *, effect=0.0, domain=0.0):
    """Tokens of three classes in documents of two languages; digits and zh may be off."""
    n = rng.integers(10, 60, n_documents)
    documents = np.repeat(np.arange(n_documents), n)
    classes = rng.choice(["word", "digits", "space"], len(documents), p=[0.7, 0.2, 0.1])
    language = np.where(np.arange(n_documents) % 3 == 0, "zh", "en")[documents]
    common = rng.normal(0, 0.5, n_documents)[documents]
    x = common + rng.normal(0, 1, len(documents))
    x += effect * (classes == "digits") + domain * (language == "zh")
    return pd.DataFrame(
        {"document": documents, "token_class": classes, "language": language, KL: np.exp(x)}
    )


@pytest.mark.parametrize("by", ["token_class", "language"])
def test_slices_are_those_of_statsmodels(rng, by):
    frame = table(rng, effect=0.3)
    found = slices(frame, by).set_index(by)
    x, n = frame[KL].to_numpy(), frame["document"].nunique()
    plain = []
    for name, row in found.iterrows():
        inside = (frame[by] == name).to_numpy()
        fit = sm.OLS(x, sm.add_constant(inside.astype(float))).fit(
            cov_type="cluster",
            cov_kwds={"groups": frame["document"], "use_correction": False},
        )
        error = fit.bse[1] * np.sqrt(n / (n - 1))
        assert row["difference"] == pytest.approx(fit.params[1], rel=1e-9)
        plain.append(2 * scipy.stats.t.sf(abs(fit.params[1]) / error, n - 1))
        if by == "token_class":
            assert row["pvalue"] == pytest.approx(plain[-1], rel=1e-6)
        own = sm.OLS(x[inside], np.ones(inside.sum())).fit(
            cov_type="cluster", cov_kwds={"groups": frame["document"][inside]}, use_t=True
        )
        corrected = own.conf_int(0.05 / len(found))[0]
        refused = frame["document"][inside].nunique() < 30
        assert (
            np.isnan(row["low"])
            if refused
            else row[["low", "high"]].tolist() == pytest.approx(corrected, rel=1e-9)
        )
        assert row["n_tokens"] == inside.sum() and row["mean"] == pytest.approx(x[inside].mean())
    if by == "token_class":
        adjusted = multipletests(plain, method="holm")[1]
        assert found["holm_pvalue"].tolist() == pytest.approx(adjusted, rel=1e-6)
        assert found.index[0] == "digits" and found["holm_pvalue"]["digits"] < 0.05
    else:  # zh has 20 documents of the 60
        assert found["pvalue"].isna().all()


def test_slices_without_a_difference_seldom_find_one(rng):
    """The family-wise rate of 150 tables without an effect; tokens as units would find more."""
    low = sum(slices(table(rng), "token_class")["holm_pvalue"].min() < 0.05 for _ in range(150))
    assert scipy.stats.binomtest(low, 150).proportion_ci(0.998).low <= 0.05


def test_slices_keep_nan_and_inf_and_name_the_only_kind(rng):
    frame = table(rng)
    frame.loc[3, KL] = np.inf
    found = slices(frame, "token_class")
    assert np.isposinf(found["mean"][0]) and found["pvalue"].isna().all()
    assert found.loc[0, ["low", "high"]].isna().all() and found.loc[1:, "low"].notna().any()
    only = slices(frame.assign(kind="all"), "kind")
    assert len(only) == 1 and np.isnan(only["difference"][0])


def test_concentration_finds_the_domain_and_not_a_token_class(rng):
    found = concentration(table(rng, domain=1.5), "language", rng=rng)
    assert found.frame["language"][0] == "zh" and found.pvalue < 0.001
    assert found.frame["n_documents"].tolist() == [20, 40]
    assert "tokens of zh" in str(found)
    with pytest.raises(ValueError, match="`by` must be one kind per document; 0 has"):
        concentration(table(rng), "token_class", rng=rng)
    with pytest.raises(ValueError, match="two kinds or more; got 1"):
        concentration(table(rng).assign(kind="all"), "kind", rng=rng)


def test_concentration_is_a_permutation_test_of_documents(rng):
    frame = table(rng, 24)
    found = concentration(frame, "language", rng=rng, worst=0.1)
    worst = frame[KL] >= found.threshold
    assert worst.sum() == int(0.1 * len(frame))
    share = worst.groupby(frame["document"]).mean().to_numpy()
    zh = frame.groupby("document")["language"].first().to_numpy() == "zh"

    def spread(zh):
        return sum(side.sum() * (share[side].mean() - share.mean()) ** 2 for side in (zh, ~zh))

    drawn = np.array([spread(rng.permutation(zh)) for _ in range(4000)])
    expected = (drawn >= spread(zh) - 1e-12).mean()
    assert found.pvalue == pytest.approx(expected, abs=0.035)


def test_concentration_has_its_size_where_documents_differ_but_kinds_do_not(rng):
    """Tokens as units would reject far more often: documents differ by themselves."""
    runs, by_tokens, ours = 100, 0, 0
    for _ in range(runs):
        frame = table(rng)
        ours += concentration(frame, "language", rng=rng, n_resamples=199).pvalue <= 0.05
        worst = frame[KL] > frame[KL].quantile(0.95)
        by_tokens += (
            scipy.stats.chi2_contingency(pd.crosstab(worst, frame["language"])).pvalue <= 0.05
        )
    assert scipy.stats.binomtest(ours, runs).proportion_ci(0.998).low <= 0.05
    assert by_tokens > ours + 10


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 7.0])
def test_values_that_are_not_finite_or_tie_at_the_cut_are_failures(rng, bad):
    """By hand: all of zh fails, half of all tokens, though the worst 5 % were asked for."""
    frame = table(rng, 40)
    zh = frame["language"] == "zh"
    frame[KL] = np.where(zh, bad, np.minimum(frame[KL], 6.0))
    found = concentration(frame, "language", rng=rng)
    assert found.frame["language"].tolist() == ["zh", "en"] and found.pvalue < 0.001
    assert found.frame["failed"].tolist() == [1, 0]
    said = "at 7 or more: 100" if bad == 7 else "not finite: 100"
    assert str(found).startswith(said) and "nan" not in str(found)


def test_a_few_tokens_that_differ_at_all_are_those_that_failed(rng):
    frame = table(rng, 40)
    frame[KL] = (frame["language"] == "zh") * (np.arange(len(frame)) % 50 == 0)
    found = concentration(frame, "language", rng=rng)
    assert found.threshold == 1 and found.frame["failed"].iloc[1] == 0


@pytest.mark.parametrize("same", [0.0, 0.3, np.nan])
def test_nothing_is_ranked_where_all_tokens_are_alike(rng, same):
    with pytest.raises(ValueError, match="nothing to rank"):
        concentration(table(rng).assign(**{KL: same}), "language", rng=rng)


def test_kinds_that_cannot_be_compared_are_named(rng):
    frame = table(rng)
    holes = frame.assign(language=frame["language"].where(frame["language"] == "zh"))
    for search in (slices, lambda *args: concentration(*args, rng=rng)):
        with pytest.raises(ValueError, match="'language' has none at"):
            search(holes, "language")
    alone = frame.assign(language=np.where(frame["document"] == 3, "code", frame["language"]))
    with pytest.raises(ValueError, match="two documents or more of a kind; code has one"):
        concentration(alone, "language", rng=rng)
    for worst in (0, 1, 5):
        with pytest.raises(ValueError, match=f"`worst` must be between 0 and 1; got {worst}"):
            concentration(frame, "language", rng=rng, worst=worst)


# ---- on the tiny pair --------------------------------------------------------------------------

DOCUMENTS = prompts.read_documents()[::4]


@pytest.fixture(scope="module")
def frame(tiny_target, tiny_draft):
    return compare_on(tiny_target, tiny_draft, DOCUMENTS, max_tokens=40, progress=False)


def test_what_each_token_is(frame, tiny_target):
    found = failures.described(frame, tiny_target, DOCUMENTS)
    assert len(found) == len(frame) and set(found["language"]) == {"en", "zh", "code"}
    decode = tiny_target.tokenizer.decode
    assert (found["token"] == [decode([i]) for i in found["token_id"]]).all()
    assert {"digits", "word", "punctuation"} <= set(found["token_class"])
    counts = found["token_id"].value_counts()
    assert set(found["token_id"][found["frequency"] == "rare"]) == set(counts.index[counts <= 2])
    assert 0.4 < (found["frequency"] == "frequent").mean() < 0.6
    first = found[found["position"] < 4]
    assert (first["place"] == "first 4").all() and set(found["place"]) == {
        "first 4", "5 to 16", "17 to 64",
    }  # fmt: skip
    for by in ("token_class", "frequency", "place", "language"):
        assert slices(found, by)["n_tokens"].sum() == len(frame)
    strings = failures.described(compare_on(*[tiny_target] * 2, ["a text"], progress=False),
                                 tiny_target, ["a text"])  # fmt: skip
    assert strings["language"].isna().all()


def test_the_worst_tokens_stand_in_their_context(frame, tiny_target):
    worst = failures.worst_tokens(frame, tiny_target, DOCUMENTS, n=5)
    assert worst[KL].tolist() == sorted(frame[KL], reverse=True)[:5]
    texts = {d.id: d.text for d in DOCUMENTS}
    for row in worst.itertuples():
        if "\ufffd" not in row.context + row.token:
            assert (row.context + row.token).strip() in texts[row.document]
    one_each = frame.loc[frame.groupby("document")[KL].idxmax()]
    listed = failures.worst_tokens(one_each, tiny_target, DOCUMENTS, n=3)
    table = by_prompt(frame).set_index("document")
    assert listed["document"].tolist() == table[f"max_{KL}"].nlargest(3).index.tolist()
    means = frame.groupby("document", sort=False)[KL].mean()
    pd.testing.assert_series_equal(table[f"mean_{KL}"], means, check_names=False)


def test_failed_samples_beside_the_references_output(frame, tiny_target, tiny_draft, tmp_path):
    path = tmp_path / "failed.jsonl"
    failures.export_failures(path, frame, tiny_target, tiny_draft, DOCUMENTS, n=4, n_tokens=6)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len({line["document"] for line in lines}) == 4
    assert {"prompt", "completion", "rejected"} <= set(lines[0])
    for line in lines:
        ids = line["prompt_ids"]
        assert len(ids) == line["position"] + 1
        for name, model in (("completion", tiny_target), ("rejected", tiny_draft)):
            out = list(ids)
            for token in line[f"{name}_ids"]:  # greedy, step by step without a cache
                with torch.no_grad():
                    logits = model.network(torch.tensor([out])).logits[0, -1]
                assert logits[token] >= logits.max() - 1e-4
                out.append(token)
            text = tiny_target.tokenizer.decode(line[f"{name}_ids"], skip_special_tokens=True)
            assert text == line[name]


def test_pairs_without_a_preference_are_left_out_and_counted(frame, tiny_target, tmp_path, capsys):
    path = tmp_path / "failed.jsonl"
    made = failures.export_failures(
        path, frame, tiny_target, tiny_target, DOCUMENTS, n=3, n_tokens=2
    )
    assert len(made) == 0 and path.read_text() == ""
    assert "3 of 3 left out: both sides go on alike" in capsys.readouterr().out


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_the_export_is_strict_json(frame, tiny_target, tiny_draft, tmp_path, value):
    """No Infinity or NaN, which `json.loads` reads and no other parser does; the reason is told."""

    def refuse(word):
        raise AssertionError(word)

    first = frame["document"] == DOCUMENTS[0].id
    broken = frame.assign(**{KL: frame[KL].mask(first & (frame["position"] == 7), value)})
    broken = broken[first | (frame["document"] == DOCUMENTS[1].id)]
    if value < 0:  # the best, not the worst: of its document it must be all that there is
        broken = broken[~first | (broken["position"] == 7)]
    path = tmp_path / "failed.jsonl"
    failures.export_failures(path, broken, tiny_target, tiny_draft, DOCUMENTS, n=2, n_tokens=4)
    text = path.read_text(encoding="utf-8")
    lines = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    told = {line["document"]: (line[KL], line["not_finite"]) for line in lines}
    assert told.pop(DOCUMENTS[0].id) == (None, str(float(value)))
    assert [(x > 0, word) for x, word in told.values()] == [(True, None)]
    with pytest.raises(AssertionError, match=r"Infinity|NaN"):  # what the check would catch
        json.loads(json.dumps({KL: float(value)}), parse_constant=refuse)


def test_other_documents_and_frames_without_a_value_are_refused(frame, tiny_target, tmp_path):
    first = frame[frame["document"] == DOCUMENTS[0].id]
    swapped = [DOCUMENTS[0].model_copy(update={"text": DOCUMENTS[3].text})]
    for documents in (DOCUMENTS[1:], swapped):
        with pytest.raises(
            ValueError, match="`documents` must be those of `frame`; they lack its token"
        ):
            failures.worst_tokens(first, tiny_target, documents)
    holes = first.assign(**{KL: first[KL].where(first["position"] != 5)})
    assert failures.worst_tokens(holes, tiny_target, DOCUMENTS)["position"][0] == 5
    with pytest.raises(ValueError, match="no value of kl_reference_candidate_nats besides NaN"):
        failures.export_failures(
            tmp_path / "x", first.assign(**{KL: np.nan}), *[tiny_target] * 2, DOCUMENTS
        )


# ---- trained on ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lessons(tiny_draft, tmp_path_factory):
    """Training as in notebook 04, and failures at two bits of two sets of documents."""
    source = build.read(build.SOURCES / "04_quantization_error.py").cells
    names = {
        "torch": torch, "models": models, "linears": linears, "number_formats": number_formats,
        "LOW": "int2-group32", "N_STEPS": 40,
    }  # fmt: skip
    for mark in ("class Rounded", "def batch(", "def train("):
        (cell,) = [c.source for c in source if mark in c.source]
        exec(cell, names)
    rounded = quantized("int2-group32").apply(tiny_draft).network
    folder, files = tmp_path_factory.mktemp("failed"), {}
    everything = prompts.read_documents()
    for name, part in (("learn", everything[1::4]), ("held", everything[::4])):
        found = compare_on(tiny_draft, rounded, part, max_tokens=24, progress=False)
        failures.export_failures(
            folder / name, found, tiny_draft, rounded, part, n=len(part), n_tokens=8
        )
        lines = (folder / name).read_text(encoding="utf-8").splitlines()
        files[name] = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    documents = [{line["document"] for line in lines} for lines in files.values()]
    assert documents[0].isdisjoint(documents[1]) and len(documents[1]) >= 30
    return SimpleNamespace(**names), rounded, files


def shares(network, lines):
    """Share of the reference's own tokens after each prompt that are the likeliest; by hand."""
    found = []
    for line in lines:
        n, ids = len(line["prompt_ids"]), line["prompt_ids"] + line["completion_ids"]
        with torch.no_grad():
            top = network(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        found.append(np.mean([top[i - 1] == ids[i] for i in range(n, len(ids))]))
    return np.array(found)


def test_a_batch_marks_completions_alone(lessons):
    notebook, _, files = lessons
    ids, told = notebook.batch(files["learn"][:3])
    for row, mark, line in zip(ids.tolist(), told, files["learn"], strict=False):
        assert [t for t, m in zip(row[1:], mark, strict=True) if m] == line["completion_ids"]


def test_exported_failures_teach_what_other_documents_failed_at(lessons, tiny_draft):
    """Held-out failures, an interval over documents; trained on the rejected, it does not hold."""
    notebook, rounded, files = lessons
    before = shares(rounded, files["held"])
    assert np.array_equal(before, shares(notebook.student(), files["held"]))  # same weights
    after = shares(
        notebook.train(notebook.student(), files["learn"], tiny_draft.network), files["held"]
    )
    low, _ = cluster_mean_interval(after - before)
    assert low > 0.02
    wrong = [line | {"completion_ids": line["rejected_ids"]} for line in files["learn"]]
    mutant = shares(notebook.train(notebook.student(), wrong), files["held"])
    assert mutant.mean() < after.mean() - 0.05


def test_a_side_that_cannot_go_on_and_no_lines_are_refused(tiny_draft, tmp_path):
    documents = prompts.read_documents()[:1]
    frame = compare_on(tiny_draft, tiny_draft, documents, max_tokens=8, progress=False)
    through = ThroughCache(tiny_draft, None)
    for candidate, n, message in (
        (through, 4, "rejected: a ThroughCache cannot `generate` tokens"),
        (tiny_draft, -1, "`n` must be 1 or more; got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            failures.export_failures(tmp_path / "f", frame, tiny_draft, candidate, documents, n=n)

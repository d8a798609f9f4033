"""The charts: what they draw, what they refuse, and that no label becomes a box (B44)."""

import logging
import unicodedata
import warnings

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import font_manager
from matplotlib.figure import Figure

from lossless_lab import plots
from lossless_lab.plots import labels
from lossless_lab.plots.quantization import cost_curves, flips_against_kl

matplotlib.use("agg")
NO_CJK = "no font with Chinese glyphs on this machine (apt-get install fonts-noto-cjk)"


def layers(**changes) -> pd.DataFrame:
    columns = {"layer": range(5), "module": ["residual"] * 4 + ["logits"]}
    return pd.DataFrame({**columns, "relative_rms": [0.0, 1e-3, 2e-3, 4e-3, 3e-3], **changes})


def positions(n=8, **changes) -> pd.DataFrame:
    kl = np.linspace(1e-4, 1e-2, n)
    columns = {
        "prompt_id": "a",
        "position": range(n),
        "kl_reference_candidate_nats": kl,
        "kl_candidate_reference_nats": kl * 1.1,
        "total_variation": np.sqrt(kl / 2),
        "top1_agree": [False] + [True] * (n - 1),
    }
    return pd.DataFrame({**columns, **changes})


def law(tokens=(" a", "b", "c")) -> pd.DataFrame:
    probs = np.array([[0.7, 0.2, 0.1], [0.6, 0.4, 0.0]])
    with np.errstate(divide="ignore"):
        reference, candidate = np.log(probs)
    return pd.DataFrame(
        {"token": tokens, "reference_logprob": reference, "candidate_logprob": candidate}
    )


def pairs(**changes) -> pd.DataFrame:
    """Four outputs: one equal, two that part at 0 and 2, one that is the other's beginning."""
    columns = {
        "n_reference": [4, 4, 4, 4],
        "n_candidate": [4, 4, 4, 3],
        "ids_equal": [True, False, False, False],
        "first_divergence": pd.array([None, 0, 2, None], dtype="Int64"),
    }
    return pd.DataFrame({**columns, **changes})


def stages(**changes) -> pd.DataFrame:
    columns = {"stage": ["capture", "inductor"], "logit_rms": [0.0, 0.07]}
    errors = {"eager_error": [0.015, 0.015], "compiled_error": [0.015, 0.012]}
    return pd.DataFrame({**columns, **errors, **changes})


def triangle(**changes) -> pd.DataFrame:
    sides = ["reference–float64", "candidate–float64", "reference–candidate"]
    return pd.DataFrame({"side": sides, "rms": [3.0, 4.0, 5.0], **changes})


def steps(**changes) -> pd.DataFrame:
    columns = {"bin": ["0", "1", "2–3"], "ulp_min": [0, 1, 2], "share": [0.5, 0.3, 0.2]}
    return pd.DataFrame({**columns, "count": [5, 3, 2], "near_zero": [0, 1, 0], **changes})


def local(**changes) -> pd.DataFrame:
    errors = {"local_relative_rms": [1e-3, 0.0], "accumulated_relative_rms": [1e-3, 2e-3]}
    return pd.DataFrame({"layer": [1, 2], **errors, **changes})


def curve(**changes) -> pd.DataFrame:
    columns = {"n_tokens": [1, 2], "expected_share": [0.9, 0.8], "low": [0.8, 0.6]}
    return pd.DataFrame({**columns, "high": [1.0, 0.9], **changes})


def changes(**given) -> pd.DataFrame:
    columns = {"margin": [0.0, 0.2, 1.0], "change": [0.1, -0.3, 0.0]}
    return pd.DataFrame({**columns, "flipped": [False, True, False], **given})


CHARTS = {
    plots.drift_by_stage: stages,
    plots.error_triangle: triangle,
    plots.flips: changes,
    plots.local_error: local,
    plots.survival: curve,
    plots.ulp_bars: steps,
    plots.layer_drift: layers,
    plots.distribution_dots: law,
    plots.divergence_by_position: positions,
    plots.divergence_by_prompt: positions,
    plots.first_divergence: pairs,
}
REDRAWN = {plots.drift_by_stage, plots.error_triangle, plots.survival, plots.ulp_bars}
every_chart = pytest.mark.parametrize("chart, frame", CHARTS.items(), ids=lambda x: x.__name__)


def draw(ax) -> None:
    ax.figure.savefig("/dev/null", format="png")


def named(ax, name):
    return ax._lossless_lab_artists[name]


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@every_chart
def test_labels_name_a_unit_and_a_log_scale(chart, frame):
    ax = chart(frame())
    units = ("nats", "probability", "ratio", "tokens", "%", "layer", "logits", "steps", "prompts")
    units += ("elements",)
    for axis, scale in ((ax.xaxis, ax.get_xscale()), (ax.yaxis, ax.get_yscale())):
        label = axis.get_label_text()
        categories = not label  # token or prompt names stand on the axis themselves
        assert categories or any(unit in label for unit in units), label
        assert ("log scale" in label) == (scale == "log"), label


@every_chart
def test_a_second_call_moves_the_artists_and_adds_none(chart, frame):
    figure = Figure()
    ax = chart(frame(), ax=figure.add_subplot())
    before = [id(artist) for artist in ax.get_children()]
    assert chart(frame(), ax=ax) is ax
    after = [id(artist) for artist in ax.get_children()]
    assert len(after) == len(before) and len(ax.containers) <= 2
    assert chart in REDRAWN or after == before
    assert plt.get_fignums() == []


@every_chart
def test_a_missing_column_and_an_empty_frame_are_named(chart, frame):
    with pytest.raises(ValueError, match=r"lacks \['"):
        chart(pd.DataFrame({"a": [1]}))
    with pytest.raises(ValueError, match="must have rows"):
        chart(frame().iloc[:0])


@every_chart
def test_the_caller_s_frame_and_global_settings_stay_as_they_were(chart, frame):
    given_frame, settings = frame(), dict(matplotlib.rcParams)
    chart(given_frame)
    pd.testing.assert_frame_equal(given_frame, frame())
    assert dict(matplotlib.rcParams) == settings


def test_layer_drift_shows_each_value_zeros_and_values_that_are_none():
    ax = plots.layer_drift(layers(relative_rms=[0.0, 1e-3, np.nan, np.inf, 3e-3]))
    np.testing.assert_array_equal(named(ax, "candidate").get_ydata()[1], 1e-3)
    assert list(named(ax, "candidate: 0, below the scale").get_xdata()) == [0]
    assert list(named(ax, "candidate: infinite or NaN").get_xdata()) == [2, 3]
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts == ["candidate", "0, below the scale", "infinite or NaN"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["emb.", "1", "2", "3", "logits"]


def test_layer_drift_of_equal_models_draws():
    ax = plots.layer_drift(layers(relative_rms=0.0))
    assert list(named(ax, "candidate: 0, below the scale").get_xdata()) == [0, 1, 2, 3]
    draw(ax)


def test_the_floor_is_drawn_only_where_the_frame_has_it():
    assert "floor" not in plots.layer_drift(layers())._lossless_lab_artists
    ax = plots.layer_drift(layers(floor_relative_rms=1e-6))
    assert named(ax, "floor").get_datalim(ax.transData).y1 == pytest.approx(1e-6)
    assert ax.get_ylim()[0] < 1e-6


def test_two_labels_make_two_lines_with_a_legend_entry_each():
    ax = plots.layer_drift(layers(), label="float16")
    plots.layer_drift(layers(), ax=ax, label="bfloat16")
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts == ["float16", "0, below the scale", "bfloat16"]
    assert named(ax, "float16").get_color() != named(ax, "bfloat16").get_color()


def test_dots_stand_at_the_logprobs_and_an_impossible_token_has_none():
    ax = plots.distribution_dots(law())
    np.testing.assert_allclose(named(ax, "reference").get_xdata(), np.log([0.7, 0.2, 0.1]))
    assert np.isnan(named(ax, "candidate").get_xdata()[2])
    fewer = plots.distribution_dots(law(), ax=ax, n_tokens=2)
    assert len(named(fewer, "reference").get_xdata()) == 2 == len(fewer.get_yticklabels())
    with pytest.raises(ValueError, match=r"`candidate_logprob` must be a number.*'b'"):
        plots.distribution_dots(law().assign(candidate_logprob=[-1, np.nan, -1]))


def test_divergence_by_position_keeps_infinite_values_of_one_prompt_among_many():
    ok, bad = positions(), positions(prompt_id="b", kl_reference_candidate_nats=np.inf)
    bad.loc[0, "total_variation"] = np.nan
    ax = plots.divergence_by_position(pd.concat([ok, bad]))
    name = "kl_reference_candidate_nats: infinite or NaN"
    assert list(named(ax, name).get_xdata()) == list(range(8))
    assert list(named(ax, "total_variation: infinite or NaN").get_xdata()) == [0]
    mean = (ok["total_variation"][1] + bad["total_variation"][1]) / 2
    assert named(ax, "total_variation").get_ydata()[1] == pytest.approx(mean)
    assert list(named(ax, "flips").get_xdata()) == [0]
    assert "mean of 2 prompts" in ax.get_xlabel()


def test_divergence_by_prompt_sorts_and_says_where_zero_and_infinity_sit():
    frame = pd.concat([positions(), positions(prompt_id="zero", total_variation=0.0)])
    ax = plots.divergence_by_prompt(frame)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["zero", "a"]
    mean = positions()["total_variation"].mean()
    assert list(named(ax, "mean").get_xdata())[1] == pytest.approx(mean)
    assert "left edge: 0" in ax.get_xlabel()
    frame.iloc[0, frame.columns.get_loc("total_variation")] = np.nan
    assert "right edge: infinite or NaN" in plots.divergence_by_prompt(frame).get_xlabel()


def test_many_prompts_are_counted_rather_than_printed_over_each_other():
    frame = pd.concat([positions(prompt_id=f"p{i}") for i in range(60)])
    ax = plots.divergence_by_prompt(frame)
    assert list(ax.get_yticks()) == [] and "60 prompts" in ax.get_ylabel()


def test_first_divergence_is_the_share_that_a_count_by_hand_gives():
    ax = plots.first_divergence(pairs())
    # t tokens identical: all 4 at t=0; 3 at 1 and 2; 2 at 3 (the short one); 1 at 4.
    assert list(named(ax, "candidate").get_ydata()) == [100, 75, 75, 50, 25]
    assert "1 of 4 identical" in ax.get_legend().get_texts()[0].get_text()
    both = pd.concat([pairs(candidate="float16"), pairs(candidate="bfloat16")])
    assert len(plots.first_divergence(both).get_legend().get_texts()) == 2


def test_the_palette_gives_different_names_of_one_chart_different_colours():
    for names in (("reference", "candidate"), list(positions())[2:5], ("float16", "bfloat16")):
        assert len({plots.COLOURS[name] for name in names}) == len(names)


@pytest.mark.parametrize(
    "token, shown",
    [
        ("\n", r"\n"), ("\t", r"\t"), ("\r\n", r"\r\n"), ("\ufffd", r"\ufffd"), ("\x00", r"\x00"),
        ("\u200b", r"\u200b"), ("\\n", r"\\n"), (" the", "␣the"), ("  ", "␣␣"), ("a b ", "a b␣"),
        ("", "(empty)"), ("$x$", r"\$x\$"), ("\xa0", r"\xa0"), ("x" * 20, "x" * 13 + "…"),
        ("x" * 14, "x" * 14), ("é", "é"),
    ],
)  # fmt: skip
def test_token_labels(token, shown):
    assert plots.token_label(token) == shown


@given(st.text(max_size=30))
def test_any_token_makes_a_short_label_without_controls_or_mathematics(token):
    label = plots.token_label(token)
    assert label and not any(unicodedata.category(c)[0] == "C" for c in label)
    columns = sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in label.replace(r"\$", "$"))
    assert columns <= 14
    assert label.replace(r"\$", "").count("$") == 0


@pytest.fixture
def fresh_fonts():
    """The remembered choice of fonts is forgotten before and after."""

    def forget():
        for cached in (labels.families, labels.drawable):
            cached.cache_clear()

    forget()
    yield forget
    forget()


@pytest.fixture
def without_cjk(monkeypatch, fresh_fonts):
    """matplotlib on a machine where no font has Chinese glyphs."""
    kept = [e for e in font_manager.fontManager.ttflist if not labels._has(e, "量")]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", kept)
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda *_, **__: [])


def titled(text: str):
    with plots.style():
        ax = plots.distribution_dots(law(tokens=("量化误差", " −1", "\n")))
        ax.set_title(text)
        ax.set_xlim(-5, 0)
    labels.make_drawable(ax.figure)
    return ax


def test_chinese_is_drawn_by_a_font_that_has_it(fresh_fonts):
    if len(labels.families()) == 1:
        pytest.skip(NO_CJK)
    from fontTools.ttLib import TTCollection, TTFont  # oracle: the font file's own table

    path = font_manager.findfont(labels.families()[1])
    face = TTCollection(path).fonts[0] if str(path).endswith(".ttc") else TTFont(path)
    assert {ord(c) for c in labels.CJK_SAMPLE} <= set(face.getBestCmap())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ax = titled("量化误差 −1")
        draw(ax)
    assert ax.get_title() == "量化误差 −1"
    assert ax.get_yticklabels()[0].get_text() == "量化误差"


def test_without_a_chinese_font_labels_are_escapes_and_one_notice_is_given(without_cjk, caplog):
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error")
        ax = titled("量化误差 −1")
        draw(ax)
        draw(titled("推理"))
    assert ax.get_title() == r"\u91cf\u5316\u8bef\u5dee −1"
    assert ax.get_yticklabels()[0].get_text() == r"\u91cf\u5316…"
    notices = [record for record in caplog.records if "Chinese" in record.message]
    assert len(notices) == 1 and "Noto Sans CJK" in notices[0].message


def test_the_same_figure_without_our_labels_has_missing_glyphs(without_cjk):
    ax = Figure().add_subplot(title="量化误差 −1")
    with pytest.warns(UserWarning, match="missing from font") as caught:
        draw(ax)
    assert len({str(w.message) for w in caught}) == 4


def test_a_font_installed_after_matplotlib_s_list_was_made_is_found(monkeypatch, fresh_fonts):
    if len(labels.families()) == 1:
        pytest.skip(NO_CJK)
    path = str(font_manager.findfont(labels.families()[1]))
    known = [e for e in font_manager.fontManager.ttflist if not labels._has(e, "量")]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", known)
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda *_, **__: [path])
    fresh_fonts()
    assert len(labels.families()) == 2


def test_a_minus_sign_that_no_font_has_becomes_a_hyphen(monkeypatch, fresh_fonts):
    monkeypatch.setattr("lossless_lab.plots.theme.drawable", lambda character: character != "−")
    with plots.style():
        assert matplotlib.rcParams["axes.unicode_minus"] is False


def ladder(**changes) -> pd.DataFrame:
    columns = {"format": ["int8", "int4"], "bits_per_weight": [8.1, 4.5]}
    return pd.DataFrame({**columns, "mean_kl_nats": [1e-4, 1e-2], **changes})


def test_the_ladder_marks_the_chosen_format_and_names_a_floor_off_the_scale():
    frame = ladder(low=[8e-5, 9e-3], high=[2e-4, 2e-2], chosen=[False, True])
    figure = Figure()
    ax = figure.add_subplot()
    for _ in range(2):
        plots.format_ladder(frame, ax=ax, floors={"twin": 1e-13, "bf16": 2e-5})
    assert named(ax, "chosen").get_xdata().tolist() == [1e-2]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["int8, 8.1 bits", "int4, 4.5 bits"]
    texts = [t.get_text() for t in ax.get_legend().get_texts()]
    assert texts == ["twin 1e-13 (off scale)", "bf16 2e-05"]
    marks = [(named(ax, k).get_marker(), len(named(ax, k).get_xdata())) for k in ("twin", "bf16")]
    assert marks == [("<", 1), ("", 2)], "off the scale is a mark at the edge"
    assert named(ax, "twin").get_xdata()[0] == ax.get_xlim()[0] <= 1e-5
    looks = [handle.get_linestyle() for handle in ax.get_legend().get_lines()]
    assert looks == ["None", "--"], "what is not drawn has no line in the legend"
    assert len(ax.collections) == 1, "whiskers are drawn anew, not added"


def test_bits_that_are_written_alike_are_ordered_by_cost():
    frame = pd.DataFrame({"format": ["nvfp4", "nf4"], "bits_per_weight": [4.5004, 4.5]})
    ax = plots.format_ladder(frame.assign(mean_kl_nats=[2e-2, 1e-2]))
    assert [t.get_text().split(",")[0] for t in ax.get_yticklabels()] == ["nf4", "nvfp4"]


def test_the_tail_is_the_share_of_positions_with_at_least_that_kl():
    frame = pd.DataFrame({"candidate": "a", "kl_reference_candidate_nats": [0.1, 0.4, 0.2, 0.3]})
    ax = plots.kl_tail(frame)
    np.testing.assert_allclose(named(ax, "a").get_xdata(), [0.4, 0.3, 0.2, 0.1])
    np.testing.assert_allclose(named(ax, "a").get_ydata(), [0.25, 0.5, 0.75, 1])
    ax = plots.kl_tail(frame.assign(lost=[0.5, 0.1, 0.2, 0.3]), quantity="lost", label="lost (1)")
    np.testing.assert_allclose(named(ax, "a").get_xdata(), [0.5, 0.3, 0.2, 0.1])
    assert ax.get_xlabel() == "lost (1)"
    signed = frame.assign(lost=[0.5, -0.4, 1e-9, 0.3])
    ax = plots.kl_tail(signed, quantity="lost", label="lost (1)", smallest=1e-6)
    np.testing.assert_allclose(named(ax, "a").get_xdata(), [0.5, 0.3, 1e-6, 1e-6])
    assert named(ax, "a").get_label() == "a (mean 0.1)", "of all, not of what is drawn"


def test_flips_stand_in_percent_against_kl_and_curves_get_their_ticks():
    kl = [0.1, 0.2]
    frame = pd.DataFrame({"kind": ["en", "zh"], "kl_reference_candidate_nats": kl, "flip": kl})
    ax = flips_against_kl(frame)
    assert [named(ax, k).get_ydata().tolist() for k in ("en", "zh")] == [[10.0], [20.0]]
    frame = pd.DataFrame({"candidate": "a", "n": [1, 3, 43], "kl": [0.1, 0.2, 0.3]})
    ax = cost_curves(frame, x="n", y="kl", labels=("documents", "KL (nats)"))
    assert ax.get_xscale() == "log" and ax.get_xlabel() == "documents, log scale"
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1", "3", "43"]
    assert ax.get_yscale() == "linear" and ax.get_ylim()[0] == 0 and ax.get_ylabel() == "KL (nats)"
    ax = cost_curves(frame.assign(kl=[0.1, 1, 9]), x="n", y="kl", labels=("n", "KL (nats)"))
    assert ax.get_yscale() == "log" and ax.get_ylabel() == "KL (nats), log scale"


def test_the_map_shows_log10_of_each_matrix():
    frame = pd.DataFrame({"layer": [1, 1, 2, 2], "module": ["q", "k"] * 2})
    ax = plots.sensitivity_map(frame.assign(mean_kl_nats=[1e-1, 1e-2, 1e-3, 1e-4]))
    assert ax.images[0].get_array().tolist() == [[-1, -3], [-2, -4]]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["q", "k"]

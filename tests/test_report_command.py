"""`lossless-lab report`: what it writes from two runs, what it leaves out and why."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import build_t0
from PIL import Image

from lossless_lab import runs
from lossless_lab.cli import main
from lossless_lab.optimizations import find

FIGURES = ("layers", "divergences", "first_divergences")
TABLES = ("answers", "settings")
PROMPTS = ("def add(a, b):", "import os", "for i in range", "class A(", "return x +", "if not")


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """Runs that several tests report on; read-only but for their reports."""
    root = tmp_path_factory.mktemp("report")
    prompts = root / "prompts.jsonl"
    rows = [json.dumps({"id": f"p{i}", "text": text}) + "\n" for i, text in enumerate(PROMPTS)]
    prompts.write_text("".join(rows), "utf-8")
    (root / "fewer.jsonl").write_text("".join(rows[:2]), "utf-8")
    (root / "mine").mkdir()
    for name, more in {
        "before": ["--save-logits"],
        "again": ["--save-logits"],
        "int4": ["--save-logits", "--optimization", "int4-group32"],
        "bf16": ["--save-logits", "--dtype", "bfloat16"],
        "dropped": ["--save-logits", "--optimization", "drop-layers-3"],
        "draft": ["--save-logits", "--model", "tiny-draft"],
        "bare": ["--optimization", "int4-group32"],
        "drawn": ["--save-logits", "--temperature", "1"],
        "drawn4": ["--save-logits", "--temperature", "1", "--optimization", "int4-group32"],
    }.items():
        given = ["--prompts", str(prompts), "--max-new-tokens", "12", *more]
        assert main(["run", str(root / name), *given]) == 0
    given = ["--prompts", str(root / "fewer.jsonl"), "--max-new-tokens", "12"]
    assert main(["run", str(root / "fewer"), *given]) == 0
    return root


def report(there, reference, candidate, *more, folder=None):
    """(exit code, folder, report.md) of one report."""
    out = there / f"report-{candidate}-against-{reference}" if folder is None else folder
    given = [] if folder is None else ["--out", str(folder)]
    code = main(["report", str(there / reference), str(there / candidate), *given, *more])
    return code, out, (out / "report.md").read_text("utf-8")


def test_three_figures_the_table_the_settings_and_one_sentence(there, capsys):
    code, folder, page = report(there, "before", "int4")
    said = capsys.readouterr().out
    assert code == 1 and f"report written to {folder}" in said and "left out" not in said
    for name in FIGURES:
        assert {p.suffix for p in folder.glob(f"{name}.*")} == {".png", ".svg", ".csv", ".json"}
        assert Image.open(folder / f"{name}.png").size[0] == 2070  # 6.9 inches of 300 dots
        assert f"]({name}.png)" in page
        origin = json.loads((folder / f"{name}.json").read_text("utf-8"))
        hashes = [runs.configuration_hash(runs.Run(there / r).manifest) for r in ("before", "int4")]
        assert origin["configurations"] == [["before", hashes[0]], ["int4", hashes[1]]]
    for name in TABLES:
        assert {p.suffix for p in folder.glob(f"{name}.*")} == {".md", ".tex", ".csv", ".json"}
        assert (folder / f"{name}.md").read_text("utf-8").strip() in page
        assert (folder / f"{name}.tex").read_text("utf-8").startswith("\\begin{tabular}")
    assert main(["compare", str(there / "before"), str(there / "int4")]) == 1
    sentence = capsys.readouterr().out.splitlines()[0]
    assert sentence in page and sentence in said
    settings = pd.read_csv(folder / "settings.csv").set_index("field")
    assert settings.loc["optimization", ["reference", "candidate"]].tolist() == [
        "none",
        "int4-group32",
    ]
    answers = pd.read_csv(folder / "answers.csv", dtype=str).set_index("level")
    words = {
        a["level"]: a["word"] for a in json.loads((folder / "verdict.json").read_text())["answers"]
    }
    assert answers["answer"].to_dict() == words


def test_the_figures_hold_what_plain_torch_finds(there, tiny_target):
    """Drift, TV and margins again, by hooks, softmax and sort of their own."""
    _, folder, _ = report(there, "before", "int4")
    ours = [runs.Run(there / name) for name in ("before", "int4")]
    tv, margins = {}, {}
    for a, b in zip(*(run.records for run in ours), strict=True):
        (x, y) = (run.logits(a.prompt_id)[1].double() for run in ours)
        pairs = zip(a.output_ids, b.output_ids, strict=False)
        parted = next((i for i, (s, t) in enumerate(pairs) if s != t), None)
        n = len(x) if parted is None else parted + 1
        tv[a.prompt_id] = float((x[:n].softmax(-1) - y[:n].softmax(-1)).abs().sum(-1).mean() / 2)
        if parted is not None:
            best = x[parted].sort(descending=True).values
            margins[a.prompt_id] = float(best[0] - best[1])
    frame = pd.read_csv(folder / "divergences.csv")
    assert frame.groupby("prompt_id")["total_variation"].mean().to_dict() == pytest.approx(
        tv, rel=1e-4
    )
    frame = pd.read_csv(folder / "first_divergences.csv")
    flipped = frame[frame["flipped"]].set_index("prompt_id")
    assert flipped["margin"].to_dict() == pytest.approx(margins, rel=1e-4) and margins
    assert (flipped["position"] == flipped["first_divergence"]).all()
    rounded = find("int4-group32").apply(tiny_target).network
    texts = sorted((r.prompt_ids + r.output_ids for r in ours[0].records), key=len)[-8:]
    ids = torch.tensor([text[: min(64, len(texts[0]))] for text in texts])
    with torch.no_grad():
        hidden = [
            m(ids, output_hidden_states=True).hidden_states for m in (tiny_target.network, rounded)
        ]
    drift = pd.read_csv(folder / "layers.csv").query("module == 'residual'").set_index("layer")
    for layer in range(1, 4):  # the last one of transformers' has the final norm in it
        x, y = (side[layer].double() for side in hidden)
        assert drift["relative_rms"][layer] == pytest.approx(
            float((x - y).norm() / x.norm()), rel=1e-4
        )
    floor = drift["floor_relative_rms"][1:]
    assert ((floor > 0) & (floor < 1e-5)).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "candidate", "left", "why"),
    [
        ("before", "again", ["layers"], "both runs are of one network"),
        ("before", "bare", ["divergences"], "no logits were kept by bare"),
        ("before", "draft", ["layers"], "`candidate` has 2 layers and `reference` 4."),
        ("before", "fewer", [*FIGURES], "could not be compared at all"),
        ("before", "bf16", [], ""),
        ("before", "dropped", [], ""),
    ],
)
def test_what_the_runs_do_not_bear_out_is_left_out_with_the_reason(
    there, capsys, reference, candidate, left, why
):
    code, folder, page = report(there, reference, candidate)
    told = capsys.readouterr()
    assert [name for name in FIGURES if not (folder / f"{name}.png").exists()] == left
    assert page.count("Left out: ") == len(left)
    assert told.out.count(" left out: ") == len(left)
    assert why in page
    assert main(["compare", str(there / reference), str(there / candidate)]) == code


@pytest.mark.slow
def test_without_logits_the_ids_are_drawn_and_the_margins_are_not(there):
    _, folder, page = report(there, "before", "bare")
    assert "Margins are left out: no logits were kept by bare" in page
    assert "margin" not in pd.read_csv(folder / "first_divergences.csv").columns.tolist()
    _, folder, page = report(there, "drawn", "drawn4")
    assert "Margins are left out: tokens were drawn" in page


def test_texts_alone_have_no_figures(there, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("yes\nno\n", "utf-8")
    (tmp_path / "b.txt").write_text("yes\nnope\n", "utf-8")
    code, folder, page = report(tmp_path, "a.txt", "b.txt")
    assert code == 1 and page.count("Left out: ") == 3
    assert "token ids were not at hand" in page and "no logits were kept by a.txt and b.txt" in page
    assert not list(folder.glob("*.png"))


@pytest.mark.slow
def test_a_model_that_is_known_by_no_name_is_not_looked_for(tmp_path, capsys):
    ids = tmp_path / "ids.jsonl"
    ids.write_text('{"id": "a", "ids": [1, 5, 9, 13]}\n', "utf-8")
    for name, std in (("one", 0.2), ("two", 0.21)):
        build_t0(initializer_range=std).save_pretrained(tmp_path / f"model-{name}")
        given = ["--prompts", str(ids), "--model", str(tmp_path / f"model-{name}")]
        assert main(["run", str(tmp_path / name), *given, "--max-new-tokens", "3"]) == 0
    page = report(tmp_path, "one", "two")[2]
    assert "one names the model model-one, which is not known here by name" in page


def changed(there, tmp_path, **fields):
    """A copy of the run int4 whose manifest says something else."""
    shutil.copytree(there / "int4", tmp_path / "int4")
    path = tmp_path / "int4" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | fields), "utf-8")
    return tmp_path / "int4"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"weights_sha256": "state:" + "0" * 64}, "has other weights than were recorded"),
        ({"optimization": "of-mine"}, "of-mine, which is no catalogue entry"),
        ({"engine": "llama.cpp"}, "was made by llama.cpp, which cannot be looked into"),
        ({"dtype": "float12"}, "cannot be made again: `dtype` must be one of"),
        ({"model_id": "tiny-other"}, "names the model tiny-other, which is not known here"),
    ],
)
def test_layers_of_another_network_are_never_shown(there, tmp_path, fields, why):
    folder = changed(there, tmp_path, **fields)
    main(["report", str(there / "before"), str(folder), "--out", str(tmp_path / "out")])
    page = (tmp_path / "out" / "report.md").read_text("utf-8")
    assert why in page and not (tmp_path / "out" / "layers.png").exists()


@pytest.mark.slow
def test_captured_layers_are_drawn_as_they_are_and_damaged_ones_left_out(there, tmp_path):
    folder = changed(there, tmp_path, model_id="not-here")
    layers = {"layer": [0, 1, 2], "module": ["residual", "residual", "logits"]}
    pd.DataFrame(layers | {"relative_rms": [0, 0.1, 0.2]}).to_csv(folder / "layers.csv")
    page = report(there, "before", folder, folder=tmp_path / "out")[2]
    assert "As captured in layers.csv of int4" in page
    assert pd.read_csv(tmp_path / "out" / "layers.csv")["relative_rms"].tolist() == [0, 0.1, 0.2]
    for text, said in (
        ("a,b\n1,2\n", "`frame` of layer_drift lacks"),
        ("layer,module,relative_rms\n1,residual,much\n", "could not convert string to float"),
        ("", "No columns"),
    ):
        (folder / "layers.csv").write_text(text, "utf-8")
        page = report(there, "before", folder, folder=tmp_path / "out")[2]
        assert f"Left out: {said}" in page
        assert not (tmp_path / "out" / "layers.png").exists()  # nor what was there before


@pytest.mark.slow
def test_logits_that_are_no_law_are_told_not_drawn_as_numbers(there, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(there / "int4", tmp_path / "int4")
    path = tmp_path / "int4" / "logits.safetensors"
    held = load_file(path)
    held["logits/p0"][0, 0] = np.nan
    save_file(held, path)
    code, folder, page = report(there, "before", tmp_path / "int4", folder=tmp_path / "out")
    assert code == 1 and "are no law" in page
    assert pd.read_csv(folder / "divergences.csv")["total_variation"].isna().sum() == 1


@pytest.mark.slow
def test_the_same_runs_give_the_same_files(there, tmp_path):
    folders = [report(there, "before", "bf16", folder=tmp_path / n)[1] for n in "ab"]
    for path in sorted(folders[0].iterdir()):
        assert path.read_bytes() == (folders[1] / path.name).read_bytes(), path.name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("report before", "required: candidate"),
        ("report before nowhere", "there is no run folder or file nowhere"),
        ("report before int4 --out before", "`--out`: before is a run"),
        ("report before int4 --out prompts.jsonl", "prompts.jsonl"),
        ("report before int4 --require numericl", "did you mean 'numerical'?"),
        ("report before int4 --formt x", "unknown option '--formt'"),
    ],
)
def test_wrong_usage_is_one_line(there, monkeypatch, capsys, words, said):
    monkeypatch.chdir(there)
    try:
        code = main(words.split())
    except SystemExit as stop:
        code = stop.code
    told = capsys.readouterr()
    assert code == 3 and told.out == "" and told.err.count("\n") == 1 and said in told.err


def test_it_explains_itself(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["report", "--help"])
    assert "three figures" in capsys.readouterr().out

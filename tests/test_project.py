"""Set-up files agree with each other and with what is installed; the wheel carries its data."""

import ast
import importlib.metadata as metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())
PIP_SECTION = next(d["pip"] for d in ENVIRONMENT["dependencies"] if isinstance(d, dict))


def pins():
    """Name and version of each line of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and line[0] != "#")


def installed(name):
    """The version that runs here, without the build tag of torch."""
    return metadata.version(name).split("+")[0]


def closure(name, extras):
    """Canonical names of everything that `name[extras]` needs here, itself left out."""
    seen = {}
    todo = [(name, frozenset(extras))]
    while todo:
        current, wanted = todo.pop()
        key = canonicalize_name(current)
        new = ({""} | wanted) - seen.setdefault(key, set())
        seen[key] |= new
        for text in metadata.requires(current) or []:
            requirement = Requirement(text)
            marker = requirement.marker
            if any(marker is None or marker.evaluate({"extra": e}) for e in new):
                todo.append((requirement.name, frozenset(requirement.extras)))
    return set(seen) - {canonicalize_name(name)}


def test_what_runs_is_what_is_pinned():
    different = {n: (installed(n), v) for n, v in pins().items() if installed(n) != v}
    assert not different, "installed is not what constraints.txt says: make setup"


def test_the_pins_are_sorted_plain_and_complete():
    names = list(pins())
    assert names == sorted(names)
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", f"{n}=={v}") for n, v in pins().items())
    if sys.platform == "linux" and sys.version_info[:2] == (3, 11):
        needed = closure("lossless-lab", ["dev"])
        gpu = {n for n in needed if n.startswith(("nvidia-", "cuda-", "triton"))}
        assert needed - gpu == set(names)


def test_pyproject_states_ranges_not_pins():
    requirements = [Requirement(r) for r in metadata.requires("lossless-lab")]
    assert not [r for r in requirements if any(s.operator == "==" for s in r.specifier)]
    assert {"torch", "sentencepiece", "accelerate"} <= {r.name for r in requirements}


def test_makefile_installs_the_pip_section_of_environment_yml():
    printed = subprocess.run(
        ["make", "-n", "-B", "setup"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert PIP_SECTION == ["-c constraints.txt", "-e .[dev]"]
    assert f"pip install {' '.join(PIP_SECTION)}\n" in printed
    assert ENVIRONMENT["channels"] == ["conda-forge", "nodefaults"]
    assert "python=3.11" in ENVIRONMENT["dependencies"]


def test_a_second_make_does_no_set_up(tmp_path):
    """With the stamp newer than the three files that it depends on, make has nothing to do."""
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / ".installed").touch()
    printed = subprocess.run(
        ["make", "setup", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "pip install" not in printed


def test_every_package_that_is_imported_is_declared():
    """Nothing is leant on that only comes along with something else."""
    declared = {canonicalize_name(Requirement(r).name) for r in metadata.requires("lossless-lab")}
    owners = metadata.packages_distributions()
    imported = set()
    for folder in ("lossless_lab", "notebooks", "benchmarks", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    imported.add(node.module.split(".")[0])
    others = {n: owners[n] for n in imported & set(owners) if n not in sys.stdlib_module_names}
    others = {n: d for n, d in others.items() if not declared & set(map(canonicalize_name, d))}
    assert not {n for n in others if n not in ("lossless_lab", "notebooks", "benchmarks")}


def test_every_dependency_has_its_reason():
    reasons = (ROOT / "docs" / "dependencies.md").read_text()
    named = {canonicalize_name(name) for name in re.findall(r"^\| `(.+?)`", reasons, re.M)}
    own = {canonicalize_name(Requirement(r).name) for r in metadata.requires("lossless-lab")}
    assert named == own - {"lossless-lab"}


def test_readme_links_lead_somewhere():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text())
        here = [link for link in links if not link.startswith("http")]
        assert not [link for link in here if not (page.parent / link).exists()], page


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from this tree; the build backend comes from the package index."""
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out), str(ROOT)],
        check=True,
    )
    return next(out.glob("*.whl"))


@pytest.mark.slow
def test_a_wheel_elsewhere_loads_the_tiny_pair_and_the_prompts(wheel, tmp_path):
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel],
        check=True,
    )
    script = """
import sys
sys.path.insert(0, sys.argv[1])
import lossless_lab
from lossless_lab import load, paths, prompts
assert lossless_lab.__file__.startswith(sys.argv[1]), lossless_lab.__file__
assert str(paths.DATA).startswith(sys.argv[1]) and paths.CHECKOUT is None
assert not str(paths.CACHE).startswith(sys.argv[1])
print(len(prompts.read()))
for name in ("tiny-target", "tiny-draft"):
    model = load(name)
    ids = model.tokenizer("def f(x):", return_tensors="pt").input_ids
    print(model.network(ids).logits.isfinite().all().item())
"""
    run = subprocess.run(
        [sys.executable, "-c", script, str(site)], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    number, *finite = run.stdout.split()
    assert int(number) >= 60 and finite == ["True", "True"]
    assert not list(site.rglob("cache")) and wheel.stat().st_size < 40 * 2**20


@pytest.mark.slow
def test_a_tokenizer_that_needs_sentencepiece_loads(tmp_path):
    """A unigram model trained here on a few lines becomes a T5 tokenizer."""
    import sentencepiece
    from transformers import AutoTokenizer

    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(f"the cache holds {i} keys and values" for i in range(200)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(tmp_path / "spiece"),
        vocab_size=60,
        hard_vocab_limit=False,
        model_type="unigram",
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer"}')
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    ids = tokenizer("the cache holds 7 keys").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the cache holds 7 keys"

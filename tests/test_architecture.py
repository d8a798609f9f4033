"""The house rules, read from the sources: who may import whom, sizes, names, cheap import."""

import ast
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import lossless_lab

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lossless_lab"
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if "_data" not in p.parts)
NOTEBOOKS = sorted((ROOT / "notebooks" / "src").glob("*.py"))
LEVELS = {"numerical", "statistical", "semantic"}
SHARED = {"results", "paths"}  # belong to no room
# What a room may import besides itself and SHARED; a room that is not listed may import nothing.
MAY_IMPORT = {
    **{level: {"stats"} for level in LEVELS},
    "stats": set(),
    "kv_cache": set(),
    "number_formats": set(),
    "plots": set(),
    "figures": {"plots"},
    "panels": {"plots", "figures", "stats", "kv_cache", "number_formats"} | LEVELS,
    "verdict": {"stats"},
    "models": set(),
    "prompts": {"models"},
    "doctor": {"models"},
    "engines": {"models", "number_formats"},
    "optimizations": {"models", "number_formats"},
    "mutants": {"numerical", "statistical"},
    "runs": {"engines", "models", "prompts"},
}
JOIN_ROOMS = {"pipeline", "cli"}
DRAW = {"plots", "figures", "panels"}


def room(path):
    """The room a module belongs to: the first name under lossless_lab."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path, package=PACKAGE.name):
    """Every dotted name that a file imports, anywhere in it, relative ones resolved."""
    here = path.with_suffix("").relative_to(ROOT).parts if ROOT in path.parents else ()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = here[: len(here) - node.level]
                base = ".".join((*up, base)).rstrip(".")
            yield from (f"{base}.{alias.name}" for alias in node.names)
            yield base


def rooms_imported(path):
    """The rooms of this package that a file imports, lazily exported names included."""
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == PACKAGE.name and len(parts) > 1:
            owner = lossless_lab._NAMES.get(parts[1], parts[1])
            yield owner.split(".")[0]


def violations(path):
    """Rooms that this module imports and may not."""
    own = room(path)
    if own in JOIN_ROOMS or own == "__init__":
        return set()
    found = set(rooms_imported(path)) - {own, "__version__"} - SHARED
    return found - MAY_IMPORT.get(own, set())


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_data_flows_one_way(path):
    assert not violations(path), f"{room(path)} may not import {sorted(violations(path))}"
    outside = {name.split(".")[0] for name in imported(path)}
    assert "ipywidgets" not in outside or room(path) == "panels"
    assert "matplotlib" not in outside or room(path) in DRAW
    assert not outside & {"tests", "benchmarks", "notebooks", "papermill", "IPython"} or (
        room(path) in {"panels", "cli"} and "IPython" in outside
    )


def test_the_import_rule_sees_a_breach(tmp_path, monkeypatch):
    folder = PACKAGE / "numerical"
    for line in (
        "from ..engines import protocol",
        "def f():\n    import lossless_lab.plots",
        "from lossless_lab import check",
        "from lossless_lab.semantic.x import y",
    ):
        broken = tmp_path / "lossless_lab" / "numerical" / "broken.py"
        broken.parent.mkdir(parents=True, exist_ok=True)
        broken.write_text(line)
        monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
        monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "lossless_lab")
        assert violations(broken), line
    assert folder.is_dir()


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_are_short_and_say_what_belongs_in_them(path):
    text = path.read_text(encoding="utf-8")
    lines = len(text.splitlines())
    assert lines <= 300, f"{path.name} has {lines} lines: split the room"
    if lines > 250:
        warnings.warn(f"{path.relative_to(ROOT)} has {lines} lines", stacklevel=1)
    assert ast.get_docstring(ast.parse(text)), f"{path.name} does not say what belongs in it"


def code_lines(path):
    """Lines that are neither blank, nor comment, nor docstring."""
    text = path.read_text(encoding="utf-8")
    prose = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            prose |= set(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(t.strip()) and t.strip()[0] != "#" and i not in prose for i, t in lines)


def test_the_package_is_small():
    lines = sum(code_lines(p) for p in MODULES)
    assert lines <= 15_550, f"{lines} lines of code; about 6,000 are meant for everything"
    if lines > 6000:
        warnings.warn(f"{lines} lines of code; about 6,000 are meant", stacklevel=1)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_names_and_signatures(path):
    assert not {"utils", "helpers", "manager", "misc"} & set(path.relative_to(PACKAGE).parts)
    assert path.stem not in {"utils", "helpers", "manager", "misc", "common"}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            where = f"{path.name}:{node.lineno} {node.name}"
            assert not node.name.lstrip("_").startswith(("get_", "calc_", "compute_")), where
            if node.name[0] == "_":
                continue
            positional = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
            assert len([a for a in positional if a not in ("self", "cls")]) <= 5, where
        if isinstance(node, ast.ClassDef):
            assert_result_shape(node, path)


def assert_result_shape(node, path):
    """A class with `to_frame` that is a dataclass is frozen, slotted, keyword-only, <= 8 fields."""
    where = f"{path.name}:{node.lineno} {node.name}"
    decorators = [d for d in node.decorator_list if "dataclass" in ast.unparse(d)]
    is_result = any("Result" in ast.unparse(b) for b in node.bases) or any(
        isinstance(n, ast.FunctionDef) and n.name == "to_frame" for n in node.body
    )
    if not (decorators and is_result):
        return
    options = ast.unparse(decorators[0])
    for wanted in ("frozen=True", "slots=True", "kw_only=True"):
        assert wanted in options, where
    fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
    assert len(fields) <= 8, f"{where} has {len(fields)} fields"
    assert not any(isinstance(n, ast.FunctionDef) and n.name == "plot" for n in node.body), where


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_stand_alone(path):
    names = set(imported(path))
    assert not any(n.split(".")[0] in {"notebooks", "tests", "benchmarks"} for n in names)
    assert "%run" not in path.read_text(encoding="utf-8")


def test_random_state_is_never_global():
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("np.random.seed", "random.seed", "numpy.random.seed"), path
                if called == "torch.manual_seed":
                    assert "fork_rng" in path.read_text(), f"{path}: seeds torch globally"


IMPORT = """
import sys, time
start = time.perf_counter()
import lossless_lab
seconds = time.perf_counter() - start
heavy = {"torch", "transformers", "numpy", "pandas", "matplotlib", "ipywidgets"} & set(sys.modules)
print(seconds, *heavy)
"""


def test_import_is_cheap():
    """Under 0.3 s and without torch; the best of three, since the machine may be busy."""
    runs = [
        subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    results = [run.stdout.split() for run in runs]
    assert all(len(r) == 1 for r in results), f"import loads {results[0][1:]}"
    assert min(float(r[0]) for r in results) < 0.3


def test_every_exported_name_exists():
    for name in lossless_lab.__all__:
        assert getattr(lossless_lab, name) is not None, name


def test_a_mistyped_name_suggests_the_nearest():
    with pytest.raises(AttributeError, match="did you mean 'compare_tokens'"):
        _ = lossless_lab.compare_token

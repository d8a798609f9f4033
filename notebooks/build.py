"""Runs notebooks/src/*.py into notebooks/*.ipynb, clean and stamped; says which are stale."""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert.filters import strip_ansi
from tqdm import tqdm

from lossless_lab import models, paths
from notebooks.cleaning import clean

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
SOURCES = FOLDER / "src"
MAX_BYTES = 2**20


def sources(names: Iterable[str] = ()) -> list[Path]:
    """The notebook sources in order; `names` are numbers or stems ("00", "01_three_levels")."""
    found = sorted(SOURCES.glob("[0-9][0-9]_*.py"))
    chosen = []
    for name in names:
        match = [p for p in found if p.stem == name or p.stem.split("_")[0] == name]
        if not match:
            raise ValueError(f"no notebook {name!r}; there are {', '.join(p.stem for p in found)}")
        chosen += match
    return chosen or found


def folder_sha256(folder: Path, *, skip: tuple[str, ...] = ()) -> str:
    """SHA-256 over the relative names and bytes of the files under `folder`, in name order."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if path.is_file() and relative.parts[0] not in skip and "__pycache__" not in path.parts:
            digest.update(f"{relative.as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def stamp(source: Path) -> dict[str, str]:
    """The hashes a notebook is stamped with: of its source, the package and the data."""
    return {
        "source_sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
        "package_sha256": folder_sha256(paths.PACKAGE, skip=("_data",)),
        "data_sha256": folder_sha256(paths.DATA, skip=("cache", "runs")),
    }


def read(source: Path) -> nbformat.NotebookNode:
    """The notebook of a py:percent source, with cell ids that do not change from run to run."""
    notebook = jupytext.read(source, fmt="py:percent")
    for i, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{i:03d}"
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": {"name": "python3", "language": "python", "display_name": "Python 3"}}
    )
    return notebook


def parameters(notebook: nbformat.NotebookNode) -> dict[str, object]:
    """Name and default of each parameter: the literals assigned in the cell tagged so."""
    cells = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    if len(cells) != 1:
        raise ValueError(f"a notebook has one cell tagged `parameters`; found {len(cells)}")
    assigned = [s for s in ast.parse(cells[0].source).body if isinstance(s, ast.Assign)]
    return {s.targets[0].id: ast.literal_eval(s.value) for s in assigned}


def validate(known: Mapping[str, object], given: Mapping[str, object]) -> None:
    """A parameter whose name or type does not fit is an error, before anything runs."""
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"no parameter {name!r} (there are {', '.join(known)}){hint}")
        default = known[name]
        integer_for_float = isinstance(default, float) and type(value) is int
        if default is not None and type(value) is not type(default) and not integer_for_float:
            raise TypeError(
                f"parameter {name} is a {type(default).__name__} (default {default!r}); "
                f"received {value!r}"
            )


def inject(notebook: nbformat.NotebookNode, given: Mapping[str, object]) -> None:
    """Add a cell after the parameters that overrides them."""
    validate(parameters(notebook), given)
    if given:
        tagged = ["parameters" in c.metadata.get("tags", []) for c in notebook.cells]
        cell = nbformat.v4.new_code_cell("\n".join(f"{k} = {v!r}" for k, v in given.items()))
        cell.metadata["tags"] = ["injected-parameters"]
        cell["id"] = "injected"
        notebook.cells.insert(tagged.index(True) + 1, cell)


def run(notebook: nbformat.NotebookNode, *, title: str = "", timeout: int = 1200) -> float:
    """Run all cells in a fresh kernel, with a progress bar; returns seconds, raises on an error."""
    start = time.perf_counter()
    code = sum(c.cell_type == "code" for c in notebook.cells)
    with tqdm(total=code, desc=title, unit="cell", file=sys.stdout, mininterval=1) as bar:
        client = NotebookClient(
            notebook,
            timeout=timeout,
            kernel_name="python3",
            coalesce_streams=True,
            resources={"metadata": {"path": str(FOLDER)}},
            on_cell_complete=lambda cell, cell_index: bar.update(cell.cell_type == "code"),
        )
        try:
            client.execute()
        except Exception as error:
            # nbclient ends its kernel on a signal, and then trips over the missing kernel
            if getattr(client, "_async_cleanup_kernel_future", None) is not None:
                raise KeyboardInterrupt from error
            raise
    return time.perf_counter() - start


def build(source: Path, folder: Path = FOLDER, *, given: Mapping[str, object] = {}) -> Path:
    """Run one source and write folder/NAME.ipynb; after an error the file keeps it and says so."""
    notebook = read(source)
    inject(notebook, given)
    out = folder / f"{source.stem}.ipynb"
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        seconds = run(notebook, title=source.stem)
        clean(notebook, root=ROOT)
        notebook.metadata["lossless_lab"] = stamp(source) | {"parameters": dict(given)}
    except CellExecutionError:
        nbformat.write(notebook, out.with_suffix(".failed.ipynb"))
        raise
    written = nbformat.writes(notebook)
    if len(written.encode()) > MAX_BYTES:
        raise ValueError(f"{out.name} is {len(written.encode()) / 2**20:.2f} MiB; at most 1 MiB")
    out.write_text(written + "\n", encoding="utf-8")
    print(f"{source.stem}: {seconds:.0f} s, {len(written.encode()) / 2**10:.0f} KiB")
    return out


def stale(source: Path, folder: Path = FOLDER) -> list[str]:
    """Which of "source", "package", "data" changed since folder/NAME.ipynb was run."""
    out = folder / f"{source.stem}.ipynb"
    if not out.exists():
        return ["source"]
    found = nbformat.read(out, as_version=4).metadata.get("lossless_lab", {})
    return [k.split("_")[0] for k, v in stamp(source).items() if found.get(k) != v]


def build_all(chosen: list[Path], folder: Path, given: Mapping[str, object]) -> dict[str, object]:
    """Build each source with those parameters it has; an error in one does not stop the others."""
    results: dict[str, object] = {}
    for source in chosen:
        fitting = {k: v for k, v in given.items() if k in parameters(read(source))}
        try:
            results[source.stem] = build(source, folder, given=fitting)
        except Exception as error:  # reported at the end, with the exit status
            results[source.stem] = error
    return results


def main(arguments: list[str] | None = None) -> int:
    """`rebuild` writes notebooks/*.ipynb, `report` figures/report.html, `check` names the stale."""
    parser = argparse.ArgumentParser(prog="python -m notebooks.build", description=__doc__)
    parser.add_argument("action", choices=("rebuild", "report", "check"))
    parser.add_argument("names", nargs="*", help="numbers or names of notebooks; all if none")
    parser.add_argument("-p", dest="given", nargs=2, action="append", default=[], metavar="X")
    options = parser.parse_args(arguments)
    given = {name: literal(text) for name, text in options.given}
    chosen = sources(options.names)
    if options.action == "check":
        changed = {s.stem: stale(s) for s in chosen}
        print("\n".join(f"{name}: {', '.join(w) or 'up to date'}" for name, w in changed.items()))
        return int(any("source" in w for w in changed.values()))
    validate({k: v for s in chosen for k, v in parameters(read(s)).items()}, given)
    if options.action == "rebuild":
        results = build_all(chosen, FOLDER, given)
    else:
        from notebooks import report

        results = report.make(chosen, with_a_model(given))
    failed = {name: r for name, r in results.items() if isinstance(r, Exception)}
    for name, error in failed.items():
        told = strip_ansi(str(error)) or type(error).__name__
        print(f"\n{name} failed: {told}", file=sys.stderr)
    return int(bool(failed))


def with_a_model(given: Mapping[str, object]) -> Mapping[str, object]:
    """The parameters, with MODEL set to "tiny-target" where SmolLM2 is not to be had."""
    if "MODEL" in given:
        return given
    try:
        models.fetch("smollm2")
    except (OSError, RuntimeError) as error:
        print(f"SmolLM2 could not be fetched ({error}); going on with tiny-target.")
        return {**given, "MODEL": "tiny-target"}
    return given


def literal(text: str) -> object:
    """A parameter from the command line: a Python literal, else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        raise SystemExit(130) from None

"""Binds executed notebooks into one self-contained page, figures/report.html."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from pathlib import Path

import nbformat
from jinja2 import DictLoader
from nbconvert import HTMLExporter
from nbconvert.filters import markdown2html, strip_ansi
from pygments.formatters import HtmlFormatter

from lossless_lab import paths
from notebooks import build

# Code is folded away: the report is for a reader of results, the notebook for one of code.
TEMPLATE = """{%- extends 'basic/index.html.j2' -%}
{%- block input -%}
<details class="code"><summary>code</summary>{{ super() }}</details>
{%- endblock input -%}"""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head>
<body><main><h1>{title}</h1>{body}</main></body></html>
"""

STYLE = """
body { font: 16px/1.5 system-ui, "Noto Sans", "Noto Sans CJK SC", sans-serif; margin: 0; }
main { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
article { border-top: 2px solid #888; margin-top: 4rem; }
img, svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; display: block; overflow-x: auto; margin: 1rem 0; }
th, td { padding: .25rem .6rem; text-align: left; border-bottom: 1px solid #ddd; }
pre { white-space: pre-wrap; overflow-x: auto; font-size: .85rem; }
details.code > summary { color: #888; font-size: .75rem; cursor: pointer; }
.anchor-link { display: none; }
.failed { color: #a00; }
"""


def body(notebook: nbformat.NotebookNode) -> str:
    """The HTML of one executed notebook: every picture inlined, code folded, no script."""
    exporter = HTMLExporter(
        extra_loaders=[DictLoader({"report.html.j2": TEMPLATE})],
        template_file="report.html.j2",
        template_name="basic",
        embed_images=True,
        exclude_input_prompt=True,
        exclude_output_prompt=True,
    )
    resources = {"metadata": {"path": str(build.FOLDER)}}
    return exporter.from_notebook_node(notebook, resources=resources)[0]


def verdicts(notebook: nbformat.NotebookNode) -> list[str]:
    """What the cells under a heading that says "Verdict" put out, as HTML."""
    found, inside = [], False
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            headings = re.findall(r"^#+ .*$", cell.source, flags=re.MULTILINE)
            inside = "verdict" in headings[-1].lower() if headings else inside
        elif inside:
            for output in cell.get("outputs", []):
                shown = rendered(output)
                if shown:
                    found.append(shown)
    return found


def rendered(output: nbformat.NotebookNode) -> str:
    """One output's text as HTML; "" when it is a picture or an error."""
    data = output.get("data", {})
    if "text/html" in data:
        return data["text/html"]
    if "text/markdown" in data:
        return markdown2html(data["text/markdown"])
    text = output.get("text") or ("" if "image/png" in data else data.get("text/plain", ""))
    return "<p>" + html.escape(text).replace("\n", "<br>") + "</p>" if text else ""


def page(notebooks: Mapping[str, nbformat.NotebookNode | Exception]) -> str:
    """The whole report: first the verdict of each notebook, then the notebooks."""
    rows, articles = [], []
    for name, notebook in notebooks.items():
        if isinstance(notebook, Exception):
            told = html.escape(strip_ansi(str(notebook))[-2000:] or type(notebook).__name__)
            rows.append((name, f'<span class="failed">failed</span><pre>{told}</pre>'))
            continue
        rows.append((name, "".join(verdicts(notebook)) or "no verdict in this notebook"))
        articles.append(f'<article id="{name}">{body(notebook)}</article>')
    table = "".join(f'<tr><td><a href="#{n}">{n}</a></td><td>{v}</td></tr>' for n, v in rows)
    return PAGE.format(
        title="lossless_lab: report",
        style=STYLE + HtmlFormatter().get_style_defs(".highlight"),
        body=f"<h2>Verdicts</h2><table>{table}</table>{''.join(articles)}",
    )


def make(chosen: list[Path], given: Mapping[str, object]) -> dict[str, object]:
    """Run the chosen notebooks into build/notebooks and bind them; returns each file or error."""
    results = build.build_all(chosen, build.ROOT / "build" / "notebooks", given)
    read = {n: r if isinstance(r, Exception) else nbformat.read(r, 4) for n, r in results.items()}
    paths.FIGURES.mkdir(parents=True, exist_ok=True)
    out = paths.FIGURES / "report.html"
    out.write_text(page(read), encoding="utf-8")
    print(f"\nfigures/{out.name}: {out.stat().st_size / 2**20:.1f} MiB")
    return results

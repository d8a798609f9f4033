"""What a panel's page needs for keys and screen readers, which ipywidgets cannot set itself."""

import html
from pathlib import Path

import ipywidgets

# JupyterLab's cell shortcuts (arrows, M, D D) leave a focused element alone only if it carries the
# attribute itself; a parent's is looked at too late. A slider of named values says its place (2.0)
# to a screen reader rather than the value that it shows.
_SCRIPT = Path(__file__).with_name("keyboard.js").read_text("utf-8")


def keyboard() -> ipywidgets.HTML:
    """An invisible element that prepares the panel around it once the page shows it."""
    image = f'<img src="data:," alt="" hidden onerror="{html.escape(_SCRIPT)}">'
    return ipywidgets.HTML(image, layout={"display": "none"})

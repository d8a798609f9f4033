"""What every panel is made of: controls, one persistent picture, text, and errors in plain sight.

A panel is a pure function from the values of its controls to a `Content`, and a function that
moves the artists of one figure. A burst of slider moves is answered by few pictures, of which the
last one is always the last state; where no widget can run, a picture and the text stay.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import html
import io
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import ipywidgets
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lossless_lab.panels.keyboard import keyboard
from lossless_lab.plots import style
from lossless_lab.plots.labels import make_drawable
from lossless_lab.results import Result

GATHER_S = 0.02  # how long a move waits for the moves that follow it


@dataclass(frozen=True, slots=True, kw_only=True)
class Content(Result):
    """What one state of a panel says.

    Parameters
    ----------
    text : the answer in one or a few lines; shown escaped.
    frames : the DataFrames that are drawn, by name.
    table : a small table shown under the text, or None.
    """

    text: str
    frames: Mapping[str, pd.DataFrame]
    table: pd.DataFrame | None = None

    def to_frame(self) -> pd.DataFrame:
        """The table, or the text alone where there is none."""
        return pd.DataFrame({"text": [self.text]}) if self.table is None else self.table

    def to_html(self) -> str:
        """Text and table, escaped."""
        return _lines(self.text) + ("" if self.table is None else _table(self.table))

    def __str__(self) -> str:
        return self.text


class Panel(ipywidgets.VBox):
    """Controls over a picture and its text.

    Parameters
    ----------
    controls : widgets by name; their values are the state.
    compute : pure function `compute(**state) -> Content`, with one keyword for each control.
    draw : `draw(figure, content, state)` moves the figure's artists; it makes them the first time.
    figure : the one figure, not one of pyplot's; its layout is frozen after the first drawing.
    adapt : called before the state is read, to bring controls that depend on others in line.
    actions : buttons by label, `action(panel)`; what one prints or raises shows in the panel.
    """

    def __init__(
        self,
        *,
        controls: Mapping[str, ipywidgets.ValueWidget],
        compute: Callable[..., Content],
        draw: Callable[[Figure, Content, dict], None],
        figure: Figure,
        adapt: Callable[[Mapping], None] | None = None,
        actions: Mapping[str, Callable[[Panel], None]] | None = None,
    ) -> None:
        self.controls, self.compute, self.figure = dict(controls), compute, figure
        self.error: Exception | None = None
        self._draw, self._adapt = draw, adapt or (lambda controls: None)
        self._canvas = FigureCanvasAgg(figure)
        self._lock = threading.RLock()  # JupyterLab may send moves to another thread
        self._stale, self._scheduled, self._held = True, False, False
        self._content = Content(text="", frames={})
        self._note, self._answer = ipywidgets.HTML(), ipywidgets.HTML()
        shape = {"width": f"{figure.bbox.width:.0f}px", "max_width": "100%"}
        self._image = ipywidgets.Image(format="png", layout={**shape, "align_self": "flex-start"})
        buttons = [self._button(label, action) for label, action in (actions or {}).items()]
        rows = [*self.controls.values(), *buttons]
        children = [ipywidgets.VBox(rows), self._note, self._answer, self._image, keyboard()]
        super().__init__(children)
        self.add_class("lossless-lab-panel")
        for control in self.controls.values():
            control.observe(self._moved, "value")
        self.refresh()

    @property
    def state(self) -> dict:
        """The value of each control, by name."""
        return {name: control.value for name, control in self.controls.items()}

    @property
    def content(self) -> Content:
        """What the panel says about its present state."""
        self.refresh()
        return self._content

    @property
    def text(self) -> str:
        """The answer, or the error that kept it from being computed, as plain text."""
        return self.content.text

    @property
    def png(self) -> bytes:
        """The picture that is shown."""
        self.refresh()
        return bytes(self._image.value)

    def refresh(self) -> None:
        """Bring text and picture up to the controls, unless they already are."""
        with self._lock:
            if self._stale:
                self._guarded(self._redraw)

    def _moved(self, _change) -> None:
        self._stale = True
        if self._held:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a plain script: nothing will run later
            return self.refresh()
        if not self._scheduled:
            self._scheduled = True
            loop.call_later(GATHER_S, self._settle)

    def _settle(self) -> None:
        self._scheduled = False
        self.refresh()

    @contextlib.contextmanager
    def _hold(self) -> Iterator[None]:
        """Moves made inside only note that the picture is stale."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def _redraw(self) -> None:
        try:
            with self._hold():
                self._adapt(self.controls)
            self._stale = False
            state = self.state
            content = self.compute(**state)
            with style():
                self._draw(self.figure, content, state)
                self._image.value = self._picture()
        except Exception as error:
            self._stale = False
            self._content, self._answer.value = Content(text=_told(error), frames={}), ""
            raise
        self._content, self._answer.value = content, content.to_html()

    def _picture(self) -> bytes:
        make_drawable(self.figure)
        if self.figure.get_layout_engine() is not None:
            self._canvas.draw()
            self.figure.set_layout_engine("none")
        png = io.BytesIO()
        self._canvas.print_png(png, metadata={"Software": None}, pil_kwargs={"compress_level": 1})
        return png.getvalue()

    def _button(self, label: str, action: Callable[[Panel], None]) -> ipywidgets.Button:
        def act() -> None:
            with self._hold():
                action(self)

        button = ipywidgets.Button(description=label)
        button.on_click(lambda _: self._guarded(act, lambda: self._stale and self._redraw()))
        return button

    def _guarded(self, *steps: Callable[[], object]) -> None:
        """Do each step; what one prints or raises is shown in the panel, not in a log."""
        printed, errors = io.StringIO(), []
        with self._lock, contextlib.redirect_stdout(printed):
            for step in steps:
                try:
                    step()
                except Exception as error:
                    errors.append(error)
        self.error = errors[0] if errors else None
        told = "\n".join(map(_told, errors))
        self._note.value = _lines(printed.getvalue()) + _lines(told, "color:#b00020")

    def _repr_mimebundle_(self, **options) -> dict:
        """The live widget, and beside it the picture and text for where no widget can run."""
        bundle = super()._repr_mimebundle_(**options) or {}
        bundle |= {"text/plain": self.text, "text/html": self.content.to_html()}
        if self.error is None:
            picture = base64.b64encode(self.png).decode()
            bundle["image/png"] = picture
            bundle["text/html"] += f"<img src='data:image/png;base64,{picture}'>"
        return bundle


def control(kind, label: str, *, width: tuple[int, int] = (80, 420), **options):
    """A widget of that kind with its label; widths of the label and of the whole in pixels."""
    look = {"style": {"description_width": f"{width[0]}px"}, "layout": {"width": f"{width[1]}px"}}
    return kind(description=label, **look, **options)


def offer(menu: ipywidgets.Dropdown, options: Sequence[str], *, default: int = 0) -> None:
    """Let a menu offer these; what was chosen stays, or else the one at `default` is."""
    if list(menu.options) != list(options):
        kept, menu.options = menu.value, options
        menu.value = kept if kept in options else options[default]


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _table(frame: pd.DataFrame) -> str:
    with pd.option_context("display.max_colwidth", None):
        table = frame.to_html(index=False, border=0, float_format="{:.3g}".format)
    return re.sub("<(t[dh])>", r"<\1 style='text-align:left;padding:2px 16px 2px 0'>", table)


def _lines(text: str, look: str = "") -> str:
    shown = f"<div style='white-space:pre-wrap;{look}'>{html.escape(text)}</div>"
    return shown if text else ""

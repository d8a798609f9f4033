"""What every result has in common: a table, one line of text, and HTML that is safe to show."""

from __future__ import annotations

import html
from dataclasses import fields

import pandas as pd


class Result:
    """Base of the frozen result classes; a subclass adds a one-line `__str__`.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, slots=True, kw_only=True)
    ... class Share(Result):
    ...     text: str
    ...     def __str__(self): return f"said {self.text}"
    >>> "<b>" in Share(text="<b>")._repr_html_()
    False
    """

    __slots__ = ()

    def to_frame(self) -> pd.DataFrame:
        """The field `frame` where there is one; else one row, one column per field."""
        row = {f.name: getattr(self, f.name) for f in fields(self)}
        return row["frame"] if "frame" in row else pd.DataFrame([row])

    def _repr_html_(self) -> str:
        """The line above the table, escaped, and with $ kept from being read as mathematics."""
        table = self.to_frame().to_html(
            index=False, escape=True, max_rows=20, border=0, float_format="{:.4g}".format
        )
        return f"<div class='tex2jax_ignore'><p>{html.escape(str(self))}</p>{table}</div>"

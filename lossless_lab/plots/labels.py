"""Text that comes from a model, made fit for a figure: escapes, width, fonts that have the glyphs.

A token may be a newline, half a character, a dollar sign or Chinese. What the chosen fonts cannot
draw is written as a readable escape, so that no figure shows an empty box.
"""

import contextlib
import functools
import logging
import re
import unicodedata
from collections.abc import Iterable

from matplotlib import font_manager
from matplotlib.text import Text

BASE_FONT = "DejaVu Sans"  # shipped inside matplotlib, so it is on every machine
CJK_SAMPLE = "量化误差的，推理。"


@functools.lru_cache(maxsize=64)
def _face(path: str, index: int):
    # matplotlib 3.11 lists each face of a collection; older ones only the first.
    return font_manager.get_font(font_manager.FontPath(path, index) if index else path)


def _has(entry: font_manager.FontEntry, characters: str) -> bool:
    try:
        face = _face(entry.fname, getattr(entry, "index", 0))
    except (OSError, RuntimeError):  # a file in matplotlib's list that is gone or broken
        return False
    return all(face.get_char_index(ord(character)) for character in characters)


def _regular(entries: Iterable[font_manager.FontEntry]) -> list[font_manager.FontEntry]:
    plain = [e for e in entries if e.style == "normal" and e.weight in (400, "normal", "regular")]
    return [e for e in plain if "Last Resort" not in e.name]  # that one draws boxes


def cjk_font(entries: Iterable[font_manager.FontEntry]) -> str | None:
    """Name of a font that has glyphs for Chinese text, found by looking at the glyphs, or None."""
    rank = {e.name: ("SC" not in e.name, "Serif" in e.name, "Mono" in e.name) for e in entries}
    ranked = sorted(_regular(entries), key=lambda e: (rank[e.name], e.name))
    return next((e.name for e in ranked if _has(e, CJK_SAMPLE)), None)


def _with_new() -> list[font_manager.FontEntry]:
    """matplotlib's list of fonts, with those on the system that it was too old to know."""
    manager = font_manager.fontManager
    for path in set(font_manager.findSystemFonts()) - {entry.fname for entry in manager.ttflist}:
        with contextlib.suppress(OSError, RuntimeError):
            manager.addfont(path)
    return manager.ttflist


@functools.lru_cache(maxsize=1)
def families() -> tuple[str, ...]:
    """Font names to try in order: matplotlib's own, then a Chinese one where there is any."""
    found = cjk_font(font_manager.fontManager.ttflist) or cjk_font(_with_new())
    if found is None:
        logging.getLogger("lossless_lab.plots").warning(
            "No font with Chinese glyphs was found: Chinese characters in figures are written as "
            "\\u escapes. Install one (for example Noto Sans CJK) and restart to see them."
        )
    return (BASE_FONT,) if found is None else (BASE_FONT, found)


@functools.lru_cache(maxsize=65536)
def drawable(character: str) -> bool:
    """Whether one of `families()` has a glyph for this character."""
    chosen = [e for e in _regular(font_manager.fontManager.ttflist) if e.name in families()]
    return any(_has(entry, character) for entry in chosen)


def escaped(character: str, *, fonts: bool = True) -> str:
    r"""The character, or an escape for what has no ink, is broken, or (`fonts`) has no glyph.

    >>> "".join(map(escaped, "a\tb\ufffd"))
    'a\\tb\\ufffd'
    """
    unseen = not character.isprintable() or character in "\\\ufffd"
    return _code(character) if unseen or (fonts and not drawable(character)) else character


def _code(character: str) -> str:
    return character.encode("unicode_escape").decode()


def token_label(token: str, *, width: int = 14) -> str:
    r"""Label of a token: escaped, outer blanks as U+2423, at most `width` columns, no mathtext.

    >>> token_label(" $x$ ")
    '␣\\$x\\$␣'
    """
    shown = re.sub(r"^ +| +\Z", lambda blanks: "␣" * len(blanks[0]), token)
    pieces = [c if c == "␣" else escaped(c) for c in shown]
    label, left = "", width
    for i, piece in enumerate(pieces):
        left -= sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in piece)
        if left < (i < len(pieces) - 1):  # keep a column for the mark of what was cut
            label += "…"
            break
        label += piece
    return label.replace("$", r"\$") or "(empty)"


def make_drawable(figure) -> None:
    """Give every text of a figure fonts that have its glyphs, and escape what none of them has."""
    for text in figure.findobj(Text):
        content = text.get_text()
        if not content.isascii():
            text.set_fontfamily(list(families()))
            text.set_text("".join(c if c == "\n" or drawable(c) else _code(c) for c in content))

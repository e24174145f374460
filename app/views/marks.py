"""Tokens as the eye can read them, and safe inside HTML and Plotly's markup."""

import html
import unicodedata

from app.text import say

_MARKS = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}


def visible(text: str, limit: int = 14) -> str:
    """Whitespace, control and direction characters as signs; cut to `limit` characters."""
    shown = "".join(_mark(character) for character in text)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def _mark(character: str) -> str:
    if character in _MARKS:
        return _MARKS[character]
    if ord(character) < 32:
        return chr(0x2400 + ord(character))
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return f"U+{ord(character):04X}"
    return character


def safe(text: str, limit: int = 14) -> str:
    """`visible`, with markup characters escaped (Plotly reads a subset of HTML)."""
    return html.escape(visible(text, limit))


def table(language: str, heads: list[str], rows: list[list[str]]) -> str:
    """An HTML table that folds away: the text alternative of a chart. Cells are escaped here."""
    head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    summary = html.escape(say(language, "chart.as_table"))
    return (
        f"<details class='chart-table'><summary>{summary}</summary><div><table><thead><tr>{head}"
        f"</tr></thead><tbody>{body}</tbody></table></div></details>"
    )

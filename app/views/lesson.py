"""The page's own words: the head line, and "how it works" with what to try."""

import html

from app.lessons import EXAMPLES, GLOSSARY, MATHS
from app.text import say


def head(language: str) -> str:
    title = html.escape(say(language, "page.title"))
    lead = html.escape(say(language, "page.lead"))
    return f"<div class='page-head'><h1>{title}</h1><p>{lead}</p></div>"


def hiding(selectors: list[str]) -> str:
    """A style element that hides these parts of the page."""
    rule = f"{', '.join(selectors)} {{ display: none !important; }}"
    return f"<style>{rule}</style>" if selectors else ""


def question(language: str, example: str) -> str:
    """What to look at in a recorded example, as plain text."""
    return say(
        language,
        "example.recorded",
        name=say(language, f"example.{example}"),
        question=say(language, f"try.{example}"),
    )


def body(language: str) -> str:
    """Five steps of the method, what to try with each example, and the words."""

    def words(key: str) -> str:
        return html.escape(say(language, key))

    steps = "".join(f"<li>{words(f'lesson.step_{n}')}</li>" for n in range(1, 6))
    tries = "".join(
        f"<li><b>{words(f'example.{e.name}')}</b>: {words(f'try.{e.name}')}</li>" for e in EXAMPLES
    )
    glossary = "".join(
        f"<dt><b>{words(f'glossary.{word}')}</b></dt><dd>{words(f'glossary.{word}_means')}</dd>"
        for word in GLOSSARY
    )
    formulas = "".join(
        f"<dt><code>{html.escape(formula)}</code></dt><dd>{words(f'maths.{key}')}</dd>"
        for key, formula in MATHS.items()
    )
    return (
        f"<div class='lesson'><h2>{words('lesson.title')}</h2><ol>{steps}</ol>"
        f"<details class='maths'><summary>{words('lesson.maths')}</summary>"
        f"<dl>{formulas}</dl></details>"
        f"<h2>{words('lesson.ours')}</h2><p>{words('lesson.ours_text')}</p>"
        f"<h2>{words('lesson.try')}</h2><ul>{tries}</ul>"
        f"<h2>{words('dialog.glossary')}</h2><dl>{glossary}</dl>"
        f"<p>{words('lesson.api')} <a href='?view=api'>/compare</a></p></div>"
    )

r"""Bring a written answer into one canonical form: `\dfrac12 \text{ cm}` -> `\frac{1}{2}`."""

import re

_UNICODE = str.maketrans(
    {
        "\u2212": "-",
        "\u2013": "-",
        "\u00d7": r"\times ",
        "\u00b7": r"\cdot ",
        "\u00f7": "/",
        "\u03c0": r"\pi ",
        "\u221e": r"\infty ",
        "\u00b1": r"\pm ",
        "\u222a": r"\cup ",
        "\u00b0": "",
        "\u00a0": " ",
        "\u202f": " ",
        "\uff0c": ",",
    }
)

_TEXT_MACRO = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mbox|mathrm|mathbf|mathit|bold|rm)\s*\{([^{}]*)\}"
)
# A word that multiplies is part of the number, not a unit of it.
_NOT_UNITS = {
    "hundred",
    "thousand",
    "million",
    "billion",
    "trillion",
    "dozen",
    "pi",
    "sqrt",
    "and",
    "or",
    "log",
    "ln",
    "sin",
    "cos",
    "tan",
}
_UNIT = re.compile(
    r"(?P<number>[-+]?(?:[\d.,]+(?:\s*/\s*\d+)?|\\frac\s*\{\d+\}\s*\{\d+\}))\s*"
    r"(?P<unit>[A-Za-z]{2,}[A-Za-z .]*)(?:\^\{?\d\}?)?"
)
_MACRO_BEFORE_LETTER = re.compile(r"(\\[A-Za-z]+)\s+(?=[A-Za-z])")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")

_RULES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|displaystyle|textstyle|[bB]igg?[lr]?)(?![A-Za-z])", ""),
        (r"(?<!\\)\\[,!;: ()\[\]]|\\q?quad(?![A-Za-z])|~", " "),
        (r"_\s*(\w)", r"_{\1}"),
        (r"\{,\}", ","),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\\\$|\$", ""),
        (r"\s*\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])|\\circ(?![A-Za-z])", ""),
        (r"\\%|%", ""),
        (r"(?<!\\)\bsqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
        (r"\\le(?![A-Za-z])", r"\\leq"),
        (r"\\ge(?![A-Za-z])", r"\\geq"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
    )
]

MAX_ANSWER_CHARS = 2000
"""A longer answer is no answer; also bounds every pattern above."""


def canonical(text: str) -> str:
    """Return the canonical form of an answer, without blanks; empty if there is nothing left."""
    if len(text) > MAX_ANSWER_CHARS:
        return ""
    text = text.translate(_UNICODE)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = _TEXT_MACRO.sub(lambda match: f" {match[1].strip()} ", text)
    text = _without_unit(text.strip())
    # The blank that ends a macro's name stays: \pi r is not \pir.
    text = _MACRO_BEFORE_LETTER.sub("\\1\0", text)
    text = re.sub(r"\s+", "", text).replace("\0", " ").rstrip(".,;:")
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def _without_unit(text: str) -> str:
    match = _UNIT.fullmatch(text)
    if match is None:
        return text
    words = match["unit"].lower().replace(".", " ").split()
    return text if _NOT_UNITS.intersection(words) else match["number"]

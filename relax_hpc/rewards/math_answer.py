r"""Is the final answer of a response the right one? Extraction and exact comparison.

Policies, each pinned by a test:
- The last `\boxed{...}` or `\fbox{...}` counts, wherever it stands; hedging with several boxes does
  not help. An unterminated last box is a truncated answer: wrong, whatever stood in front of it.
- Without a box: the rest of the last `Answer:` line (or the line below it). Without that: a
  response that is nothing but a number.
- Numbers are compared exactly: 0.333 is not 1/3. Units, `%`, degrees and `$` are ignored.
- Tuples and intervals are ordered, sets and bare lists are not.
- Nothing here raises on any text, and nothing takes long: what needs algebra is `None` in
  `quick_verdict` and goes to `symbolic` in a process that can be killed.
"""

import re
import typing
from fractions import Fraction

from relax_hpc.rewards.math_text import canonical

Verdict = bool | None
ScalarEqual = typing.Callable[[str, str], Verdict]

_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_ANSWER = re.compile(r"answer\**\s*[:\uff1a]", re.IGNORECASE)
_BARE = re.compile(r"[-+\d.,/\s$\u2212]{1,64}")
_OPEN, _CLOSE = "([{", ")]}"


def is_correct(text: str, label: str) -> bool:
    """Compare the final answer of a response with the label, with algebra where it is needed.

    Slow and possibly endless on hostile input: call it in a scoring process.
    """
    verdict = quick_verdict(text, label)
    if verdict is not None:
        return verdict
    from relax_hpc.rewards.symbolic import symbolic_equal

    return _verdict(text, label, symbolic_equal) is True


def quick_verdict(text: str, label: str) -> Verdict:
    """Decide at once what string and number comparison can decide; None: needs algebra."""
    return _verdict(text, label, lambda _a, _b: None)


def extract_answer(text: str) -> str | None:
    """Return the final answer as it was written; None if there is none or it is cut off."""
    boxes = list(_BOX.finditer(text))
    if boxes:
        start = boxes[-1].end()
        end = _closing_brace(text, start)
        return None if end is None else text[start:end].strip() or None
    marks = list(_ANSWER.finditer(text))
    if marks:
        rest = text[marks[-1].end() :].lstrip("* \t")
        lines = [line for line in map(_plain_line, rest.splitlines()) if line]
        return lines[0] if lines else None
    bare = text.strip()
    return bare if _BARE.fullmatch(bare) and any(c.isdigit() for c in bare) else None


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    index = start
    while index < len(text):
        char = text[index]
        if char == "\\":
            index += 1  # an escaped brace is a character of the answer: \{1, 2\}
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return index
        index += 1
    return None


def _plain_line(line: str) -> str:
    """Strip the Markdown and end punctuation around an answer in a line."""
    return line.strip().strip("*`").strip().removesuffix(".").strip()


def _verdict(text: str, label: str, scalar_equal: ScalarEqual) -> Verdict:
    answer = extract_answer(text)
    if answer is None:
        return False
    # Labels may be marked up like responses ("#### 42" and the like are prepare_data's business).
    gold = extract_answer(label) if _BOX.search(label) else label
    if gold is None:
        return False
    left, right = canonical(answer), canonical(gold)
    if not left or not right:
        return False
    return _equal(*_same_shape(left, right), scalar_equal)


def _same_shape(answer: str, gold: str) -> tuple[str, str]:
    """Drop what one side says more: `x=` and the text behind a choice's letter."""
    variable = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?(?:\([a-z]\))?=(?!.*=)")
    if "=" not in gold:
        answer = variable.sub("", answer, count=1) if variable.match(answer) else answer
    elif "=" not in answer and variable.match(gold):
        gold = variable.sub("", gold, count=1)
    if re.fullmatch(r"\(?[A-Z]\)?", gold):
        gold = gold.strip("()")
        choice = re.match(r"\(?([A-Z])(?:\)|[:.]|$)", answer)
        answer = choice[1] if choice else answer
    return answer, gold


# ---------------------------------------------------------------------------------------------
# Comparison of canonical strings
# ---------------------------------------------------------------------------------------------


def _equal(left: str, right: str, scalar_equal: ScalarEqual) -> Verdict:
    left, right = _without_parentheses(left), _without_parentheses(right)
    if left == right:
        return True
    a, b = parse_collection(left), parse_collection(right)
    if a is None and b is None:
        x, y = parse_number(left), parse_number(right)
        if x is not None and y is not None:
            return x == y
        if left.isalpha() and right.isalpha() and min(len(left), len(right)) > 1:
            return left.lower() == right.lower()  # words: Yes, yes
        return scalar_equal(left, right)
    if a is None or b is None or a[0] != b[0] or len(a[1]) != len(b[1]):
        return False
    if a[0] in ("{}", ","):
        return _equal_unordered(a[1], b[1], scalar_equal)
    return _all(_equal(x, y, scalar_equal) for x, y in zip(a[1], b[1], strict=True))


def _equal_unordered(left: list[str], right: list[str], scalar_equal: ScalarEqual) -> Verdict:
    if len(left) > 64:
        return sorted(left) == sorted(right)
    rest = list(right)
    unsure = False
    for item in left:
        verdicts = [_equal(item, other, scalar_equal) for other in rest]
        if True in verdicts:
            del rest[verdicts.index(True)]
        elif None in verdicts:
            unsure = True
        else:
            return False
    return None if unsure else True


def _all(verdicts: typing.Iterable[Verdict]) -> Verdict:
    seen = list(verdicts)
    return False if False in seen else None if None in seen else True


def parse_collection(text: str) -> tuple[str, list[str]] | None:
    r"""Split a tuple, interval, set, union, bare list or `\pm` into its kind and items."""
    if r"\pm" in text:
        # `-2,2` and `\pm2` are the same list.
        return ",", [text.replace(r"\pm", "").lstrip("+"), text.replace(r"\pm", "-")]
    if r"\cup" in text:
        return ",", text.split(r"\cup")
    if text.startswith(r"\{") and text.endswith(r"\}"):
        inner = text[2:-2]
        return "{}", split_commas(inner) if inner else []
    items = split_commas(text)
    if len(items) > 1:
        return ",", items
    if text.startswith(("(", "[")) and text.endswith((")", "]")):
        items = split_commas(text[1:-1])
        return (text[0] + text[-1], items) if len(items) > 1 else None
    return None


def split_commas(text: str) -> list[str]:
    """Split at commas outside of brackets; an interval's brackets need not be of one kind."""
    items, depth, start = [], 0, 0
    for index, char in enumerate(text):
        if char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
        elif char == "," and depth == 0:
            items.append(text[start:index])
            start = index + 1
    return [*items, text[start:]]


def _without_parentheses(text: str) -> str:
    while text.startswith("(") and text.endswith(")") and len(text) > 2:
        inner = text[1:-1]
        depth = 0
        for char in inner:
            depth += (char in _OPEN) - (char in _CLOSE)
            if depth < 0:
                return text  # (1)(2): the first parenthesis closes before the end
        if len(split_commas(inner)) > 1:
            return text
        text = inner
    return text


_NUMBER = r"(?:\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})"
_DECIMAL = re.compile(rf"[-+]?{_NUMBER}")
_FRACTION = re.compile(
    rf"(?P<sign>[-+]?)(?P<whole>\d{{1,400}})?\\frac\{{(?P<a>-?{_NUMBER})\}}\{{(?P<b>-?{_NUMBER})\}}"
)
_SLASH = re.compile(rf"(?P<a>[-+]?{_NUMBER})/(?P<b>{_NUMBER})")
_SCIENTIFIC = re.compile(
    rf"(?P<sign>[-+]?)(?:(?P<m>{_NUMBER})(?:\\times|\\cdot|\*))?10\^\{{?(?P<e>-?\d{{1,3}})\}}?"
)


def parse_number(text: str) -> Fraction | None:
    """Return the exact value of a canonical decimal, fraction, mixed or scientific number."""
    if _DECIMAL.fullmatch(text):
        return Fraction(text)
    if match := _FRACTION.fullmatch(text) or _SLASH.fullmatch(text):
        groups = match.groupdict()
        denominator = Fraction(groups["b"])
        if denominator == 0:
            return None
        value = Fraction(groups.get("whole") or 0) + Fraction(groups["a"]) / denominator
        return -value if groups.get("sign") == "-" else value
    if match := _SCIENTIFIC.fullmatch(text):
        value = Fraction(match["m"] or 1) * Fraction(10) ** int(match["e"])
        return -value if match["sign"] == "-" else value
    return None

r"""Equality of two answers by algebra. Only for scoring processes: it may take for ever.

Parsing is latex2sympy (of math-verify); the comparison is our own, since math-verify 0.9.0 calls
1/2^{99} and 1/2^{98} equal. Two expressions are equal when they agree to 45 digits, at several
points if they hold variables: no simplification, whose result depends on luck.
"""

import re
from typing import Any

_DIGITS = 60
_AGREEING_DIGITS = 45
_NUM_POINTS = 4
_MIN_POINTS = 2

_DECIMAL = re.compile(r"(\d*)\.(\d+)")
_LONG_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")
# Evaluating these takes all memory of a machine: a tower of powers, a huge exponent or factorial.
_EXPLODES = re.compile(r"\^\{?[^{}]*\^|\^\{?-?\d{5,}|\d{5,}\)?!|!\)*!|\^\{?\(?\d*!")


def symbolic_equal(left: str, right: str) -> bool:
    """Compare two canonical answers. What cannot be read as mathematics equals nothing."""
    if any(_EXPLODES.search(text) or _LONG_WORD.search(text) for text in (left, right)):
        return False
    a, b = _parse(left), _parse(right)
    return a is not None and b is not None and _equal(a, b)


def _parse(text: str) -> Any:
    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    config = ConversionConfig(lowercase_symbols=False)
    try:
        return latex2sympy(_DECIMAL.sub(_as_fraction, text), conversion_config=config)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - the grammar raises a bare Exception on what it cannot read
        return None


def _as_fraction(match: re.Match[str]) -> str:
    # A binary float would make 0.1 * pi differ from pi / 10 in the 17th digit.
    numerator = int(match[1] + match[2])
    return rf"\frac{{{numerator}}}{{{10 ** len(match[2])}}}"


def _equal(a: Any, b: Any) -> bool:
    import sympy

    if isinstance(a, sympy.MatrixBase) and isinstance(b, sympy.MatrixBase):
        return a.shape == b.shape and all(map(_equal, a, b))
    if isinstance(a, sympy.Eq) and isinstance(b, sympy.Eq):
        same = _equal(a.lhs, b.lhs) and _equal(a.rhs, b.rhs)
        return same or (_equal(a.lhs, b.rhs) and _equal(a.rhs, b.lhs))
    if isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr):
        return _equal_expressions(a, b)
    return bool(a == b)


def _equal_expressions(a: Any, b: Any) -> bool:
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    if not symbols:
        return _agree(a, b) is True
    agreeing = 0
    for point in range(_NUM_POINTS):
        values = _point(symbols, point)
        verdict = _agree(a.subs(values), b.subs(values))
        if verdict is False:
            return False
        agreeing += verdict is True
    return agreeing >= _MIN_POINTS


def _point(symbols: list[Any], index: int) -> dict[Any, Any]:
    import sympy

    # Fractions of primes: no accidental zeros, ones or perfect powers.
    return {
        symbol: sympy.Rational(sympy.prime(7 + 5 * place + 3 * index), sympy.prime(6 + index))
        for place, symbol in enumerate(symbols)
    }


def _agree(a: Any, b: Any) -> bool | None:
    """Compare two numbers; None where one of them is undefined (a pole, an unknown function)."""
    import sympy

    if a == b:
        return True
    x, y = a.evalf(_DIGITS), b.evalf(_DIGITS)
    if (
        not (x.is_number and y.is_number)
        or x.has(sympy.nan, sympy.zoo)
        or y.has(sympy.nan, sympy.zoo)
    ):
        return None
    if x.is_infinite or y.is_infinite:
        return bool(x == y)
    scale = max(sympy.Abs(x), sympy.Abs(y))
    return bool(sympy.Abs(x - y) <= scale * sympy.Float(10) ** -_AGREEING_DIGITS)

"""Slurm's notations: host lists (`gpu[001-003,007]`) and job ids (`123_[0-6:2%4]`, `123+1.batch`).

Pure text; import these names from `relax_hpc.slurm`.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator

from relax_hpc.errors import ConfigError

# ---------------------------------------------------------------------------------------------
# Host lists
# ---------------------------------------------------------------------------------------------

MAX_HOSTS = 262_144
"""Slurm's own limit (MAX_RANGES); a typo like n[1-999999999] must not eat the memory."""
_MAX_NAME = 255
"""Letters of a name outside of its brackets; DNS allows 253."""
_MAX_BRACKETS = 32
_MAX_DIGITS = 18

_PIECE = re.compile(r"[^\[\],\s]+|\[[^\[\]]*\]")
_RANGE = re.compile(rf"(\d{{1,{_MAX_DIGITS}}})(?:-(\d{{1,{_MAX_DIGITS}}}))?", re.ASCII)

_Range = tuple[int, int, int]
"""Low, high, digits."""


def expand_hostlist(text: str) -> list[str]:
    """Expand `gpu[001-003,007],login1` like `scontrol show hostnames` (22.05), without scontrol.

    Order and duplicates are kept. Zero padding follows the low bound. Names with several brackets
    come in Slurm's order: the last bracket fastest, then the others from left to right. A suffix
    behind a bracket (`n[1-2]-ib`) is valid as in Slurm >= 23.11. Nothing is expanded before it is
    known to be small enough.

    Raises:
        ConfigError: unbalanced brackets, empty or reversed ranges (scontrol answers some of these
            with exit code 0 and no output, or with the nonsense host `n]`), too many hosts.
    """
    items = [_parse_item(item, text) for item in _split_outside_brackets(text)]
    if sum(_count(item) for item in items) > MAX_HOSTS:
        raise ConfigError(f"host list {_cut(text)}: more than {MAX_HOSTS} hosts")
    return [host for item in items for host in _expand_item(item)]


def _cut(text: str) -> str:
    return repr(text[:80]) + ("..." if len(text) > 80 else "")


def _split_outside_brackets(text: str) -> list[str]:
    items, start, depth = [], 0, 0
    for match in re.finditer(r"[\[\],]", text):
        if match[0] == "," and depth == 0:
            items.append(text[start : match.start()])
            start = match.end()
        elif match[0] != ",":
            depth = int(match[0] == "[")
    items.append(text[start:])
    return [item.strip() for item in items if item.strip()]


def _parse_item(item: str, text: str) -> list[str | list[_Range]]:
    """Return the pieces of a name: letters, and ranges for a bracket."""
    pieces = _PIECE.findall(item)
    if "".join(pieces) != item:
        raise ConfigError(f"host list {_cut(text)}: {_cut(item)} has blanks or unbalanced brackets")
    brackets = sum(piece[0] == "[" for piece in pieces)
    letters = sum(len(piece) for piece in pieces if piece[0] != "[")
    if brackets > _MAX_BRACKETS or letters > _MAX_NAME:
        raise ConfigError(
            f"host list {_cut(text)}: {_cut(item)} is no host name: it has {brackets} brackets "
            f"and {letters} letters; at most {_MAX_BRACKETS} and {_MAX_NAME}"
        )
    return [_parse_bracket(p[1:-1], text) if p[0] == "[" else p for p in pieces]


def _parse_bracket(ranges: str, text: str) -> list[_Range]:
    found = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        low = int(match[1]) if match else 1
        high = int(match[2]) if match and match[2] is not None else low
        if match is None or high < low or high - low >= MAX_HOSTS:
            raise ConfigError(
                f"host list {_cut(text)}: {_cut(part)} is no range; write LOW-HIGH with LOW <= "
                f"HIGH and at most {MAX_HOSTS} hosts, e.g. n[01-04,07]"
            )
        found.append((low, high, len(match[1])))
    return found


def _count(item: list[str | list[_Range]]) -> int:
    brackets = (piece for piece in item if not isinstance(piece, str))
    return math.prod(sum(high - low + 1 for low, high, _ in ranges) for ranges in brackets)


def _expand_item(item: list[str | list[_Range]]) -> Iterator[str]:
    choices = [[piece] if isinstance(piece, str) else _numbers(piece) for piece in item]
    brackets = [index for index, piece in enumerate(item) if not isinstance(piece, str)]
    # itertools.product varies its last argument fastest, so this is slowest to fastest.
    order = [*reversed(brackets[:-1]), *brackets[-1:]]
    for values in itertools.product(*(choices[index] for index in order)):
        chosen = dict(zip(order, values, strict=True))
        yield "".join(chosen.get(index, parts[0]) for index, parts in enumerate(choices))


def _numbers(ranges: list[_Range]) -> list[str]:
    return [f"{n:0{digits}d}" for low, high, digits in ranges for n in range(low, high + 1)]


def compress_hostlist(hosts: Iterable[str]) -> str:
    """Write hosts as Slurm does (`scontrol show hostlist`): order and duplicates are kept.

    `expand_hostlist(compress_hostlist(hosts)) == list(hosts)`; sort first for the shortest text.
    """
    groups: list[tuple[str, list[str]]] = []
    for host in hosts:
        if not host or re.search(r"[\[\],\s]", host):
            raise ConfigError(f"{host!r} is not a host name")
        prefix = host.rstrip("0123456789")
        digits = host[len(prefix) :]
        if len(digits) > _MAX_DIGITS:  # a serial number, no place in a range
            prefix, digits = host, ""
        if digits and groups and groups[-1][0] == prefix and groups[-1][1][0]:
            groups[-1][1].append(digits)
        else:
            groups.append((prefix, [digits]))
    return ",".join(prefix + _join_numbers(numbers) for prefix, numbers in groups)


def _join_numbers(numbers: list[str]) -> str:
    if len(numbers) == 1:
        return numbers[0]
    parts, low, high = [], numbers[0], numbers[0]
    for number in [*numbers[1:], ""]:
        if number and number == f"{int(high) + 1:0{len(low)}d}":
            high = number
            continue
        parts.append(low if low == high else f"{low}-{high}")
        low = high = number
    return f"[{','.join(parts)}]"


# ---------------------------------------------------------------------------------------------
# Job ids
# ---------------------------------------------------------------------------------------------

_MAX_TASK = 4_000_001
"""slurm.conf(5): the largest MaxArraySize."""
_JOB_ID = re.compile(
    r"(?P<job>\d{1,18})"
    r"(?:_(?P<array>\d+|\*|\[[\d,:%.-]+\])|\+(?P<offset>\d{1,7}))?"
    r"(?:\.(?P<step>\d+|batch|extern|interactive))?"
    r"(?:;(?P<cluster>[\w.-]+))?",
    re.ASCII,
)


@dataclasses.dataclass(frozen=True, slots=True)
class JobId:
    """A job id in any of the forms that Slurm's commands print."""

    job: int
    """Number: of the job, of the array, or of the het job's leader."""
    array: str | None = None
    """Array part without brackets: `4`, `0-6:2%4`, `*`."""
    het_offset: int | None = None
    """Component k of `123+k`; 0 is the leader."""
    step: str | None = None
    """`0`, `batch`, `extern`, `interactive`."""

    def __str__(self) -> str:
        text = str(self.job)
        if self.array is not None:
            text += f"_{self.array}" if re.fullmatch(r"\d+|\*", self.array) else f"_[{self.array}]"
        if self.het_offset is not None:
            text += f"+{self.het_offset}"
        return text + ("" if self.step is None else f".{self.step}")

    @property
    def request(self) -> str:
        """The form that scontrol and scancel take: no step, and the leader for `123+k`.

        `scontrol requeue 123+0` answers "Invalid job id specified" (22.05-25.11).
        """
        return str(dataclasses.replace(self, het_offset=None, step=None))

    @property
    def array_tasks(self) -> list[int] | None:
        """Task numbers of an array id; None if it is no array, or all (`*`), or cut off (`...`)."""
        if self.array is None or self.array == "*" or "..." in self.array:
            return None
        tasks: list[int] = []
        for part in self.array.partition("%")[0].split(","):
            bounds, _, stride = part.partition(":")
            low, _, high = bounds.partition("-")
            tasks += range(int(low), int(high or low) + 1, int(stride or 1))
        return tasks


def parse_job_id(text: str) -> JobId:
    """Parse `123`, `123_4`, `123_[0-6:2%4]`, `123_[0-3,...]`, `123+1`, `123.batch`, `123;cluster`.

    Raises:
        ConfigError: not a job id.
    """
    match = _JOB_ID.fullmatch(text.strip())
    valid = match is not None
    if match is not None and (match["array"] or "")[:1] == "[":
        part = r"\d+(-\d+(:[1-9]\d*)?)?"
        valid = bool(re.fullmatch(rf"\[{part}(,{part})*(,?\.\.\.)?(%\d+)?\]", match["array"]))
    numbers = re.findall(r"\d+", match["array"] or "") if match is not None else []
    if match is None or not valid or any(len(n) > 7 or int(n) > _MAX_TASK for n in numbers):
        raise ConfigError(f"{_cut(text)} is no Slurm job id; write e.g. 123, 123_4 or 123+1")
    array, offset = match["array"], match["offset"]
    return JobId(
        int(match["job"]),
        None if array is None else array.strip("[]"),
        None if offset is None else int(offset),
        match["step"],
    )

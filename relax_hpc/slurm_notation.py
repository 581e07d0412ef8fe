"""Slurm's notations: host lists (`gpu[001-003,007]`) and job ids (`123_[0-6:2%4]`, `123+1.batch`).

Pure text; import these names from `relax_hpc.slurm`.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable

from relax_hpc.errors import ConfigError

# ---------------------------------------------------------------------------------------------
# Host lists
# ---------------------------------------------------------------------------------------------

MAX_HOSTS = 262_144
"""Slurm's own limit (MAX_RANGES); a typo like n[1-999999999] must not eat the memory."""

_PIECE = re.compile(r"[^\[\],\s]+|\[[^\[\]]*\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_hostlist(text: str) -> list[str]:
    """Expand `gpu[001-003,007],login1` like `scontrol show hostnames` (22.05), without scontrol.

    Order and duplicates are kept. Zero padding follows the low bound. Names with several brackets
    come in Slurm's order: the last bracket fastest, then the others from left to right. A suffix
    behind a bracket (`n[1-2]-ib`) is valid as in Slurm >= 23.11.

    Raises:
        ConfigError: unbalanced brackets, empty or reversed ranges (scontrol answers some of these
            with exit code 0 and no output, or with the nonsense host `n]`).
    """
    hosts: list[str] = []
    for item in _split_outside_brackets(text):
        hosts += _expand_item(item, text)
        if len(hosts) > MAX_HOSTS:
            raise ConfigError(f"host list {text[:80]!r}: more than {MAX_HOSTS} hosts")
    return hosts


def _split_outside_brackets(text: str) -> list[str]:
    items = re.split(r",(?![^\[\]]*\])", text)
    return [item.strip() for item in items if item.strip()]


def _expand_item(item: str, text: str) -> list[str]:
    pieces = _PIECE.findall(item)
    if "".join(pieces) != item:
        raise ConfigError(f"host list {text[:80]!r}: {item!r} has blanks or unbalanced brackets")
    choices = [_expand_bracket(p[1:-1], text) if p[0] == "[" else [p] for p in pieces]
    brackets = [index for index, piece in enumerate(pieces) if piece[0] == "["]
    # itertools.product varies its last argument fastest, so this is slowest to fastest.
    order = [*reversed(brackets[:-1]), *brackets[-1:]]
    total = 1
    for index in order:
        total *= len(choices[index])
    if total > MAX_HOSTS:
        raise ConfigError(f"host list {text[:80]!r}: more than {MAX_HOSTS} hosts")
    hosts = []
    for values in itertools.product(*(choices[index] for index in order)):
        chosen = dict(zip(order, values, strict=True))
        hosts.append("".join(chosen.get(i, piece) for i, piece in enumerate(pieces)))
    return hosts


def _expand_bracket(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        low = int(match[1]) if match else 1
        high = int(match[2]) if match and match[2] is not None else low
        if match is None or high < low or high - low >= MAX_HOSTS:
            raise ConfigError(
                f"host list {text[:80]!r}: {part!r} is no range; write LOW-HIGH with LOW <= HIGH "
                f"and at most {MAX_HOSTS} hosts, e.g. n[01-04,07]"
            )
        numbers += [f"{number:0{len(match[1])}d}" for number in range(low, high + 1)]
    return numbers


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

_JOB_ID = re.compile(
    r"(?P<job>\d+)"
    r"(?:_(?P<array>\d+|\*|\[[\d,:%.-]+\])|\+(?P<offset>\d+))?"
    r"(?:\.(?P<step>\d+|batch|extern|interactive))?"
    r"(?:;(?P<cluster>[\w.-]+))?"
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
    if match is None or not valid:
        raise ConfigError(f"{text!r} is no Slurm job id; write e.g. 123, 123_4 or 123+1")
    array, offset = match["array"], match["offset"]
    return JobId(
        int(match["job"]),
        None if array is None else array.strip("[]"),
        None if offset is None else int(offset),
        match["step"],
    )

"""Find and read what a dead job left: files, folders, run folders, stdin, .gz and .zst.

A file is read in blocks. Lines without any literal that some parser looks for are only counted;
around the others a window of lines is kept, so memory and time follow the number of messages, not
the size of the logs.
"""

import codecs
import contextlib
import datetime
import gzip
import importlib
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from relax_hpc.postmortem.flight import is_dump
from relax_hpc.postmortem.parse.record import Record, rank_of_file, records, wrap_width

BLOCK_BYTES = 4 << 20
SMALL_BYTES = 256 << 10
"""A file (or pipe) up to this size is one window: all its lines are context."""

MAX_WINDOW_LINES = 200_000
"""Lines per file that parsers may see; a log that has more repeats itself."""

_BEFORE, _AFTER = 3, 48
_BINARY = frozenset(
    (
        ".pt",
        ".pth",
        ".bin",
        ".safetensors",
        ".npz",
        ".npy",
        ".h5",
        ".hdf5",
        ".png",
        ".jpg",
        ".gz2",
        ".so",
        ".a",
        ".o",
        ".pyc",
        ".whl",
        ".zip",
        ".tar",
        ".parquet",
        ".arrow",
        ".distcp",
        ".key",
        ".html",
        ".svg",
        ".tfevents",
    )
)
_SKIPPED_FOLDERS = frozenset({"secret", "checkpoints", "__pycache__", ".git", "node_modules"})


class Corpus(msgspec.Struct, kw_only=True):
    """What there is to read. `logs` and `dumps` are paths; `-` is standard input."""

    logs: list[str] = []
    dumps: list[str] = []
    """Flight-recorder dumps, by name or by their first bytes."""
    notes: list[str] = []
    """What was skipped and why."""
    num_bytes: int = 0


class Window(msgspec.Struct):
    """Consecutive lines of one file as records; several windows of a file do not touch."""

    file: str
    records: list[Record]


class ReadStatus(msgspec.Struct):
    """Filled while windows are read."""

    num_lines: int = 0
    notes: list[str] = []


def read(paths: Iterable[str]) -> Corpus:
    """List the files below `paths`. Missing ones become notes.

    Raises:
        FileNotFoundError: none of the paths exists.
    """
    corpus = Corpus()
    seen: set[str] = set()
    asked = missing = 0
    for given in paths:
        asked += 1
        if given == "-":
            corpus.logs.append("-")
            continue
        path = Path(given)
        if not path.exists():
            corpus.notes.append(f"{given}: no such file or folder")
            missing += 1
            continue
        for file in sorted(_walk(path)) if path.is_dir() else [path]:
            real = os.path.realpath(file)
            if real not in seen:
                seen.add(real)
                _sort_in(corpus, file)
    if asked and missing == asked:
        raise FileNotFoundError(corpus.notes[0])
    return corpus


def file_ranks(logs: Sequence[str]) -> dict[str, int]:
    """Ranks that file names tell. A single file with such a name proves nothing: it may be about
    that rank; files of one pattern with different numbers are one file per rank."""
    found = {log: rank for log in logs if (rank := rank_of_file(log)) is not None}
    return found if len(set(found.values())) > 1 else {}


def _walk(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS)
        for name in names:
            file = Path(root) / name
            if file.suffix.lower() not in _BINARY and file.is_file():
                yield file


def _sort_in(corpus: Corpus, file: Path) -> None:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(65536)
    except OSError as err:
        corpus.notes.append(f"{file}: {err.strerror}")
        return
    corpus.num_bytes += size
    if is_dump(head, file.name):
        corpus.dumps.append(str(file))
    elif size == 0:
        corpus.notes.append(f"{file}: empty")
    elif _is_binary(head) and file.suffix not in (".gz", ".zst"):
        corpus.notes.append(f"{file}: binary, not read")
    else:
        corpus.logs.append(str(file))


def _is_binary(head: bytes) -> bool:
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return False
    odd = sum(head.count(byte) for byte in (0, 1, 2, 3, 4, 5, 6))
    # Torn writes leave runs of zeros in logs of parallel file systems; those files are still text.
    return odd > len(head) * 0.3


# --------------------------------------------------------------------------------------------
# Blocks and windows
# --------------------------------------------------------------------------------------------


def windows(
    path: str, literals: Sequence[str], status: ReadStatus, rank: int | None = None
) -> Iterator[Window]:
    """Read one log and yield the neighbourhoods of lines that hold one of `literals`."""
    name = "<stdin>" if path == "-" else path
    year = _year(path)
    kept = 0
    try:
        with _open(path) as stream:
            for lines in _spans(_blocks(stream), tuple(literals), status):
                kept += len(lines)
                width = wrap_width([text for _, text in lines])
                yield Window(name, list(records(name, lines, year, width, rank)))
                if kept > MAX_WINDOW_LINES:
                    status.notes.append(f"{name}: more than {MAX_WINDOW_LINES} lines of messages")
                    break
    except (OSError, EOFError, ValueError, ImportError) as err:
        status.notes.append(f"{name}: read up to line {status.num_lines}: {err}")


def _year(path: str) -> int:
    """glog stamps have no year: take the one in which the file was written."""
    try:
        when = Path(path).stat().st_mtime if path != "-" else None
    except OSError:
        when = None
    now = datetime.datetime.now(datetime.UTC)
    return now.year if when is None else datetime.datetime.fromtimestamp(when, datetime.UTC).year


@contextlib.contextmanager
def _open(path: str) -> Iterator[BinaryIO]:
    if path == "-":
        yield sys.stdin.buffer
        return
    with Path(path).open("rb") as raw:
        magic = raw.read(4)
        raw.seek(0)
        if magic[:2] == b"\x1f\x8b":
            with gzip.open(raw) as stream:
                yield stream  # type: ignore[misc]
        elif magic == b"\x28\xb5\x2f\xfd":
            with _zstd(path, raw) as stream:
                yield stream
        elif magic[:2] in (b"\xff\xfe", b"\xfe\xff"):
            yield _Transcoded(raw)  # type: ignore[misc]
        else:
            yield raw


@contextlib.contextmanager
def _zstd(path: str, raw: BinaryIO) -> Iterator[BinaryIO]:
    """Unpack with the package zstandard, or else with the program zstd."""
    try:
        zstandard = importlib.import_module("zstandard")  # optional: only for .zst files
    except ImportError:
        program = shutil.which("zstd")
        if program is None:
            raise ImportError(".zst needs the package zstandard or the program zstd") from None
        with subprocess.Popen(
            [program, "-dcq", "--", path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            yield process.stdout  # type: ignore[misc]
        if process.returncode:
            code = process.returncode
            raise OSError(f"zstd ended with exit code {code}: cut off or damaged") from None
        return
    try:
        yield zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
    except zstandard.ZstdError as err:
        raise OSError(str(err)) from err


class _Transcoded(io.RawIOBase):
    """UTF-16 (what PowerShell and some terminals save) as UTF-8."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._decoder = codecs.getincrementaldecoder("utf-16")(errors="replace")

    def read(self, size: int = -1) -> bytes:
        data = self._raw.read(size)
        return self._decoder.decode(data, final=not data).encode("utf-8", "replace")


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    """Blocks that end at a line's end, except where a line is longer than two blocks."""
    rest = b""
    while True:
        data = stream.read(BLOCK_BYTES)
        if not data:
            break
        data = rest + data
        cut = data.rfind(b"\n") + 1
        if cut == 0 and len(data) < 2 * BLOCK_BYTES:
            rest = data
            continue
        cut = cut or len(data)
        rest = data[cut:]
        yield data[:cut]
    if rest:
        yield rest


def _spans(
    blocks: Iterator[bytes], literals: tuple[str, ...], status: ReadStatus
) -> Iterator[list[tuple[int, str]]]:
    """Windows as (line number, text). A window may end early at a block's end; so it is rare."""
    carried = b""
    block = next(blocks, b"")
    while block:
        after = next(blocks, b"")
        data = carried + block
        first = status.num_lines - carried.count(b"\n")
        carried = b""
        if not after and status.num_lines == 0 and len(data) <= SMALL_BYTES:
            spans = [(0, len(data))]
        else:
            spans = _hits(data, literals)
        if after and spans and spans[-1][1] >= len(data) and len(data) < 3 * BLOCK_BYTES:
            carried = data[spans[-1][0] :]
            spans.pop()
        status.num_lines = first + data.count(b"\n")
        if not after and not data.endswith(b"\n"):
            status.num_lines += 1
        yield from _numbered(data, spans, first)
        block = after


def _hits(data: bytes, literals: tuple[str, ...]) -> list[tuple[int, int]]:
    from relax_hpc.postmortem.prefilter import prefilter  # NumPy: only for files that are large

    spans: list[tuple[int, int]] = []
    for start, stop in prefilter(literals).lines(data):
        for _ in range(_BEFORE):
            start = _line_start(data, max(0, start - 1))
        for _ in range(_AFTER):
            if stop == len(data):
                break
            stop = data.find(b"\n", stop) + 1 or len(data)
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(stop, spans[-1][1]))
        else:
            spans.append((start, stop))
    return spans


def _line_start(data: bytes, position: int) -> int:
    return data.rfind(b"\n", 0, position) + 1


def _numbered(
    data: bytes, spans: list[tuple[int, int]], first: int
) -> Iterator[list[tuple[int, str]]]:
    counted, number = 0, first
    for start, stop in spans:
        number += data.count(b"\n", counted, start)
        counted = start
        lines: list[tuple[int, str]] = []
        text = data[start:stop].decode("utf-8", "replace")
        for offset, line in enumerate(text.removesuffix("\n").split("\n"), number + 1):
            for piece in line.rstrip("\r").split("\r") if "\r" in line else (line,):
                lines.append((offset, piece))
        yield lines

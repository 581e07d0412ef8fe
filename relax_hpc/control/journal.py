"""Append-only journal: what a service must remember when it is killed.

One record per line: `CHECKSUM JSON`, xxh3-64 of the JSON. A line is on disk (fdatasync) when
`append` returns. A torn tail (the writer was killed inside a write) is ignored on reading; damage
before the tail is an error, because everything after it would be applied to a wrong state.
"""

import dataclasses
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from relax_hpc.errors import ControlError
from relax_hpc.runfolder import write_atomic

_CHECKSUM_HEX = 16


class Journal:
    """One journal file. One writer; opening it cuts a torn tail off."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def append(self, record: Any) -> None:
        """Write one record and wait until it is on disk."""
        self.append_many([record])

    def append_many(self, records: Iterable[Any]) -> None:
        """Write several records with one fsync; a crash keeps a prefix of them.

        Raises:
            ControlError: the file cannot be written (disk full, quota): nothing may rely on it.
        """
        self.append_lines(encode_line(record) for record in records)

    def append_lines(self, lines: Iterable[bytes]) -> None:
        """Like append_many, for records that `encode_line` rendered already."""
        data = b"".join(lines)
        try:
            if self._file is None:
                self._file = self._open()
            while data:
                data = data[os.write(self._file, data) :]
            os.fdatasync(self._file)  # the size, too, but not the time of the change
        except OSError as err:
            raise ControlError(
                f"cannot write journal {self._path}: {err.strerror}; free space or quota on the "
                "run folder's file system and restart the job"
            ) from err

    def replay(self) -> Iterator[Any]:
        """Yield the records in order; a file that does not exist has none.

        Raises:
            ControlError: a record before the tail is damaged.
        """
        yield from decode_lines(self._path)

    def close(self) -> None:
        """Close the file; a later append opens it again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        good = sum(len(line) for line, _ in _lines(self._path))
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        if os.fstat(descriptor).st_size != good:
            os.ftruncate(descriptor, good)
        return descriptor


def encode_line(record: Any) -> bytes:
    """Render one record as a journal line."""
    text = msgspec.json.encode(record)
    return xxhash.xxh3_64_hexdigest(text).encode() + b" " + text + b"\n"


def decode_lines(path: Path) -> Iterator[Any]:
    """Yield the decoded records of a journal file, without a torn tail."""
    for _, text in _lines(path):
        yield msgspec.json.decode(text)


def raw_lines(path: Path) -> Iterator[bytes]:
    """Yield the JSON text of each record, for callers that decode into types of their own."""
    for _, text in _lines(path):
        yield text


def _lines(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield (whole line, its JSON text) of intact records; stop at a torn tail."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = line[_CHECKSUM_HEX + 1 : -1]
            seen = xxhash.xxh3_64_hexdigest(text).encode()
            if line.endswith(b"\n") and line[:_CHECKSUM_HEX] == seen:
                yield line, text
            elif file.read(1):
                raise ControlError(
                    f"journal {path} line {number} is damaged and more records follow: restore the "
                    "file from a backup, or remove it and restart from the last checkpoint"
                )
            else:
                return


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class _Generation:
    attempt: int
    incarnation: int
    number: int


class GenerationalJournal:
    """A journal that starts anew, with a snapshot, whenever its service starts.

    Files are `NAME-ATTEMPT-INCARNATION-K.jsonl`; the first record is a snapshot of the state.
    A service that was replaced but still runs (a node that came back) writes on to its own old
    file, which nobody reads any more. The newest file and the one before it are kept.
    """

    def __init__(self, folder: Path, name: str, attempt: int, incarnation: int) -> None:
        self._folder = folder
        self._name = name
        self._attempt = attempt
        self._incarnation = incarnation
        self._journal: Journal | None = None

    def read(self) -> Iterator[bytes]:
        """Yield the JSON text of the newest file's records: a snapshot, then events.

        Raises:
            ControlError: the newest file is damaged or belongs to a newer incarnation.
        """
        found = self._generations()
        if not found:
            return
        newest = max(found)
        if (newest.attempt, newest.incarnation) > (self._attempt, self._incarnation):
            raise ControlError(
                f"journal {self._path(newest)} was started by attempt {newest.attempt} incarnation "
                f"{newest.incarnation}, which replaced this process (attempt {self._attempt} "
                f"incarnation {self._incarnation})"
            )
        yield from raw_lines(self._path(newest))

    def start(self, snapshot: Any) -> None:
        """Begin a new file with a snapshot; events are appended to it from now on."""
        found = self._generations()
        number = max((g.number for g in found), default=0) + 1
        generation = _Generation(self._attempt, self._incarnation, number)
        write_atomic(self._path(generation), encode_line(snapshot), mode=0o600)
        if self._journal is not None:
            self._journal.close()
        self._journal = Journal(self._path(generation))
        for old in sorted(found)[:-1]:
            self._path(old).unlink(missing_ok=True)

    def append_many(self, records: Iterable[Any]) -> None:
        """Append events with one fsync."""
        self.append_lines(encode_line(record) for record in records)

    def append_lines(self, lines: Iterable[bytes]) -> None:
        """Like append_many, for records that `encode_line` rendered already."""
        assert self._journal is not None, "start() comes first"
        self._journal.append_lines(lines)

    def close(self) -> None:
        """Close the file."""
        if self._journal is not None:
            self._journal.close()

    def _path(self, generation: _Generation) -> Path:
        g = generation
        return self._folder / (
            f"{self._name}-{g.attempt:04d}-{g.incarnation:04d}-{g.number:06d}.jsonl"
        )

    def _generations(self) -> list[_Generation]:
        found = []
        for path in self._folder.glob(f"{self._name}-*-*-*.jsonl"):
            parts = path.stem[len(self._name) + 1 :].split("-")
            if len(parts) == 3 and all(part.isdigit() for part in parts):
                found.append(_Generation(*(int(part) for part in parts)))
        return found

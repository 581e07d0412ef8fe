"""Checkpoints on the shared file system: naming, manifest, verification, retention. No torch here.

    RUN/checkpoints/.step_40.tmp/    being written by all ranks; never read
    RUN/checkpoints/step_40/         complete: it holds manifest.json, which is written last
        manifest.json                step, and size + xxh3 of every other file
        state/ ...                   what the trainer wrote
        hf/ ...                      the model as a Hugging Face folder (last step only)

The folder gets its name by a rename after the manifest is on disk, so a kill at any moment leaves
either the old state or a whole checkpoint. Reading trusts nothing: sizes and checksums are compared
before a checkpoint is used, and a damaged one is skipped for the one before it.

Work on many files is shared: every rank digests (or verifies) its share, one rank commits.
"""

import logging
import os
import re
import shutil
import time
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from relax_hpc.errors import CheckpointError
from relax_hpc.log import kv
from relax_hpc.runfolder import write_atomic

_log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_STEP = re.compile(r"step_(\d+)")
_BLOCK_BYTES = 8 * 2**20
_DIGESTS = ".digest-"


class FileEntry(msgspec.Struct, frozen=True):
    """One file of a checkpoint."""

    nbytes: int
    xxh3: str
    """xxh3-64 of the contents, hexadecimal."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a complete checkpoint holds."""

    step: int
    """Applied optimizer steps = policy version of the weights."""
    created: float
    """Unix time in seconds."""
    files: dict[str, FileEntry]
    """By path relative to the checkpoint's folder."""
    info: dict[str, str]
    """Anything the trainer wants to tell a reader: parallel sizes, versions."""


def path_of(checkpoints: Path, step: int) -> Path:
    """Folder of a complete checkpoint."""
    return checkpoints / f"step_{step}"


def temporary_path_of(checkpoints: Path, step: int) -> Path:
    """Folder in which a checkpoint is being written."""
    return checkpoints / f".step_{step}.tmp"


def begin(checkpoints: Path, step: int) -> Path:
    """Make an empty folder to write into; what a killed save left there is removed. One rank."""
    folder = temporary_path_of(checkpoints, step)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def digest_share(folder: Path, index: int, count: int) -> None:
    """Flush and digest every `count`-th file, from `index`. All ranks; then a barrier."""
    entries = {name: _digest(folder / name) for name in _share(folder, index, count)}
    write_atomic(folder / f"{_DIGESTS}{index}.json", msgspec.json.encode(entries))


def commit(checkpoints: Path, step: int, info: dict[str, str]) -> Path:
    """Make the written folder a checkpoint: manifest last, then the rename. One rank.

    Args:
        checkpoints: parent folder.
        step: as given to `begin`.
        info: see Manifest.

    A whole checkpoint of the same step is never moved: it gets what only the new one has.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: a file has no digest (a rank did not call `digest_share`).
    """
    folder = temporary_path_of(checkpoints, step)
    files: dict[str, FileEntry] = {}
    for part in sorted(folder.glob(f"{_DIGESTS}*.json")):
        files |= msgspec.json.decode(part.read_bytes(), type=dict[str, FileEntry])
        part.unlink()
    missing = sorted(set(_files(folder)) - files.keys())
    if missing or not files:
        raise CheckpointError(f"checkpoint {folder}: no digest of {missing[:3] or 'any file'}")
    manifest = Manifest(step=step, created=time.time(), files=files, info=info)
    final = path_of(checkpoints, step)
    if final.exists() and is_whole_alone(final):
        _complete(final, folder, manifest)
        return final
    _write_manifest(folder, manifest)
    doomed = _put_away(checkpoints, step) if final.exists() else None  # a damaged one
    folder.rename(final)
    _sync_folder(checkpoints)
    if doomed is not None:
        shutil.rmtree(doomed)
    return final


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    write_atomic(folder / MANIFEST, encoded)
    _sync_folder(folder)


def _complete(final: Path, folder: Path, new: Manifest) -> None:
    """Move what a whole checkpoint lacks (hf/) into it from a new one of its step, manifest last.

    Renaming it away, to put the new one there, would leave none if the process were killed between.
    """
    old = read_manifest(final)
    present = {_top(name) for name in old.files}
    added = {name: entry for name, entry in new.files.items() if _top(name) not in present}
    for top in sorted({_top(name) for name in added}):
        # In the way without being listed: an earlier attempt was killed before its manifest.
        shutil.rmtree(final / top, ignore_errors=True)
        (folder / top).rename(final / top)
    if added:
        _sync_folder(final)
        _write_manifest(final, msgspec.structs.replace(old, files=old.files | added))
    shutil.rmtree(folder)


def _top(name: str) -> str:
    return name.partition("/")[0]


def _put_away(checkpoints: Path, step: int) -> Path:
    """Rename a checkpoint that is to be deleted: half deleted, it must not look like one."""
    doomed = checkpoints / f".step_{step}.old"
    if doomed.exists():
        shutil.rmtree(doomed)
    return path_of(checkpoints, step).rename(doomed)


def steps(checkpoints: Path) -> list[int]:
    """Steps of all folders that look like checkpoints, newest first. Not verified."""
    if not checkpoints.is_dir():
        return []
    found = (_STEP.fullmatch(path.name) for path in checkpoints.iterdir())
    return sorted((int(match[1]) for match in found if match), reverse=True)


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest.

    Raises:
        CheckpointError: there is none (the save did not finish) or it is unreadable.
    """
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except OSError as err:
        raise CheckpointError(f"checkpoint {folder}: incomplete, no {MANIFEST} ({err})") from err
    except msgspec.DecodeError as err:
        raise CheckpointError(f"checkpoint {folder}: {MANIFEST} is damaged ({err})") from err


def verify(folder: Path, index: int = 0, count: int = 1) -> Manifest:
    """Compare every `count`-th file, from `index`, with the manifest; all of them by default.

    Raises:
        CheckpointError: names the first file that is missing, unreadable, of another size or of
            other contents.
    """
    manifest = read_manifest(folder)
    for name in sorted(manifest.files)[index::count]:
        try:
            _verify_file(folder / name, manifest.files[name])
        except OSError as err:
            raise CheckpointError(f"checkpoint {folder / name}: {err.strerror}") from err
    return manifest


def _verify_file(path: Path, expected: FileEntry) -> None:
    size = path.stat().st_size if path.is_file() else -1
    if size != expected.nbytes:
        seen = "is missing" if size < 0 else f"has {size} bytes"
        raise CheckpointError(f"checkpoint {path}: {seen}, expected {expected.nbytes} bytes")
    seen = _xxh3(path)
    if seen != expected.xxh3:
        raise CheckpointError(f"checkpoint {path}: xxh3 {seen}, expected {expected.xxh3}")


def newest_complete(
    checkpoints: Path, is_whole: typing.Callable[[Path], bool] | None = None
) -> Path | None:
    """Find the newest checkpoint that verifies; damaged ones are skipped with a warning.

    Args:
        checkpoints: parent folder.
        is_whole: judges a folder; default `verify` of all files by this process.
    """
    judge = is_whole_alone if is_whole is None else is_whole
    for step in steps(checkpoints):
        if judge(path_of(checkpoints, step)):
            return path_of(checkpoints, step)
    return None


def is_whole_alone(folder: Path, index: int = 0, count: int = 1) -> bool:
    """Verify (a share of) a checkpoint; False, and a warning that says why, if it is damaged."""
    try:
        verify(folder, index, count)
    except CheckpointError as err:
        _log.warning("checkpoint skipped %s", kv(reason=str(err)))
        return False
    return True


def retain(checkpoints: Path, keep: int, saved: int | None = None) -> list[int]:
    """Delete all but the newest `keep` complete checkpoints, and what failed saves left. One rank.

    Never deletes the newest complete one.

    Args:
        checkpoints: parent folder.
        keep: how many stay.
        saved: step that was just saved; newer ones were skipped as damaged when the run resumed:
            they do not count, and stay until they are written again.

    Returns:
        Steps that were deleted.
    """
    complete = [
        s
        for s in steps(checkpoints)
        if (saved is None or s <= saved) and (path_of(checkpoints, s) / MANIFEST).is_file()
    ]
    if not complete:
        return []
    kept = complete[: max(1, keep)]
    # Newer than the newest complete one: a reader may still want to see why it was skipped.
    old = [s for s in steps(checkpoints) if s not in kept and s < kept[0]]
    for step in old:
        shutil.rmtree(_put_away(checkpoints, step))
    for leftover in checkpoints.glob(".step_*.old"):
        shutil.rmtree(leftover, ignore_errors=True)
    for leftover in checkpoints.glob(".step_*.tmp"):
        if leftover != temporary_path_of(checkpoints, kept[0]):
            shutil.rmtree(leftover, ignore_errors=True)
    return old


def _files(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith(_DIGESTS):
            yield path.relative_to(folder).as_posix()


def _share(folder: Path, index: int, count: int) -> list[str]:
    return list(_files(folder))[index::count]


def _digest(path: Path) -> FileEntry:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return FileEntry(path.stat().st_size, _xxh3(path))


def _xxh3(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

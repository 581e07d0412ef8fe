"""Raw prompts from files and from reasoning-gym, before tokenization. Torch-free.

A source is a `.jsonl` or `.parquet` file in the DAPO-Math-17k schema (`prompt`: message list or
string, `label`; dotted keys such as `reward_model.ground_truth` reach into objects) or
`reasoning_gym:TASK?key=value&...` (options of the task; `seed` and `size` too, and `suffix`, text
after each question).
"""

import dataclasses
import importlib.util
import itertools
import json
import typing
import urllib.parse
from pathlib import Path
from typing import Any

from relax_hpc.data.tokenizer import Messages
from relax_hpc.errors import ConfigError, require_extra

REASONING_GYM = "reasoning_gym:"


@dataclasses.dataclass(frozen=True, slots=True)
class RawPrompt:
    """One row as it was read."""

    prompt: str | Messages
    label: str
    metadata: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where rows come from, and the names of the columns."""

    spec: str
    prompt_key: str = "prompt"
    label_key: str = "label"
    name: str = "data.train"
    """Configuration key, for error messages."""
    default_size: int = 100
    """Rows of a reasoning_gym source that names no size."""
    default_seed: int = 0

    def rows(self) -> typing.Iterator[RawPrompt]:
        """Yield the rows in order.

        Raises:
            ConfigError: no such file, an unknown format, or a row without prompt or label.
        """
        if self.spec.startswith(REASONING_GYM):
            yield from _gym_rows(self)
            return
        for where, row in _file_rows(self):
            yield _parse_row(self, where, row)

    def count(self) -> int:
        """Number of rows without reading them all into memory."""
        if self.spec.startswith(REASONING_GYM):
            return int(_gym_options(self)[1]["size"])
        path = _existing(self)
        if path.suffix == ".parquet":
            return int(_parquet(self, path).metadata.num_rows)
        return sum(1 for _ in _lines(self, path))

    def error(self, message: str) -> ConfigError:
        """Build an error that names the configuration key and its value."""
        return ConfigError(f"{self.name}={self.spec!r}: {message}")


def check_rows(source: Source, num_rows: int = 8) -> int:
    """Check cheaply that a source exists, is not empty and that its rows parse.

    Args:
        source: what to check.
        num_rows: rows to look at in a generated or parquet source (whose rows all have the same
            columns); all rows of a jsonl file are read.

    Returns:
        Number of rows. A reasoning_gym task is looked up only where reasoning_gym is installed
        (the training environment, not necessarily the login node).
    """
    gym = source.spec.startswith(REASONING_GYM)
    if gym and importlib.util.find_spec("reasoning_gym") is None:
        return source.count()
    if source.spec.endswith(".jsonl"):
        count = first = sum(1 for _ in source.rows())
    else:
        count = source.count()
        first = sum(1 for _ in itertools.islice(source.rows(), num_rows))
    if count == 0 or first == 0:
        raise source.error("has no rows; an empty data set cannot be trained on")
    return count


def _existing(source: Source) -> Path:
    path = Path(source.spec)
    if path.suffix not in (".jsonl", ".parquet"):
        raise source.error("unknown kind; valid are *.jsonl, *.parquet and reasoning_gym:TASK")
    try:
        is_file = path.is_file()
    except OSError as err:
        raise _unreadable(source, err) from err
    if not is_file:
        raise source.error(f"no such file (looked in {Path.cwd()})")
    return path


def _unreadable(source: Source, err: OSError) -> ConfigError:
    return source.error(f"cannot be read: {err.strerror or err}")


def _file_rows(source: Source) -> typing.Iterator[tuple[str, Any]]:
    path = _existing(source)
    if path.suffix == ".parquet":
        yield from _parquet_rows(source, path)
        return
    for number, line in _lines(source, path):
        yield f"line {number}", _parse_json(source, number, line)


def _lines(source: Source, path: Path) -> typing.Iterator[tuple[int, str]]:
    """Yield number and text of the lines that are not blank; a byte order mark is left out."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                line = _decode(source, number, raw)
                if line.strip():
                    yield number, line
    except OSError as err:
        raise _unreadable(source, err) from err


def _decode(source: Source, number: int, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as err:
        raise source.error(f"line {number}: not UTF-8 text ({err.reason})") from err


def _parse_json(source: Source, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as err:  # also a number of too many digits, deep nesting
        raise source.error(f"line {number}: not JSON ({err})") from err


def _parquet_rows(source: Source, path: Path) -> typing.Iterator[tuple[str, Any]]:
    number = 0
    batches = _parquet(source, path).iter_batches(batch_size=1024)
    while True:
        try:
            rows = next(batches, None)
        except (OSError, ValueError) as err:  # pyarrow.ArrowInvalid is a ValueError
            raise source.error(f"cannot be read after row {number} ({err})") from err
        if rows is None:
            return
        for row in rows.to_pylist():
            number += 1
            yield f"row {number}", row


def _parquet(source: Source, path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as err:
        raise require_extra("pyarrow", "rollout", err) from err
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowInvalid) as err:
        raise source.error(f"not a parquet file ({err})") from err


def _parse_row(source: Source, where: str, row: Any) -> RawPrompt:
    if not isinstance(row, dict):
        raise source.error(f"{where}: must be an object, is {type(row).__name__}")
    prompt = _parse_prompt(source, where, _lookup(source, where, row, source.prompt_key))
    label = _lookup(source, where, row, source.label_key)
    if not isinstance(label, (str, int, float)) or not str(label).strip():
        raise source.error(f"{where}: {source.label_key}={label!r} must be text or a number")
    used = {source.prompt_key.split(".")[0], source.label_key.split(".")[0]}
    metadata = {key: value for key, value in row.items() if key not in used}
    return RawPrompt(prompt, str(label), metadata)


def _lookup(source: Source, where: str, row: dict[str, Any], key: str) -> Any:
    node: Any = row
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            keys = ", ".join(sorted(map(str, row)))
            raise source.error(f"{where}: no key {key!r}; the row has {keys}")
        node = node[part]
    return node


def _parse_prompt(source: Source, where: str, value: Any) -> str | Messages:
    if isinstance(value, str) and value.strip():
        return value
    messages = list(value) if isinstance(value, (list, tuple)) else []
    ok = bool(messages) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in messages
    )
    if not ok:
        raise source.error(
            f"{where}: {source.prompt_key} must be text or a list of "
            '{"role": text, "content": text}'
        )
    return [{"role": m["role"], "content": m["content"]} for m in messages]


# ---------------------------------------------------------------------------------------------
# reasoning-gym
# ---------------------------------------------------------------------------------------------


def _gym_options(source: Source) -> tuple[str, dict[str, Any], str]:
    """Task, options with size and seed, and the suffix of questions."""
    task, _, query = source.spec.removeprefix(REASONING_GYM).partition("?")
    options: dict[str, Any] = {"size": source.default_size, "seed": source.default_seed}
    for key, text in urllib.parse.parse_qsl(query, keep_blank_values=True):
        try:
            options[key] = json.loads(text)
        except json.JSONDecodeError:
            options[key] = text  # a bare word
    suffix = str(options.pop("suffix", ""))
    if not task or not isinstance(options["size"], int) or options["size"] < 1:
        raise source.error("write reasoning_gym:TASK?size=100&key=value, size a positive number")
    return task, options, suffix


def _gym_rows(source: Source) -> typing.Iterator[RawPrompt]:
    task, options, suffix = _gym_options(source)
    dataset = open_gym_task(source, task, options)
    for index in range(options["size"]):
        entry = dataset[index]
        metadata = {"reasoning_gym": {"task": task, "options": options, "index": index}}
        yield RawPrompt(entry["question"] + suffix, str(entry["answer"]), metadata)


def open_gym_task(source: Source, task: str, options: dict[str, Any]) -> Any:
    """Make a reasoning-gym data set; the same options give the same questions.

    Raises:
        ConfigError: unknown task or option.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as err:
        raise require_extra("reasoning_gym", "rollout", err) from err
    if task not in DATASETS:
        raise source.error(f"no such task; valid are {', '.join(sorted(DATASETS))}")
    try:
        return reasoning_gym.create_dataset(task, **options)
    except (TypeError, ValueError, AssertionError) as err:
        raise source.error(f"the task refuses its options: {err}") from err

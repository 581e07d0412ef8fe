"""Keys of a recipe's tables: `--set a.b=c`, unknown ones. What the values mean is config.py's."""

import dataclasses
import tomllib
import types
import typing
from collections.abc import Sequence
from typing import Any

from relax_hpc.errors import ConfigError

Tree = dict[str, Any]
"""Nested tables as TOML and JSON give them."""


def apply_override(tree: Tree, override: str, root: type) -> None:
    """Set the key that `a.b=value` names.

    Args:
        tree: of the recipe; changed.
        override: value as TOML, or a bare word, which is a string as in a shell.
        root: dataclass of the tree.

    Raises:
        ConfigError: not of this form, or a value stands where a section must be.
    """
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise ConfigError(f"--set {override!r}: write section.key=value, e.g. train.lr=1e-6")
    node = tree
    for part in parts[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {override!r}: {part} is a value, not a section")
    try:
        value = tomllib.loads(f"v = {text.strip()}")["v"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    is_text = hint_of(root, parts) is str and not isinstance(value, str)
    node[parts[-1]] = text.strip() if is_text else value  # run.name=inf is a name, no number


def hint_of(root: type, parts: list[str]) -> Any:
    """Return the type of a key, None for one that does not exist."""
    hint: Any = root
    for part in parts:
        cls = _dataclass_of(hint)
        hint = typing.get_type_hints(cls).get(part) if cls is not None else None
    return hint


def refuse_unknown(tree: Tree, cls: type, prefix: str = "") -> None:
    """Refuse keys that the dataclass does not have.

    Raises:
        ConfigError: lists the valid ones.
    """
    if not isinstance(tree, dict):
        raise ConfigError(f"{prefix or 'recipe'}: must be a table of keys, is {tree!r}")
    fields = typing.get_type_hints(cls)
    for key, value in tree.items():
        if key not in fields:
            raise ConfigError(
                f"{prefix}{key}: unknown key; valid here: {', '.join(sorted(fields))}"
            )
        inner = _dataclass_of(fields[key])
        if inner is not None and value is not None:
            refuse_unknown(value, inner, f"{prefix}{key}.")


def _dataclass_of(hint: Any) -> type | None:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next((o for o in options if isinstance(o, type) and dataclasses.is_dataclass(o)), None)


def merged(tree: Tree, more: Tree) -> Tree:
    """Return the tree with the keys of `more`, table by table; neither is changed."""
    result = dict(tree)
    for key, new in more.items():
        value, old = new, result.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = merged(old, value)
        result[key] = value
    return result


def flat(tree: Tree, prefix: str = "") -> Tree:
    """Return `{"train.lr": 1e-6}` for `{"train": {"lr": 1e-6}}`."""
    found: Tree = {}
    for key, value in tree.items():
        inner = isinstance(value, dict)
        found.update(flat(value, f"{prefix}{key}.") if inner else {prefix + key: value})
    return found


def without(tree: Tree, key: str) -> Tree:
    """Return the tree without one key, given as `train.lr`."""
    head, _, rest = key.partition(".")
    if not rest or not isinstance(tree.get(head), dict):
        return {name: value for name, value in tree.items() if name != head or rest}
    return {**tree, head: without(tree[head], rest)}


def check_sweep(entries: Sequence[Tree], root: type) -> None:
    """Check the keys of a sweep's entries, `sweep.runs`.

    Raises:
        ConfigError: an unknown key, or one that all tasks of an array have in common.
    """
    for number, entry in enumerate(entries):
        refuse_unknown(entry, root, f"sweep.runs[{number}].")
        for key in flat(entry):
            is_common = key.partition(".")[0] in ("resources", "sweep")
            if is_common or key in ("run.name", "run.folder"):
                raise ConfigError(
                    f"sweep.runs[{number}].{key}: the tasks of an array share name, folder and "
                    "allocation; write a recipe of its own for it"
                )


def free_sweep(tree: Tree, key: str) -> None:
    """Take a key out of all entries: what the command line says holds for all tasks."""
    sweep = tree.get("sweep")
    if isinstance(sweep, dict) and isinstance(sweep.get("runs"), list):
        sweep["runs"] = [
            without(entry, key) if isinstance(entry, dict) else entry for entry in sweep["runs"]
        ]

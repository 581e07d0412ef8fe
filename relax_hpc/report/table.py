"""Tables of text: plain columns in a file or a pipe, with rich on a terminal."""

import shutil
from collections.abc import Sequence
from typing import TextIO


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], out: TextIO, wide: str = ""
) -> None:
    """Print rows below their column names.

    Args:
        columns: names.
        rows: a cell per column.
        out: plain text unless it is a terminal.
        wide: column that may be wrapped on a terminal.
    """
    if out.isatty():
        _print_rich(columns, rows, out, wide)
    else:
        out.write("\n".join(_plain(columns, rows)) + "\n")


def _plain(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    table = [columns, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


def _print_rich(
    columns: Sequence[str], rows: Sequence[Sequence[str]], out: TextIO, wide: str
) -> None:
    import rich.box  # 0.1 s: only where it is seen
    import rich.console
    import rich.table

    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    for name in columns:
        table.add_column(name, no_wrap=name != wide)
    for row in rows:
        table.add_row(*row)
    width = max(80, shutil.get_terminal_size((100, 24)).columns)
    rich.console.Console(file=out, highlight=False, markup=False, width=width).print(table)

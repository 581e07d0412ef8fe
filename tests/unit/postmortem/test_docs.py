"""docs/postmortem.md says what the code does. Run as a program, it writes the table."""

import re
from pathlib import Path

from relax_hpc.launcher.recorder import recorder_environment
from relax_hpc.postmortem.classes import CATALOGUE
from relax_hpc.postmortem.evidence import EventKind
from relax_hpc.postmortem.picture import FAMILIES
from relax_hpc.postmortem.verdict import Report

PAGE = Path(__file__).parents[3] / "docs" / "postmortem.md"
MARKS = ("<!-- classes -->\n", "<!-- /classes -->")


def table() -> str:
    """The catalogue as Markdown."""
    rows = ["| class | family | means | what to do |", "|---|---|---|---|"]
    for name, entry in CATALOGUE.items():
        mark = " *node*" if entry.blames_node else "" if entry.is_failure else " *orderly*"
        cells = (f"`{name}`{mark}", entry.family, entry.meaning, entry.remedy)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def split_page() -> tuple[str, str, str]:
    head, _, rest = PAGE.read_text().partition(MARKS[0])
    middle, _, tail = rest.partition(MARKS[1])
    return head, middle, tail


def test_every_class_is_explained() -> None:
    assert split_page()[1] == table(), f"run python {__file__}"


def test_every_setting_is_explained() -> None:
    text = PAGE.read_text()
    for name, value in recorder_environment(Path("x")).items():
        shown = f"`{name}=" if name.endswith("FILE") else f"`{name}={value}`"
        assert shown in text


def test_the_schema_names_all_fields() -> None:
    shown = set(re.findall(r'"(\w+)":', PAGE.read_text()))
    assert set(Report.__struct_fields__) <= shown


def test_every_kind_has_a_colour() -> None:
    coloured = {kind for kinds in FAMILIES.values() for kind in kinds}
    assert coloured | {"config_note"} == {kind.value for kind in EventKind}


if __name__ == "__main__":
    head, _, tail = split_page()
    PAGE.write_text(head + MARKS[0] + table() + MARKS[1] + tail)

"""docs/preflight.md says what the code does. Run as a program, it writes the table."""

import re
from pathlib import Path

from relax_hpc.launcher import node_checks
from relax_hpc.launcher.check_list import FAULTS
from relax_hpc.launcher.node_scores import Tolerance
from relax_hpc.launcher.node_survey import Limits
from relax_hpc.topology import outliers

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "preflight.md"
MARKS = ("<!-- faults -->\n", "<!-- /faults -->")
SOURCES = ("launcher", "steps")


def table() -> str:
    """The list of faults as Markdown."""
    rows = ["| check | finds | remedy | found by |", "|---|---|---|---|"]
    for fault in FAULTS.values():
        cells = (f"`{fault.name}`", fault.finds, fault.remedy, fault.seen_by)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def test_every_fault_is_explained() -> None:
    _, _, rest = PAGE.read_text().partition(MARKS[0])
    assert rest.partition(MARKS[1])[0] == table(), f"run python {__file__}"


def test_every_fault_is_found_somewhere_and_planted_in_a_test() -> None:
    code = "".join(path.read_text() for path in (ROOT / "relax_hpc/launcher").glob("*.py"))
    tests = "".join(
        path.read_text()
        for folder in ("unit/launcher", "slurm")
        for path in (ROOT / "tests" / folder).glob("test_*.py")
    )
    found = set(re.findall(r'found\(\s*"([\w-]+)"', code)) | {"shm-size", "shm-full"}
    assert found == set(FAULTS)
    assert {name for name in FAULTS if f'"{name}"' not in tests} == set()


def test_the_numbers_of_the_page() -> None:
    text = " ".join(PAGE.read_text().split())
    limits, allow = Limits(), Tolerance()
    for number in (limits.start_s, limits.pairs_s, limits.total_s):
        assert f"| {number:.0f} s" in text
    rule = (
        f"more than a factor of {allow.factor:.0f} (GPUs: {allow.gpu_factor:g}), *and* by more "
        f"than {allow.latency_slack_us:.0f} us or {allow.gbytes_slack:g} GB/s, *and* by more than "
        f"{outliers.DEVIATIONS:.0f} x {outliers._MAD_TO_SIGMA:g} x"
    )
    assert rule in text
    assert node_checks.NODE_CHECKS[: len(node_checks.MACHINE_CHECKS)] == node_checks.MACHINE_CHECKS


if __name__ == "__main__":
    head, _, rest = PAGE.read_text().partition(MARKS[0])
    PAGE.write_text(head + MARKS[0] + table() + MARKS[1] + rest.partition(MARKS[1])[2])

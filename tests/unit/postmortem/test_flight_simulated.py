"""Many jobs that a small simulator lets run into a failure: the answer is known, so must be ours.

The simulator knows nothing of the rules: ranks launch what their program says, at most `depth`
unfinished operations each; a collective ends when all members launched the same.
"""

import dataclasses
import random
from pathlib import Path

import pytest

from relax_hpc.postmortem.flight import read_dumps
from relax_hpc.postmortem.flight_rules import flight_findings
from relax_hpc.postmortem.verdict import Confidence
from tests.unit.postmortem.flight_samples import Job

Operation = tuple[str, str, int, str]
"""Group, operation, size, type."""

CLASSES = {
    "stops": {"missing-rank"},
    "dies": {"missing-rank"},
    "skips": {"missing-rank", "op-mismatch", "size-mismatch"},
    "extra": {"extra-op", "op-mismatch", "size-mismatch", "missing-rank"},
    "op": {"op-mismatch"},
    "size": {"size-mismatch"},
    "dtype": {"dtype-mismatch"},
}


@dataclasses.dataclass
class Simulation:
    """A job of tensor, data and pipeline groups whose rank `culprit` fails in train step 4."""

    world: int
    groups: dict[str, tuple[str, list[int]]]
    programs: list[list[Operation]]
    depth: int
    culprit: int
    failure: str

    def run(self, folder: Path) -> list[str]:
        """Run to the standstill and write the dumps."""
        launched: list[list[Operation]] = [[] for _ in range(self.world)]
        seqs: list[list[int]] = [[] for _ in range(self.world)]
        table: dict[tuple[str, int], dict[int, Operation]] = {}
        counts: dict[tuple[int, str], int] = {}
        ended: set[tuple[str, int]] = set()
        moved = True
        order: list[tuple[int, int]] = []
        while moved:
            moved = False
            for rank in range(self.world):
                place = len(launched[rank])
                if (
                    place >= len(self.programs[rank])
                    or self._num_open(rank, launched, seqs, ended) >= self.depth
                ):
                    continue
                operation = self.programs[rank][place]
                group = operation[0]
                counts[rank, group] = seq = counts.get((rank, group), 0) + 1
                launched[rank].append(operation)
                seqs[rank].append(seq)
                order.append((rank, place))
                table.setdefault((group, seq), {})[rank] = operation
                moved = True
                self._finish(group, table, ended)
        return self._write(folder, launched, seqs, ended, order)

    def _num_open(
        self,
        rank: int,
        launched: list[list[Operation]],
        seqs: list[list[int]],
        ended: set[tuple[str, int]],
    ) -> int:
        pairs = zip(launched[rank], seqs[rank], strict=True)
        return sum((operation[0], seq) not in ended for operation, seq in pairs)

    def _finish(
        self,
        group: str,
        table: dict[tuple[str, int], dict[int, Operation]],
        ended: set[tuple[str, int]],
    ) -> None:
        members = set(self.groups[group][1])
        seq = 1
        while (group, seq) in table:
            here = table[group, seq]
            if (group, seq) not in ended:
                if set(here) != members or len(set(here.values())) > 1:
                    return
                ended.add((group, seq))
            seq += 1

    def _write(
        self,
        folder: Path,
        launched: list[list[Operation]],
        seqs: list[list[int]],
        ended: set[tuple[str, int]],
        order: list[tuple[int, int]],
    ) -> list[str]:
        job = Job(self.world, self.groups)
        for rank, place in order:
            group, op, size, dtype = launched[rank][place]
            seq = seqs[rank][place]
            done = (group, seq) in ended
            first = (group, seq - 1) in ended or seq == 1
            state = "completed" if done else "started" if first else "scheduled"
            job.launch([rank], op, group, state=state, size=size, dtype=dtype)
        without = (self.culprit,) if self.failure == "dies" else ()
        return job.write(folder, without=without)


def make(seed: int) -> Simulation:
    """A job with a failure, all drawn from `seed`."""
    draw = random.Random(seed)
    tensor, data = draw.choice([(2, 2), (4, 2), (2, 4), (4, 4), (1, 4), (1, 8)])
    world = tensor * data
    groups = {"0": ("default_pg", list(range(world)))}
    for first in range(0, world, tensor):
        if tensor > 1:
            groups[str(len(groups))] = ("tp", list(range(first, first + tensor)))
    for place in range(tensor):
        groups[str(len(groups))] = ("dp", list(range(place, world, tensor)))
    culprit = draw.randrange(world)
    step = [("tp", "all_gather", 16), ("tp", "all_reduce", 64)] * draw.randint(1, 2)
    step += [
        ("dp", "reduce_scatter", 256),
        ("dp", "all_gather", 32),
        ("default_pg", "all_reduce", 1),
    ]
    mine = [
        [
            (
                next(g for g, (desc, ranks) in groups.items() if desc == kind and rank in ranks),
                op,
                size,
                "Float",
            )
            for kind, op, size in step * 6
            if kind != "tp" or tensor > 1
        ]
        for rank in range(world)
    ]
    failure = draw.choice(sorted(CLASSES))
    length = len(mine[0]) // 6
    place = 4 * length + draw.randrange(length)
    _spoil(mine[culprit], place, failure)
    return Simulation(world, groups, mine, draw.choice([1, 1, 2, 4]), culprit, failure)


def _spoil(program: list[Operation], place: int, failure: str) -> None:
    group, op, size, dtype = program[place]
    if failure in ("stops", "dies"):
        del program[place:]
    elif failure == "skips":
        del program[place]
    elif failure == "extra":
        program.insert(place, (group, "broadcast", 7, "Float"))
    elif failure == "op":
        program[place] = (group, "broadcast", size, dtype)
    elif failure == "size":
        program[place] = (group, op, 3 * size, dtype)
    else:
        program[place] = (group, op, size, "BFloat16")


def verdict_of(simulation: Simulation, folder: Path) -> tuple[bool, bool, str]:
    """Whether the culprit is right, whether a certain answer is wrong, and the words."""
    finding = flight_findings(read_dumps(simulation.run(folder)))[0]
    is_right = (
        finding.ranks == [simulation.culprit] and finding.class_ in CLASSES[simulation.failure]
    )
    is_wrong = finding.confidence is Confidence.ESTABLISHED and finding.ranks != [
        simulation.culprit
    ]
    return is_right, is_wrong, f"{finding.class_} {finding.ranks} {finding.sentence}"


@pytest.mark.parametrize("first", range(0, 100, 50))
def test_simulated_failures(tmp_path: Path, first: int) -> None:
    wrong = []
    for seed in range(first, first + 50):
        simulation = make(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        is_right, is_certain_and_wrong, words = verdict_of(simulation, folder)
        assert not is_certain_and_wrong, f"seed {seed}: {simulation.failure}: {words}"
        if not is_right:
            wrong.append(f"seed {seed}: rank {simulation.culprit} {simulation.failure}: {words}")
    assert wrong == []

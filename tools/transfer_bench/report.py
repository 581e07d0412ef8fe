"""All measurements of a run, as a table or as JSON."""

import dataclasses
import json
import os
import statistics
import subprocess
import sys

from transfer_bench.compare import (
    ONLY_THEIRS,
    OURS,
    OURS_IN_MEMORY,
    PLANS,
    QUICK_PLANS,
    THEIRS,
    Comparison,
    compare,
    median_s,
)
from transfer_bench.environment import ROOT
from transfer_bench.floors import Floors
from transfer_bench.network import Network, measure_network
from transfer_bench.queues import TransferQueueSimple
from transfer_bench.side import Answer, SideError
from transfer_bench.work import WORKS, make_work
from transfer_bench.workplace import Workplace

_METADATA_TIMEOUT_S = 400.0
_NETWORK_ROUNDS, _QUICK_NETWORK_ROUNDS = 9, 3


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What was measured."""

    version: str
    """Of TransferQueue."""
    floors: dict[str, float]
    """GB/s, medians."""
    works: dict[str, Comparison]
    key_value: list[Answer]
    """TransferQueue's key-value interface on the text work."""
    network: Network | None
    metadata: Answer
    load: float
    """Load average at the end."""

    @property
    def ratios(self) -> dict[str, float | None]:
        """Ours to TransferQueue's, or to the floor: larger is better."""
        works = self.works
        ratios = {
            "ragged_ratio": works["text"].ratio("put_s", "get_s"),
            "tensor_ratio": works["tensors"].ratio("put_s", "get_s"),
            "latency_ratio": works["latency"].ratio("latency_s"),
            "ragged_ratio_of_arrays": works["text"].ratio("put_s", "get_s", *ONLY_THEIRS),
            "latency_ratio_of_arrays": works["latency"].ratio("latency_s", *ONLY_THEIRS),
            "put_vs_memcpy": works["tensors"].put_vs_copy,
            "controller_rows_per_s": float(self.metadata["controller_rows_per_s"]),
            "tcp_vs_raw": None if self.network is None else self.network.ratio,
        }
        return {name: _rounded(value) for name, value in ratios.items()}

    def as_json(self) -> str:
        """One object with everything, times in seconds."""
        works = {
            name: {
                "nbytes": work.work.nbytes,
                **{queue: _medians(answers) for queue, answers in work.answers.items()},
            }
            for name, work in self.works.items()
        }
        return json.dumps(
            {
                "transferqueue": self.version,
                "works": works,
                "key_value": _medians(self.key_value),
                "floors_gb_per_s": self.floors,
                "tcp_gb_per_s": None if self.network is None else dataclasses.asdict(self.network),
                "metadata": self.metadata,
                "load": self.load,
            }
        )

    def as_table(self) -> str:
        """Lines for people; Markdown."""
        lines = [
            "| work | step | ours | ours, journal in memory | TransferQueue | ratio |",
            "|---|---|---|---|---|---|",
        ]
        for name in ("text", "tensors"):
            lines += [self._line(name, "put", "put_s"), self._line(name, "get", "get_s")]
            lines += [self._line(name, "put + get", "put_s", "get_s")]
            lines += [self._line(name, "put + get, arrays", "put_s", "get_s", *ONLY_THEIRS)]
            keys = ("put_s", "get_s", *ONLY_THEIRS, "read_s")
            lines += [self._line(name, "put + get + read", *keys)]
        lines += [self._line("latency", "put to get", "latency_s")]
        lines += [self._line("latency", "arrays to arrays", "latency_s", *ONLY_THEIRS)]
        key_value = 1000 * median_s(self.key_value, "put_s", "get_s")
        lines += [
            "",
            f"TransferQueue {self.version}, kv_batch_put + kv_batch_get: {key_value:.1f} ms",
        ]
        floors = ", ".join(f"{name} {value:.1f}" for name, value in self.floors.items())
        lines += [f"floors, GB/s, one thread: {floors}"]
        if self.network is not None:
            raw = ", ".join(f"{n} streams {gb:.2f}" for n, gb in self.network.raw.items())
            lines += [f"TCP between namespaces, GB/s: ours {self.network.ours:.2f}, raw {raw}"]
        lines += [f"controller: {json.dumps(self.metadata)}"]
        return "\n".join([*lines, f"{os.cpu_count()} cores, load average {self.load:.1f}"])

    def _line(self, name: str, step: str, *keys: str) -> str:
        work = self.works[name]
        ratios = "/".join(f"{work.ratio(*keys, ours=ours):.1f}" for ours in (OURS, OURS_IN_MEMORY))
        times = []
        for queue in (OURS, OURS_IN_MEMORY, THEIRS):
            seconds = work.seconds(queue, *keys)
            times.append(f"{1000 * seconds:.2f} ms, {work.work.nbytes / seconds / 1e9:.2f} GB/s")
        return f"| {' | '.join([name, step, *times, ratios])} |"


def measure(place: Workplace, *, is_quick: bool) -> Report:
    """Do everything, one after the other.

    Args:
        place: folders and processes of this run.
        is_quick: few rounds.

    Raises:
        SideError: a process failed; holds its last lines.
    """
    plans = QUICK_PLANS if is_quick else PLANS
    floors = Floors(make_work("text"), make_work("tensors"))
    theirs = TransferQueueSimple(place)
    try:
        works = {name: compare(name, plans[name], theirs, floors, place) for name in WORKS}
        rounds = plans["text"].turns * plans["text"].burst
        key_value = [theirs.key_value_round("text") for _ in range(rounds)]
    finally:
        theirs.close()
    rounds = _QUICK_NETWORK_ROUNDS if is_quick else _NETWORK_ROUNDS
    network = measure_network(place, rounds)
    metadata = _measure_metadata(place, is_quick=is_quick)
    return Report(
        theirs.version, floors.medians(), works, key_value, network, metadata, os.getloadavg()[0]
    )


def _measure_metadata(place: Workplace, *, is_quick: bool) -> Answer:
    """Run metadata.py: rows per second of a controller with 64 producers and 64 consumers."""
    command = [sys.executable, "-m", "transfer_bench.metadata", *(["--quick"] * is_quick)]
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=dict(place.variables()),
        timeout=_METADATA_TIMEOUT_S, check=False,
    )  # fmt: skip
    if result.returncode != 0:
        end = "\n".join((result.stdout + result.stderr).splitlines()[-12:])
        raise SideError(f"metadata benchmark failed with {result.returncode}:\n{end}")
    answer: Answer = json.loads(result.stdout.splitlines()[-1])
    return answer


def _medians(answers: list[Answer]) -> dict[str, float]:
    names = [name for name in answers[0] if name.endswith("_s")]
    return {name: statistics.median(answer[name] for answer in answers) for name in names}


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")

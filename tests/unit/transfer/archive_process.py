"""A producer that archives without end, for tests that kill it or its writer.

`archive_process.py RUN SEED`: group k has uid `0.k.0`; its arrays are made of k.
`archive_process.py PATH N die`: writes 5 groups, and dies after N calls of HDF5 for the next 5.
"""

import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from relax_hpc.control.identity import Identity
from relax_hpc.records import FinishReason, PromptSlot, Sample
from relax_hpc.runfolder import RunFolder
from relax_hpc.transfer.archive import GroupArchive
from relax_hpc.transfer.archive_file import FinishedGroup, StepFile, schema_of

GROUP_SIZE = 4


def make_slot(k: int, deadline_version: int = 1) -> PromptSlot:
    return PromptSlot(uid=f"0.{k}.0", prompt_index=k, epoch=0, deadline_version=deadline_version)


def make_samples(k: int, version: int = 0, max_response: int = 300) -> list[Sample]:
    """Ragged samples that only depend on the arguments."""
    chance = random.Random(k)
    samples = []
    for index in range(GROUP_SIZE):
        num_response = chance.randint(1, max_response)
        generator = np.random.default_rng([k, index])
        samples.append(
            Sample(
                num_prompt_tokens=3,
                finish_reason=FinishReason.STOP if index % 2 else FinishReason.LENGTH,
                fields={
                    "tokens": generator.integers(0, 50_000, 3 + num_response).astype(np.int32),
                    "rollout_logprobs": generator.standard_normal(num_response).astype(np.float32),
                    "token_versions": np.full(num_response, version, np.int32),
                    "loss_mask": np.ones(num_response, np.uint8),
                    "reward": np.asarray(k + index, np.float32),
                    "accuracy": np.asarray(0.5, np.float32),
                },
            )
        )
    return samples


def is_equal(one: list[Sample], other: list[Sample]) -> bool:
    """Bit for bit, dtypes and shapes included."""
    return len(one) == len(other) and all(
        (a.num_prompt_tokens, a.finish_reason) == (b.num_prompt_tokens, b.finish_reason)
        and a.fields.keys() == b.fields.keys()
        and all(
            a.fields[name].dtype == b.fields[name].dtype
            and a.fields[name].shape == b.fields[name].shape
            and a.fields[name].tobytes() == b.fields[name].tobytes()
            for name in a.fields
        )
        for a, b in zip(one, other, strict=True)
    )


def die(path: Path, num_calls: int) -> None:
    groups = [
        FinishedGroup(slot=make_slot(k), samples=make_samples(k), finished_s=k) for k in range(10)
    ]
    file = StepFile(path, schema_of(groups), {})
    file.append(groups[:5])
    left = itertools.count(num_calls, -1)

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return replacement

    calls = ((h5py.Dataset, "resize"), (h5py.Dataset, "__setitem__"), (h5py.File, "flush"))
    for owner, name in calls:
        setattr(owner, name, counted(getattr(owner, name)))
    file.append(groups[5:])
    print("done", next(left))


def main() -> None:
    if sys.argv[3:] == ["die"]:
        die(Path(sys.argv[1]), int(sys.argv[2]))
        return
    run = RunFolder(Path(sys.argv[1]))
    identity = Identity(run=run, role="rollout", node="n1")
    archive = GroupArchive(run.path / "trajectories", identity, min_free_bytes=0)
    k = 0
    while True:
        for _ in range(random.Random(f"{sys.argv[2]}{k}").randint(1, 8)):
            archive.offer(make_slot(k), make_samples(k, version=k // 40, max_response=3000))
            k += 1
        archive.flush(60)
        sys.stdout.write(f"{archive.stats().num_written}\n")
        sys.stdout.flush()
        time.sleep(0.001)


if __name__ == "__main__":
    main()

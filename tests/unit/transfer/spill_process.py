"""A producer that spills without end, for tests that kill it: `spill_process.py FOLDER SEED`.

Prints one JSON line per acknowledged block, after `append` returned.
"""

import random
import sys
from pathlib import Path

import msgspec
import numpy as np

from relax_hpc.transfer.block import Entry, plan_block, write_block
from relax_hpc.transfer.spill import SpillLimits, SpillWriter


def make_image(uid: str, epoch: int, num_values: int) -> tuple[bytearray, int]:
    """One block whose payload tells its epoch, and its digest."""
    plan = plan_block([Entry(uid, 0, "tokens", np.arange(num_values, dtype=np.int32) + epoch)])
    image = bytearray(plan.nbytes)
    return image, write_block(plan, memoryview(image), epoch)


def main() -> None:
    chance = random.Random(int(sys.argv[2]))
    limits = SpillLimits(max_bytes=1 << 30, segment_bytes=4 << 20)
    spill = SpillWriter(Path(sys.argv[1]), "n1", "rollout0.0-1.1-abc", limits, b"stamp")
    epoch = 0
    while True:
        blocks = []
        for _ in range(chance.randint(1, 3)):
            epoch += 1
            image, digest = make_image(f"0.{epoch}.0", epoch, chance.randint(1, 400_000))
            blocks.append((image, epoch, digest))
        for ref in spill.append_many(blocks):
            sys.stdout.write(msgspec.json.encode(ref).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

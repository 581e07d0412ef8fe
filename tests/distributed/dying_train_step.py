"""A train step whose rank 1 kills itself when its shard of version 2 is written, not yet announced.

`python -m tests.distributed.dying_train_step`, with the environment of `relax_hpc.steps.train`.
"""

import os
import signal
from collections.abc import Iterable

import numpy as np

from relax_hpc.dcs.layout import Box
from relax_hpc.dcs.store import ShardManifest, VersionId, WeightStore
from relax_hpc.steps import train

_VERSION = 2
_write_shard = WeightStore.write_shard


def _write_and_die(
    store: WeightStore,
    version: VersionId,
    rank: int,
    pieces: Iterable[tuple[Box, str, np.ndarray]],
) -> ShardManifest:
    manifest = _write_shard(store, version, rank, pieces)
    if rank == 1 and version.version == _VERSION:
        os.kill(os.getpid(), signal.SIGKILL)
    return manifest


if __name__ == "__main__":
    WeightStore.write_shard = _write_and_die  # type: ignore[method-assign]
    os._exit(train.main())

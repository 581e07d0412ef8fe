"""Processes that tests kill: `coordinator RUN ATTEMPT INCARNATION`, `publisher RUN VERSION PAUSE`.

The publisher stops before piece number PAUSE (-1: never) and waits to be killed.
"""

import sys
import time
from pathlib import Path

import numpy as np

from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import RpcServer
from relax_hpc.dcs.client import WeightPublisher
from relax_hpc.dcs.coordinator import SERVICE, WeightCoordinator
from relax_hpc.dcs.layout import TensorSpec
from relax_hpc.runfolder import RunFolder

SPECS = [TensorSpec(f"w{i}", "float32", (100,)) for i in range(4)]


def whole_pieces(version, pause_before=None):
    for number, spec in enumerate(SPECS):
        if number == pause_before:
            print("middle", flush=True)
            time.sleep(60)
        yield spec.whole(), spec.dtype, np.full(spec.shape, version + number / 8, np.float32)


def main():
    kind, run = sys.argv[1], RunFolder(Path(sys.argv[2]))
    if kind == "coordinator":
        attempt, incarnation = int(sys.argv[3]), int(sys.argv[4])
        me = Identity(
            run=run,
            role="dcs",
            node="n01",
            attempt=attempt,
            incarnation=incarnation,
            address_prefix="127.",
        )
        server = RpcServer(run, SERVICE, me)
        WeightCoordinator(server, me)
        server.start_thread()
        print("serving", flush=True)
        time.sleep(120)
    else:
        version, middle = int(sys.argv[3]), int(sys.argv[4])
        me = Identity(run=run, role="train", node="n01", address_prefix="127.")
        WeightPublisher(me).publish(version, whole_pieces(version, middle), SPECS, 1, 0)


if __name__ == "__main__":
    main()

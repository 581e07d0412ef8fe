"""A preflight's task with faults planted: n03 is slow, n04 dies before it reports.

All nodes get a delay per ping, far above what a busy machine adds, so that only the planted
difference counts. Plays relax_hpc.steps.preflight.
"""

import os
import signal
import socket
import sys
import time

from relax_hpc.steps import preflight, preflight_pair

_ALL_S, _SLOW_S = 0.03, 0.3
_receive = preflight_pair.receive


def _late(connection: socket.socket, size: int) -> bytes:
    data = _receive(connection, size)
    if data == b"p":
        time.sleep(_SLOW_S if os.environ["SLURMD_NODENAME"] == "n03" else _ALL_S)
    return data


if os.environ["SLURMD_NODENAME"] == "n04":
    os.kill(os.getpid(), signal.SIGKILL)
preflight_pair.receive = _late
sys.exit(preflight.main())

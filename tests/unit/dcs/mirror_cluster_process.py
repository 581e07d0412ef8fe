"""A cluster of mirror_bed.py in a process of its own: `PARENT NAME MIB`, then commands on stdin.

Weights of a version follow from its number: random ones, then 3 % of the elements changed each
time. `publish V` and `check V` answer `ok`.
"""

import contextlib
import sys
from pathlib import Path

from relax_hpc.dcs.layout import TensorSpec
from tests.unit.dcs.mirror_bed import Cluster, changed, random_weights, version


def specs_of(mib):
    return [TensorSpec(f"w{i}", "bfloat16", (1 << 10, mib << 7)) for i in range(4)]


def main():
    specs = specs_of(int(sys.argv[3]))
    with contextlib.ExitStack() as stack:
        cluster = Cluster(Path(sys.argv[1]), sys.argv[2], stack)
        print(cluster.run.path, flush=True)
        weights, number = random_weights(0, specs), 0
        for line in sys.stdin:
            command, wanted = line.split()
            while number < int(wanted):
                number += 1
                weights = changed(weights, number, specs=specs)
            if command == "publish":
                cluster.publish(number, weights, specs=specs)
            else:
                cluster.check(version(number), weights, specs)
            print("ok", flush=True)


if __name__ == "__main__":
    main()

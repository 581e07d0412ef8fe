"""A node agent with weights in a process that tests stop and kill: `RUN NODE INCARNATION`.

It prints the data server's port, and ends with its standard input.
"""

import sys
from pathlib import Path

from relax_hpc.control.identity import Identity
from relax_hpc.dcs.keeper import WeightKeeper
from relax_hpc.runfolder import RunFolder
from relax_hpc.transfer.agent import NodeAgent


def main():
    run, node, incarnation = RunFolder(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
    me = Identity(run=run, role="dcs", node=node, incarnation=incarnation, address_prefix="127.")
    agent, keeper = NodeAgent(me), WeightKeeper(me)
    keeper.register(agent.data)
    agent.start()
    keeper.start()
    print(agent.data.address[1], flush=True)
    sys.stdin.read()
    keeper.stop()
    agent.close(remove=False)


if __name__ == "__main__":
    main()

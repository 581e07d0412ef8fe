"""A mirror that is killed at a point: `POINT RUN NODE KEY PORT SPOOL`."""

import os
import signal
import sys
from pathlib import Path

from relax_hpc.control.identity import Identity
from relax_hpc.dcs import client
from relax_hpc.dcs.mirror import Mirror
from relax_hpc.dcs.mirror_wire import load_mirror_key
from relax_hpc.runfolder import RunFolder


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def main():
    point, run, node, key, port, spool = sys.argv[1:]
    me = Identity(run=RunFolder(Path(run)), role="mirror", node=node, address_prefix="127.")
    mirror = Mirror(me, load_mirror_key(Path(key)), ("127.0.0.1", int(port)), Path(spool))
    if point == "before_announce":
        client.WeightPublisher._announce = die  # the shard is written, nobody knows of it
    else:
        publish = client.WeightPublisher.publish

        def publish_and_die(*arguments, **options):
            publish(*arguments, **options)
            die()  # it is served; the spool is still there and the source was told nothing

        client.WeightPublisher.publish = publish_and_die
    mirror.pull(30)


if __name__ == "__main__":
    main()

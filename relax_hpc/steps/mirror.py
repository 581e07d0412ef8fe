"""Weights across clusters, started by hand or by a script of yours: nothing of a recipe yet.

    python -m relax_hpc.steps.mirror key FILE                 once; copy FILE to the other cluster
    python -m relax_hpc.steps.mirror serve  --run RUN --key FILE --listen IP:PORT
    python -m relax_hpc.steps.mirror follow --run RUN --key FILE --source HOST:PORT

`serve` runs in the trainer's cluster, on any node from which RUN is seen; `follow` in the engines'
cluster, on the node that is to hold the versions, with the dcs step of its own RUN there. Either
may be killed at any time and started again.

Exit codes: 0 all versions asked for were followed; 1 something failed; 2 wrong use; 75 the source
did not answer for --patience-s: start it again, what came is kept.
"""

import argparse
import ipaddress
import logging
import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from relax_hpc.control.identity import Identity, observer_identity
from relax_hpc.control.rpc_message import read_address
from relax_hpc.dcs.coordinator import SERVICE
from relax_hpc.dcs.mirror import Mirror
from relax_hpc.dcs.mirror_source import MirrorSource
from relax_hpc.dcs.mirror_wire import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    create_mirror_key,
    load_mirror_key,
)
from relax_hpc.errors import ConfigError, DeadlineError, RelaxError, WeightSyncError
from relax_hpc.log import kv, setup_logging
from relax_hpc.runfolder import RunFolder

_log = logging.getLogger(__name__)

_TEMPORARY_FAILURE = 75
_MAX_FAILURES = 3
"""Versions in a row that could not be served here."""
_PULL_S = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one side, or make a key; returns the exit code."""
    options = _parser().parse_args(arguments)
    setup_logging("mirror")
    try:
        if options.command == "key":
            create_mirror_key(options.file)
        elif options.command == "serve":
            _serve(options)
        else:
            _follow(options)
    except DeadlineError as err:
        _log.error("mirror gives up %s", kv(reason=err))
        return _TEMPORARY_FAILURE
    except RelaxError as err:
        _log.error("mirror failed %s", kv(error=type(err).__name__, reason=err))
        return err.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="relax_hpc.steps.mirror", description="Weights across clusters."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    key = commands.add_parser("key", help="write a new key file, mode 0600")
    key.add_argument("file", type=Path)
    both = argparse.ArgumentParser(add_help=False)
    both.add_argument("--run", type=Path, required=True, help="run folder of this cluster")
    both.add_argument("--key", type=Path, required=True, help="key file, the same in both clusters")
    both.add_argument("--node", default=os.environ.get("SLURMD_NODENAME", socket.gethostname()))
    serve = commands.add_parser("serve", parents=[both], help="in the trainer's cluster")
    serve.add_argument("--listen", type=_address, required=True, metavar="IP:PORT")
    serve.add_argument("--chunk-bytes", type=int, default=1 << 20, help="unit of transfer")
    serve.add_argument("--no-deflate", action="store_true", help="for fast links: docs/dcs.md")
    follow = commands.add_parser("follow", parents=[both], help="in the engines' cluster")
    follow.add_argument("--source", type=_address, required=True, metavar="HOST:PORT")
    follow.add_argument("--spool", type=Path, help="folder for what has come; RUN/mirror/NODE")
    follow.add_argument("--streams", type=int, default=4, help="connections")
    follow.add_argument("--patience-s", type=float, default=600.0, help="without a chunk: exit 75")
    follow.add_argument("--versions", type=int, default=0, help="end after so many; 0: never")
    return parser


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def _serve(options: argparse.Namespace) -> None:
    ip, size = options.listen[0], options.chunk_bytes
    try:
        ipaddress.ip_address(ip)
    except ValueError as err:
        raise ConfigError(f"--listen {ip}: not an IP address of this machine") from err
    if not MIN_CHUNK_BYTES <= size <= MAX_CHUNK_BYTES or size % 8:
        raise ConfigError(
            f"--chunk-bytes {size}: a multiple of 8, {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}"
        )
    me = observer_identity(RunFolder(options.run))
    source = MirrorSource(
        Identity(run=me.run, role=me.role, node=options.node),
        load_mirror_key(options.key),
        options.listen,
        chunk_bytes=size,
        deflate=not options.no_deflate,
    )
    ip, port = source.start()
    sys.stdout.write(f"{ip} {port}\n")  # the port may have been 0
    sys.stdout.flush()
    threading.Event().wait()  # until a signal ends the process; there is nothing to clean up


def _follow(options: argparse.Namespace) -> None:
    if options.streams < 1 or options.patience_s <= 0:
        raise ConfigError("--streams and --patience-s must be > 0")
    run = RunFolder(options.run)
    service = read_address(run.control / f"{SERVICE}.addr")
    if service is None:
        raise ConfigError(f"no weight service has started in {run.path}: start its dcs step first")
    mirror = Mirror(
        Identity(run=run, role="mirror", node=options.node, attempt=service.attempt),
        load_mirror_key(options.key),
        options.source,
        options.spool or run.path / "mirror" / options.node,
        streams=options.streams,
        patience_s=options.patience_s,
    )
    failures = 0
    while options.versions == 0 or mirror.stats.versions < options.versions:
        try:
            version = mirror.pull(_PULL_S)
        except WeightSyncError as err:
            failures += 1
            if failures == _MAX_FAILURES:
                raise
            _log.error("version not served %s", kv(failures=failures, reason=err))
        else:
            failures = 0 if version is not None else failures
    mirror.close()


if __name__ == "__main__":
    sys.exit(main())

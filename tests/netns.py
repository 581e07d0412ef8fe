"""Two network namespaces joined by a cable that can be cut: two nodes on one machine (root, ip(8)).

    with two_nodes() as nodes:
        server = nodes.start(0, [sys.executable, "-c", ...])   # its pid is the process itself
        nodes.call(1, lambda: socket.create_connection((nodes.ipv4[0], port)))
        with nodes.cut():                                      # ip link set down ... up
            ...

Nothing in them can reach anything else: there is no route out, and no other interface.
"""

import contextlib
import ctypes
import os
import secrets
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
_DEVICE = "cable"
Result = TypeVar("Result")


def why_not() -> str:
    """Return why namespaces cannot be made here, empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    return "" if shutil.which("ip") else "ip(8) is not installed (Debian: iproute2)"


class TwoNodes:
    """Both ends of the cable; made by `two_nodes`."""

    ipv4 = ("10.77.0.1", "10.77.0.2")
    ipv6 = ("fd77::1", "fd77::2")

    def __init__(self) -> None:
        mark = f"relax-{os.getpid()}-{secrets.token_hex(3)}"
        self.names = (f"{mark}-a", f"{mark}-b")
        self._processes: list[subprocess.Popen[Any]] = []

    def start(self, node: int, command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
        """Start a process in a node; it is killed at the end if it still runs."""
        whole = ["ip", "netns", "exec", self.names[node], *command]
        process = subprocess.Popen(whole, **options)  # ip(8) becomes the command: the same pid
        self._processes.append(process)
        return process

    def call(self, node: int, function: Callable[[], Result]) -> Result:
        """Run a function in a node, in a thread; what it starts there stays in that node."""
        results: list[Result] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                _enter(self.names[node])
                results.append(function())
            except BaseException as err:  # noqa: BLE001 - raised again in the caller
                errors.append(err)

        thread = threading.Thread(target=run, name=f"node-{node}", daemon=True)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    def down(self) -> None:
        """Cut the cable."""
        self._ip(0, "link", "set", _DEVICE, "down")

    def up(self) -> None:
        """Mend it."""
        self._ip(0, "link", "set", _DEVICE, "up")

    @contextlib.contextmanager
    def cut(self, seconds: float = 0.0) -> Iterator[None]:
        """Cut the cable for the block, and for at least so many seconds."""
        self.down()
        until = time.monotonic() + seconds
        try:
            yield
            time.sleep(max(until - time.monotonic(), 0.0))
        finally:
            self.up()

    def _make(self) -> None:
        for name in self.names:
            _run("ip", "netns", "add", name)
        # Both ends are made inside: nothing of this machine's own network is touched.
        self._ip(0, "link", "add", _DEVICE, "type", "veth", "peer", _DEVICE, "netns", self.names[1])
        for node in (0, 1):
            # A cut cable is no reason to lose the address.
            keep = "echo 1 > /proc/sys/net/ipv6/conf/all/keep_addr_on_down"
            _run("ip", "netns", "exec", self.names[node], "sh", "-c", keep)
            self._ip(node, "addr", "add", f"{self.ipv4[node]}/24", "dev", _DEVICE)
            self._ip(node, "addr", "add", f"{self.ipv6[node]}/64", "dev", _DEVICE, "nodad")
            self._ip(node, "link", "set", "lo", "up")
            self._ip(node, "link", "set", _DEVICE, "up")

    def _remove(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        for name in self.names:
            if Path("/run/netns", name).exists():
                _run("ip", "netns", "del", name)

    def _ip(self, node: int, *words: str) -> None:
        _run("ip", "-n", self.names[node], *words)


@contextlib.contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    """Make the namespaces and remove them, with the processes in them, whatever happens."""
    nodes = TwoNodes()
    try:
        nodes._make()
        yield nodes
    finally:
        nodes._remove()


def _enter(name: str) -> None:
    """Move this thread into a namespace."""
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _LIBC.setns(descriptor, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"setns {name}: {os.strerror(number)}")
    finally:
        os.close(descriptor)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"

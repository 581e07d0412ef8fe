"""RPC over the UNIX socket of a node: who may, kills of either side, wake-ups, early replies."""

import contextlib
import dataclasses
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from relax_hpc.control import rpc_client, rpc_near, rpc_server
from relax_hpc.control.identity import Identity
from relax_hpc.control.keys import load_keys
from relax_hpc.control.rpc import Caller, Responder, RpcClient, RpcServer, create_keys
from relax_hpc.control.rpc_message import LinkLostError
from relax_hpc.control.rpc_near import NearLink, near_name
from relax_hpc.errors import DeadlineError, TransferError
from relax_hpc.runfolder import RunFolder, create_run_folder
from tests.stopping import stop


class Text(msgspec.Struct):
    text: str


def _echo(caller: Caller, request: Text, responder: Responder) -> None:
    responder.send(request)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = create_run_folder(tmp_path, "run")
    create_keys(run)
    return run


def _identity(folder: RunFolder, **changes: object) -> Identity:
    base = Identity(run=folder, role="train", node="n1", address_prefix="127.")
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


Start = Callable[..., RpcServer]


@pytest.fixture
def start(folder: RunFolder) -> Iterator[Start]:
    servers: list[RpcServer] = []

    def start(handler: Callable[..., None] = _echo, **changes: object) -> RpcServer:
        server = RpcServer(folder, "echo", _identity(folder, role="dcs", **changes))
        server.register_direct("echo", Text, handler)
        server.start_thread()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()


def _ask(client: RpcClient, text: str = "x", timeout_s: float = 30.0) -> str:
    return client.call("echo", Text(text), Text, timeout_s=timeout_s, why="test").text


def _is_near(client: RpcClient) -> bool:
    return isinstance(client._free[-1].link, NearLink)


def test_only_processes_of_the_node_come_near(folder: RunFolder, start: Start) -> None:
    start()
    here = RpcClient(folder, "echo", _identity(folder))
    there = RpcClient(folder, "echo", _identity(folder, node="n2"))
    assert _ask(here, "a") == "a" and _is_near(here)
    assert _ask(there, "b") == "b" and not _is_near(there)
    here.close()
    there.close()


def test_who_has_other_keys_does_not_find_it(
    folder: RunFolder, start: Start, tmp_path: Path
) -> None:
    server = start()
    other = create_run_folder(tmp_path / "other", "run")
    create_keys(other)
    address = folder.control / "echo.addr"
    (other.control / "echo.addr").write_bytes(address.read_bytes())
    stranger = RpcClient(other, "echo", _identity(other))
    with pytest.raises(DeadlineError):
        _ask(stranger, timeout_s=1.0)
    assert server._published is not None
    assert NearLink.connect(near_name(load_keys(other), server._published.nonce)) is None


def test_another_users_process_is_refused_by_both_ends(
    folder: RunFolder, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_mine = rpc_near._is_mine
    start()

    def refuse_clients(connected: socket.socket) -> bool:
        return not connected.getsockname() and is_mine(connected)

    monkeypatch.setattr(rpc_near, "_is_mine", refuse_clients)
    client = RpcClient(folder, "echo", _identity(folder))
    assert _ask(client, "by TCP") == "by TCP" and not _is_near(client)
    monkeypatch.setattr(rpc_near, "_is_mine", lambda connected: bool(connected.getsockname()))
    other = RpcClient(folder, "echo", _identity(folder))
    assert _ask(other, "by TCP") == "by TCP" and not _is_near(other)


def test_without_a_unix_socket_everybody_comes_by_tcp(
    folder: RunFolder, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no more of them")

    monkeypatch.setattr(rpc_server, "NearServer", refuse)
    start()
    client = RpcClient(folder, "echo", _identity(folder))
    assert _ask(client, "by TCP") == "by TCP" and not _is_near(client)


def test_large_messages_from_many_threads(folder: RunFolder, start: Start) -> None:
    """Larger than any socket buffer: both ends go on with what did not fit."""
    start()
    client = RpcClient(folder, "echo", _identity(folder))
    wrong: list[int] = []

    def work(number: int) -> None:
        text = str(number) * (3 << 20)
        wrong.extend(number for _ in range(3) if _ask(client, text, 60) != text)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and _is_near(client)


def test_a_client_that_reads_nothing_is_cut_off(
    folder: RunFolder, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_near, "_MAX_UNREAD_BYTES", 1 << 20)
    server = start(lambda caller, request, responder: responder.send(Text("y" * (1 << 20))))
    client, other = (RpcClient(folder, "echo", _identity(folder)) for _ in range(2))
    calls = [client.start("echo", Text(""), Text, timeout_s=30, why="test") for _ in range(2)]
    assert len(_ask(other)) == 1 << 20
    link = calls[0]._connection.link  # type: ignore[union-attr]
    with contextlib.suppress(LinkLostError):  # it may be cut off before the last one is sent
        for number in range(8):
            link.send([number.to_bytes(8, "big") + calls[0]._frames[0][8:], calls[0]._frames[1]])
    assert len(calls[1].result().text) == 1 << 20
    assert len(calls[0].result().text) == 1 << 20, "asked again by TCP when it was cut off"
    assert server.is_running


def test_a_length_that_lies_ends_its_connection_and_no_other(
    folder: RunFolder, start: Start
) -> None:
    server = start()
    client = RpcClient(folder, "echo", _identity(folder))
    assert _ask(client) == "x"
    assert server._published is not None
    liar = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    liar.connect(near_name(load_keys(folder), server._published.nonce))
    liar.settimeout(30)
    liar.sendall(struct.pack("<II", 8, (1 << 32) - 9))
    with contextlib.suppress(ConnectionResetError):
        assert liar.recv(1) == b""
    liar.close()
    assert _ask(client) == "x" and _is_near(client)


def test_a_half_message_waits_for_its_other_half(folder: RunFolder, start: Start) -> None:
    start()
    client = RpcClient(folder, "echo", _identity(folder))
    call = client.start("echo", Text("z" * 1000), Text, timeout_s=30, why="test")
    assert call.result().text == "z" * 1000
    link = client._free[-1].link
    assert isinstance(link, NearLink)
    head, body = client._frames("echo", Text("slow"))
    data = struct.pack("<II", len(head), len(body)) + head + body
    for byte in data:
        link._socket.send(bytes([byte]))
    reply = link.receive(30_000)
    assert reply is not None and msgspec.msgpack.decode(reply[1], type=Text).text == "slow"


_SERVICE = """
import pathlib, sys, time
import msgspec
from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import RpcServer
from relax_hpc.runfolder import RunFolder

class Text(msgspec.Struct):
    text: str

run = RunFolder(pathlib.Path(sys.argv[1]))
me = Identity(run=run, role="dcs", node="n1", address_prefix="127.", incarnation=int(sys.argv[2]))
server = RpcServer(run, "echo", me)

def echo(caller, request, responder):
    print("asked", flush=True)
    if sys.argv[3] == "answer":
        responder.send(request)

server.register_direct("echo", Text, echo)
server.on_start(lambda: tell())

async def tell():
    server._loop.call_later(0.1, lambda: print("ready", flush=True))

server.run()
"""


@contextlib.contextmanager
def _service(folder: RunFolder, incarnation: int, what: str) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, "-c", _SERVICE, str(folder.path), str(incarnation), what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_a_call_survives_kill_9_of_the_service_that_holds_it(
    folder: RunFolder, start: Start
) -> None:
    client = RpcClient(folder, "echo", _identity(folder))
    with _service(folder, 1, "hold") as process:
        call = client.start("echo", Text("a"), Text, timeout_s=60, why="test")
        assert process.stdout is not None and process.stdout.readline() == "asked\n"
        process.kill()
        process.wait()
        start(incarnation=2)
        assert call.result().text == "a"
        assert _ask(client, "b") == "b"


def test_a_service_that_was_stopped_answers_when_it_goes_on(folder: RunFolder) -> None:
    """The request came while nobody could be woken: it is there when the service is."""
    client = RpcClient(folder, "echo", _identity(folder))
    with _service(folder, 1, "answer") as process:
        assert _ask(client) == "x" and _is_near(client)
        stop(process.pid)
        try:
            call = client.start("echo", Text("a"), Text, timeout_s=60, why="test")
            with pytest.raises(DeadlineError):
                _ask(client, timeout_s=0.3)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        assert call.result().text == "a"


_CLIENT = """
import pathlib, sys, time
import msgspec
from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import RpcClient
from relax_hpc.runfolder import RunFolder

class Text(msgspec.Struct):
    text: str

run = RunFolder(pathlib.Path(sys.argv[1]))
client = RpcClient(run, "echo", Identity(run=run, role="train", node="n1", address_prefix="127."))
client.call("echo", Text("held"), Text, timeout_s=60, why="test")
"""


def test_kill_9_of_a_client_whose_request_is_held_hurts_nobody(
    folder: RunFolder, start: Start
) -> None:
    held: list[Responder] = []
    came = threading.Event()

    def hold(caller: Caller, request: Text, responder: Responder) -> None:
        if request.text == "held":
            held.append(responder)
            came.set()
            return
        for one in held:
            one.send(Text("y" * (1 << 20)))
        responder.send(request)

    start(hold)
    client = RpcClient(folder, "echo", _identity(folder))
    assert _ask(client) == "x"
    with subprocess.Popen([sys.executable, "-c", _CLIENT, str(folder.path)]) as process:
        try:
            assert came.wait(60)
        finally:
            process.kill()
    assert _ask(client, "a") == "a", "answered in the same turn as the dead one"
    assert _ask(client, "b") == "b" and _is_near(client)


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_an_early_reply_counts_when_it_is_confirmed(
    folder: RunFolder, start: Start, node: str
) -> None:
    held: list[Responder] = []

    def tell(caller: Caller, request: Text, responder: Responder) -> None:
        if request.text == "end":
            held.pop(0).confirm()
            held.pop(0).fail(TransferError("the disk is full"))
            held.pop(0).send(Text("other"))
        else:
            responder.send_early(msgspec.msgpack.encode(request))
            held.append(responder)
            return
        responder.send(request)

    server = start(tell)
    client = RpcClient(folder, "echo", _identity(folder, node=node))
    calls, told = [], []
    for text in "abcd":  # one by one: over several connections they may arrive in any order
        calls.append(client.start("echo", Text(text), Text, timeout_s=30, why="test"))
        told.append(calls[-1].early())
    assert [one.text for one in told if one is not None] == ["a", "b", "c", "d"]
    assert _ask(client, "end") == "end"
    assert calls[0].result() is told[0]
    with pytest.raises(TransferError, match="the disk is full"):
        calls[1].result()
    other = calls[2].result()
    assert other is not told[2] and other.text == "other"
    assert server._loop is not None
    server._loop.call_soon_threadsafe(held.pop().confirm)
    assert calls[3].result() is told[3]


def test_what_was_told_early_by_a_service_that_died_counts_no_more(
    folder: RunFolder, start: Start
) -> None:
    first = start(
        lambda caller, request, responder: responder.send_early(
            msgspec.msgpack.encode(Text("first"))
        )
    )
    client = RpcClient(folder, "echo", _identity(folder))
    call = client.start("echo", Text("x"), Text, timeout_s=60, why="test")
    told = call.early()
    assert told is not None and told.text == "first"
    first.stop()

    def second(caller: Caller, request: Text, responder: Responder) -> None:
        responder.send_early(msgspec.msgpack.encode(Text("second")))
        responder.confirm()

    start(second, incarnation=2)
    result = call.result()
    assert result is not told and result.text == "second"


def test_only_the_early_reply_that_was_told_last_is_confirmed(
    folder: RunFolder, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request was sent twice, and the answer to the second try is another one."""
    monkeypatch.setattr(rpc_client, "_RESEND_S", 0.2)
    held: list[Responder] = []

    def tell(caller: Caller, request: Text, responder: Responder) -> None:
        responder.send_early(msgspec.msgpack.encode(Text(f"try {len(held)}")))
        held.append(responder)
        if len(held) == 2:
            for one in held:
                one.confirm()

    start(tell)
    client = RpcClient(folder, "echo", _identity(folder))
    call = client.start("echo", Text("x"), Text, timeout_s=60, why="test")
    first = call.early()
    assert first is not None and first.text == "try 0"
    assert call.result().text == "try 1"

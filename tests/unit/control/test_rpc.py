"""RPC: real sockets, restarts, strangers, stale incarnations, typed errors, garbage."""

import asyncio
import dataclasses
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import zmq

from relax_hpc.control import rpc_client, rpc_server
from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import PING, Caller, Empty, Responder, RpcClient, RpcServer, create_keys
from relax_hpc.control.rpc_message import ErrorReply, Header, typed_error
from relax_hpc.errors import (
    ControlError,
    DeadlineError,
    RelaxError,
    StaleIncarnationError,
    TransferError,
)
from relax_hpc.runfolder import RunFolder, create_run_folder


class Number(msgspec.Struct):
    value: int


async def _double(caller: Caller, request: Number) -> Number:
    return Number(2 * request.value)


async def _refuse(caller: Caller, request: Empty) -> None:
    raise TransferError("no such row")


async def _crash(caller: Caller, request: Empty) -> None:
    raise ZeroDivisionError("bug")


async def _never(caller: Caller, request: Empty) -> None:
    await asyncio.sleep(3600)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = create_run_folder(tmp_path, "a run 'quoted'")
    create_keys(run)
    return run


@pytest.fixture(params=["near", "far"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Everything holds on both ways: the UNIX socket of a node, and TCP."""
    if request.param == "far":
        monkeypatch.setattr(rpc_client.NearLink, "connect", classmethod(lambda cls, name: None))
    return str(request.param)


def _identity(folder: RunFolder, **changes: object) -> Identity:
    base = Identity(run=folder, role="train", node="n1", address_prefix="127.")
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def _serve(folder: RunFolder, **changes: object) -> RpcServer:
    server = RpcServer(folder, "echo", _identity(folder, role="dcs", **changes))
    server.register("double", Number, _double)
    server.register("refuse", Empty, _refuse)
    server.register("crash", Empty, _crash)
    server.register("never", Empty, _never)
    server.start_thread()
    return server


def _double_of(client: RpcClient, value: int, timeout_s: float = 20.0) -> int:
    return client.call("double", Number(value), Number, timeout_s=timeout_s, why="test").value


def test_many_threads_get_their_own_replies(folder: RunFolder) -> None:
    server = _serve(folder)
    client = RpcClient(folder, "echo", _identity(folder))
    wrong: list[int] = []

    def work(start: int) -> None:
        wrong.extend(i for i in range(start, start + 50) if _double_of(client, i) != 2 * i)

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    client.close()
    server.stop()


def test_errors_travel_by_type(folder: RunFolder) -> None:
    server = _serve(folder)
    client = RpcClient(folder, "echo", _identity(folder))
    with pytest.raises(TransferError, match="no such row"):
        client.call("refuse", Empty(), Empty, timeout_s=10, why="test")
    with pytest.raises(ControlError, match="ZeroDivisionError"):
        client.call("crash", Empty(), Empty, timeout_s=10, why="test")
    with pytest.raises(ControlError, match="no method 'nothing'"):
        client.call("nothing", Empty(), Empty, timeout_s=10, why="test")
    with pytest.raises(ControlError, match="bad request"):
        client.call(
            "double",
            Caller(role="x", index=0, rank=0, incarnation=1, attempt=1),
            Number,
            timeout_s=10,
            why="test",
        )
    assert _double_of(client, 4) == 8
    server.stop()


@pytest.mark.parametrize("method", ["unencodable", "unspeakable"])
def test_what_cannot_be_encoded_is_an_error_of_the_call(folder: RunFolder, method: str) -> None:
    """Not silence until the caller's deadline."""

    async def unencodable(caller: Caller, request: Empty) -> Number:
        return Number(2**70)  # msgpack has 64 bits

    async def unspeakable(caller: Caller, request: Empty) -> None:
        raise TransferError("no file \udcff")  # what os.fsdecode makes of a byte that is no UTF-8

    server = RpcServer(folder, "echo", _identity(folder, role="dcs"))
    server.register("unencodable", Empty, unencodable)
    server.register("unspeakable", Empty, unspeakable)
    server.start_thread()
    client = RpcClient(folder, "echo", _identity(folder))
    expected = {"unencodable": r"echo: internal error", "unspeakable": r"no file \\udcff"}
    with pytest.raises(RelaxError, match=expected[method]) as caught:
        client.call(method, Empty(), Empty, timeout_s=10, why="test")
    assert not isinstance(caught.value, DeadlineError)
    server.stop()


def test_every_server_answers_a_ping(folder: RunFolder) -> None:
    server = RpcServer(folder, "mute", _identity(folder, role="dcs"))
    server.start_thread()
    client = RpcClient(folder, "mute", _identity(folder))
    client.call(PING, Empty(), Empty, timeout_s=10, why="test")
    server.stop()


def test_deadline_names_what_was_waited_for(folder: RunFolder) -> None:
    client = RpcClient(folder, "echo", _identity(folder))
    with pytest.raises(DeadlineError, match=r"echo\.double.*0\.1 s.*test.*no address"):
        _double_of(client, 1, timeout_s=0.1)
    server = _serve(folder)
    with pytest.raises(DeadlineError, match=r"echo\.never.*tcp://127"):
        client.call("never", Empty(), Empty, timeout_s=0.3, why="a reply that never comes")
    assert _double_of(client, 3) == 6, "a late reply must not answer the next call"
    server.stop()


def test_call_in_flight_survives_a_restart(folder: RunFolder) -> None:
    first = _serve(folder)
    client = RpcClient(folder, "echo", _identity(folder))
    assert _double_of(client, 1) == 2
    hung = RpcServer(folder, "echo", _identity(folder, role="dcs", incarnation=2))
    hung.register("double", Number, _never)
    first.stop()
    hung.start_thread()
    result: list[int] = []
    thread = threading.Thread(target=lambda: result.append(_double_of(client, 21, 30)))
    thread.start()
    third = _serve(folder, incarnation=3)  # replaces the address while the call waits
    thread.join()
    assert result == [42]
    hung.stop()
    assert _double_of(client, 5) == 10, "the older server's end must not remove the newer address"
    third.stop()


def test_older_incarnations_are_refused(folder: RunFolder) -> None:
    server = _serve(folder)
    newer: list[int] = []
    server.on_newer(lambda caller: newer.append(caller.incarnation))
    old = RpcClient(folder, "echo", _identity(folder, incarnation=1))
    new = RpcClient(folder, "echo", _identity(folder, incarnation=2))
    assert _double_of(old, 1) == 2
    assert _double_of(new, 1) == 2
    assert newer == [1, 2]
    with pytest.raises(StaleIncarnationError, match="train/0 attempt 1 incarnation 1 was"):
        _double_of(old, 1)
    other = RpcClient(folder, "echo", _identity(folder, role="rollout", index=3))
    assert _double_of(other, 1) == 2, "other roles are not concerned"
    server.stop()


def test_older_attempts_are_refused_both_ways(folder: RunFolder) -> None:
    stale_server = _serve(folder)
    waiting = RpcClient(folder, "echo", _identity(folder, attempt=2))
    with pytest.raises(DeadlineError):
        _double_of(waiting, 1, timeout_s=0.2)  # never talks to the service of attempt 1
    server = _serve(folder, attempt=2)
    assert _double_of(waiting, 1) == 2
    late = RpcClient(folder, "echo", _identity(folder, attempt=1))
    with pytest.raises(StaleIncarnationError):
        _double_of(late, 1)
    with pytest.raises(ControlError, match="did not start"):
        _serve(folder, attempt=1)
    stale_server.stop()
    server.stop()


_STRANGER = """
import sys, zmq
context = zmq.Context()
socket = context.socket(zmq.DEALER)
socket.linger = 0
if sys.argv[2] != "plain":
    public, secret = zmq.curve_keypair()
    socket.curve_publickey, socket.curve_secretkey = public, secret
    socket.curve_serverkey = sys.argv[2].encode()
socket.connect(sys.argv[1])
socket.send_multipart([b"00000001x", b"y"])
print(socket.poll(1500))
"""


def test_strangers_get_nothing(folder: RunFolder) -> None:
    server = _serve(folder)
    server_public = msgspec.json.decode((folder.secret / "curve.json").read_bytes())
    for key in ("plain", zmq.curve_keypair()[0].decode(), server_public["server_public"]):
        command = [sys.executable, "-c", _STRANGER, server.address, key]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert run.stdout.strip() == "0", f"stranger with key {key!r} got an answer"
    client = RpcClient(folder, "echo", _identity(folder))
    assert _double_of(client, 2) == 4
    server.stop()


def test_keys_are_private_and_kept(folder: RunFolder, tmp_path: Path) -> None:
    path = folder.secret / "curve.json"
    before = path.read_bytes()
    create_keys(folder)
    assert path.read_bytes() == before
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(ControlError, match="chmod 600"):
        RpcClient(folder, "echo", _identity(folder))
    path.unlink()
    with pytest.raises(ControlError, match="cannot read the keys"):
        RpcClient(folder, "echo", _identity(folder))


def test_garbage_frames_do_not_stop_the_service(folder: RunFolder) -> None:
    server = _serve(folder)
    client = RpcClient(folder, "echo", _identity(folder))
    assert _double_of(client, 1) == 2
    link = client._free[0].link
    if isinstance(link, rpc_client._FarLink):
        link.socket.send_multipart([b"1"])
    link.send([b"00000001\xc1garbage", b"\xff"])
    reply = link.receive(10_000)
    assert reply is not None and reply[0] == b"00000001error"
    assert _double_of(client, 2) == 4
    server.stop()


def test_error_types_that_are_not_ours_become_control_errors() -> None:
    assert type(typed_error(ErrorReply("SystemExit", "x"))) is ControlError
    assert type(typed_error(ErrorReply("require_extra", "x"))) is ControlError
    assert isinstance(typed_error(ErrorReply("WeightSyncError", "x")), RelaxError)


def test_calls_under_way_at_once_get_their_own_replies(folder: RunFolder) -> None:
    held: list[tuple[Number, Responder]] = []
    turns: list[int] = []

    def hold(caller: Caller, request: Number, responder: Responder) -> None:
        held.append((request, responder))
        while len(held) >= 3:  # the last one first
            number, answer = held.pop()
            answer.send(Number(2 * number.value))
            if not held:
                return
            number, answer = held.pop()
            answer.fail(TransferError(f"no {number.value}"))
            number, answer = held.pop()
            answer.send(Number(3 * number.value))

    server = RpcServer(folder, "echo", _identity(folder, role="dcs"))
    server.register_direct("hold", Number, hold)
    server.on_drained(lambda: turns.append(len(held)))
    server.start_thread()
    client = RpcClient(folder, "echo", _identity(folder))
    calls = [
        client.start("hold", Number(n), Number, timeout_s=20, why="test") for n in (10, 20, 30)
    ]
    seen = []
    for call in reversed(calls):  # each has its own connection: they may arrive in any order
        try:
            seen.append(call.result().value)
        except TransferError as err:
            assert str(err) in ("no 10", "no 20", "no 30")
            seen.append(0)
    assert seen.count(0) == 1
    assert {n for n, value in zip((30, 20, 10), seen, strict=True) if value in (2 * n, 3 * n)} == {
        n for n, value in zip((30, 20, 10), seen, strict=True) if value
    }
    server.stop()
    assert turns[-1] == 0, "replies may leave before the end of their turn"


def test_a_request_without_a_reply_is_sent_again(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a connection that broke unseen, and libzmq made anew."""
    monkeypatch.setattr(rpc_client, "_RESEND_S", 0.5)
    seen: list[int] = []

    def lose_first(caller: Caller, request: Number, responder: Responder) -> None:
        seen.append(request.value)
        if len(seen) > 1:
            responder.send(request)

    server = RpcServer(folder, "echo", _identity(folder, role="dcs"))
    server.register_direct("lose", Number, lose_first)
    server.start_thread()
    client = RpcClient(folder, "echo", _identity(folder))
    assert client.call("lose", Number(5), Number, timeout_s=30, why="test").value == 5
    assert seen == [5, 5]
    server.stop()


def test_a_message_that_is_too_large_ends_its_connection_and_no_other(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_server, "_MAX_REQUEST_BYTES", 1000)
    server = _serve(folder)
    client = RpcClient(folder, "echo", _identity(folder))
    assert _double_of(client, 1) == 2
    big = _Text("x" * 2000)
    with pytest.raises(DeadlineError):
        client.call("double", big, Number, timeout_s=1.0, why="test")
    assert _double_of(client, 2) == 4
    server.stop()


class _Text(msgspec.Struct):
    text: str


def test_a_peer_that_reads_nothing_does_not_hold_up_others(folder: RunFolder) -> None:
    server = _serve(folder)
    client, slow = (RpcClient(folder, "echo", _identity(folder)) for _ in range(2))
    assert _double_of(slow, 1) == 2
    link = slow._free[0].link
    header = msgspec.msgpack.encode(Header("double", slow._caller))
    body = msgspec.msgpack.encode(Number(1))
    for number in range(20_000):
        link.send([number.to_bytes(8, "big") + header, body])
    for value in range(20):
        assert _double_of(client, value) == 2 * value
    link.close()
    server.stop()


def test_a_service_that_cannot_end_its_turn_ends(folder: RunFolder) -> None:
    """Its callers go on with the next start, instead of waiting for what was half done."""
    server = RpcServer(folder, "echo", _identity(folder, role="dcs"))
    server.register("double", Number, _double)
    server.on_drained(lambda: 1 / 0)  # type: ignore[arg-type]
    server.start_thread()
    client = RpcClient(folder, "echo", _identity(folder))
    result: list[int] = []
    thread = threading.Thread(target=lambda: result.append(_double_of(client, 4, 60)))
    thread.start()
    assert server._thread is not None
    server._thread.join(30)
    assert not server.is_running
    again = _serve(folder, incarnation=2)
    thread.join(60)
    assert result == [8]
    again.stop()


_SERVICE = """
import gc, pathlib, sys
from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import RpcServer
from relax_hpc.runfolder import RunFolder
run = RunFolder(pathlib.Path(sys.argv[1]))
server = RpcServer(run, "echo", Identity(run=run, role="dcs", node="n1", address_prefix="127."))
kept = [[number] for number in range(1000)]

async def stop_soon():
    gc.collect()
    server._loop.call_later(0.2, server.stop)

server.on_start(stop_soon)
server.run()
print(gc.get_freeze_count() > len(kept), gc.get_threshold() == sys.modules[
    "relax_hpc.control.rpc_server"]._COLLECT_AFTER)
"""


def test_the_collector_stays_away_from_what_a_service_begins_with(folder: RunFolder) -> None:
    command = [sys.executable, "-c", _SERVICE, str(folder.path)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.split() == ["True", "True"]

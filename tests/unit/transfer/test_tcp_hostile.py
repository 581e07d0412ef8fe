"""Peers of the data server that are not of the run, or bad ones: closed, counted, harmless."""

import functools
import hmac
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from relax_hpc.errors import DeadlineError, TransferError
from relax_hpc.runfolder import create_run_folder
from relax_hpc.transfer import frames
from relax_hpc.transfer.buffers import BufferPool
from relax_hpc.transfer.connections import ServerLimits
from relax_hpc.transfer.frames import Ask, Reply, Request, Trailer, WrongKeyError
from relax_hpc.transfer.tcp import DataClient
from relax_hpc.transfer.tcp_server import DataServer
from relax_hpc.transfer.wire import BlockRef, DataAccess

from .data_server_process import KEY, write_blocks

SIZE = 24 << 20
"""Of a block that no socket buffer holds."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "arenas"


Serve = Callable[..., DataServer]


@pytest.fixture
def serve(folder: Path) -> Iterator[Serve]:
    servers = []

    def start(key: bytes = KEY, **limits: float) -> DataServer:
        server = DataServer({"arenas": folder}, key, "127.0.0.1", ServerLimits(**limits))  # type: ignore[arg-type]
        server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()
        assert server.stats()["connections"] == 0


def read(server: DataServer, refs: list[BlockRef], key: bytes = KEY) -> list[bytes]:
    access = DataAccess(*server.address)
    client = DataClient(key, lambda *_: access, BufferPool())
    try:
        return [bytes(b) for b in client.read_blocks("n1", refs, time.monotonic() + 60)]  # type: ignore[arg-type]
    finally:
        client.close()


def wait_for(server: DataServer, reason: str, count: int = 1) -> None:
    deadline = time.monotonic() + 30
    while server.stats().get(f"end_{reason}", 0) < count:
        assert time.monotonic() < deadline, f"no {reason}: {server.stats()}"
        time.sleep(0.01)


class Peer:
    """A client without the library: sends what it wants."""

    def __init__(self, server: DataServer, key: bytes = KEY, *, greet: bool = True) -> None:
        self.socket = socket.create_connection(server.address, 30)
        if greet:
            self.channel = frames.greet(self.socket, self.receive, key)

    def receive(self, nbytes: int, what: str = "") -> bytes:
        data = b""
        while len(data) < nbytes:
            part = self.socket.recv(nbytes - len(data))
            if not part:
                raise EOFError(what)
            data += part
        return data

    def is_closed(self) -> bool:
        self.socket.settimeout(30)
        try:
            while self.socket.recv(1 << 20):
                pass
        except ConnectionResetError:
            return True
        return True

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


# -- keys -----------------------------------------------------------------------------------------


def test_a_client_with_another_key_learns_nothing(folder: Path, serve: Serve) -> None:
    refs = write_blocks(folder, "x", [100])
    server = serve()
    with Peer(server, greet=False) as peer:
        peer.socket.sendall(frames.MAGIC + bytes(32))
        peer.receive(64)
        peer.socket.sendall(bytes(32))
        assert peer.is_closed()
    wait_for(server, "wrong_key")
    assert len(read(server, refs)) == 1


def test_a_client_recognises_a_server_of_another_run(folder: Path, serve: Serve) -> None:
    refs = write_blocks(folder, "x", [100])
    with pytest.raises(WrongKeyError, match="did not prove this run's key"):
        read(serve(key=b"q" * 32), refs)


def test_an_old_address_that_now_belongs_to_another_run_is_asked_for_anew(
    folder: Path, serve: Serve
) -> None:
    refs = write_blocks(folder, "x", [100])
    stranger, ours = serve(key=b"q" * 32), serve()

    def access(node: str, deadline: float, refresh: bool) -> DataAccess:
        return DataAccess(*(ours if refresh else stranger).address)

    client = DataClient(KEY, access, BufferPool())
    (block,) = client.read_blocks("n1", refs, time.monotonic() + 30)
    assert isinstance(block, memoryview)
    client.close()


def test_the_key_comes_from_the_runs_secrets_only(tmp_path: Path) -> None:
    from relax_hpc.control.rpc import create_keys

    one, two = create_run_folder(tmp_path, "run"), create_run_folder(tmp_path, "run")
    with pytest.raises(TransferError, match="only the user"):
        frames.data_key(one)
    create_keys(one)
    create_keys(two)
    assert frames.data_key(one) == frames.data_key(one) != frames.data_key(two)
    (one.secret / "curve.json").chmod(0o644)
    with pytest.raises(TransferError, match="chmod 600"):
        frames.data_key(one)


def test_a_recorded_request_cannot_be_sent_again(folder: Path, serve: Serve) -> None:
    write_blocks(folder, "x", [100])
    server = serve()
    body = msgspec.msgpack.encode(Request([("arenas", "x")], [], []))
    with Peer(server) as peer:
        mac = hmac.digest(peer.channel._session, b"c" + bytes(8) + body, "sha256")
        recorded = struct.pack("<I", len(body)) + mac + body
        peer.socket.sendall(recorded)
        assert peer.channel.receive(Reply, 1 << 20).is_good
        peer.socket.sendall(recorded)
        assert peer.is_closed()
    wait_for(server, "bad_mac")
    with Peer(server) as peer:
        peer.socket.sendall(recorded)
        assert peer.is_closed()
    wait_for(server, "bad_mac", 2)


# -- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [b"", frames.MAGIC, b"GET / HTTP/1.1\r\n\r\n"])
def test_garbage_ends_the_connection_only(folder: Path, serve: Serve, first: bytes) -> None:
    refs = write_blocks(folder, "x", [100])
    server = serve()
    for seed in range(5):
        with Peer(server, greet=False) as peer:
            peer.socket.sendall(first + random.Random(seed).randbytes(5000))
            assert peer.is_closed()
    wait_for(server, "wrong_key" if first == frames.MAGIC else "garbage", 5)
    assert len(read(server, refs)) == 1


def test_a_length_field_of_2_gb_takes_no_memory(folder: Path, serve: Serve) -> None:
    refs = write_blocks(folder, "x", [100])
    server = serve()
    with Peer(server) as peer:
        peer.socket.sendall(struct.pack("<I", 2**31) + bytes(32))
        assert peer.is_closed()
    wait_for(server, "oversized")
    assert len(read(server, refs)) == 1


@pytest.mark.parametrize(
    "message",
    [
        Reply([1], [], []),
        Ask("nobody", b""),
        Request([("arenas", "x")], [(1, 0, 64)], []),
        Request([("arenas", "x")], [(-1, 0, 64)], []),
        Request([("arenas", "x")], [(0, -64, 64)], []),
        Request([("arenas", "x")], [(0, 0, -64)], []),
        Request([("arenas", "x")], [(0, 2**62, 64)], []),
        Request([("arenas", "x")], [(0, 0, 2**62)], []),
        Request([("arenas", "x")], [], [(0, 2**62, 1)]),
        Request([("arenas", "x")] * 20_001, [], []),
    ],
    ids=lambda m: str(m)[:60],
)
def test_signed_nonsense_ends_the_connection_only(
    folder: Path, serve: Serve, message: msgspec.Struct
) -> None:
    refs = write_blocks(folder, "x", [100])
    server = serve()
    with Peer(server) as peer:
        peer.channel.send(message)
        assert peer.is_closed()
    wait_for(server, "bad_request")
    assert len(read(server, refs)) == 1


def test_a_server_that_answers_garbage_is_a_deadline_error(folder: Path) -> None:
    refs = write_blocks(folder, "x", [100])
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                receive = functools.partial(_receive_all, peer)
                frames.welcome(peer, receive, KEY).receive(Request, 1 << 20)
                peer.sendall(os.urandom(10_000))

    threading.Thread(target=answer, daemon=True).start()
    access = DataAccess(*listener.getsockname())
    client = DataClient(KEY, lambda *_: access, BufferPool())
    with pytest.raises(DeadlineError, match=r"a reply (of|whose)"):
        client.read_blocks("n1", refs, time.monotonic() + 0.5)
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    client.close()


def _receive_all(peer: socket.socket, nbytes: int, what: str) -> bytes:
    return peer.recv(nbytes, socket.MSG_WAITALL)


# -- slow, silent, half closed --------------------------------------------------------------------


def test_a_slow_reader_is_closed_and_others_are_served_meanwhile(
    folder: Path, serve: Serve
) -> None:
    refs = write_blocks(folder, "x", [SIZE])
    server = serve(send_s=0.5)
    with Peer(server) as peer:
        peer.channel.send(Request([("arenas", "x")], [(0, 4096, SIZE)], []))
        assert len(read(server, refs)) == 1, "while the other does not read"
        wait_for(server, "slow_reader")


def test_silent_peers_are_closed_by_what_they_wait_for(folder: Path, serve: Serve) -> None:
    refs = write_blocks(folder, "x", [100])
    server = serve(handshake_s=0.2, request_s=0.2, idle_s=0.6)
    with Peer(server, greet=False) as silent, Peer(server) as idle, Peer(server) as half:
        half.socket.sendall(b"\x10\0")
        wait_for(server, "slow_handshake")
        wait_for(server, "slow_request")
        wait_for(server, "idle")
        assert all(peer.is_closed() for peer in (silent, idle, half))
    assert len(read(server, refs)) == 1


def test_a_peer_that_sends_no_more_still_gets_its_answer(folder: Path, serve: Serve) -> None:
    refs = write_blocks(folder, "x", [100_000])
    server = serve()
    with Peer(server) as peer:
        nbytes = -(-refs[0].nbytes // 64) * 64
        peer.channel.send(Request([("arenas", "x")], [(0, 4096, nbytes)], [(0, 4096, 1)]))
        peer.socket.shutdown(socket.SHUT_WR)
        assert peer.channel.receive(Reply, 1 << 20).is_good
        whole = (folder / "x").read_bytes()
        assert peer.receive(nbytes)[: refs[0].nbytes] == whole[4096 : 4096 + refs[0].nbytes]
        assert peer.channel.receive(Trailer, 1 << 20).stale == []
        assert peer.is_closed()
    wait_for(server, "closed")


def test_peers_that_vanish_in_the_middle(folder: Path, serve: Serve) -> None:
    refs = write_blocks(folder, "x", [SIZE])
    server = serve()
    with Peer(server, greet=False) as peer:
        peer.socket.sendall(frames.MAGIC[:5])
    wait_for(server, "truncated")
    with Peer(server) as peer:
        peer.socket.sendall(b"\x10\0\0")
    wait_for(server, "truncated", 2)
    with Peer(server) as peer:
        peer.channel.send(Request([("arenas", "x")], [(0, 4096, SIZE)], []))
        peer.channel.receive(Reply, 1 << 20)
    wait_for(server, "broken")
    assert len(read(server, refs)) == 1


def test_strangers_do_not_keep_clients_out(folder: Path, serve: Serve) -> None:
    refs = write_blocks(folder, "x", [100])
    server = serve(max_connections=4)
    strangers = [Peer(server, greet=False) for _ in range(8)]
    assert len(read(server, refs)) == 1
    wait_for(server, "crowded_out", 5)
    for stranger in strangers:
        stranger.socket.close()
    clients = [Peer(server) for _ in range(4)]
    for client in clients:  # the server has seen its proof when it answers
        client.channel.send(Request([], [], []))
        client.channel.receive(Reply, 1 << 20)
    with pytest.raises((EOFError, ConnectionError)):
        Peer(server)
    wait_for(server, "too_many")
    for client in clients:
        client.socket.close()


def test_a_file_that_becomes_shorter_while_it_is_sent(
    folder: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = write_blocks(folder, "x", [SIZE])
    server = serve()
    send = DataServer._send_range

    def cut(self: DataServer, *args: object) -> None:
        (folder / "x").write_bytes(b"short")
        send(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(DataServer, "_send_range", cut)
    access = DataAccess(*server.address)
    client = DataClient(KEY, lambda *_: access, BufferPool())
    (result,) = client.read_blocks("n1", refs, time.monotonic() + 30)
    assert isinstance(result, TransferError) and "do not lie in its file of 5 bytes" in str(result)
    wait_for(server, "changed")
    client.close()

"""Peers of a mirror and of its source that lie, know no key, or say nothing; and the key's file."""

import hashlib
import os
import random
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import xxhash

from relax_hpc.dcs.layout import TensorSpec
from relax_hpc.dcs.mirror_chunks import Content
from relax_hpc.dcs.mirror_wire import (
    Ask,
    Chunk,
    Offer,
    Open,
    Wanted,
    create_mirror_key,
    load_mirror_key,
)
from relax_hpc.errors import ConfigError, DeadlineError, TransferError, WeightSyncError
from relax_hpc.transfer.connections import ServerLimits
from relax_hpc.transfer.frames import MAGIC, greet, welcome

from .mirror_bed import random_weights, two_clusters, version, wait_until

KEY = bytes(range(32))


@pytest.fixture
def bed(tmp_path):
    with two_clusters(tmp_path) as bed:
        yield bed


def connect(address):
    sock = socket.create_connection(address, 10)
    sock.settimeout(30)
    return sock


def receiver(sock):
    def receive(nbytes, what):
        data = b""
        while len(data) < nbytes:
            part = sock.recv(nbytes - len(data))
            if not part:
                raise ConnectionError(what)
            data += part
        return data

    return receive


def ended(sock):
    """The peer ends the connection; what it said before is thrown away."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


# -- bad clients of the source ----------------------------------------------------------------


def test_strangers_get_nothing_and_mirrors_do_not_notice(bed):
    weights = random_weights(0)
    bed.a.publish(0, weights)
    source = bed.source(limits=ServerLimits(handshake_s=0.5, request_s=0.5))
    rng, socks = random.Random(0), []
    first_words = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        rng.randbytes(1 << 16),
        MAGIC,
        MAGIC + rng.randbytes(32),
        MAGIC + rng.randbytes(32 + 32),
        b"\xff" * 4096,
    ]
    for words in first_words:
        socks.append(connect(source.address))
        socks[-1].sendall(words)
    mirror = bed.mirror(source.address)
    assert mirror.pull(10) == version(0)
    bed.b.check(version(0), weights)
    for sock in socks:
        assert ended(sock)
        sock.close()
    mirror.close()
    wait_until(lambda: source.stats()["connections"] == 0, "all ended")
    counts = source.stats()
    assert counts["end_garbage"] == 3 and counts["end_wrong_key"] == 1, counts
    assert counts["end_slow_handshake"] == 3 and "end_internal" not in counts, counts


def trusted(bed, source):
    sock = connect(source.address)
    return sock, greet(sock, receiver(sock), bed.key)


def test_a_length_of_2_gb_is_refused_before_memory_is_allocated(bed):
    source = bed.source()
    sock, _ = trusted(bed, source)
    sock.sendall(struct.pack("<I", 2**31) + bytes(32))
    assert ended(sock)
    wait_until(lambda: source.stats().get("end_oversized") == 1, "it is counted")


def test_requests_that_are_nonsense_end_that_connection_only(bed):
    weights = random_weights(0)
    bed.a.publish(0, weights)
    source = bed.source()
    mirror = bed.mirror(source.address)
    assert mirror.pull(10) == version(0)
    for ask in (
        Ask(),
        Ask(chunk=Wanted(-1, version(0), None)),
        Ask(chunk=Wanted(10**12, version(0), None)),
        Open(None, None, None, 1.0),
    ):
        sock, channel = trusted(bed, source)
        channel.send(ask)
        assert ended(sock)
        sock.close()
    sock, channel = trusted(bed, source)
    channel.send(Ask(chunk=Wanted(0, version(77), None)))
    assert channel.receive(Chunk, 4096).nbytes == -1  # gone, and the connection lives
    channel.send(Ask(open=Open(None, version(0), None, -1e9)))
    assert channel.receive(Offer, 4096).version is None
    sock.close()
    wait_until(lambda: source.stats().get("end_bad_request") == 4, "it is counted")
    bed.a.publish(1, weights)
    assert mirror.pull(10) == version(1)


def test_a_request_that_comes_byte_by_byte_is_cut_off(bed):
    source = bed.source(limits=ServerLimits(request_s=0.3))
    sock, _ = trusted(bed, source)
    sock.sendall(b"\x01")
    assert ended(sock)
    wait_until(lambda: source.stats().get("end_slow_request") == 1, "it is counted")


def test_a_mirror_that_reads_nothing_is_cut_off_and_others_are_served(bed):
    specs = [TensorSpec("w", "uint8", (16 << 20,))]
    weights = random_weights(0, specs)
    bed.a.publish(0, weights, specs=specs)
    source = bed.source(limits=ServerLimits(send_s=0.5))
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    sock.settimeout(30)
    sock.connect(source.address)
    channel = greet(sock, receiver(sock), bed.key)
    channel.send(Ask(open=Open(None, None, None, 20.0)))
    assert channel.receive(Offer, 1 << 20).version == version(0)
    for number in range(1000):
        channel.send(Ask(chunk=Wanted(number, version(0), None)))
    mirror = bed.mirror(source.address)
    assert mirror.pull(10) == version(0)
    bed.b.check(version(0), weights, specs)
    wait_until(lambda: source.stats().get("end_slow_reader", 0) > 0, "the reader is cut off")
    sock.close()


def test_both_ends_must_know_the_key(bed, tmp_path):
    other = tmp_path / "other.key"
    create_mirror_key(other)
    source = bed.source()
    bed.key = load_mirror_key(other)
    with pytest.raises(TransferError, match="did not prove this run's key"):
        bed.mirror(source.address).pull(10)


def test_a_port_that_is_taken_is_named(bed):
    source = bed.source()
    command = [sys.executable, "-m", "relax_hpc.steps.mirror", "serve", "--run", bed.a.run.path]
    command += ["--key", bed.key_file, "--listen", f"127.0.0.1:{source.address[1]}"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert child.returncode == 1
    assert f"cannot bind 127.0.0.1 port {source.address[1]}: Address already in" in child.stderr


# -- bad sources of a mirror ------------------------------------------------------------------


class BadSource:
    """Does the handshake, then what the test says with each connection."""

    def __init__(self, key, talk):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._key, self._talk = key, talk
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._converse, args=(sock,), daemon=True).start()

    def _converse(self, sock):
        with sock:
            sock.settimeout(30)
            try:
                channel = welcome(sock, receiver(sock), self._key) if self._key else None
                self._talk(sock, channel)
            except OSError:
                pass

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


@pytest.fixture
def bad(bed):
    made = []

    def make(talk, key=None):
        made.append(BadSource(key, talk))
        return made[-1].address

    yield make
    for source in made:
        source.close()


def test_garbage_and_lengths_of_2_gb_from_a_source_are_errors_at_the_deadline(bed, bad):
    rng = random.Random(0)

    def babble(sock, _):
        sock.sendall(rng.randbytes(100_000))
        ended(sock)

    def boast(sock, channel):
        sock.sendall(struct.pack("<I", 2**31) + bytes(32))
        ended(sock)

    with pytest.raises(TransferError, match="did not prove"):
        bed.mirror(bad(babble), patience_s=1.0).pull(10)
    bed.spool = bed.folder / "second"
    with pytest.raises(DeadlineError, match="a offer of 2147483648 bytes: at most"):
        bed.mirror(bad(boast, bed.key), patience_s=1.0).pull(10)


def test_a_source_that_says_one_byte_now_and_then_is_an_error_at_the_deadline(bed, bad):
    def trickle(sock, channel):
        while True:
            sock.sendall(b"\1")
            threading.Event().wait(0.1)

    with pytest.raises(DeadlineError, match="nothing came for 1 s"):
        bed.mirror(bad(trickle, bed.key), patience_s=1.0).pull(10)


def test_a_source_that_accepts_and_is_silent_is_an_error_at_the_deadline(bed, bad):
    with pytest.raises(DeadlineError, match="no byte of handshake"):
        bed.mirror(bad(lambda sock, _: ended(sock)), patience_s=1.0).pull(10)


SPEC = TensorSpec("w", "bfloat16", (1 << 16,))


@pytest.mark.parametrize(
    ("offer", "match"),
    [
        (Offer(version(0), None, 0, Content([SPEC], [1])), "chunks of 0 bytes"),
        (Offer(version(0), None, 1 << 30, Content([SPEC], [1])), "chunks of 1073741824 bytes"),
        (Offer(version(0), None, 4096, Content([SPEC], [])), "0 checksums of 1 tensors"),
        (Offer(version(0), None, 4096, Content([SPEC, SPEC], [1, 1])), "two tensors of one name"),
        (
            Offer(version(0), None, 4096, Content([TensorSpec("w", "uint8", (2**60,))], [1])),
            "GB are free",
        ),
        (
            Offer(version(0), None, 4096, Content([TensorSpec("w", "uint8", (-4, -4))], [1])),
            "shape",
        ),
        (Offer(version(0), None, 4096, Content([TensorSpec("w", "q8", (4,))], [1])), "dtype 'q8'"),
        (Offer(version(0), version(9), 4096, Content([SPEC], [1])), "a delta against"),
    ],
)
def test_offers_that_no_source_makes_are_refused(bed, bad, offer, match):
    def talk(sock, channel):
        channel.receive(Ask, 4096)
        channel.send(offer)
        ended(sock)

    with pytest.raises(WeightSyncError, match=match):
        bed.mirror(bad(talk, bed.key), patience_s=5.0).pull(10)
    assert bed.b.newest() is None


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("oversized", "of 1099511627776 bytes: at most"),
        ("sha", "changed on the way"),
        ("other", ""),
    ],
)
def test_chunks_that_lie_are_errors_at_the_deadline(bed, bad, kind, match):
    data = bytes(5000)

    def talk(sock, channel):
        while True:
            ask = channel.receive(Ask, 4096)
            if ask.open is not None:
                channel.send(Offer(version(0), None, 4096, Content([SPEC], [1])))
                continue
            number = ask.chunk.number
            sha256 = hashlib.sha256(data).digest() if kind != "sha" else bytes(32)
            if kind == "other":
                number += 1
            nbytes = 2**40 if kind == "oversized" else 100
            channel.send(Chunk(number, nbytes, 0, sha256))
            sock.sendall(data[:100])

    with pytest.raises(DeadlineError, match=f"version 0 .*nothing came for 1 s; 0 bytes.*{match}"):
        bed.mirror(bad(talk, bed.key), patience_s=1.0).pull(10)
    assert bed.b.newest() is None


def test_a_source_whose_checksums_do_not_fit_its_bytes_is_an_error(bed, bad):
    def talk(sock, channel):
        while True:
            ask = channel.receive(Ask, 4096)
            if ask.open is not None:
                spec = TensorSpec("w", "uint8", (4000,))
                channel.send(Offer(version(0), None, 4096, Content([spec], [1])))
                continue
            data = struct.pack("<BBBxII", 2, 0, 0, 0, 4000) + bytes(4000)
            checksum, sha256 = xxhash.xxh3_64_intdigest(data), hashlib.sha256(data).digest()
            channel.send(Chunk(ask.chunk.number, len(data), checksum, sha256))
            sock.sendall(data)

    mirror = bed.mirror(bad(talk, bed.key), patience_s=5.0)
    with pytest.raises(WeightSyncError, match=r"came whole and wrong: weights w: checksum"):
        mirror.pull(10)
    assert bed.b.newest() is None


# -- the key's file ---------------------------------------------------------------------------


def test_a_key_file_is_private_and_never_overwritten(tmp_path):
    path = tmp_path / "mirror.key"
    create_mirror_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    key = load_mirror_key(path)
    assert len(key) == 32 and key.hex() not in path.read_text()
    with pytest.raises(ConfigError, match="not overwritten"):
        create_mirror_key(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"mode 640.*chmod 600"):
        load_mirror_key(path)
    path.chmod(0o600)
    path.write_text("short\n")
    with pytest.raises(ConfigError, match="has 5 bytes: at least 32"):
        load_mirror_key(path)
    with pytest.raises(ConfigError, match="No such file"):
        load_mirror_key(tmp_path / "none")
    with pytest.raises(ConfigError, match="is not a file of user"):
        load_mirror_key(tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="chown needs root")
def test_a_key_file_of_somebody_else_is_refused(tmp_path):
    path = tmp_path / "mirror.key"
    create_mirror_key(path)
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match=r"is not a file of user 0"):
        load_mirror_key(path)


def test_the_key_is_in_no_command_line(bed):
    bed.a.publish(0, random_weights(0))
    child, _ = bed.serve()
    secret = bed.key_file.read_text().strip()
    words = Path(f"/proc/{child.pid}/cmdline").read_bytes()
    assert secret.encode() not in words and str(bed.key_file).encode() in words
    assert msgspec.msgpack.encode(Ask())  # an Ask has no field for a secret

"""RPC client: calls of one process to one service, over restarts of the service."""

import dataclasses
import itertools
import threading
import time
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from relax_hpc.control.identity import Identity
from relax_hpc.control.keys import load_keys
from relax_hpc.control.rpc_message import (
    EARLY,
    NUMBER_BYTES,
    OK,
    SAME,
    Address,
    Caller,
    ErrorReply,
    Header,
    Link,
    LinkLostError,
    digest_of,
    read_address,
    receive_frames,
    send_frames,
    typed_error,
)
from relax_hpc.control.rpc_near import NearLink, near_name
from relax_hpc.errors import ControlError, DeadlineError
from relax_hpc.runfolder import RunFolder

_POLL_ADDRESS_S = 1.0
"""How often a waiting client looks whether the service moved."""
_TRUST_ADDRESS_S = 0.2
"""A call within this time of the last look does not look at all."""
_RESEND_S = 30.0
"""After so long without a reply the connection may have been lost unseen: send again."""
_MAX_IDLE = 16
"""Idle connections that are kept."""

Response = TypeVar("Response", bound=msgspec.Struct)


@dataclasses.dataclass(slots=True)
class _Connection:
    link: Link
    address: Address


class _FarLink:
    """A connection by TCP; libzmq makes it anew when it breaks."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self.socket = socket
        self._wait_ms = -1

    def send(self, frames: list[bytes]) -> None:
        send_frames(self.socket, frames)

    def receive(self, wait_ms: int) -> list[bytes] | None:
        if wait_ms != self._wait_ms:
            self.socket.rcvtimeo = self._wait_ms = wait_ms
        try:
            return receive_frames(self.socket)
        except zmq.Again:
            return None

    def close(self) -> None:
        self.socket.close(linger=0)


class RpcClient:
    """Calls of one process to one service. Thread-safe; each call in flight has its own socket."""

    def __init__(self, folder: RunFolder, service: str, identity: Identity) -> None:
        self._path = folder.control / f"{service}.addr"
        self._service = service
        self._identity = identity
        self._keys = load_keys(folder)
        self._caller = Caller(
            role=identity.role,
            index=identity.index,
            rank=identity.rank,
            incarnation=identity.incarnation,
            attempt=identity.attempt,
        )
        self._headers: dict[str, bytes] = {}
        self._decoders: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {}
        self._free: list[_Connection] = []
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._known: Address | None = None
        self._known_file: tuple[int, int] | None = None
        self._looked_at = -1e9

    def call(
        self,
        method: str,
        request: msgspec.Struct,
        response_type: type[Response],
        *,
        timeout_s: float,
        why: str,
    ) -> Response:
        """Send a request and wait for its reply; survives a restart of the service.

        Args:
            method: name that the server registered.
            request: any msgspec Struct.
            response_type: Struct type to decode the reply into (Empty for none).
            timeout_s: deadline of the whole call, restarts of the service included.
            why: what the caller waits for, for the error message.

        Raises:
            DeadlineError: no reply in time; names service, method, why and the last address.
            StaleIncarnationError: a newer incarnation of this role replaced this process.
            RelaxError: what the handler raised, by class name.
        """
        call = PendingCall(self, method, request, response_type, timeout_s, why)
        return call.result()

    def start(
        self,
        method: str,
        request: msgspec.Struct,
        response_type: type[Response],
        *,
        timeout_s: float,
        why: str,
    ) -> "PendingCall[Response]":
        """Send a request now and wait for its reply later; arguments as in `call`.

        Several calls may be under way at once; the service may answer them in any order, but
        each service handles those of one process in the order they were sent.
        """
        call = PendingCall(self, method, request, response_type, timeout_s, why)
        call.send()
        return call

    def close(self) -> None:
        """Close idle sockets. Calls that are in flight in other threads end by themselves."""
        with self._lock:
            connections, self._free = self._free, []
        for connection in connections:
            connection.link.close()

    # -- for PendingCall ----------------------------------------------------------------------

    def _frames(self, method: str, request: msgspec.Struct) -> list[bytes]:
        header = self._headers.get(method)
        if header is None:
            header = msgspec.msgpack.encode(Header(method, self._caller))
            self._headers[method] = header
        number = next(self._numbers).to_bytes(NUMBER_BYTES, "big")
        return [number + header, msgspec.msgpack.encode(request)]

    def _decode(
        self, method: str, status: bytes, body: bytes, response_type: type[Response]
    ) -> Response:
        decoder = self._decoders.get(response_type)
        if decoder is None:
            decoder = self._decoders[response_type] = msgspec.msgpack.Decoder(response_type)
        try:
            if status in (OK, EARLY):
                answer: Response = decoder.decode(body)
                return answer
            error = msgspec.msgpack.decode(body, type=ErrorReply)
        except msgspec.DecodeError as err:
            raise ControlError(f"{self._service}.{method}: unreadable reply: {err}") from err
        raise typed_error(error)

    def _look(self, *, is_urgent: bool) -> Address | None:
        """Return the service's present address; a look may be `_TRUST_ADDRESS_S` old."""
        now = time.monotonic()
        if not is_urgent and self._known is not None and now - self._looked_at < _TRUST_ADDRESS_S:
            return self._known
        try:
            stat = self._path.stat()
            file = (stat.st_mtime_ns, stat.st_ino)
        except OSError:
            file = None  # read_address tells what is wrong with it
        if file is None or file != self._known_file or self._known is None:
            self._known, self._known_file = read_address(self._path), file
        self._looked_at = now
        if self._known is not None and self._known.attempt < self._identity.attempt:
            return None  # left behind by an earlier attempt: wait for ours
        return self._known

    def _take(
        self, deadline: float, *, is_urgent: bool, lost: Address | None
    ) -> _Connection | None:
        """Return a connection to the service's present address; None at the deadline.

        Args:
            deadline: of the call.
            is_urgent: the address may just have changed.
            lost: where a near connection of this call broke: another one is made by TCP.
        """
        pause_s = 0.02
        while (address := self._look(is_urgent=is_urgent)) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _POLL_ADDRESS_S)
            is_urgent = True
        while (connection := self._take_idle()) is not None:
            is_lost = address == lost and isinstance(connection.link, NearLink)
            if connection.address == address and not is_lost:
                return connection
            connection.link.close()
        return self._connect(address, is_near=address != lost)

    def _take_idle(self) -> _Connection | None:
        with self._lock:
            return self._free.pop() if self._free else None

    def _connect(self, address: Address, *, is_near: bool) -> _Connection:
        if is_near and address.node == self._identity.node:
            near = NearLink.connect(near_name(self._keys, address.nonce))
            if near is not None:
                return _Connection(near, address)
        with self._lock:
            if self._context is None:
                self._context = zmq.Context.instance()
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.curve_serverkey = self._keys.server_public.encode()
        socket.curve_publickey = self._keys.client_public.encode()
        socket.curve_secretkey = self._keys.client_secret.encode()
        socket.connect(address.address)
        return _Connection(_FarLink(socket), address)

    def _give_back(self, connection: _Connection, *, is_reusable: bool) -> None:
        with self._lock:
            if is_reusable and len(self._free) < _MAX_IDLE:
                self._free.append(connection)
                return
        connection.link.close()

    @property
    def _place(self) -> str:
        return f"look into the dcs step's log or {self._path}"


class PendingCall(Generic[Response]):
    """A request under way. Use it from one thread; `result()` once."""

    def __init__(
        self,
        client: RpcClient,
        method: str,
        request: msgspec.Struct,
        response_type: type[Response],
        timeout_s: float,
        why: str,
    ) -> None:
        self._client = client
        self._method = method
        self._response_type = response_type
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._why = why
        self._frames = client._frames(method, request)
        self._connection: _Connection | None = None
        self._last = "no address published"
        self._lost: Address | None = None
        """Where a near connection broke."""
        self._early: Response | None = None
        self._digest = b""
        """Of the early reply."""
        self._reply: list[bytes] | None = None
        """The final reply, when it came while an early one was waited for."""

    def send(self) -> bool:
        """Send (again), waiting for an address until the deadline; False: there was none."""
        while True:
            is_urgent = self._lost is not None
            connection = self._client._take(self._deadline, is_urgent=is_urgent, lost=self._lost)
            if connection is None:
                return False
            self._connection, self._last = connection, connection.address.address
            try:
                connection.link.send(self._frames)
            except LinkLostError:
                self._lost = connection.address
                self._give_up()
                continue  # the next one is by TCP, or to another start of the service
            return True

    def early(self) -> Response | None:
        """Wait for what the reply will be, as far as it is told early; None: it is not.

        The caller may prepare for it, but act only when `result` returns that very object.
        """
        if self._connection is not None or self.send():
            self._reply = self._receive(is_early_enough=True)
        return self._early if self._reply is None else None

    def result(self) -> Response:
        """Wait for the reply; raises as `RpcClient.call`."""
        while True:
            if self._reply is not None:
                return self._open(self._reply)
            if self._connection is not None or self.send():
                self._reply = self._receive()
                if self._reply is not None:
                    continue
            if time.monotonic() >= self._deadline:
                client = self._client
                raise DeadlineError(
                    f"no reply of service {client._service}.{self._method} in {self._timeout_s:g} "
                    f"s ({self._why}); last address: {self._last}; {client._place}"
                )

    def close(self) -> None:
        """Give the call up: its reply, if it still comes, is lost."""
        self._end(is_reusable=False)

    def _open(self, reply: list[bytes]) -> Response:
        head, body = reply
        status = head[NUMBER_BYTES:]
        if status == SAME:
            assert self._early is not None
            return self._early
        return self._client._decode(self._method, status, body, self._response_type)

    def _end(self, *, is_reusable: bool) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._client._give_back(connection, is_reusable=is_reusable)

    def _give_up(self) -> None:
        """The connection is no good: what it told early counts no more."""
        self._early, self._digest = None, b""
        self._end(is_reusable=False)

    def _receive(self, *, is_early_enough: bool = False) -> list[bytes] | None:
        """Wait for the reply, or until one is told early.

        None: it is told early, or the connection was closed: the service moved, the connection
        broke or the deadline passed.
        """
        connection, reply = self._connection, None
        assert connection is not None
        try:
            reply = self._wait(connection, is_early_enough)
        except LinkLostError:
            self._lost = connection.address
        except BaseException:
            self._give_up()
            raise
        if reply is None:
            self._give_up()
            return None
        if reply[0][NUMBER_BYTES:] == EARLY:
            return None
        self._end(is_reusable=True)
        return reply

    def _wait(self, connection: _Connection, is_early_enough: bool) -> list[bytes] | None:
        number = self._frames[0][:NUMBER_BYTES]
        resend_at = time.monotonic() + _RESEND_S
        while (left_s := self._deadline - (now := time.monotonic())) > 0:
            if now > resend_at:
                connection.link.send(self._frames)
                resend_at = now + _RESEND_S
            reply = connection.link.receive(int(1000 * min(left_s, _POLL_ADDRESS_S)) + 1)
            if reply is None:
                if self._client._look(is_urgent=True) != connection.address:
                    return None
                continue
            if len(reply) != 2 or reply[0][:NUMBER_BYTES] != number:
                continue  # of an earlier try
            status = reply[0][NUMBER_BYTES:]
            if status == SAME and reply[1] != self._digest:
                continue  # that one was lost, or replaced by the answer to a later try
            if status == EARLY:
                self._early, self._digest = self._open(reply), digest_of(reply[1])
                if not is_early_enough:
                    continue
            return reply
        return None

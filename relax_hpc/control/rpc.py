"""Requests and replies between the processes of a run: pyzmq + msgspec, encrypted with CURVE.

client (any process)                         server (one asyncio loop, port 0)
  call(method, request) --- ROUTER/DEALER --->  async handler(caller, request)
     waits for a reply, re-reads               may await (long-poll); its reply or the RelaxError
     RUN/control/SERVICE.addr every second     that it raised goes back
     and sends again when the service moved

Delivery: a request is sent again when the service was restarted, so a handler may see it twice
and must be idempotent or carry a key of its own. Replies of an earlier request never reach a later
one (request ids, and a socket whose wait ended at the deadline is closed, not reused).
Nothing received is unpickled or evaluated: msgspec decodes into declared types only.
"""

import asyncio
import dataclasses
import itertools
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from relax_hpc import errors
from relax_hpc.control.identity import OBSERVER, Identity
from relax_hpc.errors import ControlError, DeadlineError, RelaxError, StaleIncarnationError
from relax_hpc.log import kv
from relax_hpc.runfolder import RunFolder, write_atomic, write_secret

logger = logging.getLogger(__name__)

_POLL_ADDRESS_S = 1.0
"""How often a waiting client looks whether the service moved."""


PING = "ping"
"""Method that every server answers: its loop turns."""


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who sent a request; filled by the client from its Identity."""

    role: str
    index: int
    rank: int
    incarnation: int
    attempt: int


class Empty(msgspec.Struct, frozen=True):
    """A request or reply without content."""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Content of RUN/control/SERVICE.addr."""

    address: str
    """tcp://IP:PORT"""
    pid: int
    node: str
    attempt: int
    incarnation: int
    nonce: str = ""
    """Differs between two starts, so that a restart on the same port is seen."""


class _Header(msgspec.Struct, frozen=True):
    method: str
    caller: Caller


class _ErrorReply(msgspec.Struct, frozen=True):
    kind: str
    message: str


Handler = Callable[[Caller, Any], Awaitable[msgspec.Struct | None]]
Response = TypeVar("Response", bound=msgspec.Struct)

# ---------------------------------------------------------------------------------------------
# Keys
# ---------------------------------------------------------------------------------------------


class _Keys(msgspec.Struct, frozen=True):
    server_public: str
    server_secret: str
    client_public: str
    client_secret: str


def create_keys(folder: RunFolder) -> None:
    """Make the run's CURVE keys once, at submit time: RUN/secret/curve.json, mode 0600.

    A second call keeps the keys: a requeued job goes on with the same ones.
    """
    path = folder.secret / "curve.json"
    if path.exists():
        return
    folder.secret.mkdir(mode=0o700, exist_ok=True)
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    keys = _Keys(
        server_public.decode(),
        server_secret.decode(),
        client_public.decode(),
        client_secret.decode(),
    )
    write_secret(path, msgspec.json.encode(keys))


def _load_keys(folder: RunFolder) -> _Keys:
    path = folder.secret / "curve.json"
    try:
        data, mode = path.read_bytes(), path.stat().st_mode
    except OSError as err:
        raise ControlError(
            f"cannot read the keys of run {folder.run_id} ({path}: {err.strerror}): only the user "
            "who submitted the run can talk to it"
        ) from err
    if mode & 0o077:
        raise ControlError(f"{path} can be read by others (mode {mode & 0o777:o}): chmod 600 it")
    try:
        return msgspec.json.decode(data, type=_Keys)
    except msgspec.DecodeError as err:
        raise ControlError(f"{path} is not a key file: {err}") from err


# ---------------------------------------------------------------------------------------------
# Server
# ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Method:
    decoder: msgspec.msgpack.Decoder[Any]
    handler: Handler


class _KnownClient:
    """Credentials callback of pyzmq's authenticator: the run's client key and no other."""

    def __init__(self, public: str) -> None:
        self._public = public.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


class RpcServer:
    """One service of the control plane: one asyncio loop, one ROUTER socket on a free port.

    Register handlers, then `run()` in the main thread or `start_thread()`. Handlers run in the
    loop: what blocks (files) belongs into `asyncio.to_thread`.
    """

    def __init__(self, folder: RunFolder, service: str, identity: Identity) -> None:
        self._folder = folder
        self._service = service
        self._identity = identity
        self._keys = _load_keys(folder)
        self._methods: dict[str, _Method] = {}
        self._newest: dict[tuple[str, int], tuple[int, int]] = {}
        self._on_newer: list[Callable[[Caller], None]] = []
        self._on_start: list[Callable[[], Awaitable[None]]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._stop_asked = False
        self._failure: BaseException | None = None
        self._started = threading.Event()
        self._thread: threading.Thread | None = None
        self._published: Address | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.register(PING, Empty, _pong)

    def register(self, method: str, request_type: type[Any], handler: Handler) -> None:
        """Serve `method`: `handler(caller, request)` returns a Struct or None (= Empty)."""
        self._methods[method] = _Method(msgspec.msgpack.Decoder(request_type), handler)

    def on_newer(self, hook: Callable[[Caller], None]) -> None:
        """Call `hook` in the loop when a (role, index) is seen with a newer incarnation."""
        self._on_newer.append(hook)

    def on_start(self, hook: Callable[[], Awaitable[None]]) -> None:
        """Await `hook` in the loop before the first request is read."""
        self._on_start.append(hook)

    def seed_incarnation(self, role: str, index: int, attempt: int, incarnation: int) -> None:
        """Know an incarnation from a journal: older ones are refused from the first request on."""
        known = self._newest.get((role, index), (0, 0))
        self._newest[(role, index)] = max(known, (attempt, incarnation))

    @property
    def address(self) -> str:
        """tcp://IP:PORT, once started."""
        if self._published is None:
            raise ControlError(f"service {self._service} has not started yet")
        return self._published.address

    @property
    def is_running(self) -> bool:
        """True while the thread of `start_thread` serves."""
        return self._thread is not None and self._thread.is_alive()

    def run(self) -> None:
        """Serve until `stop()`; re-raises what `fail()` was given."""
        try:
            asyncio.run(self._serve())
        finally:
            self._started.set()
        if self._failure is not None:
            raise self._failure

    def start_thread(self, timeout_s: float = 30.0) -> None:
        """Serve in a daemon thread; returns when the address is published.

        Raises:
            ControlError: the service did not start.
        """
        self._thread = threading.Thread(
            target=self._run_thread, name=f"rpc-{self._service}", daemon=True
        )
        self._thread.start()
        if not self._started.wait(timeout_s) or self._published is None:
            raise ControlError(
                f"service {self._service} did not start in {timeout_s:g} s on {self._identity.node}"
            ) from self._failure

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the loop; waiting requests get no reply and are sent again to the next start."""
        self._stop_asked = True
        if self._loop is not None and self._stopping is not None and not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self._stopping.set)
            except RuntimeError as err:  # the loop closed between the check and the call
                logger.info("stop %s", kv(service=self._service, note=str(err)))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def fail(self, failure: BaseException) -> None:
        """End the service with an error (called in the loop): its state cannot be trusted."""
        self._failure = failure
        if self._stopping is not None:
            self._stopping.set()

    def _run_thread(self) -> None:
        try:
            self.run()
        except BaseException as err:
            self._failure = err
            logger.exception("service ended %s", kv(service=self._service))
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        if self._stop_asked:
            return
        context = zmq.asyncio.Context()
        auth = AsyncioAuthenticator(context)
        auth.start()
        auth.configure_curve_callback(credentials_provider=_KnownClient(self._keys.client_public))
        socket = context.socket(zmq.ROUTER)
        try:
            for hook in self._on_start:
                await hook()
            self._bind(socket)
            await self._read_until_stopped(socket)
        finally:
            await self._cancel_tasks()
            self._unpublish()
            socket.close(linger=200)
            auth.stop()
            context.term()

    def _bind(self, socket: zmq.asyncio.Socket) -> None:
        socket.curve_server = True
        socket.curve_secretkey = self._keys.server_secret.encode()
        socket.curve_publickey = self._keys.server_public.encode()
        ip = self._identity.bind_address()
        socket.bind(f"tcp://{ip}:*")  # the kernel chooses a free port
        self._publish(socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def _publish(self, endpoint: str) -> None:
        me = self._identity
        path = self._folder.control / f"{self._service}.addr"
        other = _read_address(path)
        if other and (other.attempt, other.incarnation) > (me.attempt, me.incarnation):
            raise StaleIncarnationError(
                f"service {self._service} of attempt {me.attempt} incarnation {me.incarnation} on "
                f"{me.node}: {path} belongs to attempt {other.attempt} incarnation "
                f"{other.incarnation} on {other.node}, which replaced this process"
            )
        self._published = Address(
            address=endpoint,
            pid=os.getpid(),
            node=me.node,
            attempt=me.attempt,
            incarnation=me.incarnation,
            nonce=os.urandom(8).hex(),
        )
        write_atomic(path, msgspec.json.encode(self._published), mode=0o600)
        logger.info("serving %s", kv(service=self._service, address=endpoint, node=me.node))
        self._started.set()

    def _unpublish(self) -> None:
        path = self._folder.control / f"{self._service}.addr"
        if self._published is not None and _read_address(path) == self._published:
            path.unlink(missing_ok=True)

    async def _read_until_stopped(self, socket: zmq.asyncio.Socket) -> None:
        assert self._stopping is not None
        stopping = asyncio.ensure_future(self._stopping.wait())
        while not self._stopping.is_set():
            receive = asyncio.ensure_future(socket.recv_multipart())
            await asyncio.wait({receive, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not receive.done():
                receive.cancel()
                break
            task = asyncio.ensure_future(self._answer(socket, receive.result()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        stopping.cancel()

    async def _cancel_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, socket: zmq.asyncio.Socket, frames: list[bytes]) -> None:
        if len(frames) != 4:
            logger.warning("request ignored %s", kv(service=self._service, frames=len(frames)))
            return
        peer, request_id, header, body = frames
        try:
            reply = await self._handle(header, body)
            # Inside: a reply that cannot be encoded is a failure of the handler.
            status, encoded = b"ok", msgspec.msgpack.encode(Empty() if reply is None else reply)
        except RelaxError as err:
            status, encoded = b"error", _encode_error(type(err).__name__, str(err))
        except Exception as err:
            logger.exception("handler failed %s", kv(service=self._service))
            message = f"service {self._service}: internal error {err!r}, see its log"
            status, encoded = b"error", _encode_error("ControlError", message)
        await socket.send_multipart([peer, request_id, status, encoded])

    async def _handle(self, header: bytes, body: bytes) -> msgspec.Struct | None:
        try:
            head = msgspec.msgpack.decode(header, type=_Header)
        except msgspec.DecodeError as err:
            raise ControlError(f"service {self._service}: unreadable request: {err}") from err
        self._check_incarnation(head.caller)
        method = self._methods.get(head.method)
        if method is None:
            raise ControlError(f"service {self._service} has no method {head.method!r}")
        try:
            request = method.decoder.decode(body)
        except msgspec.DecodeError as err:
            raise ControlError(f"{self._service}.{head.method}: bad request: {err}") from err
        return await method.handler(head.caller, request)

    def _check_incarnation(self, caller: Caller) -> None:
        if caller.role == OBSERVER:
            return
        seen = (caller.attempt, caller.incarnation)
        key = (caller.role, caller.index)
        newest = self._newest.get(key, (self._identity.attempt, 0))
        if seen < newest:
            raise StaleIncarnationError(
                f"{caller.role}/{caller.index} attempt {seen[0]} incarnation {seen[1]} was "
                f"replaced: {self._service} knows attempt {newest[0]} incarnation {newest[1]}; "
                "this process must end"
            )
        if seen > newest:
            self._newest[key] = seen
            for hook in self._on_newer:
                hook(caller)


async def _pong(_: Caller, __: Empty) -> None:
    return None


def _encode_error(kind: str, message: str) -> bytes:
    """Encode what a caller must get in any case: names of files may be no valid Unicode."""
    text = message.encode(errors="backslashreplace").decode()
    return msgspec.msgpack.encode(_ErrorReply(kind, text))


# ---------------------------------------------------------------------------------------------
# Client
# ---------------------------------------------------------------------------------------------


def _read_address(path: Path) -> Address | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Address)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as err:
        raise ControlError(f"cannot read service address {path}: {err}") from err


@dataclasses.dataclass(slots=True)
class _Connection:
    socket: "zmq.Socket[bytes]"
    address: Address


class RpcClient:
    """Calls of one process to one service. Thread-safe; each call in flight has its own socket."""

    def __init__(self, folder: RunFolder, service: str, identity: Identity) -> None:
        self._path = folder.control / f"{service}.addr"
        self._service = service
        self._identity = identity
        self._keys = _load_keys(folder)
        self._caller = Caller(
            role=identity.role,
            index=identity.index,
            rank=identity.rank,
            incarnation=identity.incarnation,
            attempt=identity.attempt,
        )
        self._free: list[_Connection] = []
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

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
        deadline = time.monotonic() + timeout_s
        frames = [
            next(self._numbers).to_bytes(8, "big"),
            msgspec.msgpack.encode(_Header(method, self._caller)),
            msgspec.msgpack.encode(request),
        ]
        last = "no address published"
        while True:
            connection = self._take(deadline)
            if connection is not None:
                last = connection.address.address
                reply = self._exchange(connection, frames, deadline)
                if reply is not None:
                    return self._decode(method, reply, response_type)
            if time.monotonic() >= deadline:
                raise DeadlineError(
                    f"no reply of service {self._service}.{method} in {timeout_s:g} s ({why}); "
                    f"last address: {last}; look into the dcs step's log or {self._path}"
                )

    def close(self) -> None:
        """Close idle sockets. Calls that are in flight in other threads end by themselves."""
        with self._lock:
            connections, self._free = self._free, []
        for connection in connections:
            connection.socket.close(linger=0)

    def _decode(self, method: str, reply: list[bytes], response_type: type[Response]) -> Response:
        _, status, body = reply
        try:
            if status == b"ok":
                return msgspec.msgpack.decode(body, type=response_type)
            error = msgspec.msgpack.decode(body, type=_ErrorReply)
        except msgspec.DecodeError as err:
            raise ControlError(f"{self._service}.{method}: unreadable reply: {err}") from err
        raise _typed_error(error)

    def _current_address(self) -> Address | None:
        address = _read_address(self._path)
        if address is not None and address.attempt < self._identity.attempt:
            return None  # left behind by an earlier attempt: wait for ours
        return address

    def _take(self, deadline: float) -> _Connection | None:
        """Return a connection to the service's present address; None at the deadline."""
        pause_s = 0.02
        while (address := self._current_address()) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _POLL_ADDRESS_S)
        with self._lock:
            while self._free:
                connection = self._free.pop()
                if connection.address == address:
                    return connection
                connection.socket.close(linger=0)
        return self._connect(address)

    def _connect(self, address: Address) -> _Connection:
        with self._lock:
            if self._context is None:
                self._context = zmq.Context.instance()
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.curve_serverkey = self._keys.server_public.encode()
        socket.curve_publickey = self._keys.client_public.encode()
        socket.curve_secretkey = self._keys.client_secret.encode()
        socket.connect(address.address)
        return _Connection(socket, address)

    def _exchange(
        self, connection: _Connection, frames: list[bytes], deadline: float
    ) -> list[bytes] | None:
        """Send and wait; None when the service moved or the deadline passed (socket closed)."""
        is_reusable = False
        try:
            connection.socket.send_multipart(frames)
            while (left_s := deadline - time.monotonic()) > 0:
                wait_ms = int(1000 * min(left_s, _POLL_ADDRESS_S)) + 1
                if connection.socket.poll(wait_ms):
                    reply = connection.socket.recv_multipart()
                    if len(reply) == 3 and reply[0] == frames[0]:
                        is_reusable = True
                        return reply
                elif self._current_address() != connection.address:
                    return None
            return None
        finally:
            if is_reusable:
                with self._lock:
                    self._free.append(connection)
            else:
                connection.socket.close(linger=0)


def _typed_error(reply: _ErrorReply) -> RelaxError:
    kind = getattr(errors, reply.kind, None)
    if isinstance(kind, type) and issubclass(kind, RelaxError):
        return kind(reply.message)
    return ControlError(f"{reply.kind}: {reply.message}")

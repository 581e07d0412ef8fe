"""RPC server: one asyncio loop, one ROUTER socket on a free port, one UNIX socket for the node.

A turn of the loop reads every message that has arrived, answers what can be answered, then calls
the `on_drained` hooks, so that a service can decide and write once for all of them.
"""

import asyncio
import dataclasses
import gc
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from relax_hpc.control.identity import OBSERVER, Identity
from relax_hpc.control.keys import load_keys
from relax_hpc.control.rpc_message import (
    EARLY,
    ERROR,
    NUMBER_BYTES,
    OK,
    PING,
    SAME,
    Address,
    Caller,
    Empty,
    Header,
    Peer,
    digest_of,
    encode_error,
    read_address,
    receive_frames,
    send_frames,
)
from relax_hpc.control.rpc_near import NearPeer, NearServer, near_name
from relax_hpc.errors import ControlError, RelaxError, StaleIncarnationError
from relax_hpc.log import kv
from relax_hpc.runfolder import RunFolder, write_atomic

logger = logging.getLogger(__name__)

_MAX_TURN = 256
"""Messages read in one turn of the loop: then timers and tasks get theirs."""
_MAX_REQUEST_BYTES = 1 << 30
"""A larger message ends its connection before memory is taken for it (ZMQ_MAXMSGSIZE)."""
_MAX_HEADERS = 10_000
"""Decoded headers that are kept: one per client and method, tens of thousands of ranks at most."""
_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
"""Plain integers: see rpc_message."""
_COLLECT_AFTER = (5_000, 20, 20)
"""gc thresholds of a service process. A full collection of a queue with 4,096 groups takes 40 ms,
in which nobody is answered, and finds nothing: what a service keeps is in no cycle."""
_EMPTY = msgspec.msgpack.encode(Empty())


class Responder:
    """The way back to one request. Used once, in the loop, now or later."""

    __slots__ = ("_early", "_number", "_peer", "_service")

    def __init__(self, service: str, peer: Peer, number: bytes) -> None:
        self._service = service
        self._peer = peer
        self._number = number
        self._early = b""

    def send(self, reply: msgspec.Struct | None) -> None:
        """Answer with a Struct; None = Empty."""
        self.send_encoded(_EMPTY if reply is None else msgspec.msgpack.encode(reply))

    def send_encoded(self, body: bytes) -> None:
        """Answer with what msgspec.msgpack.encode returned."""
        self._peer.answer(self._number + OK, body)

    def send_early(self, body: bytes) -> None:
        """Tell what the answer will be; `confirm`, `fail` or another answer must follow."""
        self._early = digest_of(body)
        self._peer.answer(self._number + EARLY, body)

    def confirm(self) -> None:
        """Answer with what was told early."""
        self._peer.answer(self._number + SAME, self._early)

    def fail(self, err: Exception) -> None:
        """Answer with an error."""
        self._peer.answer(self._number + ERROR, encode_error(err, self._service))


class _FarPeer:
    """A client of the ROUTER socket."""

    __slots__ = ("_client", "_server")

    def __init__(self, server: "RpcServer", client: bytes) -> None:
        self._server = server
        self._client = client

    def answer(self, head: bytes, body: bytes) -> None:
        self._server.answer([self._client, head, body])


Handler = Callable[[Caller, Any], Awaitable[msgspec.Struct | None]]
DirectHandler = Callable[[Caller, Any, Responder], None]


@dataclasses.dataclass(frozen=True, slots=True)
class _Method:
    name: str
    decoder: msgspec.msgpack.Decoder[Any]
    handler: Handler | None
    direct: DirectHandler | None


class _KnownClient:
    """Credentials callback of pyzmq's authenticator: the run's client key and no other."""

    def __init__(self, public: str) -> None:
        self._public = public.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


class RpcServer:
    """One service of the control plane.

    Register handlers, then `run()` in the main thread or `start_thread()`. Handlers run in the
    loop: what blocks (files) belongs into `asyncio.to_thread`.
    """

    def __init__(self, folder: RunFolder, service: str, identity: Identity) -> None:
        self.service = service
        self._folder = folder
        self._identity = identity
        self._keys = load_keys(folder)
        self._methods: dict[str, _Method] = {}
        self._headers: dict[bytes, tuple[Caller, _Method]] = {}
        self._header_decoder = msgspec.msgpack.Decoder(Header)
        self._newest: dict[tuple[str, int], tuple[int, int]] = {}
        self._on_newer: list[Callable[[Caller], None]] = []
        self._on_start: list[Callable[[], Awaitable[None]]] = []
        self._on_stop: list[Callable[[], None]] = []
        self._on_drained: list[Callable[[], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._stop_asked = False
        self._failure: BaseException | None = None
        self._started = threading.Event()
        self._thread: threading.Thread | None = None
        self._published: Address | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket: zmq.Socket[bytes] | None = None
        self._is_turn_planned = False
        self._near: NearServer | None = None
        self._is_end_planned = False
        self.register(PING, Empty, _pong)

    def register(self, method: str, request_type: type[Any], handler: Handler) -> None:
        """Serve `method`: `handler(caller, request)` returns a Struct or None (= Empty)."""
        decoder = msgspec.msgpack.Decoder(request_type)
        self._methods[method] = _Method(method, decoder, handler, None)

    def register_direct(self, method: str, request_type: type[Any], handler: DirectHandler) -> None:
        """Serve `method` without a task: `handler(caller, request, responder)` never waits.

        It answers through the responder, now or later in the loop; what it raises is the answer.
        """
        decoder = msgspec.msgpack.Decoder(request_type)
        self._methods[method] = _Method(method, decoder, None, handler)

    def on_newer(self, hook: Callable[[Caller], None]) -> None:
        """Call `hook` in the loop when a (role, index) is seen with a newer incarnation."""
        self._on_newer.append(hook)

    def on_start(self, hook: Callable[[], Awaitable[None]]) -> None:
        """Await `hook` in the loop before the first request is read."""
        self._on_start.append(hook)

    def on_stop(self, hook: Callable[[], None]) -> None:
        """Call `hook` at the end, after the last request."""
        self._on_stop.append(hook)

    def on_drained(self, hook: Callable[[], None]) -> None:
        """Call `hook` in the loop after each turn that read requests."""
        self._on_drained.append(hook)

    def seed_incarnation(self, role: str, index: int, attempt: int, incarnation: int) -> None:
        """Know an incarnation from a journal: older ones are refused from the first request on."""
        known = self._newest.get((role, index), (0, 0))
        self._newest[(role, index)] = max(known, (attempt, incarnation))

    @property
    def address(self) -> str:
        """tcp://IP:PORT, once started."""
        if self._published is None:
            raise ControlError(f"service {self.service} has not started yet")
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
            target=self._run_thread, name=f"rpc-{self.service}", daemon=True
        )
        self._thread.start()
        if not self._started.wait(timeout_s) or self._published is None:
            raise ControlError(
                f"service {self.service} did not start in {timeout_s:g} s on {self._identity.node}"
            ) from self._failure

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the loop; waiting requests get no reply and are sent again to the next start."""
        self._stop_asked = True
        if self._loop is not None and self._stopping is not None and not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self._stopping.set)
            except RuntimeError as err:  # the loop closed between the check and the call
                logger.info("stop %s", kv(service=self.service, note=str(err)))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def fail(self, failure: BaseException) -> None:
        """End the service with an error (called in the loop): its state cannot be trusted."""
        self._failure = failure
        if self._stopping is not None:
            self._stopping.set()

    def answer(self, frames: list[bytes]) -> None:
        """Send a reply (in the loop); to a peer that is gone, or that reads nothing, it is lost."""
        if self._socket is None:
            return
        try:
            send_frames(self._socket, frames, _NOBLOCK)
        except zmq.Again:
            logger.warning("reply dropped %s", kv(service=self.service, bytes=len(frames[-1])))
        if not self._is_turn_planned:  # sending may have eaten the signal of an arrival
            self._plan_turn()

    def _run_thread(self) -> None:
        try:
            self.run()
        except BaseException as err:
            self._failure = err
            logger.exception("service ended %s", kv(service=self.service))
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
        socket: zmq.Socket[bytes] = zmq.Socket(context, zmq.ROUTER)  # no futures: see _turn
        try:
            for hook in self._on_start:
                await hook()
            if threading.current_thread() is threading.main_thread():
                _collect_rarely()
            self._bind(socket)
            self._socket = socket
            self._loop.add_reader(socket.FD, self._turn)
            self._plan_turn()
            await self._stopping.wait()
        finally:
            self._loop.remove_reader(socket.FD)
            if self._near is not None:
                self._near.close()
            await self._cancel_tasks()
            self._unpublish()
            for stop in self._on_stop:
                stop()
            self._socket = None
            socket.close(linger=200)
            auth.stop()
            context.term()

    def _bind(self, socket: "zmq.Socket[bytes]") -> None:
        socket.curve_server = True
        socket.curve_secretkey = self._keys.server_secret.encode()
        socket.curve_publickey = self._keys.server_public.encode()
        socket.maxmsgsize = _MAX_REQUEST_BYTES
        ip = self._identity.bind_address()
        socket.bind(f"tcp://{ip}:*")  # the kernel chooses a free port
        nonce = os.urandom(8).hex()
        self._listen_near(nonce)
        self._publish(socket.getsockopt_string(zmq.LAST_ENDPOINT), nonce)

    def _listen_near(self, nonce: str) -> None:
        assert self._loop is not None
        name = near_name(self._keys, nonce)
        try:
            self._near = NearServer(self._loop, name, self._take_near, _MAX_REQUEST_BYTES)
        except OSError as err:  # clients of this node come by TCP, like all others
            logger.warning("no UNIX socket %s", kv(service=self.service, reason=err))

    def _publish(self, endpoint: str, nonce: str) -> None:
        me = self._identity
        path = self._folder.control / f"{self.service}.addr"
        other = read_address(path)
        if other and (other.attempt, other.incarnation) > (me.attempt, me.incarnation):
            raise StaleIncarnationError(
                f"service {self.service} of attempt {me.attempt} incarnation {me.incarnation} on "
                f"{me.node}: {path} belongs to attempt {other.attempt} incarnation "
                f"{other.incarnation} on {other.node}, which replaced this process"
            )
        self._published = Address(
            address=endpoint,
            pid=os.getpid(),
            node=me.node,
            attempt=me.attempt,
            incarnation=me.incarnation,
            nonce=nonce,
        )
        write_atomic(path, msgspec.json.encode(self._published), mode=0o600)
        logger.info("serving %s", kv(service=self.service, address=endpoint, node=me.node))
        self._started.set()

    def _unpublish(self) -> None:
        path = self._folder.control / f"{self.service}.addr"
        if self._published is not None and read_address(path) == self._published:
            path.unlink(missing_ok=True)

    async def _cancel_tasks(self) -> None:
        while tasks := [task for task in self._tasks if not task.done()]:
            for task in tasks:
                task.cancel()
            # Again, until it took effect: wait_for(3.11) drops a cancellation that comes together
            # with what it waits for (python/cpython#86296).
            await asyncio.wait(tasks, timeout=0.1)

    # -- one turn -----------------------------------------------------------------------------

    def _plan_turn(self) -> None:
        """Look for messages soon: libzmq's descriptor tells changes, not states."""
        assert self._loop is not None
        self._is_turn_planned = True
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        socket = self._socket
        if socket is None:
            return
        self._is_turn_planned = True  # replies of this turn need plan none: we read to the end
        num_read = 0
        while num_read < _MAX_TURN and _is_readable(socket):
            try:
                frames = receive_frames(socket, _NOBLOCK)
            except zmq.Again:
                break
            num_read += 1
            if len(frames) == 3:
                self._dispatch(_FarPeer(self, frames[0]), frames[1], frames[2])
            else:
                logger.warning("request ignored %s", kv(service=self.service, frames=len(frames)))
        if num_read:
            self._end_turn()
        self._is_turn_planned = False
        if num_read and _is_readable(socket):
            self._plan_turn()

    def _take_near(self, peer: NearPeer, head: bytes, body: bytes) -> None:
        """Handle a request of this node; all that came together share the end of the turn."""
        self._dispatch(peer, head, body)
        if not self._is_end_planned:
            assert self._loop is not None
            self._is_end_planned = True
            self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._is_end_planned = False
        try:
            for hook in self._on_drained:
                hook()
        except Exception as err:  # half done: nothing after it can be trusted
            logger.exception("service ends %s", kv(service=self.service))
            self.fail(err)

    def _dispatch(self, peer: Peer, head: bytes, body: bytes) -> None:
        responder = Responder(self.service, peer, head[:NUMBER_BYTES])
        try:
            caller, method = self._open_header(head[NUMBER_BYTES:])
            request = self._decode(method, body)
            if method.direct is not None:
                method.direct(caller, request, responder)
            else:
                assert method.handler is not None
                work = self._answer_later(method.handler, caller, request, responder)
                task = asyncio.ensure_future(work)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except RelaxError as err:
            responder.fail(err)
        except Exception as err:
            logger.exception("handler failed %s", kv(service=self.service))
            responder.fail(err)

    async def _answer_later(
        self, handler: Handler, caller: Caller, request: Any, responder: Responder
    ) -> None:
        try:
            responder.send(
                await handler(caller, request)
            )  # inside: a reply may be impossible to encode
        except RelaxError as err:
            responder.fail(err)
        except Exception as err:
            logger.exception("handler failed %s", kv(service=self.service))
            responder.fail(err)

    def _open_header(self, data: bytes) -> tuple[Caller, _Method]:
        known = self._headers.get(data)
        if known is None:
            try:
                head = self._header_decoder.decode(data)
            except msgspec.DecodeError as err:
                raise ControlError(f"service {self.service}: unreadable request: {err}") from err
            method = self._methods.get(head.method)
            if method is None:
                raise ControlError(f"service {self.service} has no method {head.method!r}")
            if len(self._headers) >= _MAX_HEADERS:
                self._headers.clear()
            known = self._headers[data] = (head.caller, method)
        self._check_incarnation(known[0])
        return known

    def _decode(self, method: _Method, body: bytes) -> Any:
        try:
            return method.decoder.decode(body)
        except msgspec.DecodeError as err:
            raise ControlError(f"{self.service}.{method.name}: bad request: {err}") from err

    def _check_incarnation(self, caller: Caller) -> None:
        if caller.role == OBSERVER:
            return
        seen = (caller.attempt, caller.incarnation)
        key = (caller.role, caller.index)
        newest = self._newest.get(key, (self._identity.attempt, 0))
        if seen < newest:
            raise StaleIncarnationError(
                f"{caller.role}/{caller.index} attempt {seen[0]} incarnation {seen[1]} was "
                f"replaced: {self.service} knows attempt {newest[0]} incarnation {newest[1]}; "
                "this process must end"
            )
        if seen > newest:
            self._newest[key] = seen
            for hook in self._on_newer:
                hook(caller)


def _collect_rarely() -> None:
    """Keep the garbage collector of a service process away from what is there at its start."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


def _is_readable(socket: "zmq.Socket[bytes]") -> bool:
    """A question costs less than the exception of a read in vain."""
    return bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)


async def _pong(_: Caller, __: Empty) -> None:
    return None

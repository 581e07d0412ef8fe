"""The SGLang engine: a server in a child process, driven through its public HTTP endpoints.

    generate        POST /generate with input_ids, wait for the gate first; an answer that was cut
                    off by an update is continued from the tokens it has (same request, same seed)
    update_weights  check, write to shared memory | close the gate, abort all, wait until they
                    returned | load in every TP rank, flush the prefix cache, compare bit sums |
                    open the gate; the cut-off calls go on by themselves
    watcher         waits for the child process; its end breaks the engine

Why abort and resubmit instead of the server's own pause: in "in_place" and "retract" mode keys and
values of the old weights survive in the prefix cache and serve new requests (SGLang 0.5.17:
log-probs off by 0.2), a flush is refused while requests wait, and "flush with the update" kills the
server then. After an abort the server is idle, the flush cannot fail and the prefix cache can stay
on: the samples of a group share their prompt. The price is one prefill of prompt and partial
completion for each running request. A hash of (seed, position) draws each token, so a resubmitted
request goes on as if nothing had happened. Every HTTP answer also belongs to one version then.

Differences between SGLang versions: `_load_in_server` (0.5.17 has no begin_weight_update).
Tried with 0.5.23 on the CPU, TP 1 and 2.
"""

import asyncio
import base64
import contextlib
import dataclasses
import json
import logging
import shutil
import typing
import uuid
from collections.abc import Coroutine, Mapping
from http import HTTPStatus
from pathlib import Path

import aiohttp

from relax_hpc.config import Config
from relax_hpc.errors import ConfigError, EngineError
from relax_hpc.log import kv
from relax_hpc.records import Completion, FinishReason
from relax_hpc.rollout import sglang_weights
from relax_hpc.rollout.engine import NO_VERSION, GenerateRequest, WeightTensor
from relax_hpc.rollout.sglang_process import (
    LOADER,
    ServerProcess,
    scratch_folder,
    server_arguments,
    server_environment,
)
from relax_hpc.runfolder import new_token, write_secret

if typing.TYPE_CHECKING:
    from relax_hpc.control.identity import Identity

log = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 60.0
"""From an abort to the end of the request: one forward batch, a long prefill on a CPU included."""
HEALTH_TIMEOUT_S = 60.0
CONTROL_TIMEOUT_S = 600.0
"""Deadline of one control call; loading tens of GB is the longest."""
START_TRIES = 3
"""Only a port that was taken between the choice and the bind is tried again."""
_ABORT_EVERY_S = 0.2
"""An abort that overtakes its request is lost: it is repeated until the request has ended."""
_NO_TENSORS = base64.b64encode(b"\x80\x04]\x94.").decode()
"""Pickle of []: the loader takes everything from shared memory, but the field must be there."""

Json = dict[str, typing.Any]


class _AnswerError(EngineError):
    """The server answered a call with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclasses.dataclass(slots=True, eq=False)
class _Running:
    """One `generate` call and what it has so far."""

    request: GenerateRequest
    rid: str = ""
    """Id at the server, new for each HTTP call (aborts match by prefix there)."""
    aborted: bool = False
    cut_off: bool = False
    """An update made the server end the HTTP call."""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    token_versions: list[int] = dataclasses.field(default_factory=list)

    @property
    def is_full(self) -> bool:
        """Whether no token is left to generate."""
        return len(self.token_ids) >= self.request.max_new_tokens

    def completion(self, reason: FinishReason) -> Completion:
        """Return what there is."""
        return Completion(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            token_versions=self.token_versions,
            finish_reason=reason,
        )


class SglangEngine:
    """See `engine.Engine`. One server, `rollout.engine_tp` ranks on this node.

    Raises:
        ConfigError: the step has other GPUs or tasks than the engine needs.
    """

    def __init__(self, config: Config, identity: "Identity") -> None:
        _check_place(config, identity)
        self._config, self._identity = config, identity
        self._model = Path(config.model.path)
        self._folder = identity.run.shm(identity.node) / f"sglang-{identity.index}"
        self._key = new_token()
        self._version = NO_VERSION
        self._broken = "it was not started"
        self._running: dict[str, _Running] = {}
        self._calls: dict[str, asyncio.Task[Json]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._gate = asyncio.Event()
        self._update_lock = asyncio.Lock()
        self._cleanup = contextlib.AsyncExitStack()
        self._server: ServerProcess | None = None
        self._http: aiohttp.ClientSession | None = None

    @property
    def version(self) -> int:
        """Policy version that is served."""
        return self._version

    @property
    def server_pid(self) -> int | None:
        """Process id of the server (leader of its process group) while it runs."""
        return self._server.process.pid if self._server is not None else None

    # -- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the server and generate one token with it.

        Call it from a thread that lives as long as the engine (see `ServerProcess.spawn`).

        Raises:
            EngineError: it ended, or did not answer by `recovery.start_timeout_s`; with the end of
                its log.
        """
        self._shapes = await asyncio.to_thread(sglang_weights.expected_shapes, self._model)
        self._tied = sglang_weights.is_tied(self._model)
        self._vocab_size = _write_server_model(self._model, self._folder / "model")
        self._cleanup.callback(shutil.rmtree, self._folder, ignore_errors=True)
        scratch = scratch_folder(self._folder)
        self._cleanup.callback(shutil.rmtree, scratch, ignore_errors=True)
        key_file = self._identity.run.secret / f"sglang-{self._identity.index}.key"
        key_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_secret(key_file, self._key)
        self._http = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._key}"},
            # limit 0: SGLang queues, not the client. New connections: uvicorn closes idle ones
            # after 5 s, and a request that meets a closing one fails ("Server disconnected").
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )
        environment = server_environment(
            self._config, self._identity, key_file, self._folder, scratch
        )
        try:
            await self._start_server(environment)
        except BaseException:
            await self.close()
            raise
        self._gate.set()
        self._spawn(self._watch())

    async def _start_server(self, environment: dict[str, str]) -> None:
        identity, device = self._identity, "cuda" if self._identity.gpus else "cpu"
        arguments = server_arguments(self._config, self._folder / "model", device)
        name = f"sglang-{identity.index}.{identity.incarnation}.log"
        log_file = identity.run.logs(identity.attempt, "rollout") / name
        for number in range(1, START_TRIES + 1):
            self._server = server = await ServerProcess.spawn(
                arguments, environment, log_file, self._folder / "shared-memory"
            )
            try:
                await self._wait_until_up(server)
                return
            except EngineError:
                await server.kill()
                if not server.port_was_taken or number == START_TRIES:
                    raise
                log.warning("sglang port was taken, trying another %s", kv(port=server.port))

    async def _wait_until_up(self, server: ServerProcess) -> None:
        deadline_s = self._config.recovery.start_timeout_s
        try:
            async with asyncio.timeout(deadline_s):
                info = await self._first_answer(server)
                if info["model_path"] != str(self._folder / "model"):
                    raise EngineError(f"port {server.port} belongs to another server: {info}")
                if not await self._generates():
                    raise EngineError(f"sglang server is up but generates nothing{_end_of(server)}")
                await asyncio.to_thread(server.note_shared_memory)
        except TimeoutError as err:
            raise EngineError(
                f"sglang server pid {server.process.pid} did not generate within {deadline_s} s "
                f"(recovery.start_timeout_s){_end_of(server)}"
            ) from err
        self._broken = ""

    async def _first_answer(self, server: ServerProcess) -> Json:
        while server.alive:
            with contextlib.suppress(aiohttp.ClientError, EngineError, TimeoutError):  # not up yet
                return await self._request("GET", "/get_model_info", None, timeout_s=5.0)
            await asyncio.sleep(0.2)
            await asyncio.to_thread(server.note_shared_memory)  # it may crash at its start
        raise EngineError(
            f"sglang server ended with code {server.process.returncode} while it started"
            f"{_end_of(server)}"
        )

    async def _watch(self) -> None:
        assert self._server is not None
        code = await self._server.process.wait()
        if not self._broken:
            self._broken = f"its server ended with code {code}{_end_of(self._server)}"
            log.error("sglang engine %s", self._broken)

    async def healthy(self) -> bool:
        """Generate one token. True without it while an update, with its own deadlines, runs."""
        if self._broken:
            return False
        return not self._gate.is_set() or await self._generates()

    async def _generates(self) -> bool:
        health = GenerateRequest(
            request_id="health", token_ids=[0], max_new_tokens=1, temperature=0.0
        )
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                answer = await self._call_generate(_Running(health))
        except (TimeoutError, EngineError) as err:
            log.warning("sglang engine does not generate %s", kv(error=repr(err)))
            return False
        # one that an update cut off has no token
        return len(answer["output_ids"]) == 1 or not self._gate.is_set()

    def _check_alive(self) -> None:
        if self._broken:
            raise EngineError(f"sglang engine {self._identity.index}: {self._broken}")

    def _spawn(self, work: Coroutine[typing.Any, typing.Any, None]) -> None:
        """Run in the background; a failure is logged, and waited for by nobody."""

        async def guarded() -> None:
            try:
                await work
            except EngineError as err:
                log.warning("sglang engine %s", kv(error=err))

        task = asyncio.create_task(guarded())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Kill the server with its process group; running calls raise EngineError."""
        self._broken = "it was closed"
        self._gate.set()  # who waits for it sees that the engine is closed
        try:
            if self._server is not None:
                await self._server.kill()
        finally:
            tasks = [*self._calls.values(), *self._background]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._http is not None:
                await self._http.close()
            await self._cleanup.aclose()

    # -- generation -------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Completion:
        """Generate one sample; see `engine.Engine.generate`."""
        self._check_request(request)
        running = self._running[request.request_id] = _Running(request)
        try:
            return await self._generate(running)
        except asyncio.CancelledError:
            if running.rid in self._calls:
                self._spawn(self._end_calls(running.rid))
            raise
        finally:
            del self._running[request.request_id]

    def _check_request(self, request: GenerateRequest) -> None:
        name = f"request {request.request_id}"
        self._check_alive()
        if self._version == NO_VERSION:
            raise EngineError(f"{name}: no weights yet, call update_weights first")
        if request.request_id in self._running:
            raise EngineError(f"{name}: this id is already running")
        if not request.token_ids or request.max_new_tokens < 1:
            raise EngineError(f"{name}: needs a prompt and max_new_tokens > 0")
        # the server's scheduler dies of an id outside the vocabulary
        if not all(0 <= token < self._vocab_size for token in request.token_ids):
            raise EngineError(f"{name}: token ids must be in [0, {self._vocab_size})")

    async def _generate(self, running: _Running) -> Completion:
        while True:
            await self._gate.wait()
            self._check_alive()
            if running.aborted:
                return running.completion(FinishReason.ABORT)
            running.cut_off, version = False, self._version
            answer = await self._call_generate(running)
            _take(running, answer["output_ids"], answer["meta_info"], version)
            reason = _finish_reason(running, answer["meta_info"])
            if reason is not None:
                return running.completion(reason)

    async def _call_generate(self, running: _Running) -> Json:
        """POST what is left of a request.

        The call outlives its caller: an update must know when the server has ended it.
        """
        request = running.request
        running.rid = uuid.uuid4().hex
        payload = {
            "rid": running.rid,
            "input_ids": request.token_ids + running.token_ids,
            "sampling_params": _sampling_parameters(running),
            "return_logprob": True,
        }
        deadline_s = self._config.recovery.progress_timeout_s
        call = asyncio.create_task(self._request("POST", "/generate", payload, deadline_s))
        self._calls[running.rid] = call
        call.add_done_callback(lambda _, rid=running.rid: self._calls.pop(rid))  # type: ignore[misc]
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if call.cancelled():  # by close(); else the caller of `generate` was cancelled
                self._check_alive()
            raise
        except (aiohttp.ClientError, TimeoutError) as err:
            await asyncio.sleep(0.1)  # the watcher may know that the server ended, and why
            self._check_alive()
            raise EngineError(f"request {request.request_id}: {err!r}") from err

    async def abort(self, request_id: str) -> None:
        """End a running request with reason abort."""
        running = self._running.get(request_id)
        if running is not None and not running.aborted:
            running.aborted = True
            await self._end_calls(running.rid)

    async def _end_calls(self, rid: str = "") -> None:
        """Abort one HTTP call, or all without `rid`, and wait until the server has ended them."""
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                while calls := [c for r, c in self._calls.items() if rid in ("", r)]:
                    body = {"rid": rid, "abort_all": not rid}
                    await self._request("POST", "/abort_request", body, ABORT_TIMEOUT_S)
                    await asyncio.wait(calls, timeout=_ABORT_EVERY_S)
        except (TimeoutError, aiohttp.ClientError) as err:
            self._check_alive()
            raise EngineError(
                f"sglang server did not end {len(self._calls)} requests within "
                f"{ABORT_TIMEOUT_S} s of an abort: {err!r}"
            ) from err

    # -- weights ----------------------------------------------------------------------------------

    async def update_weights(self, version: int, tensors: Mapping[str, WeightTensor]) -> None:
        """Serve a whole version; see `engine.Engine.update_weights`.

        A version that the model cannot have is refused before anything is touched. A failure after
        that leaves the server without usable weights: the engine is broken then, never half new.
        """
        self._check_alive()
        async with self._update_lock:
            names = sglang_weights.check_tensors(self._shapes, tensors, self._tied)
            dtype = self._config.model.dtype
            sent = await asyncio.to_thread(sglang_weights.bit_sums, names, tensors, dtype)
            file = await asyncio.to_thread(
                sglang_weights.write_version, self._folder, version, names, tensors
            )
            self._gate.clear()
            try:
                await self._stop_running(rolled_back=version < self._version)
                await self._load(version, sent)
            finally:
                file.unlink(missing_ok=True)
                self._gate.set()

    async def _stop_running(self, rolled_back: bool) -> None:
        for running in self._running.values():
            running.cut_off = True
            running.aborted |= rolled_back
        await self._end_calls()

    async def _load(self, version: int, sent: dict[str, sglang_weights.BitSum]) -> None:
        num_ranks = self._config.rollout.engine_tp
        try:
            await self._load_in_server(version, num_ranks)
            compared = await asyncio.to_thread(
                sglang_weights.check_reports, self._folder, version, num_ranks, sent
            )
        except BaseException as err:
            reason = f"update to version {version} failed: {err}"
            self._broken = self._broken or reason
            if isinstance(err, aiohttp.ClientError | TimeoutError):
                raise EngineError(f"sglang engine: {reason}") from err
            raise
        self._version = version
        log.info("weights loaded %s", kv(version=version, parameters_compared=compared))

    async def _load_in_server(self, version: int, num_ranks: int) -> None:
        """Run the loader in every rank of an idle server and forget all keys and values."""
        load = {
            "serialized_named_tensors": [_NO_TENSORS] * num_ranks,
            "load_format": LOADER,
            # "flush with the update" kills the server when anything is left in it (0.5.17)
            "flush_cache": False,
            "weight_version": str(version),
        }
        try:
            await self._request("POST", "/begin_weight_update", {}, CONTROL_TIMEOUT_S)
            has_sessions = True
        except _AnswerError as err:
            if err.status != HTTPStatus.NOT_FOUND:
                raise
            has_sessions = False  # SGLang 0.5.17
        await self._request("POST", "/update_weights_from_tensor", load, CONTROL_TIMEOUT_S)
        if has_sessions:
            await self._request("POST", "/end_weight_update", {}, CONTROL_TIMEOUT_S)
        else:
            body = {"new_version": str(version), "abort_all_requests": False}
            await self._request("POST", "/update_weight_version", body, CONTROL_TIMEOUT_S)
        await self._flush_cache()

    async def _flush_cache(self) -> None:
        """Empty the prefix cache; the scheduler may need a moment to see that it is idle."""
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            while True:
                try:
                    await self._request("POST", "/flush_cache", None, ABORT_TIMEOUT_S)
                    return
                except _AnswerError as err:
                    log.debug("flush refused %s", kv(error=err))
                    await asyncio.sleep(0.05)

    # -- HTTP -------------------------------------------------------------------------------------

    async def _request(
        self, method: str, path: str, payload: Json | None, timeout_s: float
    ) -> Json:
        """Make one call. Returns its JSON, {} for an answer that is none.

        Raises:
            _AnswerError: the status is not 200.
            aiohttp.ClientError, TimeoutError: no answer.
        """
        assert self._http is not None and self._server is not None
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=10.0)
        url = self._server.url + path
        async with self._http.request(method, url, json=payload, timeout=timeout) as response:
            text = await response.text()
        if response.status != HTTPStatus.OK:
            raise _AnswerError(
                response.status, f"{path} answered {response.status}: {text.strip()[:500]}"
            )
        return json.loads(text) if text.startswith("{") else {}


def _check_place(config: Config, identity: "Identity") -> None:
    tp, gpus = config.rollout.engine_tp, identity.gpus
    if identity.world > 1:
        raise ConfigError(
            f"rollout.engine_tp={tp}: an SGLang engine cannot span several tasks or nodes, "
            "use at most the GPUs of one node"
        )
    if gpus and len(gpus) != tp:
        raise ConfigError(f"rollout.engine_tp={tp}: the rollout step got GPUs {gpus}, not {tp}")


def _end_of(server: ServerProcess) -> str:
    return f"; end of {server.log_file}:\n{server.last_lines()}"


def _write_server_model(model: Path, folder: Path) -> int:
    """Write the config.json that the server reads; return the vocabulary size.

    Without an end-of-sequence token: SGLang would stop at it even if a request does not name it.
    """
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        vocab_size = int(config["vocab_size"])
    except (OSError, ValueError, KeyError) as err:
        raise EngineError(f"model {model} has no usable config.json: {err!r}") from err
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    return vocab_size


def _sampling_parameters(running: _Running) -> Json:
    request = running.request
    return {
        "max_new_tokens": request.max_new_tokens - len(running.token_ids),
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop_token_ids": list(request.stop_token_ids),
        "sampling_seed": request.seed,
    }


def _take(running: _Running, token_ids: list[int], meta: Json, version: int) -> None:
    """Add what one HTTP call generated.

    Raises:
        EngineError: ids, log-probs and the weight version do not belong together.
    """
    logprobs = meta.get("output_token_logprobs") or []
    if [entry[1] for entry in logprobs] != token_ids:
        raise EngineError(
            f"request {running.request.request_id}: {len(token_ids)} tokens but log-probs of "
            f"{len(logprobs)}"
        )
    if token_ids and meta["weight_version"] != str(version):
        raise EngineError(
            f"request {running.request.request_id}: tokens of weight version "
            f"{meta['weight_version']!r}, served is {version}"
        )
    running.token_ids += token_ids
    running.logprobs += [float(entry[0]) for entry in logprobs]
    running.token_versions += [version] * len(token_ids)


def _finish_reason(running: _Running, meta: Json) -> FinishReason | None:
    """Return why the request ended; None: it was cut off and goes on.

    Raises:
        EngineError: the server gave up on its own.
    """
    if running.token_ids and running.token_ids[-1] in running.request.stop_token_ids:
        return FinishReason.STOP
    if running.is_full:
        return FinishReason.LENGTH
    finish = meta["finish_reason"]
    if finish["type"] == "abort" and running.aborted:
        return FinishReason.ABORT
    if finish["type"] == "abort" and running.cut_off:
        return None
    raise EngineError(
        f"request {running.request.request_id}: the server ended it after {len(running.token_ids)} "
        f"of {running.request.max_new_tokens} tokens ({finish}); a cache that is too small for "
        "prompt and response is enlarged with rollout.max_tokens_in_cache"
    )

"""The embedded inference engine: plain torch in a thread of the rollout step.

    asyncio loop                         compute thread (owns scheduler, cache and weights)
    generate -> inbox, wake              take the inbox; new weights; aborts; one step; repeat
    await future  <---- call_soon ------ finished sequences
    update_weights: builds the new version in a third thread, while generation goes on; the
    compute thread then swaps it in between two steps

For laptops, CPUs and tests, and for single GPUs where no server is installed. It computes what the
Hugging Face model computes; equal seeds give equal tokens up to ties within float rounding (the
batch around a sequence may change the last bit of its logits).
"""

import asyncio
import contextlib
import dataclasses
import logging
import threading
import typing
from collections.abc import Mapping
from pathlib import Path

import torch

from relax_hpc.config import Config
from relax_hpc.errors import ConfigError, EngineError
from relax_hpc.log import kv
from relax_hpc.records import Completion, FinishReason
from relax_hpc.rollout.decoder import (
    Decoder,
    DecoderConfig,
    DecoderWeights,
    KvPool,
    load_weights,
    read_decoder_config,
)
from relax_hpc.rollout.engine import NO_VERSION, GenerateRequest, WeightTensor
from relax_hpc.rollout.scheduler import Scheduler, Sequence

if typing.TYPE_CHECKING:
    from relax_hpc.control.identity import Identity

log = logging.getLogger(__name__)

MAX_RUNNING = 256
"""Sequences of one decode step."""


@dataclasses.dataclass(slots=True, eq=False)
class _Pending:
    """A sequence and who waits for it."""

    sequence: Sequence
    future: asyncio.Future[Completion]


@dataclasses.dataclass(slots=True, eq=False)
class _Update:
    version: int
    weights: DecoderWeights
    future: asyncio.Future[None]


class EmbeddedEngine:
    """See `engine.Engine`. Weights come from `update_weights` only, never from the model folder."""

    def __init__(
        self,
        folder: Path,
        *,
        max_tokens_in_cache: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        max_running: int = MAX_RUNNING,
    ) -> None:
        self._folder = folder
        self._max_tokens_in_cache, self._max_running = max_tokens_in_cache, max_running
        self._dtype = dtype
        self._device = torch.device("cpu") if device is None else device
        self._version = NO_VERSION
        self._wake = threading.Condition()
        self._inbox: list[_Pending] = []
        self._aborts: set[str] = set()
        self._update: _Update | None = None
        self._pending: dict[str, _Pending] = {}
        self._failure: str | None = "it was not started"
        self._closing = False
        self._update_lock = asyncio.Lock()
        self._thread: threading.Thread | None = None

    @classmethod
    def from_config(cls, config: Config, identity: "Identity") -> "EmbeddedEngine":
        """Build the engine of one rollout step: its first GPU, else the CPU."""
        if config.rollout.engine_tp != 1:
            raise ConfigError(
                f"rollout.engine_tp={config.rollout.engine_tp}: the embedded engine runs on one "
                'device, use 1 or rollout.engine = "sglang"'
            )
        device = torch.device("cuda", identity.gpus[0]) if identity.gpus else torch.device("cpu")
        return cls(
            Path(config.model.path),
            max_tokens_in_cache=config.rollout.max_tokens_in_cache,
            dtype=torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32,
            device=device,
        )

    @property
    def version(self) -> int:
        """Policy version that is served."""
        return self._version

    async def start(self) -> None:
        """Read the architecture, allocate the cache, start the compute thread."""
        config = await asyncio.to_thread(read_decoder_config, self._folder)
        self._config = config
        self._loop = asyncio.get_running_loop()
        pool = KvPool(config, self._max_tokens_in_cache, self._dtype, self._device)
        self._max_length = min(config.max_positions, self._max_tokens_in_cache)
        self._scheduler = Scheduler(
            Decoder(config, self._device), pool, self._max_length, self._max_running
        )
        self._failure = None
        self._thread = threading.Thread(target=self._compute, name="engine", daemon=True)
        self._thread.start()
        size_mb = 2 * pool.keys.numel() * pool.keys.element_size() / 2**20
        log.info("embedded engine up %s", kv(device=self._device, cache_mb=size_mb))

    async def generate(self, request: GenerateRequest) -> Completion:
        """Generate one sample; see `engine.Engine.generate`."""
        self._check_alive()
        _check_request(request, self._config, self._max_length)
        if self._version == NO_VERSION:
            raise EngineError(
                f"request {request.request_id}: no weights yet, call update_weights first"
            )
        if request.request_id in self._pending:
            raise EngineError(f"request {request.request_id}: this id is already running")
        sequence = Sequence(request, tuple(request.token_ids))
        pending = _Pending(sequence, self._loop.create_future())
        self._pending[request.request_id] = pending
        try:
            with self._wake:
                self._inbox.append(pending)
                self._wake.notify()
            return await pending.future
        finally:
            del self._pending[request.request_id]
            if not pending.future.done() or pending.future.cancelled():
                await self.abort(request.request_id)

    async def update_weights(self, version: int, tensors: Mapping[str, WeightTensor]) -> None:
        """Verify and load a version; see `engine.Engine.update_weights`."""
        async with self._update_lock:
            self._check_alive()
            weights = await asyncio.to_thread(
                load_weights, self._config, tensors, self._dtype, self._device
            )
            self._check_alive()
            update = _Update(version, weights, self._loop.create_future())
            with self._wake:
                self._update = update
                self._wake.notify()
            # Shielded: the swap is not undone when the caller is cancelled.
            await asyncio.shield(update.future)

    async def abort(self, request_id: str) -> None:
        """End one request."""
        with self._wake:
            self._aborts.add(request_id)
            self._wake.notify()

    async def healthy(self) -> bool:
        """Whether the compute thread lives."""
        return self._failure is None and self._thread is not None and self._thread.is_alive()

    async def close(self) -> None:
        """Stop the compute thread; running requests raise EngineError."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 30.0)
            if self._thread.is_alive():
                raise EngineError("embedded engine: its thread did not end within 30 s")

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineError(f"embedded engine ({self._folder}) cannot answer: {self._failure}")

    # -- compute thread -------------------------------------------------------------------------

    def _compute(self) -> None:
        """Serve until closed; a failure fails every caller and is logged, never swallowed."""
        try:
            with torch.inference_mode():
                while self._serve_once():
                    pass
            failure = "it was closed"
        except Exception as err:  # the boundary of the thread: logged, and every caller is told
            log.exception("embedded engine broke")
            failure = f"{type(err).__name__}: {err}"
        with contextlib.suppress(RuntimeError):  # the loop may be gone: then nobody waits
            self._loop.call_soon_threadsafe(self._fail, failure)

    def _serve_once(self) -> bool:
        scheduler = self._scheduler
        with self._wake:
            while not (
                scheduler.num_sequences
                or self._inbox
                or self._aborts
                or self._update
                or self._closing
            ):
                self._wake.wait()
            inbox, self._inbox = self._inbox, []
            aborts, self._aborts = self._aborts, set()
            update = self._update
            if self._closing:
                return False
        for pending in inbox:
            scheduler.submit(pending.sequence)
        finished = [(s, FinishReason.ABORT) for s in scheduler.remove(aborts)] if aborts else []
        if update is not None:
            finished += [(s, FinishReason.ABORT) for s in self._swap(update)]
        finished += [(s, s.finish_reason) for s in scheduler.step() if s.finish_reason is not None]
        if finished or update is not None:
            done = [(s.request.request_id, s.completion(reason)) for s, reason in finished]
            self._loop.call_soon_threadsafe(self._deliver, done, update)
        return True

    def _swap(self, update: _Update) -> list[Sequence]:
        scheduler = self._scheduler
        scheduler.retract_all()
        rolled_back = update.version < scheduler.version
        ended = scheduler.remove_all() if rolled_back else []
        scheduler.weights, scheduler.version = update.weights, update.version
        with self._wake:
            if self._update is update:  # kept until here, so that a failure reaches its caller
                self._update = None
        return ended

    # -- back on the asyncio loop ---------------------------------------------------------------

    def _deliver(self, done: list[tuple[str, Completion]], update: _Update | None) -> None:
        if update is not None:
            self._version = update.version
            if not update.future.done():
                update.future.set_result(None)
        for request_id, completion in done:
            pending = self._pending.get(request_id)
            if pending is not None and not pending.future.done():
                pending.future.set_result(completion)

    def _fail(self, failure: str) -> None:
        self._failure = failure
        waiting: list[asyncio.Future[typing.Any]] = [p.future for p in self._pending.values()]
        if self._update is not None:
            waiting.append(self._update.future)
        for future in waiting:
            if not future.done():
                future.set_exception(
                    EngineError(f"embedded engine ({self._folder}) stopped: {failure}")
                )


def _check_request(request: GenerateRequest, config: DecoderConfig, max_length: int) -> None:
    """Refuse what could never be generated, before it takes part in a batch."""
    tokens, problem = request.token_ids, None
    total = len(tokens) + request.max_new_tokens
    if not tokens:
        problem = "the prompt is empty"
    elif min(tokens) < 0 or max(tokens) >= config.vocab_size:
        problem = f"a prompt token is outside 0..{config.vocab_size - 1}"
    elif request.max_new_tokens <= 0 or request.temperature < 0 or not 0 < request.top_p <= 1:
        problem = (
            f"max_new_tokens={request.max_new_tokens} must be > 0, "
            f"temperature={request.temperature} >= 0, top_p={request.top_p} in (0, 1]"
        )
    elif total > max_length:
        problem = (
            f"prompt {len(tokens)} + response {request.max_new_tokens} tokens exceed {max_length} "
            "(the smaller of the model's positions and rollout.max_tokens_in_cache)"
        )
    if problem is not None:
        raise EngineError(f"request {request.request_id} refused: {problem}")

"""Client of the transfer queue: rows x fields x tasks.

who             calls                              waits for / unblocked by
rollout engine  open_dataset, admit                a free slot / a trained or dropped group
                put_group, drop_group, return_group
ref, logprob    take_rows, put_fields              rows without the field / put_group
train           begin_train, take_chunk            complete groups / put_group, put_fields
(one of a dp)   complete_step

A slot is freed when its group was *trained* (or dropped), not when it is taken. Payload lies in
shared memory of the node that made it; only metadata goes through the controller. All methods are
thread-safe and blocking; each may be repeated, and survives a restart of the controller.
"""

import dataclasses
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import Empty, RpcClient
from relax_hpc.errors import DeadlineError, RelaxError, TransferError
from relax_hpc.records import Chunk, Fields, FinishReason, PromptSlot, Row, Sample
from relax_hpc.transfer import wire
from relax_hpc.transfer.shm import (
    Entry,
    Owner,
    map_segment,
    open_shm_folder,
    parse_segment,
    process_start,
    write_segment,
)
from relax_hpc.transfer.tcp import read_remote
from relax_hpc.transfer.wire import QueueStatus, StepSummary

_LONG_POLL_S = 10.0
_READ_TIMEOUT_S = 120.0
"""A segment that cannot be read for this long is lost: its prompt is dispatched again."""

Response = TypeVar("Response", bound=msgspec.Struct)


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """Answer to `admit`."""

    slots: list[PromptSlot]
    """Prompts to generate; empty when the wait ended first."""
    done: bool
    """All train steps are complete: nothing will be admitted any more."""


class TransferQueue:
    """One process's access to the queue."""

    def __init__(self, identity: Identity, *, grace_s: float = 180.0) -> None:
        """Connect lazily.

        Args:
            identity: this task.
            grace_s: how long a call waits for a controller that is being restarted.
        """
        self._identity = identity
        self._grace_s = grace_s
        self._client = RpcClient(identity.run, wire.SERVICE, identity)
        self._agents: dict[str, RpcClient] = {}
        self._lock = threading.Lock()
        self._admit_lock = threading.Lock()
        self._take_lock = threading.Lock()
        self._keys: dict[str, str] = {}
        self._names = itertools.count(1)
        self._nonce = os.urandom(4).hex()
        pid = os.getpid()
        self._owner = Owner(identity.run.run_id, identity.attempt, pid, process_start(pid))

    # -- rollout ------------------------------------------------------------------------------

    def open_dataset(self, num_prompts: int, fingerprint: str) -> None:
        """Tell the data set before the first admit; every engine does, all must agree.

        Raises:
            TransferError: the run began with another data set.
        """
        request = wire.OpenDataset(num_prompts, fingerprint)
        self._call("open_dataset", request, Empty, why="open the data set")

    def admit(self, engine_version: int, max_groups: int, timeout_s: float) -> Admission:
        """Wait for up to `max_groups` prompts to generate (long-poll).

        Args:
            engine_version: policy version that the engine serves now. Slots whose samples would
                be too old when they are trained are not granted.
            max_groups: groups that the engine can begin now, > 0.
            timeout_s: after this many seconds without a free slot: no slots, done=False.
        """
        with self._admit_lock:

            def ask(wait_s: float) -> wire.Admitted:
                request = wire.Admit(self._key("admit"), engine_version, max_groups, wait_s)
                reply = self._call("admit", request, wire.Admitted, wait_s, why="a prompt slot")
                self._keys.pop("admit", None)
                return reply

            reply = _poll(ask, lambda r: bool(r.slots) or r.done, timeout_s)
        return Admission([_to_slot(slot) for slot in reply.slots], reply.done)

    def put_group(self, slot: PromptSlot, samples: list[Sample]) -> bool:
        """Put all samples of a group; visible as a whole when this returns.

        Returns:
            False: nobody wants the group any more (the train step was rolled back, or this
            engine was thought dead and the prompt was dispatched again). Go on with others.

        Raises:
            TransferError: shared memory is full, or a sample breaks the record's shape; names
                group, sample and field.
        """
        _check_group(slot, samples)
        entries = [
            Entry(slot.uid, index, name, array)
            for index, sample in enumerate(samples)
            for name, array in sample.fields.items()
        ]
        segment = self._write(slot.uid, entries)
        rows = [_row_info(index, sample) for index, sample in enumerate(samples)]
        request = wire.PutGroup(slot.uid, segment, rows, _oldest_version(samples))
        return self._store("put_group", request, segment)

    def drop_group(self, slot: PromptSlot, reason: str) -> None:
        """Give a group up: the prompt is used up, the slot is free, the reason is counted."""
        self._call("drop_group", wire.EndGroup(slot.uid, reason), Empty, why="drop a group")

    def return_group(self, slot: PromptSlot, reason: str) -> None:
        """Give a prompt back: it is dispatched again under a new uid, to any engine."""
        self._call("return_group", wire.EndGroup(slot.uid, reason), Empty, why="return a group")

    # -- ref, logprob -------------------------------------------------------------------------

    def take_rows(self, task: str, max_rows: int, timeout_s: float) -> list[Row]:
        """Lease rows that lack the field of `task` (ref or logprob); [] at the end of the wait.

        The lease ends with `put_fields`, or when this role restarts. Arrays are read-only views.
        """
        with self._take_lock:

            def ask(wait_s: float) -> wire.TakenRows:
                request = wire.TakeRows(task, self._key("take_rows"), max_rows, wait_s)
                why = f"rows for {task}"
                reply = self._call("take_rows", request, wire.TakenRows, wait_s, why=why)
                self._keys.pop("take_rows", None)
                return reply

            reply = _poll(ask, lambda r: bool(r.groups), timeout_s)
        rows: list[Row] = []
        for group in self._read_groups(reply.groups)[0]:
            rows += group
        return rows

    def put_fields(self, rows: Sequence[Row], name: str, arrays: Sequence[np.ndarray]) -> bool:
        """Put one field (`ref_logprobs`, `train_logprobs`) for rows; completes the task for them.

        Args:
            rows: what `take_rows` gave.
            name: field name.
            arrays: one per row, float32 [R].

        Returns:
            False: none of the rows is wanted any more.
        """
        if not rows:
            return True
        entries = [
            Entry(row.uid, row.sample_index, name, _checked(row, name, array))
            for row, array in zip(rows, arrays, strict=True)
        ]
        segment = self._write(name, entries)
        keys = [(row.uid, row.sample_index) for row in rows]
        return self._store("put_fields", wire.PutFields(name, keys, segment), segment)

    # -- train --------------------------------------------------------------------------------

    def begin_train(self, step: int) -> None:
        """(Re)start training at `step` = the policy version of the loaded weights; once, rank 0.

        Groups that steps >= `step` consumed are dispatched again, exactly once; leases of older
        incarnations return.
        """
        key = os.urandom(8).hex()
        self._call("begin_train", wire.BeginTrain(key, step), Empty, why=f"begin step {step}")

    def take_chunk(
        self, step: int, index: int, dp_rank: int, dp_size: int, timeout_s: float
    ) -> Chunk:
        """Wait for chunk `index` of a train step and return this dp rank's share: whole groups.

        The division over dp ranks is decided once, balanced by tokens; asked again (by another
        rank of the same dp rank, or after a lost reply) the same rows come back.

        Raises:
            DeadlineError: not enough complete groups in time; says what the queue waits for.
            TransferError: wrong step or order of chunks.
        """
        deadline = time.monotonic() + timeout_s
        why = f"chunk {index} of step {step} for dp rank {dp_rank}"

        def ask(wait_s: float) -> wire.TakenChunk:
            request = wire.TakeChunk(step, index, dp_rank, dp_size, wait_s)
            return self._call("take_chunk", request, wire.TakenChunk, wait_s, why=why)

        while True:
            left_s = max(deadline - time.monotonic(), 0.0)
            reply = _poll(ask, lambda r: r.groups is not None, left_s)
            if reply.groups is None:
                raise DeadlineError(
                    f"{why}: not ready in {timeout_s:g} s; queue: {_state(self.status())}; look "
                    "into the logs of the steps that should fill it (rollout, ref, logprob)"
                )
            groups, lost = self._read_groups(reply.groups)
            if not lost:
                rows = [row for group in groups for row in group]
                return Chunk(task="train", step=step, index=index, rows=rows)

    def complete_step(self, step: int) -> StepSummary:
        """Acknowledge all chunks of `step` at the optimizer step: version becomes step + 1.

        Call it before the new weights are published: engines are admitted up to this version.
        """
        why = f"complete step {step}"
        return self._call("complete_step", wire.CompleteStep(step), StepSummary, why=why)

    # -- evaluation and state -----------------------------------------------------------------

    def claim_eval(self, version: int) -> bool:
        """Claim the evaluation of a policy version; one engine wins. Again: same answer."""
        return self._call("claim_eval", wire.Version(version), wire.Answer, why="claim eval").ok

    def finish_eval(self, version: int) -> None:
        """Tell that the evaluation is done and written."""
        self._call("finish_eval", wire.Version(version), Empty, why="finish eval")

    def evals_pending(self) -> list[int]:
        """Versions that are due (<= the current version) and not finished, oldest first."""
        reply = self._call("evals_pending", Empty(), wire.Versions, why="pending evals")
        return reply.versions

    def release_producer(self, role: str, index: int, incarnation: int) -> None:
        """Tell that a start of a role is dead, before its next start tells it (supervisor).

        rollout: what it had not put is dispatched again at once. ref, logprob: their leases
        return. train: `admit` does not say done until the next `begin_train`, which may have to
        repeat steps. Too late or twice is harmless: newer incarnations are not touched.
        """
        request = wire.Producer(role, index, incarnation)
        self._call("release_producer", request, Empty, why=f"release {role}/{index}")

    def status(self) -> QueueStatus:
        """Return counts and versions."""
        return self._call("status", Empty(), QueueStatus, why="queue status")

    def close(self) -> None:
        """Close sockets. Rows stay valid: their memory is freed with the last view."""
        self._client.close()
        for agent in self._agents.values():
            agent.close()

    # -- inside -------------------------------------------------------------------------------

    def _call(
        self,
        method: str,
        request: msgspec.Struct,
        response: type[Response],
        wait_s: float = 0.0,
        *,
        why: str,
    ) -> Response:
        timeout_s = wait_s + self._grace_s
        return self._client.call(method, request, response, timeout_s=timeout_s, why=why)

    def _key(self, method: str) -> str:
        """Key of the pending request: kept while no reply came, so that no grant is lost."""
        return self._keys.setdefault(method, f"{self._nonce}-{next(self._names)}")

    def _write(self, label: str, entries: list[Entry]) -> wire.Segment:
        me = self._identity
        open_shm_folder(me.run.shm(me.node))
        folder = open_shm_folder(me.run.shm(me.node) / "segments")
        place = f"{me.role}{me.index}.{me.rank}-{me.attempt}.{me.incarnation}"
        name = f"{label}-{place}-{self._nonce}.{next(self._names)}"
        return write_segment(folder, name, me.node, self._owner, entries)

    def _store(self, method: str, request: msgspec.Struct, segment: wire.Segment) -> bool:
        try:
            reply = self._call(method, request, wire.Stored, why=method)
        except DeadlineError:
            raise  # it may have arrived: the segment stays, the node agent finds orphans
        except RelaxError:
            self._unlink(segment)
            raise
        if not reply.is_kept:
            self._unlink(segment)
        return reply.is_wanted

    def _unlink(self, segment: wire.Segment) -> None:
        path = self._identity.run.shm(segment.node) / "segments" / segment.name
        path.unlink(missing_ok=True)

    def _read_groups(self, groups: list[wire.GroupRows]) -> tuple[list[list[Row]], bool]:
        """Read rows of groups; a group that is lost or corrupt is rejected and left out."""
        cache: dict[str, dict[tuple[str, int], Fields]] = {}
        result, is_lost = [], False
        for group in groups:
            try:
                for segment in group.segments:
                    if segment.name not in cache:
                        cache[segment.name] = self._read(segment)
                result.append([_to_row(group, info, cache) for info in group.rows])
            except (TransferError, DeadlineError) as err:
                is_lost = True
                request = wire.EndGroup(group.uid, f"{err}")
                self._call("reject_group", request, Empty, why=f"reject group {group.uid}")
        return result, is_lost

    def _read(self, segment: wire.Segment) -> dict[tuple[str, int], Fields]:
        me = self._identity
        place = wire.SegmentPlace(segment, me.node)
        if segment.node == me.node:
            path = me.run.shm(me.node) / "segments" / segment.name
            return parse_segment(map_segment(path), place)
        with self._lock:
            agent = self._agents.get(segment.node)
            if agent is None:
                agent = RpcClient(me.run, wire.agent_service(segment.node), me)
                self._agents[segment.node] = agent
        data = read_remote(agent, "segments", segment.name, _READ_TIMEOUT_S, str(place))
        return parse_segment(data, place)


def _poll(
    ask: Callable[[float], Response], is_enough: Callable[[Response], bool], timeout_s: float
) -> Response:
    """Repeat a long-poll of at most 10 s until the answer is enough or the time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(deadline - time.monotonic(), 0.0)
        reply = ask(min(left_s, _LONG_POLL_S))
        if is_enough(reply) or time.monotonic() >= deadline:
            return reply


def _state(status: QueueStatus) -> str:
    s = status
    return (
        f"version={s.version} generating={s.generating} waiting={s.waiting} ready={s.ready} "
        f"assigned={s.assigned} capacity={s.capacity}"
    )


def _to_slot(slot: wire.Slot) -> PromptSlot:
    return PromptSlot(
        uid=slot.uid,
        prompt_index=slot.prompt_index,
        epoch=slot.epoch,
        deadline_version=slot.deadline_version,
    )


def _to_row(
    group: wire.GroupRows, info: wire.RowInfo, cache: dict[str, dict[tuple[str, int], Fields]]
) -> Row:
    fields: Fields = {}
    for segment in group.segments:
        fields.update(cache[segment.name].get((group.uid, info.sample_index), {}))
    if "tokens" not in fields or fields["tokens"].shape[0] != info.num_tokens:
        raise TransferError(
            f"group {group.uid} sample {info.sample_index}: tokens are missing or not "
            f"{info.num_tokens} long"
        )
    return Row(
        uid=group.uid,
        sample_index=info.sample_index,
        group_size=group.group_size,
        num_prompt_tokens=info.num_prompt_tokens,
        finish_reason=FinishReason(info.finish_reason),
        fields=fields,
    )


def _row_info(index: int, sample: Sample) -> wire.RowInfo:
    length = int(sample.fields["tokens"].shape[0])
    return wire.RowInfo(index, sample.num_prompt_tokens, length, str(sample.finish_reason))


def _oldest_version(samples: Sequence[Sample]) -> int:
    oldest = [
        int(s.fields["token_versions"].min()) for s in samples if s.fields["token_versions"].size
    ]
    return min(oldest, default=-1)


_RESPONSE_FIELDS = {"rollout_logprobs": "float32", "token_versions": "int32", "loss_mask": "uint8"}
_SCALAR_FIELDS = {"reward": "float32", "accuracy": "float32"}


def _check_group(slot: PromptSlot, samples: Sequence[Sample]) -> None:
    if not samples:
        raise TransferError(f"group {slot.uid}: has no samples")
    for index, sample in enumerate(samples):
        where = f"group {slot.uid} sample {index}"
        tokens = _field(sample, "tokens", "int32", where)
        if tokens.ndim != 1 or not 0 < sample.num_prompt_tokens <= tokens.shape[0]:
            raise TransferError(
                f"{where}: tokens has shape {tokens.shape}, num_prompt_tokens is "
                f"{sample.num_prompt_tokens}"
            )
        response = (tokens.shape[0] - sample.num_prompt_tokens,)
        for name, dtype in _RESPONSE_FIELDS.items():
            _check_shape(_field(sample, name, dtype, where), response, f"{where}: {name}")
        for name, dtype in _SCALAR_FIELDS.items():
            _check_shape(_field(sample, name, dtype, where), (), f"{where}: {name}")


def _field(sample: Sample, name: str, dtype: str, where: str) -> np.ndarray:
    if name not in sample.fields:
        raise TransferError(f"{where}: field {name} is missing; has {', '.join(sample.fields)}")
    array = sample.fields[name]
    if array.dtype != np.dtype(dtype):
        raise TransferError(f"{where}: field {name} is {array.dtype}, must be {dtype}")
    return array


def _check_shape(array: np.ndarray, shape: tuple[int, ...], what: str) -> None:
    if array.shape != shape:
        raise TransferError(f"{what} has shape {array.shape}, must be {shape}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise TransferError(f"{what} is not finite")


def _checked(row: Row, name: str, array: np.ndarray) -> np.ndarray:
    where = f"group {row.uid} sample {row.sample_index}: {name}"
    if array.dtype != np.float32:
        raise TransferError(f"{where} is {array.dtype}, must be float32")
    _check_shape(array, (row.num_tokens - row.num_prompt_tokens,), where)
    return array

"""Client of the transfer queue: rows x fields x tasks.

who             calls                              waits for / unblocked by
rollout engine  open_dataset, admit                a free slot / a trained or dropped group
                put_group(s), drop_group,
                return_group, save_partial
ref, logprob    take_rows, put_fields              rows without the field / put_group
train           begin_train, take_chunk            complete groups / put_group, put_fields
(one of a dp)   complete_step, cut_ledger

A slot is freed when its group was *trained* (or dropped), not when it is taken. Payload lies in
shared memory of the node that made it; only metadata goes through the controller. Rows that were
taken are views: valid until `complete_step` of their step, when their memory is used again.

All methods are thread-safe and blocking; each may be repeated, and survives a restart of the
controller.
"""

import dataclasses
import itertools
import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from relax_hpc.config import TransferConfig
from relax_hpc.control.identity import Identity
from relax_hpc.control.rpc import Empty, RpcClient
from relax_hpc.errors import DeadlineError, RelaxError, TransferError
from relax_hpc.log import kv
from relax_hpc.records import Chunk, Fields, FinishReason, PromptSlot, Row, Sample
from relax_hpc.transfer import wire
from relax_hpc.transfer.arena import ArenaStats
from relax_hpc.transfer.block import Columns, Rows, first_not_finite
from relax_hpc.transfer.payload import Payload
from relax_hpc.transfer.schema import RL_ROWS, RowSchema, check_responses, version_span
from relax_hpc.transfer.wire import BlockRef, QueueStatus, StepSummary

_log = logging.getLogger(__name__)

_LONG_POLL_S = 10.0
_REASONS = {reason.value: reason for reason in FinishReason}

Response = TypeVar("Response", bound=msgspec.Struct)


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """Answer to `admit`."""

    slots: list[PromptSlot]
    """Prompts to generate; empty when the wait ended first."""
    done: bool
    """All train steps are complete: nothing will be admitted any more."""


class _Opened(NamedTuple):
    """Rows of a reply."""

    rows: list[Row]
    errors: dict[str, RelaxError]
    """Of groups that could not be read, by uid."""


@dataclasses.dataclass(slots=True)
class _Prepared:
    """A chunk as the controller told it early, read while the journal was written."""

    reply: wire.TakenChunk | None = None
    opened: _Opened = dataclasses.field(default_factory=lambda: _Opened([], {}))


class TransferQueue:
    """One process's access to the queue."""

    def __init__(
        self,
        identity: Identity,
        *,
        grace_s: float = 180.0,
        config: TransferConfig | None = None,
        schema: RowSchema = RL_ROWS,
    ) -> None:
        """Connect lazily; only the first put asks for shared memory.

        Args:
            identity: this task.
            grace_s: how long a call waits for a controller that is being restarted.
            config: section transfer of the run; None: its defaults.
            schema: fields that every row must have.
        """
        self._grace_s, self._schema, self._checks = grace_s, schema, schema.checks
        self._client = RpcClient(identity.run, wire.SERVICE, identity)
        self._payload = Payload(identity, config or TransferConfig(), grace_s)
        self._admit_lock = threading.Lock()
        self._take_lock = threading.Lock()
        self._keys: dict[str, str] = {}
        self._names = itertools.count(1)
        self._nonce = os.urandom(4).hex()

    # -- rollout ------------------------------------------------------------------------------

    def open_dataset(
        self, num_prompts: int, fingerprint: str, *, allow_changed: bool = False
    ) -> None:
        """Tell the data set before the first admit; every engine does, all must agree.

        Args:
            num_prompts: rows of the data set.
            fingerprint: of its contents.
            allow_changed: go on with another data set than the run began with.

        Raises:
            TransferError: the run began with another data set.
        """
        request = wire.OpenDataset(num_prompts, fingerprint, allow_changed)
        self._call("open_dataset", request, Empty, why="open the data set")
        self._payload.warm_up()

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

    def put_group(self, slot: PromptSlot, samples: Sequence[Sample]) -> bool:
        """Put all samples of a group; visible as a whole when this returns.

        Waits while the arena is full: consumers are behind.

        Returns:
            False: nobody wants the group any more (the train step was rolled back, or this
            engine was thought dead and the prompt was dispatched again). Go on with others.

        Raises:
            ArenaFullError: no memory became free within transfer.put_timeout_s.
            TransferError: a sample breaks the record's shape; names group, sample and field.
        """
        return self.put_groups([(slot, samples)])[0]

    def put_groups(self, groups: Sequence[tuple[PromptSlot, Sequence[Sample]]]) -> list[bool]:
        """Put several groups with one message; each is kept or refused on its own, see `put_group`.

        A sample that breaks the schema refuses all groups of the call, nothing is put then. Small
        groups of one call share memory: put those together that are trained at about one time.
        """
        if not groups:
            return []
        by_uid = [(slot.uid, samples) for slot, samples in groups]
        described = self._schema.describe(by_uid)
        checks = [self._checks] * len(described.blocks)
        refs = self._payload.write(described.blocks, checks)
        infos = [
            wire.GroupInfo(uid, refs[block], rows, oldest, newest)
            for (uid, _), block, rows, (oldest, newest) in zip(
                by_uid, described.block_of, described.rows, described.spans, strict=True
            )
        ]
        why = f"put group {by_uid[0][0]}" if len(by_uid) == 1 else f"put {len(by_uid)} groups"
        reply = self._store("put_groups", wire.PutGroups(infos), wire.StoredGroups, refs, why)
        stored = reply.results
        if not all(one.is_kept for one in stored):
            pairs = zip(described.block_of, stored, strict=True)
            kept = {block for block, one in pairs if one.is_kept}
            self._payload.give_up([ref for block, ref in enumerate(refs) if block not in kept])
        return [one.is_wanted for one in stored]

    def save_partial(self, slot: PromptSlot, samples: Sequence[Fields]) -> bool:
        """Keep what is generated of a group so far: its prompt's next dispatch gets it.

        Args:
            slot: the group, not put yet. What was saved for it before is replaced.
            samples: fields of each sample, `tokens` and `token_versions` at least; for a sample
                without a token they are empty.

        Returns:
            False: nobody wants the group any more.
        """
        names = dict.fromkeys(name for fields in samples for name in fields)
        columns = Columns(
            [(slot.uid, index) for index in range(len(samples))],
            {name: [fields.get(name) for fields in samples] for name in names},
        )
        refs = self._payload.write([columns])
        span = version_span([fields[self._schema.versions] for fields in samples])
        request = wire.SavePartial(slot.uid, refs[0], *span)
        why = f"save tokens of group {slot.uid}"
        reply = self._store("save_partial", request, wire.Stored, refs, why)
        self._payload.give_up([] if reply.is_kept else refs)
        return reply.is_wanted

    def read_partial(self, slot: PromptSlot) -> list[Fields]:
        """Read what an earlier dispatch of the prompt had saved; [] if nothing, or it is lost."""
        if not isinstance(slot.partial, BlockRef):
            return []
        rows = self._payload.read([slot.partial])[0]
        if isinstance(rows, RelaxError):
            _log.warning("partial tokens are lost %s", kv(uid=slot.uid, reason=rows))
            return []
        return [fields for _, fields in sorted(rows.items())]

    def drop_group(
        self, slot: PromptSlot, reason: str, response_tokens: Sequence[int] = ()
    ) -> None:
        """Give a group up: the prompt is used up, the slot is free, the reason is counted.

        Args:
            slot: the group.
            reason: a name; drops are counted by it.
            response_tokens: length of each sample, for the histograms.
        """
        request = wire.EndGroup(slot.uid, reason, list(response_tokens))
        self._call("drop_group", request, Empty, why="drop a group")

    def return_group(
        self, slot: PromptSlot, reason: str, response_tokens: Sequence[int] = ()
    ) -> None:
        """Give a prompt back: it is dispatched again under a new uid, to any engine."""
        request = wire.EndGroup(slot.uid, reason, list(response_tokens))
        self._call("return_group", request, Empty, why="return a group")

    # -- ref, logprob -------------------------------------------------------------------------

    def take_rows(self, task: str, max_rows: int, timeout_s: float) -> list[Row]:
        """Lease rows that lack the field of `task` (ref or logprob); [] at the end of the wait.

        The lease ends with `put_fields`, or when this role restarts. Arrays are read-only views
        that stay valid until the step that trains on the rows is complete.
        """
        with self._take_lock:

            def ask(wait_s: float) -> wire.TakenRows:
                request = wire.TakeRows(task, self._key("take_rows"), max_rows, wait_s)
                why = f"rows for {task}"
                reply = self._call("take_rows", request, wire.TakenRows, wait_s, why=why)
                self._keys.pop("take_rows", None)
                return reply

            reply = _poll(ask, lambda r: bool(r.groups), timeout_s)
        opened = self._open_groups(reply.groups, reply.blocks)
        self._reject(opened.errors)
        return opened.rows

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
        check_responses(rows, name, arrays)
        columns = Columns([(row.uid, row.sample_index) for row in rows], {name: arrays})
        refs = self._payload.write([columns], [{name: first_not_finite}])
        samples: dict[str, list[int]] = {}
        for row in rows:
            samples.setdefault(row.uid, []).append(row.sample_index)
        request = wire.PutFields(name, list(samples.items()), refs[0])
        reply = self._store("put_fields", request, wire.Stored, refs, f"put {name}")
        self._payload.give_up([] if reply.is_kept else refs)
        return reply.is_wanted

    # -- train --------------------------------------------------------------------------------

    def begin_train(self, step: int, cut: bytes | None = None) -> None:
        """(Re)start training at `step` = the policy version of the loaded weights; once, rank 0.

        Groups that steps >= `step` consumed are dispatched again, exactly once; leases of older
        incarnations return.

        Args:
            step: applied optimizer steps.
            cut: what `cut_ledger` gave for the loaded weights: the queue goes on from it when its
                journal is missing or older.

        Raises:
            TransferError: the cut is not one, or of another step.
        """
        request = wire.BeginTrain(os.urandom(8).hex(), step, _decode_cut(step, cut))
        self._call("begin_train", request, Empty, why=f"begin step {step}")

    def cut_ledger(self, step: int, timeout_s: float = 180.0) -> bytes:
        """Return the prompt ledger as of a policy version; store it with the weights of it.

        Args:
            step: at most the current version.
            timeout_s: the call may be late at the end of a job, when the queue ends too.
        """
        request, why = wire.CutLedger(step), f"ledger of step {step}"
        cut = self._client.call("cut_ledger", request, wire.LedgerCut, timeout_s=timeout_s, why=why)
        return msgspec.msgpack.encode(cut)

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

        prepared = _Prepared()

        def ask(wait_s: float) -> wire.TakenChunk:
            request = wire.TakeChunk(step, index, dp_rank, dp_size, wait_s)
            call = self._client.start(
                "take_chunk", request, wire.TakenChunk, timeout_s=wait_s + self._grace_s, why=why
            )
            prepared.reply = call.early()
            if prepared.reply is not None and prepared.reply.groups is not None:
                prepared.opened = self._open_groups(prepared.reply.groups, prepared.reply.blocks)
            return call.result()

        while True:
            left_s = max(deadline - time.monotonic(), 0.0)
            reply = _poll(ask, lambda r: r.groups is not None, left_s)
            if reply.groups is None:
                raise DeadlineError(
                    f"{why}: not ready in {timeout_s:g} s; queue: {_state(self.status())}; look "
                    "into the logs of the steps that should fill it (rollout, ref, logprob)"
                )
            if reply is not prepared.reply:  # decided anew: the controller was restarted
                prepared.opened = self._open_groups(reply.groups, reply.blocks)
            if not prepared.opened.errors:
                return Chunk(task="train", step=step, index=index, rows=prepared.opened.rows)
            self._reject(prepared.opened.errors)

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

    def arena_stats(self) -> ArenaStats | None:
        """Return how much shared memory this process's rows take; None before its first put."""
        return self._payload.stats()

    def close(self) -> None:
        """Close sockets and end threads. Rows stay valid: what they view is freed with them."""
        self._client.close()
        self._payload.close()

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

    def _store(
        self,
        method: str,
        request: msgspec.Struct,
        response: type[Response],
        refs: Sequence[BlockRef],
        why: str,
    ) -> Response:
        """Tell the controller of blocks; they are freed if it refuses."""
        try:
            return self._call(method, request, response, why=why)
        except DeadlineError:
            raise  # it may have arrived: the blocks stay, the node agent finds orphans
        except RelaxError:
            self._payload.give_up(refs)
            raise

    def _open_groups(self, groups: Sequence[wire.GroupRows], refs: Sequence[BlockRef]) -> "_Opened":
        """Read rows of groups; those that are lost or corrupt are left out."""
        blocks = self._payload.read(refs)
        try:
            return _Opened(_to_rows(groups, blocks, self._schema), {})
        except RelaxError:
            opened = _Opened([], {})
        for group in groups:  # which one is it?
            try:
                opened.rows.extend(_to_rows([group], blocks, self._schema))
            except RelaxError as err:
                opened.errors[group.uid] = err
        return opened

    def _reject(self, errors: Mapping[str, RelaxError]) -> None:
        """Have groups generated again that could not be read."""
        for uid, err in errors.items():
            request = wire.EndGroup(uid, f"{err}")
            self._call("reject_group", request, Empty, why=f"reject group {uid}")


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
        partial=slot.partial,
    )


def _to_rows(
    groups: Sequence[wire.GroupRows], blocks: "Sequence[Rows | RelaxError]", schema: RowSchema
) -> list[Row]:
    """Build the rows of groups from the blocks of their message.

    Raises:
        RelaxError: a block could not be read, or does not hold what the controller was told.
    """
    fields: list[Fields] = []
    for group in groups:
        fields += _fields_of(group, [blocks[i] for i in group.blocks])
    counts = [len(group.samples) for group in groups]
    told = [group.rows for group in groups]
    if schema.tokens:
        _check_sizes(groups, fields, schema.tokens)
    columns = zip(  # no work in Python for each row
        _each(map(itertools.repeat, [group.uid for group in groups], counts)),
        _each([group.samples for group in groups]),
        _each(map(itertools.repeat, [group.group_size for group in groups], counts)),
        _each([rows.num_prompt_tokens for rows in told]),
        map(_REASONS.__getitem__, _each([rows.finish_reasons for rows in told])),
        fields,
        strict=True,
    )
    return list(itertools.starmap(Row, columns))  # the order of its fields


_each = itertools.chain.from_iterable


def _fields_of(group: wire.GroupRows, blocks: "Sequence[Rows | RelaxError]") -> list[Fields]:
    held = []
    for block in blocks:
        if isinstance(block, RelaxError):
            raise block
        held.append(block.pick(group.uid, group.samples))
    return held[0] if len(held) == 1 else list(map(_merged, zip(*held, strict=True)))


def _merged(parts: Sequence[Fields]) -> Fields:
    fields: Fields = {}
    for part in parts:
        fields.update(part)
    return fields


def _check_sizes(groups: Sequence[wire.GroupRows], fields: Sequence[Fields], name: str) -> None:
    """Does the payload hold the rows that the controller was told of?"""
    try:
        sizes = list(map(len, map(operator.itemgetter(name), fields)))
    except (KeyError, TypeError):
        sizes = []
    told = list(_each([group.rows.num_tokens for group in groups]))
    if sizes != told:
        uids = ", ".join(group.uid for group in groups)
        raise TransferError(
            f"group {uids}: {name} of its rows are missing or of other lengths: {sizes}, the "
            f"queue was told {told}"
        )


def _decode_cut(step: int, data: bytes | None) -> wire.LedgerCut | None:
    if data is None:
        return None
    try:
        cut = msgspec.msgpack.decode(data, type=wire.LedgerCut)
    except msgspec.DecodeError as err:
        raise TransferError(
            f"ledger of checkpoint {step}: not one ({len(data)} bytes, {err}); remove ledger.bin "
            "from the checkpoint to go on from the queue's journal"
        ) from err
    if cut.step != step:
        raise TransferError(f"ledger of checkpoint {step} is of step {cut.step}")
    return cut

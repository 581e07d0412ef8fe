"""Continuous batching: which sequences run, where their keys and values are, one step at a time.

    submit ->  waiting (FIFO)  -- admit: prefix once per prompt, then own tokens -->  running
                    ^                                                                   | step: one
                    +---- retract: cache full, or the weights changed ------------------+ token each
                                                                                        v
                                                                          finished, to the caller

Owned by one thread. A retracted sequence keeps its tokens and computes its keys and values again
when it is admitted: that is also how running sequences meet new weights, so no cached value of old
weights is ever read.
"""

import collections
import dataclasses
import itertools

import numpy as np
import torch

from relax_hpc.records import Completion, FinishReason
from relax_hpc.rollout.decoder import Decoder, DecoderWeights, ExtendBatch, KvPool
from relax_hpc.rollout.engine import GenerateRequest
from relax_hpc.rollout.sampling import SamplingParameters, sample, uniforms

PREFILL_TOKENS = 4096
"""Padded tokens of one prefill pass: bounds its activations."""
_HEADROOM_TOKENS = 8
"""Free slots per running sequence that admission leaves, so that it does not retract at once."""


@dataclasses.dataclass(slots=True, eq=False)
class _Prefix:
    """Keys and values of one prompt, shared by the sequences that have it."""

    slots: np.ndarray
    logits: torch.Tensor
    """float32 [V] after the last prompt token."""
    users: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """One request and what was generated for it."""

    request: GenerateRequest
    key: tuple[int, ...]
    """The prompt, hashable."""
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    prefix: _Prefix | None = None
    """None while waiting."""
    slots: list[np.ndarray] = dataclasses.field(default_factory=list)
    """Own slots: generated tokens whose keys and values are in the pool."""
    row: int = -1
    """Row of the slot table while running."""
    finish_reason: FinishReason | None = None

    def completion(self, reason: FinishReason) -> Completion:
        """What the caller gets."""
        return Completion(
            token_ids=self.tokens,
            logprobs=self.logprobs,
            token_versions=self.versions,
            finish_reason=reason,
        )

    def accept(self, token: int, logprob: float, version: int) -> None:
        """Add a sampled token; sets `finish_reason` when it was the last one."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.request.stop_token_ids:
            self.finish_reason = FinishReason.STOP
        elif len(self.tokens) == self.request.max_new_tokens:
            self.finish_reason = FinishReason.LENGTH


class Scheduler:
    """Sequences over one pool. `weights` and `version` are set by the owner between steps."""

    def __init__(self, decoder: Decoder, pool: KvPool, max_length: int, max_running: int) -> None:
        self._decoder, self._pool = decoder, pool
        self._device = pool.keys.device
        self._max_running = max_running
        self._waiting: collections.deque[Sequence] = collections.deque()
        self._running: list[Sequence] = []
        self._prefixes: dict[tuple[int, ...], _Prefix] = {}
        self._table = np.zeros((max_running, max_length), dtype=np.int32)
        self._free_rows = list(range(max_running - 1, -1, -1))
        self.weights: DecoderWeights | None = None
        self.version = -1

    @property
    def num_sequences(self) -> int:
        """Sequences that are waiting or running."""
        return len(self._waiting) + len(self._running)

    @property
    def num_cached_tokens(self) -> int:
        """Slots in use."""
        return self._pool.keys.shape[1] - 1 - self._pool.num_free

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; it must fit into the empty pool."""
        self._waiting.append(sequence)

    def remove(self, request_ids: set[str]) -> list[Sequence]:
        """Take sequences out (abort), whatever they are doing."""
        gone = [s for s in (*self._waiting, *self._running) if s.request.request_id in request_ids]
        for sequence in gone:
            if sequence.prefix is None:
                self._waiting.remove(sequence)
            else:
                self._leave(sequence)
        return gone

    def remove_all(self) -> list[Sequence]:
        """Take every sequence out."""
        return self.remove(
            {s.request.request_id for s in (*self._waiting, *self._running)},
        )

    def retract_all(self) -> None:
        """Send the running sequences back to the front of the queue and empty the cache."""
        for sequence in self._running[::-1]:
            self._retract(sequence)
        assert not self._prefixes, "a prefix lives only as long as its running sequences"

    def step(self) -> list[Sequence]:
        """Admit what fits, give every running sequence one token, return the finished ones."""
        finished = self._decode() if self._running else []
        finished += self._admit()
        return finished

    # -- admission ------------------------------------------------------------------------------

    def _admit(self) -> list[Sequence]:
        """Prefill waiting sequences and sample their next token."""
        batch = self._choose()
        if not batch:
            return []
        logits = [s.prefix.logits for s in batch if s.prefix is not None]
        again = [index for index, s in enumerate(batch) if s.tokens]
        if again:  # they were retracted: their own tokens follow the prompt
            pieces = [
                (batch[i].row, len(batch[i].key), batch[i].tokens, batch[i].slots[0]) for i in again
            ]
            for index, row in zip(again, self._prefill(pieces), strict=True):
                logits[index] = row
        self._running.extend(batch)
        return self._sample(batch, torch.stack(logits))

    def _choose(self) -> list[Sequence]:
        """Move sequences from the queue to table rows while slots last; compute new prefixes."""
        batch: list[Sequence] = []
        new: dict[tuple[int, ...], _Prefix] = {}
        promised = _HEADROOM_TOKENS * len(self._running)
        while self._waiting and self._free_rows:
            sequence = self._waiting[0]
            is_new = sequence.key not in self._prefixes
            need = len(sequence.tokens) + (len(sequence.key) if is_new else 0)
            is_alone = not batch and not self._running
            if not is_alone and need + promised + _HEADROOM_TOKENS > self._pool.num_free:
                break
            promised += _HEADROOM_TOKENS
            self._waiting.popleft()
            if is_new:
                slots = self._pool.take(len(sequence.key))
                new[sequence.key] = _Prefix(slots, torch.empty(0))
                self._prefixes[sequence.key] = new[sequence.key]
            self._enter(sequence)
            batch.append(sequence)
        self._compute_prefixes(batch, new)
        return batch

    def _enter(self, sequence: Sequence) -> None:
        prefix = self._prefixes[sequence.key]
        prefix.users += 1
        sequence.prefix, sequence.row = prefix, self._free_rows.pop()
        row, length = self._table[sequence.row], len(sequence.key)
        row[:length] = prefix.slots
        if sequence.tokens:
            sequence.slots.append(self._pool.take(len(sequence.tokens)))
            row[length : length + len(sequence.tokens)] = sequence.slots[0]

    def _compute_prefixes(self, batch: list[Sequence], new: dict[tuple[int, ...], _Prefix]) -> None:
        rows = {s.key: s.row for s in batch}
        pieces = [(rows[key], 0, list(key), prefix.slots) for key, prefix in new.items()]
        for prefix, logits in zip(new.values(), self._prefill(pieces), strict=True):
            prefix.logits = logits

    def _prefill(self, pieces: list[tuple[int, int, list[int], np.ndarray]]) -> list[torch.Tensor]:
        """Compute (table row, first position, tokens, their slots); logits after each last token.

        Sorted by length, so that a pass pads little; long ones are cut along the sequence.
        """
        out: list[torch.Tensor] = [torch.empty(0)] * len(pieces)
        order = sorted(range(len(pieces)), key=lambda i: len(pieces[i][2]), reverse=True)
        while order:
            width = min(len(pieces[order[0]][2]), PREFILL_TOKENS)
            now, order = order[: PREFILL_TOKENS // width], order[PREFILL_TOKENS // width :]
            for start in itertools.count(step=width):
                active = [i for i in now if len(pieces[i][2]) > start]
                if not active:
                    break
                logits = self._extend([_cut(pieces[i], start, start + width) for i in active])
                for index, row in zip(active, logits, strict=True):
                    out[index] = row
        return out

    # -- one step -------------------------------------------------------------------------------

    def _decode(self) -> list[Sequence]:
        """One token for every running sequence, in one batch."""
        while self._pool.num_free < len(self._running):
            self._retract(self._running[-1])  # the newest: the oldest ones finish and free theirs
        running = self._running
        slots = self._pool.take(len(running))
        lengths = np.array([len(s.key) + len(s.tokens) - 1 for s in running])
        rows = np.array([s.row for s in running])
        self._table[rows, lengths] = slots
        for index, sequence in enumerate(running):
            sequence.slots.append(slots[index : index + 1])
        length = int(lengths.max()) + 1
        batch = ExtendBatch(
            tokens=self._tensor(np.array([s.tokens[-1] for s in running])[:, None]),
            positions=self._tensor(lengths[:, None]),
            write_slots=self._tensor(slots[:, None]),
            context_slots=self._tensor(self._table[rows, :length]),
            last=torch.zeros(len(running), dtype=torch.int64, device=self._device),
        )
        return self._sample(list(running), self._forward(batch))

    def _extend(self, pieces: list[tuple[int, int, list[int], np.ndarray]]) -> torch.Tensor:
        """One padded pass over pieces of prefill; the table already holds their slots."""
        lengths = [len(tokens) for _, _, tokens, _ in pieces]
        shape = (len(pieces), max(lengths))
        tokens, positions, write = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        for index, (_, start, new, slots) in enumerate(pieces):
            tokens[index, : len(new)] = new
            positions[index, : len(new)] = np.arange(start, start + len(new))
            write[index, : len(new)] = slots
        length = max(start + len(new) for _, start, new, _ in pieces)
        rows = np.array([row for row, _, _, _ in pieces])
        batch = ExtendBatch(
            tokens=self._tensor(tokens),
            positions=self._tensor(positions),
            write_slots=self._tensor(write),
            context_slots=self._tensor(self._table[rows, :length]),
            last=self._tensor(np.array(lengths) - 1),
        )
        return self._forward(batch)

    def _forward(self, batch: ExtendBatch) -> torch.Tensor:
        assert self.weights is not None, "the engine refuses requests before the first version"
        return self._decoder.extend(self.weights, self._pool, batch)

    def _sample(self, sequences: list[Sequence], logits: torch.Tensor) -> list[Sequence]:
        requests = [s.request for s in sequences]
        parameters = SamplingParameters(
            temperature=torch.tensor([r.temperature for r in requests], device=self._device),
            top_p=torch.tensor([r.top_p for r in requests], device=self._device),
            top_k=torch.tensor([r.top_k for r in requests], device=self._device),
        )
        draws = uniforms(
            np.array([r.seed for r in requests], dtype=np.uint64),
            np.array([len(s.tokens) for s in sequences]),
        )
        tokens, logprobs = sample(logits, parameters, torch.from_numpy(draws).to(self._device))
        finished = []
        for sequence, token, logprob in zip(
            sequences, tokens.tolist(), logprobs.tolist(), strict=True
        ):
            sequence.accept(token, logprob, self.version)
            if sequence.finish_reason is not None:
                finished.append(sequence)
        for sequence in finished:
            self._leave(sequence)
        return finished

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)

    # -- slots ----------------------------------------------------------------------------------

    def _leave(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        prefix = sequence.prefix
        assert prefix is not None, "only running sequences leave"
        for slots in sequence.slots:
            self._pool.put_back(slots)
        prefix.users -= 1
        if prefix.users == 0:
            self._pool.put_back(prefix.slots)
            del self._prefixes[sequence.key]
        self._free_rows.append(sequence.row)
        sequence.prefix, sequence.row = None, -1
        sequence.slots.clear()

    def _retract(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self._waiting.appendleft(sequence)


def _cut(
    piece: tuple[int, int, list[int], np.ndarray], start: int, stop: int
) -> tuple[int, int, list[int], np.ndarray]:
    row, first, tokens, slots = piece
    return row, first + start, tokens[start:stop], slots[start:stop]

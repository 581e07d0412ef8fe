"""Typed records that several roles share: samples, groups, micro-batches. No torch here.

A *group* is the n samples of one prompt; it is the unit of admission, staleness and advantages.
A *row* is one sample; its *fields* are arrays that different roles put when they exist.

`Sample` and `Row` are Structs: one is made per row, which takes 0.1 us instead of the 1.5 us of a
frozen dataclass. The garbage collector does not track them (gc=False): arrays are in no cycle.
"""

import dataclasses
import enum
import typing
from typing import Any, TypeAlias

import msgspec
import numpy as np

FieldValue: TypeAlias = "np.ndarray | bytes | str | dict[str, FieldValue]"
"""What one field of one row may be: a numeric array of any shape, bytes, text, or a dictionary."""

Fields = dict[str, np.ndarray]
"""One row's fields by name: arrays, as far as this toolkit trains on them. A row may carry more
fields, also such that are another `FieldValue` (an image's bytes); who reads them knows what they
are. Names and dtypes:

tokens               int32 [L]   prompt then response
rollout_logprobs     float32 [R] log-probs of the response tokens under the engine that sampled them
token_versions       int32 [R]   policy version that each response token was sampled with
loss_mask            uint8 [R]   1 on tokens that the loss counts (tool observations: 0)
reward               float32 []  shaped reward (what advantages are computed from)
accuracy             float32 []  raw correctness in [0, 1] (what dynamic sampling looks at)
ref_logprobs         float32 [R] put by the ref role
train_logprobs       float32 [R] put by the logprob role
The prompt's length is `Sample.num_prompt_tokens`, L = num_prompt_tokens + R.
"""


class FinishReason(enum.StrEnum):
    """Why generation of a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    """Truncated: the only reason that means truncated."""
    ABORT = "abort"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One row of a data set, tokenized. Rewards get the whole record."""

    token_ids: list[int]
    """Chat template applied; what the engine gets, never re-tokenized."""
    label: str
    """Right answer."""
    text: str
    """Contents of the messages, joined; for people and reports."""
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Other columns of the row; `reasoning_gym` tasks: what the scorer needs to find the entry."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PromptSlot:
    """Permission to generate one group: a slot of the transfer queue's admission window."""

    uid: str
    """Unique id of this dispatch, `EPOCH.INDEX.K`; two copies of one prompt have two uids."""
    prompt_index: int
    """Row of the data set."""
    epoch: int
    deadline_version: int
    """Largest train version that may still consume this group (engine version + max_staleness)."""
    partial: object = None
    """Where the tokens of an earlier dispatch lie, for `TransferQueue.read_partial`; None: none."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What an engine returned for one request: token ids, never text that was re-tokenized."""

    token_ids: list[int]
    logprobs: list[float]
    token_versions: list[int]
    """Policy version per token; same length as token_ids."""
    finish_reason: FinishReason


class Sample(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row as the producer puts it."""

    num_prompt_tokens: int
    finish_reason: FinishReason
    fields: Fields


class Row(msgspec.Struct, frozen=True, gc=False):
    """One row as a consumer takes it.

    Arrays are read-only views of shared memory that is used again once the row was trained: copy
    what outlives `complete_step`.
    """

    uid: str
    """Group uid."""
    sample_index: int
    """Place in the group, 0 .. group_size - 1."""
    group_size: int
    num_prompt_tokens: int
    finish_reason: FinishReason
    fields: Fields

    @property
    def num_tokens(self) -> int:
        """L: prompt and response tokens."""
        return int(self.fields["tokens"].shape[0])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A consumer's share of one chunk of a train step: whole groups, group-contiguous rows."""

    task: str
    step: int
    """Train step (policy version before the update)."""
    index: int
    """0 .. chunks_per_step - 1."""
    rows: list[Row]


class RewardResult(typing.NamedTuple):
    """A score. `valid=False` means infrastructure failed: never a number to learn from."""

    score: float
    accuracy: float
    valid: bool = True
    reason: str = ""

"""What the program says it does: checkpoint, evaluation, rollout, finished. Versions in prose."""

import re
from collections.abc import Iterator, Sequence

from relax_hpc.postmortem.evidence import Event, EventKind
from relax_hpc.postmortem.parse.record import Parser, Record

_FINISHED = re.compile(
    r"Trainer\.fit` stopped: `max_|[Tt]raining (?:is )?(?:completed?|finished|"
    r"done|ended|has ended)|"
    r"train_runtime|[Dd]one training|\bafter training is done\b|"
    r"Saving (?:the )?final|Finished training|End training|job (?:finished|"
    r"completed) successfully",
    re.I,
)
_PHASES = (
    (
        "checkpoint",
        re.compile(
            r"[Ss]aving (?:the |model |full )*(?:checkpoint|optimizer|state|model)|"
            r"[Ss]ave_?(?:checkpoint|pretrained|state)|Writing checkpoint|"
            r"saving checkpoint at iteration|Saving model checkpoint to",
            re.I,
        ),
    ),
    (
        "evaluation",
        re.compile(
            r"Running [Ee]valuation|Evaluating\b|\*\*\*\*\* Running (?:Evaluation|"
            r"Prediction)|[Vv]alidation (?:step|epoch|loop|DataLoader|sanity|started)|"
            r"Validating\b|eval_batch|start evaluation|Running validation",
            re.I,
        ),
    ),
    (
        "rollout",
        re.compile(
            r"Processed prompts:|generat(?:ing|e_sequences) |[Rr]ollout (?:phase|step|"
            r"start|worker)|Generating (?:rollouts|samples|experience)|Decode batch",
            re.I,
        ),
    ),
    (
        "data",
        re.compile(
            r"Loading (?:dataset|data)|Tokeniz(?:ing|er)\b.*(?:dataset|%)|"
            r"Map \(num_proc|Running tokenizer|Building (?:dataset|index)|preprocess",
            re.I,
        ),
    ),
    (
        "init",
        re.compile(
            r"Initializing (?:process group|model)|Loading checkpoint shards|"
            r"Bootstrap : Using|Loading (?:model|weights)",
            re.I,
        ),
    ),
)


_PART = re.compile(r"(?<!max_)\b(?:epoch|step|stage|iteration) *\d+", re.I)
"""The end of an epoch is not the end of the work."""


def parse_finished(records: Sequence[Record], index: int) -> Iterator[Event]:
    """The program says that its work is done."""
    record = records[index]
    if _FINISHED.search(record.text) and not _PART.search(record.text):
        yield record.event(EventKind.PHASE, attrs={"phase": "finished"})


def parse_phase(records: Sequence[Record], index: int) -> Iterator[Event]:
    """A line that tells the phase of the program."""
    record = records[index]
    for name, pattern in _PHASES:
        if pattern.search(record.text):
            yield record.event(EventKind.PHASE, attrs={"phase": name})
            return


_NCCL = re.compile(
    r"(?:NCCL version |nvidia-nccl-cu\d+\s*==\s*|\bNCCL[ /]|"
    r"\b)(?P<version>2\.\d{1,2}\.\d{1,2})(?:\+cuda[\d.]+|-\d)?(?=\D|$)"
)


def parse_nccl_version(records: Sequence[Record], index: int) -> Iterator[Event]:
    """NCCL's version; `blamed` if the text calls it broken."""
    record = records[index]
    if "nccl" not in record.text.lower() and not _WEDGE.search(record.text):
        return
    for found in _NCCL.finditer(record.text):
        if "NCCL" in record.text[: found.end()].upper() or _WEDGE.search(record.text):
            around = record.text[max(0, found.start() - 30) : found.end() + 60]
            yield record.event(
                EventKind.CONFIG_NOTE,
                attrs={
                    "note": "nccl-version",
                    "version": found["version"],
                    "blamed": int(bool(_BLAME.search(around))),
                },
            )


_WEDGE = re.compile(r"\bwedge[sd]?\b|silent(?:ly)? (?:hang|wedge)", re.I)
_BLAME = re.compile(r"wedges|has (?:the|a) bug|deadlock|regression|broken", re.I)


def parse_wedge(records: Sequence[Record], index: int) -> Iterator[Event]:
    """Findings of an investigator: a silent wedge, no Xid, no error."""
    record = records[index]
    if _WEDGE.search(record.text):
        clean = bool(re.search(r"no Xid|no error|no time-?out|silent", record.text, re.I))
        yield record.event(
            EventKind.CONFIG_NOTE, attrs={"note": "wedge", "clean_hardware": int(clean)}
        )


PARSERS = (
    Parser(
        "finished",
        (
            "raining complete",
            "raining finished",
            "raining is ",
            "raining done",
            "raining ended",
            "raining has ended",
            "train_runtime",
            "one training",
            "inished training",
            "End training",
            "aving final",
            "aving the final",
            "job finished",
            "job completed",
            "Trainer.fit",
        ),
        parse_finished,
    ),
    Parser(
        "phase",
        (
            "raining",
            "Trainer.fit",
            "train_runtime",
            "aving",
            "ave_",
            "valuat",
            "alidat",
            "Processed prompts",
            "enerat",
            "ollout",
            "Loading",
            "okeniz",
            "Map (num_proc",
            "Building",
            "Initializing",
            "Bootstrap",
            "Decode batch",
            "job finished",
            "job completed",
            "preprocess",
            "eval_batch",
        ),
        parse_phase,
    ),
    Parser("nccl_version", ("NCCL", "nccl", "wedge"), parse_nccl_version),
    Parser("wedge", ("wedge", "silent"), parse_wedge),
)
CONTEXT_ONLY = frozenset({"phase", "nccl_version"})
"""Parsers whose literals do not open a window: their lines are everywhere."""

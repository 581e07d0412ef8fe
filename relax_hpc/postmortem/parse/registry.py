"""All parsers, and which literals make a line worth reading."""

from collections.abc import Iterator, Sequence

from relax_hpc.postmortem.evidence import Event
from relax_hpc.postmortem.parse import (
    cuda,
    gloo,
    hardware,
    launch,
    mismatch,
    network,
    phase,
    ras,
    slurm,
    stacks,
    storage,
    traceback,
    watchdog,
)
from relax_hpc.postmortem.parse.record import Parser, Record

ALL: tuple[Parser, ...] = (
    *watchdog.PARSERS,
    *gloo.PARSERS,
    *mismatch.PARSERS,
    *ras.PARSERS,
    *network.PARSERS,
    *hardware.PARSERS,
    *cuda.PARSERS,
    *slurm.PARSERS,
    *launch.PARSERS,
    *traceback.PARSERS,
    *storage.PARSERS,
    *stacks.PARSERS,
    *phase.PARSERS,
)

LITERALS: tuple[str, ...] = tuple(
    literal
    for parser in ALL
    if parser.name not in phase.CONTEXT_ONLY
    for literal in parser.literals
)


def parse(records: Sequence[Record]) -> Iterator[Event]:
    """Run every parser on the records that hold one of its literals."""
    for index, record in enumerate(records):
        text = record.text
        for parser in ALL:
            if any(literal in text for literal in parser.literals):
                yield from parser.function(records, index)

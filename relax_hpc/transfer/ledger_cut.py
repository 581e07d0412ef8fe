"""The ledger as of one policy version: stored with that version's checkpoint, restored from there.

Journal and checkpoint are two files that can be lost apart. A train step that begins from a
checkpoint hands its cut back; the controller uses it when its own journal is missing or older.
What was in flight at the cut is dispatched again, what was trained before it never is.
"""

import msgspec
import xxhash

from relax_hpc.errors import TransferError
from relax_hpc.transfer.ledger import LIFE, Ledger, LedgerData
from relax_hpc.transfer.queue_data import QueueData
from relax_hpc.transfer.wire import LedgerCut

_FORMAT = 1


class _Content(msgspec.Struct):
    format: int
    step: int
    ledger: LedgerData


def cut_ledger(data: QueueData, step: int) -> LedgerCut:
    """Return the ledger that `begin_train(step)` would give, in flight counted as to dispatch.

    Raises:
        TransferError: the queue has not reached `step`.
    """
    if not 0 <= step <= data.version:
        raise TransferError(f"cut_ledger({step}): the queue is at version {data.version}")
    content = msgspec.msgpack.encode(data.ledger)
    copy = msgspec.msgpack.decode(content, type=LedgerData)
    in_flight = [group.ticket for group in data.groups.values()]
    ledger = Ledger(copy, seed=0, is_shuffled=False)
    ledger.dispatch_again(in_flight, "cut", is_first=False)
    ledger.dispatch_again(ledger.untrain(step), "rollback", is_first=True)
    # Shared memory does not outlive its job; the spill's files do.
    kept = {uid: p for uid, p in copy.partials.items() if p.block.tier == "spill"}
    copy.partials = {uid: p for uid, p in kept.items() if p.newest_version <= step}
    encoded = msgspec.msgpack.encode(_Content(_FORMAT, step, copy))
    return LedgerCut(step, encoded, xxhash.xxh3_128_hexdigest(encoded))


def ledger_of(cut: LedgerCut, step: int) -> LedgerData:
    """Check and decode a cut that came back with `begin_train(step)`.

    Raises:
        TransferError: damaged, of another step, or of another version of this program.
    """
    seen = xxhash.xxh3_128_hexdigest(cut.data)
    what = f"ledger cut of step {cut.step} ({len(cut.data)} bytes)"
    if seen != cut.digest:
        raise TransferError(
            f"{what} is damaged: digest {seen}, expected {cut.digest}; begin from another "
            "checkpoint, or without the cut (prompts may then be trained twice)"
        )
    try:
        content = msgspec.msgpack.decode(cut.data, type=_Content)
    except msgspec.DecodeError as err:
        raise TransferError(f"{what} is of another version of relax_hpc: {err}") from err
    if content.format != _FORMAT or not content.step == cut.step == step:
        raise TransferError(
            f"{what}: format {content.format} of step {content.step}, expected format {_FORMAT} "
            f"of step {step}"
        )
    return content.ledger


def restored_ledger(cut: LedgerCut, step: int, known: LedgerData, incarnation: int) -> LedgerData:
    """Decode a cut for a queue whose present ledger is `known`: uids of both never meet.

    Args:
        cut: what the checkpoint held.
        step: version of the checkpoint.
        known: the ledger that is replaced.
        incarnation: of the train step; each one restores into a life of its own.

    Raises:
        TransferError: as `ledger_of`, or the cut is of another data set than the one that was
            opened, and that was not allowed.
    """
    data = ledger_of(cut, step)
    data.first_k = max(data.first_k, known.first_k, incarnation * LIFE) + LIFE
    data.again = [ticket.at_least(data.first_k) for ticket in data.again]
    data.partials = {}
    if known.num_prompts == 0:
        return data
    seen = (known.num_prompts, known.fingerprint)
    if seen != (data.num_prompts, data.fingerprint) and not known.is_change_allowed:
        raise TransferError(
            f"the checkpoint of step {step} belongs to a data set of {data.num_prompts} prompts, "
            f"fingerprint {data.fingerprint}; this run opened {seen[0]} prompts, fingerprint "
            f"{seen[1]}: restore data.train (and the tokenizer), or set data.allow_changed = true"
        )
    Ledger(data, seed=0, is_shuffled=False).open(*seen, known.is_change_allowed)
    return data

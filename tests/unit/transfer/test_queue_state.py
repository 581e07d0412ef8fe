"""Staleness policies, saved tokens, histograms, stuck tasks."""

import dataclasses

import msgspec

from relax_hpc.config import StalePolicy
from relax_hpc.transfer import queue_data as q
from relax_hpc.transfer import wire

from .queue_simulation import CONFIG, Simulation, make_caller


def test_saved_tokens_come_back_with_the_next_dispatch_and_bring_its_deadline_forward() -> None:
    run = Simulation(dataclasses.replace(CONFIG, max_staleness=2), 5)
    run.admit(0)
    slot, block = run.slots[0][0], run.block()
    run.partial_version[block.epoch] = 0
    reply, events = run.rules.save_partial(wire.SavePartial(slot.uid, block, 0, 0))
    run.do(events)
    assert reply.is_kept and run.rules.state.blocks.has_block(block)
    again, more = run.rules.save_partial(wire.SavePartial(slot.uid, block, 0, 0))
    assert again.is_kept and not more, "a repeated message counts once"
    run.do([q.ProducerLost("rollout", 0, 1), q.StepCompleted(0, _nothing_trained())])
    run.slots[0], run.engines = [], [1, 1, 1]
    while not run.slots[1]:
        run.admit(1)
    given = {s.prompt_index: s for s in run.slots[1]}[slot.prompt_index]
    assert given.partial == block and given.deadline_version == 2
    others = [s.deadline_version for s in run.slots[1] if s is not given]
    assert set(others) <= {3}
    run.do(run.rules.drop_group(wire.EndGroup(given.uid, "x")))
    assert (block.extent, block.offset, block.epoch) in run.data.free["arena"]
    assert not run.rules.state.blocks.has_block(block)


def test_saved_tokens_that_are_too_old_are_generated_anew() -> None:
    run = Simulation(dataclasses.replace(CONFIG, max_staleness=0), 5)
    run.admit(0)
    uid, block = run.slots[0][0].uid, run.block()
    run.do(run.rules.save_partial(wire.SavePartial(uid, block, 0, 0))[1])
    run.do([q.ProducerLost("rollout", 0, 1), q.StepCompleted(0, _nothing_trained())])
    run.slots[0], run.engines = [], [1, 1, 1]
    run.admit(1)
    assert run.slots[1] and all(s.partial is None for s in run.slots[1])
    assert (block.extent, block.offset, block.epoch) in run.data.free["arena"]


def _nothing_trained() -> wire.StepSummary:
    return wire.StepSummary(
        step=0, num_groups=0, num_samples=0, num_tokens=0, staleness_mean=0.0, staleness_max=0
    )


def _one_stale_group(policy: StalePolicy) -> tuple[Simulation, wire.Stored, str]:
    run = Simulation(dataclasses.replace(CONFIG, max_staleness=0, stale_policy=policy), 1)
    run.begin(4)
    run.engines[0] = 4
    run.admit(0)
    slot = run.slots[0].pop(0)
    info = msgspec.structs.replace(run.group(slot.uid, [9, 2]), oldest_version=3)
    reply, events = run.rules.put_group(info, 1.0)
    run.do(events)
    run.check_every_prompt_is_in_one_place()
    return run, reply, slot.uid


def test_policy_regenerate_dispatches_a_stale_group_again() -> None:
    run, reply, uid = _one_stale_group(StalePolicy.REGENERATE)
    assert not reply.is_kept and not reply.is_wanted and uid not in run.data.groups
    assert run.data.ledger.redispatched == {"older_than_admitted": 1}
    assert run.data.histograms.dropped == {"older_than_admitted": {4: 1, 1: 1}}


def test_policy_drop_uses_the_prompt_up_and_counts_it() -> None:
    run, reply, uid = _one_stale_group(StalePolicy.DROP)
    assert not reply.is_kept and uid not in run.data.groups and not run.data.ledger.again
    assert run.data.ledger.dropped == {"stale": 1}
    assert run.data.histograms.dropped == {"stale": {4: 1, 1: 1}}


def test_policy_correct_trains_a_stale_group_and_tells_its_age() -> None:
    run, reply, uid = _one_stale_group(StalePolicy.CORRECT)
    assert reply.is_kept and run.data.groups[uid].phase is q.Phase.READY
    while run.data.version == 4:
        run.admit(0)
        run.finish(0)
        run.train_any_age()
    summary = run.data.last_summary
    assert summary is not None and uid in summary.uids
    assert summary.staleness_max == 1 and summary.staleness == {0: 6, 1: 2}
    assert run.data.histograms.staleness == {0: 6, 1: 2}


def test_tokens_of_a_lost_branch_are_never_trained() -> None:
    run = Simulation(dataclasses.replace(CONFIG, max_staleness=2), 1)
    run.begin(3)
    run.engines[0] = 3
    run.admit(0)
    first, second = run.slots[0][:2]
    info = msgspec.structs.replace(run.group(first.uid, [9, 9]), newest_version=3)
    run.do(run.rules.put_group(info, 1.0)[1])
    run.engines[0] = 3
    run.begin(2)  # back by one step: weights 3 will be others
    assert first.uid not in run.data.groups
    late = msgspec.structs.replace(run.group(second.uid, [9, 9]), newest_version=3)
    reply, events = run.rules.put_group(late, 1.0)
    assert not reply.is_kept
    run.do(events)
    run.check_every_prompt_is_in_one_place()


def test_histograms_count_samples_by_length() -> None:
    run = Simulation(dataclasses.replace(CONFIG, groups_per_step=2, chunks_per_step=1), 1)
    run.engines[0] = 0
    while len(run.slots[0]) < 3:
        run.admit(0)
    for slot, lengths in zip(run.slots[0][:2], ([2, 3], [5, 9]), strict=True):
        run.do(run.rules.put_group(run.group(slot.uid, lengths), 1.0)[1])
    run.do(run.rules.drop_group(wire.EndGroup(run.slots[0][2].uid, "flat", [100, 1])))
    while run.data.version == 0:
        run.train()
    status = run.rules.status(2.0)
    assert status.histograms.generated == {1: 1, 2: 1, 3: 1, 4: 1}
    assert status.histograms.trained == status.histograms.generated
    assert status.histograms.dropped == {"flat": {7: 1, 1: 1}}
    assert run.data.last_summary is not None
    assert run.data.last_summary.response_lengths == status.histograms.trained


def test_a_task_that_does_nothing_is_named() -> None:
    run = Simulation(dataclasses.replace(CONFIG, task_fields={"ref": "ref_logprobs"}), 4)
    while not run.rules.state.pending["ref"]:
        run.admit(0)
        run.finish(0)
    task = run.rules.status(1000.0).tasks["ref"]
    assert (task.oldest_s, task.is_stuck, task.leased) == (999.0, True, 0)
    taken = run.rules.take_rows(make_caller("ref"), wire.TakeRows("ref", "k", 1, 0.0))
    assert taken is not None
    run.do([taken])
    task = run.rules.status(5.0).tasks["ref"]
    assert (task.oldest_s, task.is_stuck, task.leased) == (4.0, False, 1)


def test_an_engine_that_went_on_over_a_rollback_generates_again() -> None:
    run = Simulation(dataclasses.replace(CONFIG, max_staleness=2), 1)
    step = q.StepCompleted(1, msgspec.structs.replace(_nothing_trained(), step=1))
    run.begin(1)
    run.engines[0] = 1
    run.admit(0)
    slot, block = run.slots[0][0], run.block()
    run.do([step])
    run.do(run.rules.save_partial(wire.SavePartial(slot.uid, block, 1, 2))[1])
    assert run.rules.state.blocks.has_block(block)
    run.begin(1)  # the group of version 1 goes on; its tokens of version 2 are lost
    assert (block.extent, block.offset, block.epoch) in run.data.free["arena"]
    run.do([step])
    reply, _ = run.rules.save_partial(wire.SavePartial(slot.uid, run.block(), 1, 2))
    assert not reply.is_kept and slot.uid in run.data.groups
    info = run.group(slot.uid, [9, 9])
    assert run.rules.put_group(msgspec.structs.replace(info, newest_version=1), 1.0)[0].is_kept
    reply, events = run.rules.put_group(msgspec.structs.replace(info, newest_version=2), 1.0)
    run.do(events)
    assert not reply.is_kept and slot.uid not in run.data.groups
    run.check_every_prompt_is_in_one_place()


def test_groups_of_one_message_count_as_if_each_came_alone() -> None:
    """Kept, stale, from a lost branch, unknown, put before, and twice in the same message."""
    runs = [Simulation(dataclasses.replace(CONFIG, max_staleness=1), 3) for _ in range(2)]
    answers = []
    for run, is_one_message in zip(runs, (True, False), strict=True):
        run.begin(2)
        run.engines[0] = 2
        run.admit(0)
        run.admit(0)
        uids = [slot.uid for slot in run.slots[0]]
        assert len(uids) >= 5
        before = run.group(uids[0], [9, 2])
        run.do(run.rules.put_group(before, 1.0)[1])
        shared = run.block()
        first, twice, last = (
            msgspec.structs.replace(run.group(uid, [9, 2]), block=shared)
            for uid in (uids[1], uids[1], uids[4])
        )
        stale = msgspec.structs.replace(run.group(uids[2], [5, 2]), oldest_version=0)
        lost = msgspec.structs.replace(run.group(uids[3], [9, 2]), newest_version=3)
        other = run.group(uids[1], [9, 2])
        unknown = msgspec.structs.replace(other, uid="7.7.7")
        groups = [before, first, stale, twice, lost, stale, other, unknown, last]
        if is_one_message:
            results, events = run.rules.put_groups(groups, 1.0)
            assert [type(event) for event in events[:1]] == [q.GroupsPut] and len(events) == 3
            run.do(events)
        else:
            results = []
            for group in groups:
                reply, events = run.rules.put_group(group, 1.0)
                run.do(events)
                results.append(reply)
        answers.append(results)
        run.check_every_prompt_is_in_one_place()
        run.restart_controller()
    assert answers[0] == answers[1]
    kept = [group for group, one in zip(groups, answers[0], strict=True) if one.is_kept]
    assert kept == [before, first, twice, last]
    assert msgspec.json.encode(runs[0].data) == msgspec.json.encode(runs[1].data)
    block = (shared.extent, shared.offset, shared.epoch)
    for run in runs:
        for uid in (uids[1], uids[4]):
            assert run.rules.state.blocks.has_block(shared)
            run.do(run.rules.reject_group(wire.EndGroup(uid, "x")))
        assert block in run.data.free["arena"], "free with the last of its groups"


def test_a_journal_with_one_event_per_group_still_counts() -> None:
    runs = [Simulation(CONFIG, 3) for _ in range(2)]
    for run, is_old in zip(runs, (True, False), strict=True):
        run.admit(0)
        info = run.group(run.slots[0][0].uid, [9, 2])
        old = q.GroupPut(info.uid, info.block, info.rows, 0, info.newest_version, 1.0)
        run.do([old] if is_old else run.rules.put_group(info, 1.0)[1])
        run.restart_controller()
    assert msgspec.json.encode(runs[0].data) == msgspec.json.encode(runs[1].data)

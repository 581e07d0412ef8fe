"""The queue as a state machine: random runs with lagging engines, deaths, rollbacks, restarts."""

import dataclasses

import pytest

from relax_hpc.transfer import queue_data as q
from relax_hpc.transfer import wire

from .queue_simulation import CONFIG, Simulation, make_caller


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_no_group_is_ever_trained_beyond_the_bound_and_none_is_lost(
    seed: int, max_staleness: int
) -> None:
    tasks = {"ref": "ref_logprobs", "logprob": "train_logprobs"} if seed % 2 else {}
    config = dataclasses.replace(CONFIG, max_staleness=max_staleness, task_fields=tasks, seed=seed)
    run = Simulation(config, seed)
    for _ in range(8000):
        run.turn()
        if run.rules.is_done:
            break
    run.check_every_prompt_is_in_one_place()
    assert run.rules.is_done, f"stuck: {run.rules.status(2.0)}"
    assert min(run.staleness) >= 0 and max(run.staleness) <= max_staleness
    assert {
        s: run.rules.state.ledger.trained_uids(s) for s in run.data.ledger.trained
    } == run.trained
    assert sorted(run.trained) == list(range(config.train_steps))
    prompts = [tuple(u.split(".")[:2]) for uids in run.trained.values() for u in uids]
    assert len(prompts) == len(set(prompts)) == config.train_steps * config.groups_per_step
    assert not run.data.groups, "near the end no more is admitted than can be trained"
    assert not len(run.rules.state.blocks)


def test_capacity_after_a_resume_at_version_50() -> None:
    config = dataclasses.replace(CONFIG, groups_per_step=8, max_staleness=2, train_steps=100)
    run = Simulation(config, 0, num_prompts=1000)
    run.begin(50)
    request = wire.Admit("k", 50, 1000, 0.0)
    event = run.rules.admit(make_caller("rollout"), request)
    assert event is not None and len(event.tickets) == 24
    assert run.rules.status(2.0).capacity == 24
    run.do([event])
    assert run.rules.admit(make_caller("rollout", 1), wire.Admit("l", 50, 1, 0.0)) is None


def test_a_lagging_engine_gets_only_what_can_be_trained_in_time() -> None:
    config = dataclasses.replace(CONFIG, max_staleness=2)
    run = Simulation(config, 0)
    run.begin(5)

    def room(version: int) -> int:
        request = wire.Admit(run.key(), version, 100, 0.0)
        event = run.rules.admit(make_caller("rollout"), request)
        return 0 if event is None else len(event.tickets)

    assert [room(version) for version in (2, 3, 4, 5, 6)] == [0, 4, 8, 12, 0]


def test_rollback_dispatches_consumed_prompts_again_first_and_in_order() -> None:
    run = Simulation(dataclasses.replace(CONFIG, max_staleness=0), 3)
    while run.data.version < 3:
        if run.chance.random() < 0.5:
            run.admit(0)
            run.engines[0] = run.data.version
        run.finish(0)
        run.train()
    consumed = [uid for step in (1, 2) for uid in run.trained[step]]
    ahead = len(run.data.ledger.again)
    run.incarnations["train/0"] += 1
    run.begin(1)
    again = run.data.ledger.again
    assert [t.prompt_index for t in again[:8]] == [int(u.split(".")[1]) for u in consumed]
    assert all(t.uid not in consumed for t in again)
    assert len(again) >= 8 + ahead
    run.do(run.rules.begin_train(run.train_caller(), wire.BeginTrain(run.data.train_key, 1)))
    assert len(run.data.ledger.again) == len(again), "a repeated message counts once"
    run.check_every_prompt_is_in_one_place()


def test_restarted_train_step_gets_the_same_groups_of_an_incomplete_step() -> None:
    run = Simulation(CONFIG, 1)
    while run.next_chunk < 2:
        run.admit(0)
        run.finish(0)
        run.train()
    uids = {group.uid for group in run.live}
    run.incarnations["train/0"] += 1
    run.begin(0)
    while run.next_chunk < 2:
        run.train()
    assert {group.uid for group in run.live} == uids
    assert "rollback" not in run.data.ledger.redispatched


def test_a_new_attempt_dispatches_everything_in_flight_again() -> None:
    run = Simulation(CONFIG, 1)
    for _ in range(3):
        run.admit(0)
        run.finish(0)
    in_flight = {(g.ticket.epoch, g.ticket.prompt_index) for g in run.data.groups.values()}
    assert in_flight
    run.do([q.AttemptBegun(2)])
    assert not run.data.groups and not run.data.free
    assert {(t.epoch, t.prompt_index) for t in run.data.ledger.again} >= in_flight
    run.check_every_prompt_is_in_one_place()


def _finished() -> Simulation:
    run = Simulation(dataclasses.replace(CONFIG, train_steps=2), 2)
    while not run.rules.is_done:
        run.turn()
    return run


@pytest.mark.parametrize("event", [q.ProducerLost("train", 0, 9), q.AttemptBegun(2)])
def test_engines_do_not_end_while_a_lost_train_step_may_come_back(event: q.Event) -> None:
    run = _finished()
    run.do([event])
    assert not run.rules.is_done
    assert run.rules.admit(make_caller("rollout"), wire.Admit("k", 2, 1, 0.0)) is None
    run.incarnations["train/0"] += 1
    run.begin(1)
    assert not run.rules.is_done
    run.engines = [1, 1, 1]
    while not run.rules.is_done:
        run.admit(0)
        run.finish(0)
        run.train()
    run.do([event])
    run.begin(2)
    assert run.rules.is_done, "it came back with everything saved"


def test_a_known_death_releases_prompts_and_leases_at_once() -> None:
    run = Simulation(dataclasses.replace(CONFIG, task_fields={"ref": "ref_logprobs"}), 4)
    run.admit(0)
    while not run.rules.state.pending["ref"]:
        run.finish(0)
        run.admit(0)
    taken = run.rules.take_rows(make_caller("ref"), wire.TakeRows("ref", "k", 2, 0.0))
    assert taken is not None
    run.do([taken])
    generating = sum(g.phase is q.Phase.GENERATING for g in run.data.groups.values())
    run.do([q.ProducerLost("rollout", 0, 1), q.ProducerLost("ref", 0, 1)])
    assert all(g.phase is not q.Phase.GENERATING for g in run.data.groups.values())
    assert run.data.ledger.redispatched.get("producer_lost", 0) == generating
    pending = run.rules.state.pending["ref"]
    assert all(set(samples) <= set(pending[uid]) for uid, samples in taken.rows)
    assert not any(leases for g in run.data.groups.values() for leases in g.leased.values())
    run.check_every_prompt_is_in_one_place()


def test_a_late_word_of_a_death_does_not_touch_the_next_start() -> None:
    run = Simulation(CONFIG, 4)
    run.do([q.CallerSeen(role, 0, 1, 2) for role in ("rollout", "train")])
    run.incarnations.update({"rollout/0": 1, "train/0": 1})
    run.begin(0)
    run.admit(0)
    in_flight = set(run.data.groups)
    assert in_flight and run.data.train_incarnation == 2
    run.do([q.ProducerLost("rollout", 0, 1), q.ProducerLost("train", 0, 1)])
    assert set(run.data.groups) == in_flight and run.data.train_incarnation == 2
    assert run.data.admissions["rollout/0/0"].slots


def test_a_repeated_admit_gets_the_same_slots() -> None:
    run = Simulation(CONFIG, 1)
    request = wire.Admit("same", 0, 3, 0.0)
    event = run.rules.admit(make_caller("rollout"), request)
    assert event is not None
    run.do([event])
    assert run.data.admissions["rollout/0/0"].key == "same"
    assert len(run.data.admissions["rollout/0/0"].slots) == 3

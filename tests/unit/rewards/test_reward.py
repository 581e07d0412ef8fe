"""Reward functions: processes that hang, die or raise give invalid results, never numbers."""

import asyncio
import math
import os
import signal
import sys

import psutil
import pytest

from relax_hpc.config import DataConfig, RewardConfig
from relax_hpc.errors import ConfigError, MissingExtraError
from relax_hpc.records import FinishReason, Prompt, RewardResult
from relax_hpc.rewards import reward as reward_module
from relax_hpc.rewards.gym_answer import gym_answer
from relax_hpc.rewards.reward import close_reward, make_reward
from relax_hpc.rewards.score_pool import ScorePool

DATA = DataConfig(train="train.jsonl")


def score(kind, label, text, data=DATA, metadata=None, timeout_s=60.0):
    async def run():
        function = make_reward(RewardConfig(kind=kind, timeout_s=timeout_s), data)
        try:
            prompt = Prompt(token_ids=[1], label=label, text="", metadata=metadata or {})
            return await function(prompt, text, FinishReason.STOP)
        finally:
            await close_reward(function)

    return asyncio.run(run())


def test_exact():
    assert score("exact", "82", " 82\n") == RewardResult(1.0, 1.0)
    assert score("exact", "82", "82.") == RewardResult(0.0, 0.0)


def test_math_and_dapo_differ_in_the_score_only():
    assert score("math", "42", r"\boxed{42}") == RewardResult(1.0, 1.0)
    assert score("math", "42", r"\boxed{41}") == RewardResult(0.0, 0.0)
    assert score("dapo", "42", r"\boxed{42}") == RewardResult(1.0, 1.0)
    assert score("dapo", "42", r"\boxed{41}") == RewardResult(-1.0, 0.0)


def test_algebra_goes_through_a_process():
    assert score("math", "x^2+2x+1", r"\boxed{(x+1)^2}").accuracy == 1.0
    assert score("dapo", "x^2+2x+1", r"\boxed{(x+2)^2}").score == -1.0


def test_m1_works_in_a_thread():
    # signal.alarm only works in a main thread; elsewhere it was swallowed and all scores were 0.
    seen = asyncio.run(
        asyncio.to_thread(score, "math", r"\sqrt{12}", r"\boxed{2\sqrt{3}}")  # its own loop
    )
    assert seen.accuracy == 1.0


def test_m2_the_huge_power_is_decided():
    assert score("math", "9", r"\boxed{2003^{2002^{2001}}}") == RewardResult(0.0, 0.0)


HANG = {"kind": "hang"}


@pytest.fixture
def hanging(tmp_path, monkeypatch):
    """A scoring process that hangs on request, started instead of the real one."""
    (tmp_path / "stub.py").write_text(
        "import json, sys, time\n"
        "print(json.dumps({'ready': True}), flush=True)\n"
        "for line in sys.stdin:\n"
        "    kind = json.loads(line)['kind']\n"
        "    if kind == 'hang': time.sleep(3600)\n"
        "    if kind == 'die': sys.exit(3)\n"
        "    if kind == 'torn': print('{\"score\"', end='', flush=True); sys.exit(3)\n"
        "    print(json.dumps({'score': 1.0, 'accuracy': 1.0}), flush=True)\n"
    )
    real = asyncio.create_subprocess_exec

    async def start(_program, *_arguments, **options):
        return await real(sys.executable, str(tmp_path / "stub.py"), **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)


def children():
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.usefixtures("hanging")
def test_m2_a_hang_is_killed_and_the_pool_keeps_its_capacity():
    async def run():
        pool = ScorePool(timeout_s=0.1, num_workers=2)
        results = await asyncio.gather(*(pool.score(HANG) for _ in range(100)))
        pool._timeout_s = 60
        good = await asyncio.gather(*(pool.score({"kind": "ok"}) for _ in range(20)))
        assert pool._free._value == 2
        await pool.close()
        return results, good

    before = children()
    results, good = asyncio.run(run())
    assert all(not r.valid and "0.1 s" in r.reason and math.isnan(r.score) for r in results)
    assert all(r == RewardResult(1.0, 1.0) for r in good)
    assert children() <= before  # nothing is left running


@pytest.mark.usefixtures("hanging")
@pytest.mark.parametrize("kind", ["die", "torn"])
def test_m3_a_dying_process_is_an_invalid_result(kind):
    async def run():
        pool = ScorePool(timeout_s=60, num_workers=1)
        bad = await pool.score({"kind": kind})
        good = await pool.score({"kind": "ok"})
        await pool.close()
        return bad, good

    bad, good = asyncio.run(run())
    assert not bad.valid
    assert "ended" in bad.reason
    assert good.valid


@pytest.mark.usefixtures("hanging")
def test_a_cancelled_score_does_not_poison_the_next_one():
    async def run():
        pool = ScorePool(timeout_s=60, num_workers=1)
        task = asyncio.create_task(pool.score(HANG))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        good = await pool.score({"kind": "ok"})
        await pool.close()
        return good

    assert asyncio.run(run()) == RewardResult(1.0, 1.0)


def test_a_score_cancelled_while_its_process_starts_leaves_none(monkeypatch, tmp_path):
    started = tmp_path / "pid"
    stub = tmp_path / "slow_start.py"
    stub.write_text(
        "import os, pathlib, sys, time\n"
        f"pathlib.Path({str(started)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {stub}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))

    async def run():
        task = asyncio.create_task(ScorePool(timeout_s=60, num_workers=1).score(HANG))
        async with asyncio.timeout(60):
            while not (started.exists() and started.read_text()):
                await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_a_killed_real_process_is_replaced():
    async def run():
        pool = ScorePool(timeout_s=60, num_workers=1)
        request = {"kind": "math", "text": r"\boxed{2\sqrt{3}}", "label": r"\sqrt{12}"}
        first = await pool.score(request)
        os.kill(pool._idle[0]._process.pid, signal.SIGKILL)
        second = await pool.score(request)
        failed = await pool.score({"kind": "nonsense"})
        await pool.close()
        return first, second, failed

    first, second, failed = asyncio.run(run())
    assert first.accuracy == second.accuracy == 1.0
    assert not failed.valid
    assert "nonsense" in failed.reason


def test_the_scoring_process_ends_with_its_input():
    async def run():
        pool = ScorePool(timeout_s=60, num_workers=1)
        await pool.score({"kind": "math", "text": "1", "label": "2"})
        process = pool._idle[0]._process
        process.stdin.close()
        return await asyncio.wait_for(process.wait(), 60)

    assert asyncio.run(run()) == 0


# -- reasoning-gym ----------------------------------------------------------------------------

GYM = DataConfig(train="reasoning_gym:basic_arithmetic?size=5&seed=3")
ENTRY = {
    "reasoning_gym": {"task": "basic_arithmetic", "options": {"size": 5, "seed": 3}, "index": 2}
}


def gym_label():
    import reasoning_gym

    return reasoning_gym.create_dataset("basic_arithmetic", size=5, seed=3)[2]["answer"]


def test_reasoning_gym_scores_with_the_task():
    label = gym_label()
    right = score("reasoning_gym", label, f"It is <answer>{label}</answer>", GYM, ENTRY)
    assert right == RewardResult(1.0, 1.0)
    wrong = score("reasoning_gym", label, "<answer>banana</answer>", GYM, ENTRY)
    assert wrong.valid
    assert wrong.score < 1.0


def test_reasoning_gym_needs_its_entry_and_its_source():
    missing = score("reasoning_gym", "1", "1", GYM)
    assert not missing.valid
    with pytest.raises(ConfigError, match="must be reasoning_gym:TASK"):
        make_reward(RewardConfig(kind="reasoning_gym"), DATA)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>1</answer> <answer> 2 </answer>", "2"),
        (r"\boxed{3}", "3"),
        ("Answer: 4", "4"),
        ("  5 ", "5"),
    ],
)
def test_reasoning_gym_answers(text, answer):
    assert gym_answer(text) == answer


# -- functions of one's own -------------------------------------------------------------------


def length_reward(prompt, completion_text, finish_reason):
    return len(completion_text)


async def async_reward(prompt, completion_text, finish_reason):
    return RewardResult(score=0.25, accuracy=1.0)


class ObjectReward:
    async def __call__(self, prompt, completion_text, finish_reason):
        return 0.5


object_reward = ObjectReward()


def raising_reward(prompt, completion_text, finish_reason):
    raise ZeroDivisionError("no luck")


async def endless_reward(prompt, completion_text, finish_reason):
    await asyncio.sleep(3600)


def nan_reward(prompt, completion_text, finish_reason):
    return float("nan")


@pytest.fixture
def own(monkeypatch):
    """Import path of this file's functions (import mode importlib gives it no stable one)."""
    monkeypatch.setitem(sys.modules, "own_rewards", sys.modules[__name__])
    return "own_rewards"


def test_own_functions(own):
    assert score(f"{own}.length_reward", "", "abc") == RewardResult(3.0, 3.0)
    assert score(f"{own}:async_reward", "", "abc") == RewardResult(0.25, 1.0)
    assert score(f"{own}.object_reward", "", "abc") == RewardResult(0.5, 0.5)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("raising_reward", "no luck"), ("endless_reward", "0.05 s"), ("nan_reward", "finite")],
)
def test_m3_failing_own_functions_are_invalid(own, name, reason):
    timeout_s = 0.05 if name == "endless_reward" else 60.0
    seen = score(f"{own}.{name}", "", "abc", timeout_s=timeout_s)
    assert not seen.valid
    assert reason in seen.reason
    assert math.isnan(seen.score)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("maths", "valid are math, dapo, exact, reasoning_gym"),
        ("no_such_package.f", "cannot be imported"),
        ("math.no_such_function", "cannot be imported"),
        ("math.pi", "not callable"),
    ],
)
def test_unknown_kinds_name_the_valid_ones(kind, message):
    with pytest.raises(ConfigError, match=message):
        make_reward(RewardConfig(kind=kind), DATA)


def test_a_missing_package_is_told_at_the_start(monkeypatch):
    monkeypatch.setattr(reward_module.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(MissingExtraError, match=r"relax_hpc\[rollout\]"):
        make_reward(RewardConfig(kind="math"), DATA)

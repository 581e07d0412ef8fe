"""The scoring process: what it answers, in this process and as a real child."""

import json
import subprocess
import sys

import pytest

from relax_hpc.rewards.score_process import answer

GYM = {"kind": "gym", "task": "basic_arithmetic", "options": {"size": 5, "seed": 3}, "index": 2}


def right_answer():
    import reasoning_gym

    return reasoning_gym.create_dataset("basic_arithmetic", size=5, seed=3)[2]["answer"]


def test_math():
    request = {"kind": "math", "text": r"\boxed{(x+1)^2}", "label": "x^2+2x+1"}
    assert answer(request) == {"score": 1.0, "accuracy": 1.0}
    assert answer({**request, "label": "x^2"}) == {"score": 0.0, "accuracy": 0.0}


def test_gym():
    assert answer({**GYM, "text": f"<answer>{right_answer()}</answer>"})["score"] == 1.0
    assert answer({**GYM, "text": "banana"})["score"] < 1.0


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"kind": "nonsense"}, "unknown kind"),
        ({}, "KeyError"),
        ({"kind": "math", "text": "1"}, "KeyError"),
        ({**GYM, "text": "1", "task": "no_such_task"}, "no_such_task"),
    ],
)
def test_m3_a_failure_is_an_error_never_a_number(request_, message):
    seen = answer(request_)
    assert "score" not in seen
    assert message in seen["error"]


def test_a_real_process_answers_line_by_line_and_keeps_its_channel_clean():
    requests = [{"kind": "math", "text": "1", "label": "1"}, {"kind": "nonsense"}]
    done = subprocess.run(
        [sys.executable, "-m", "relax_hpc.rewards.score_process"],
        input="".join(json.dumps(request) + "\n" for request in requests),
        capture_output=True,
        text=True,
        timeout=240,
    )
    ready, first, second = map(json.loads, done.stdout.splitlines())
    assert ready == {"ready": True}
    assert first == {"score": 1.0, "accuracy": 1.0}
    assert "error" in second
    assert done.returncode == 0

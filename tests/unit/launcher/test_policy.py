from relax_hpc.launcher.policy import RestartBudget


def test_pauses_grow_and_the_budget_ends() -> None:
    budget = RestartBudget(limit=3)
    delays = [budget.failed(lived_s=1.0) for _ in range(4)]
    assert delays == [1.0, 2.0, 4.0, None]


def test_pauses_are_bounded() -> None:
    budget = RestartBudget(limit=20)
    assert max(budget.failed(lived_s=1.0) or 0.0 for _ in range(20)) == 60.0


def test_a_long_life_starts_again_at_once() -> None:
    budget = RestartBudget(limit=5)
    budget.failed(lived_s=1.0)
    assert budget.failed(lived_s=3600.0) == 0.0
    assert budget.failed(lived_s=1.0) == 1.0


def test_progress_gives_the_budget_back() -> None:
    budget = RestartBudget(limit=1)
    assert budget.failed(lived_s=9.0, progress=10) is not None
    assert budget.failed(lived_s=9.0, progress=20) is not None
    assert budget.failed(lived_s=9.0, progress=20) is None


def test_no_restart_at_all() -> None:
    assert RestartBudget(limit=0).failed(lived_s=1.0) is None

"""The rule that names slow nodes."""

import random

from relax_hpc.topology.outliers import slow_ones


def test_the_slow_ones_are_named_with_the_median() -> None:
    speeds = {"n1": 10.0, "n2": 10.5, "n3": 9.8, "n4": 3.0}
    assert slow_ones(speeds, more_is_worse=False) == {"n4": 9.9}
    times = {"n1": 2.0, "n2": 2.1, "n3": 2.2, "n4": 9.0, "n5": 0.1}
    assert slow_ones(times, more_is_worse=True) == {"n4": 2.1}


def test_fast_ones_are_not() -> None:
    assert slow_ones({"a": 1.0, "b": 1.0, "c": 9.0}, more_is_worse=False) == {}


def test_two_nodes_have_no_majority() -> None:
    assert slow_ones({"a": 1.0, "b": 100.0}, more_is_worse=True) == {}
    assert slow_ones({}, more_is_worse=True) == {}


def test_small_differences_do_not_count() -> None:
    times = {"a": 1.0, "b": 1.0, "c": 3.0}
    assert slow_ones(times, more_is_worse=True) == {"c": 1.0}
    assert slow_ones(times, more_is_worse=True, slack=5.0) == {}
    assert slow_ones(times, more_is_worse=True, factor=4.0) == {}


def test_a_fleet_that_is_spread_names_few() -> None:
    chance = random.Random(0)
    times = {f"n{i}": chance.lognormvariate(0, 1) for i in range(1000)}
    assert len(slow_ones(times, more_is_worse=True)) < 100
    even = {f"n{i}": chance.gauss(10, 0.3) for i in range(1000)} | {"bad": 4.0}
    assert set(slow_ones(even, more_is_worse=False)) == {"bad"}


def test_a_third_of_slow_nodes_is_named() -> None:
    speeds = {f"n{i}": (2.0 if i % 3 == 0 else 10.0) for i in range(30)}
    assert set(slow_ones(speeds, more_is_worse=False)) == {f"n{i}" for i in range(0, 30, 3)}

"""Window and balance against oracles that are written in another way."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.config import Sampler
from relax_hpc.transfer.samplers import Window, _longest_first, balance, divide


def _can_all_be_trained(deadlines: list[int], version: int, assigned: int, per_step: int) -> bool:
    """Oracle: put groups into the places of the coming steps, most urgent first."""
    places = itertools.chain(
        [version] * (per_step - assigned),
        (step for step in itertools.count(version + 1) for _ in range(per_step)),
    )
    return all(step <= deadline for deadline, step in zip(sorted(deadlines), places, strict=False))


_GROUPS = st.lists(st.tuples(st.integers(10, 14), st.booleans()), max_size=14)


def _window(groups: list[tuple[int, bool]], per_step: int) -> Window:
    window = Window(per_step)
    for number, (deadline, is_ready) in enumerate(groups):
        window.add(deadline)
        if is_ready:
            window.set_ready(str(number), deadline)
    return window


@settings(max_examples=200, deadline=None)
@given(_GROUPS, st.integers(1, 4), st.integers(0, 4))
def test_feasible_means_that_all_can_be_trained(
    groups: list[tuple[int, bool]], per_step: int, assigned: int
) -> None:
    assigned = min(assigned, per_step)
    deadlines = [deadline for deadline, _ in groups]
    expected = _can_all_be_trained(deadlines, 10, assigned, per_step)
    assert _window(groups, per_step).is_feasible(10, assigned) == expected


@settings(max_examples=200, deadline=None)
@given(_GROUPS, st.integers(1, 4), st.integers(0, 4), st.integers(9, 14))
def test_room_is_the_largest_number_that_stays_feasible(
    groups: list[tuple[int, bool]], per_step: int, assigned: int, deadline: int
) -> None:
    assigned = min(assigned, per_step)
    deadlines = [d for d, _ in groups]
    if not _can_all_be_trained(deadlines, 10, assigned, per_step):
        return
    room = max(_window(groups, per_step).room(10, assigned, deadline), 0)
    more = [*deadlines, *[deadline] * room]
    assert _can_all_be_trained(more, 10, assigned, per_step)
    assert not _can_all_be_trained([*more, deadline], 10, assigned, per_step)


@settings(max_examples=200, deadline=None)
@given(_GROUPS, st.integers(1, 4), st.integers(0, 3), st.integers(1, 3))
def test_pick_keeps_places_for_stragglers_and_finds_a_choice_if_there_is_one(
    groups: list[tuple[int, bool]], per_step: int, assigned: int, num_groups: int
) -> None:
    assigned = min(assigned, per_step - 1)
    num_groups = min(num_groups, per_step - assigned)
    if not _can_all_be_trained([d for d, _ in groups], 10, assigned, per_step):
        return

    def is_fine(choice: tuple[int, ...]) -> bool:
        rest = [d for number, (d, _) in enumerate(groups) if number not in choice]
        return _can_all_be_trained(rest, 10, assigned + len(choice), per_step)

    ready = [number for number, (_, is_ready) in enumerate(groups) if is_ready]
    picked = _window(groups, per_step).pick(num_groups, 10, assigned)
    if picked:
        choice = tuple(int(uid) for uid in picked)
        assert len(set(choice)) == num_groups and set(choice) <= set(ready)
        assert is_fine(choice)
    else:
        assert not any(is_fine(choice) for choice in itertools.combinations(ready, num_groups))


def test_first_come_first_served_within_a_deadline() -> None:
    window = Window(4)
    for name in "cab":
        window.add(10)
        window.set_ready(name, 10)
    assert window.pick(3, 10, 0) == ["c", "a", "b"]


@pytest.mark.parametrize("seed", range(20))
def test_balance_gives_every_rank_a_group_and_is_close_to_the_best(seed: int) -> None:
    chance = random.Random(seed)
    num_parts = chance.randint(1, 4)
    tokens = [chance.choice([0, 1, 50, 1000]) for _ in range(chance.randint(num_parts, 8))]
    parts = balance(tokens, num_parts)
    assert sorted(itertools.chain(*parts)) == list(range(len(tokens)))
    assert all(part and part == sorted(part) for part in parts)
    heaviest = max(sum(tokens[i] for i in part) for part in parts)
    best = min(
        max(sum(t for t, p in zip(tokens, choice, strict=True) if p == part) for part in choice)
        for choice in itertools.product(range(num_parts), repeat=len(tokens))
        if len(set(choice)) == num_parts
    )
    assert heaviest <= 4 / 3 * best  # Graham's bound of LPT (4/3 - 1/(3m))


def _totals(tokens: list[int], parts: list[list[int]], loads: list[int]) -> list[int]:
    return [n + sum(tokens[i] for i in part) for n, part in zip(loads, parts, strict=True)]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_balance_counts_what_earlier_chunks_gave_and_is_never_worse_than_longest_first(
    data: st.DataObject,
) -> None:
    num_parts = data.draw(st.integers(1, 6))
    length = st.integers(1, 9000)
    tokens = data.draw(st.lists(length, min_size=num_parts, max_size=24))
    loads = data.draw(st.lists(length, min_size=num_parts, max_size=num_parts))
    parts = divide(Sampler.BALANCED, tokens, num_parts, loads)
    assert parts == divide(Sampler.BALANCED, tokens, num_parts, loads)
    assert sorted(itertools.chain(*parts)) == list(range(len(tokens))) and all(parts)
    simple = _totals(tokens, _longest_first(tokens, loads), loads)
    assert max(_totals(tokens, parts, loads)) <= max(simple)


def test_largest_differencing_finds_what_longest_first_misses() -> None:
    tokens = [8, 7, 6, 5, 4]  # the textbook's example: 16 + 14, longest first 17 + 13
    assert sorted(_totals(tokens, balance(tokens, 2), [0, 0])) == [14, 16]


def test_a_rank_that_got_much_in_one_chunk_gets_less_in_the_next() -> None:
    parts = divide(Sampler.BALANCED, [50, 50, 50, 50, 50, 50], 2, [200, 0])
    assert [len(part) for part in parts] == [1, 5]


@pytest.mark.parametrize(
    ("num_groups", "expected"),
    [(4, [[0, 1], [2, 3]]), (5, [[0, 1, 2], [3, 4]]), (2, [[0], [1]])],
)
def test_fifo_keeps_the_order_and_its_tail_is_the_same_each_time(
    num_groups: int, expected: list[list[int]]
) -> None:
    tokens = list(range(num_groups, 0, -1))
    assert divide(Sampler.FIFO, tokens, 2, [900, 0]) == expected


@settings(max_examples=200, deadline=None)
@given(_GROUPS, st.integers(1, 4), st.integers(0, 4), st.lists(st.integers(9, 13), max_size=4))
def test_deadlines_are_lowered_only_as_far_as_all_can_be_trained(
    groups: list[tuple[int, bool]], per_step: int, assigned: int, lows: list[int]
) -> None:
    assigned = min(assigned, per_step)
    deadlines = [d for d, _ in groups]
    if not _can_all_be_trained(deadlines, 10, assigned, per_step):
        return
    window, high = _window(groups, per_step), 14
    room = max(window.room(10, assigned, high), 0)
    lowered: list[int] = []
    for low in lows[:room]:
        others = [*lowered, *[high] * (room - len(lowered) - 1)]
        fits = low >= 10 and _can_all_be_trained([*deadlines, *others, low], 10, assigned, per_step)
        assert window.can_lower(10, assigned, low, high, lowered) == fits
        if fits:
            lowered.append(low)

"""Partners: both agree, every edge of the ring is tested, the number of rounds is constant."""

import pytest

from relax_hpc.topology.pairing import ROUNDS, partner, retest_pairs


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 63, 64, 1001])
def test_partners_agree_and_close_the_ring(size: int) -> None:
    met: dict[int, set[int]] = {place: set() for place in range(size)}
    for number in range(ROUNDS):
        for place in range(size):
            other = partner(place, size, number)
            if other is not None:
                assert other != place
                assert partner(other, size, number) == place
                assert other not in met[place]  # no pair is tested twice
                met[place].add(other)
    for place in range(size):
        if size > 1:
            assert (place + 1) % size in met[place]
        assert len(met[place]) <= 3


def test_the_last_round_goes_across() -> None:
    assert [partner(place, 8, 3) for place in range(8)] == [4, 5, 6, 7, 0, 1, 2, 3]
    assert partner(8, 9, 3) is None


def test_two_slow_neighbours_leave_each_node_a_partner_that_is_fine() -> None:
    size, slow = 12, {4, 5}
    for place in set(range(size)) - slow:
        partners = {partner(place, size, number) for number in range(ROUNDS)} - {None}
        assert partners - slow


def test_suspects_get_partners_of_their_own() -> None:
    assert retest_pairs([3, 4], [7, 1, 0]) == {3: 7, 7: 3, 4: 1, 1: 4}
    assert retest_pairs([1, 2, 3], [0]) == {1: 0, 0: 1}
    assert retest_pairs([], [0, 1]) == {}

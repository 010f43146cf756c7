"""The table of who waits for whom."""

from dataclasses import replace

from pipeloom.runtime.failure.rank_status import RankStatus, who_waits


def waiting(doing: str, what: str, *ranks: int) -> RankStatus:
    return RankStatus(doing=doing, waits_for=what, waits_on=ranks, waiting_s=2.04)


def test_a_circle_is_named() -> None:
    states = [
        RankStatus(doing="0F7"),
        waiting("1B0", "2SEND_B0>1 from rank 3", 3),
        None,
        waiting("2F11", "1SEND_F11>2 from rank 1", 1),
    ]
    assert who_waits(states) == (
        "rank  does  waits for\n"
        "0     0F7   -\n"
        "1     1B0   2SEND_B0>1 from rank 3, for 2.0 s\n"
        "2     ?     (it has not said anything yet)\n"
        "3     2F11  1SEND_F11>2 from rank 1, for 2.0 s\n"
        "rank 1 -> rank 3 -> rank 1: they wait for each other"
    )


def test_a_chain_of_waits_is_no_circle() -> None:
    states = [waiting("a", "x", 1), waiting("b", "y", 2), RankStatus(doing="c")]
    assert "each other" not in who_waits(states)


def test_a_silent_rank_is_in_no_circle() -> None:
    """Behind a link that was cut: what it waits for now is not known, and it is the cause."""
    silent = replace(waiting("b", "y", 0), silent_s=15.0)
    table = who_waits([waiting("a", "x", 1), silent])
    assert "each other" not in table and table.endswith("(silent for 15 s)")


def test_waiting_for_all_ranks_is_no_circle() -> None:
    states = [waiting("a", "a sum over all ranks", 1, 2), waiting("b", "a sum over all ranks", 0, 2), None]
    assert "each other" not in who_waits(states)

"""Names that torch, Megatron-LM and the papers use for the library's schedules."""

from __future__ import annotations

import pytest

from pipeloom.ir.errors import ScheduleError
from pipeloom.schedules import chunks, registry
from pipeloom.schedules.aliases import ALIASES


@pytest.mark.parametrize(("name", "alias"), [(n, a) for n, others in ALIASES.items() for a in others])
def test_an_alias_is_the_schedule(name: str, alias: str) -> None:
    assert registry.entry(alias) is registry.entry(name)
    assert registry.entry(alias.upper()) is registry.entry(name)


def test_no_alias_hides_another_schedule() -> None:
    assert not {alias.lower() for others in ALIASES.values() for alias in others} & set(registry.names())


def test_a_schedule_is_built_under_its_own_name() -> None:
    graph, placement = registry.default_placement("Interleaved:v=3", 2)
    built = registry.build("Interleaved:v=3", graph, placement, 4)
    assert built.name == "interleaved_1f1b:v=3" and built.stages == 6


def test_stages_per_rank_where_there_is_no_choice() -> None:
    for name in ("zb_h1:v=2", "dualpipe:v=2"):
        with pytest.raises(ScheduleError, match="one stage on each rank") as caught:
            registry.default_placement(name, 2)
        assert "`-v`" in caught.value.hint
    with pytest.raises(ScheduleError, match="0.5 stages per rank"):
        registry.default_placement("interleaved:v=0.5", 2)


def test_a_number_of_stages_per_rank_joins_a_name() -> None:
    assert chunks.with_chunks("interleaved:v=3", 3) == "interleaved:v=3"
    with pytest.raises(ScheduleError, match="interleaved:v=3 is to have 4 stages per rank"):
        chunks.with_chunks("interleaved:v=3", 4)
    with pytest.raises(ScheduleError, match="1f1b has one stage on each rank"):
        chunks.with_chunks("1f1b", 2)

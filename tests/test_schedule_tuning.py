"""`pipeloom schedule diff`, `why` and `sensitivity`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from pipeloom.cli import main
from pipeloom.schedules.scenario import Scenario, simulate_schedule
from pipeloom.schedules.tuning import why


def run(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["schedule", *map(str, words)])
    assert result.exit_code == code, result.output
    return result.output


def as_json(*words: object) -> Any:
    return json.loads(run(*words, "--json"))


def test_diff_names_the_first_place_of_each_rank() -> None:
    found = as_json("diff", "1f1b", "zb_h1", "-p", 2, "-m", 3)
    assert found["step_s"] == [12.0, 10.0]
    assert found["divergences"] == [
        {"rank": 0, "place": 2, "actions": ["0B0", "0I0"], "starts_s": [4.0, 3.0]},
        {"rank": 1, "place": 1, "actions": ["1B0", "1I0"], "starts_s": [2.0, 2.0]},
    ]
    idle = [sum(values) for values in zip(*found["idle"].values(), strict=True)]
    assert idle == pytest.approx([2 * 12 - 18, 2 * 10 - 18])


def test_diff_of_the_same_schedule() -> None:
    output = run("diff", "1f1b", "1f1b", "-p", 2, "-m", 3)
    assert "the same actions in the same order on every rank" in output


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "interleaved_1f1b"])
@pytest.mark.parametrize("transfer_s", [0.0, 0.5])
def test_every_action_begins_when_its_cause_lets_it(name: str, transfer_s: float) -> None:
    """Links of one's own: a cause ends at the start, or a message earlier."""
    simulated = simulate_schedule(name, Scenario(ranks=3, microbatches=4, transfer_s=transfer_s))
    ends = {event.action: event.end_s for event in simulated.timeline.events}
    for row in simulated.schedule.rows:
        for action in row:
            chain = why(simulated, str(action))
            assert chain[-1].reason == "start" and chain[-1].start_s == 0.0
            for cause in chain[:-1]:
                assert cause.start_s - ends[cause.cause] in (
                    pytest.approx(0.0),
                    pytest.approx(transfer_s if cause.reason == "message" else 0.0),
                )


def test_why_of_a_stage_on_several_ranks(tmp_path: Any) -> None:
    """Rank 1 is free, but its part of the last stage begins when that of rank 0 can."""
    file = tmp_path / "wide.py"
    file.write_text(
        "from pipeloom.schedules.language.recipe import Recipe\n"
        "from pipeloom.schedules.language.patterns import repeating\n"
        "from pipeloom.schedules.registry import Entry\n"
        "wide = Entry(recipe=lambda s: Recipe(rows=repeating(s, ['0F 1F 1B 0B', '2F 2B'])),\n"
        "             place='table', table=lambda ranks: (0, (0, 1)))\n"
    )
    chain = as_json("why", f"{file}:wide", "2F1", "-p", 2, "-m", 2)
    assert (chain[0]["reason"], chain[0]["cause"]) in [("message", "0F1"), ("partner", "0F1")]
    assert chain[-1]["action"] == "0F0"


def test_an_action_that_is_not_there_is_refused() -> None:
    assert "1f1b does not run 0I0" in run("why", "1f1b", "0I0", code=1)


def test_what_saves_most_comes_first() -> None:
    found = as_json(
        "sensitivity", "1f1b", "-p", 2, "-m", 4, "-F", "1,2", "-I", "1,2", "-W", "1,2", "-T", "0.25"
    )
    assert found["changes"][0]["stage"] == 1
    saved = [change["saved_s"] for change in found["changes"]]
    assert saved == sorted(saved, reverse=True) and len(saved) == 7
    # Rank 1 runs four F of 2 without a pause behind the first message.
    one = next(c for c in found["changes"] if (c["what"], c["stage"]) == ("F", 1))
    assert one["saved_s"] == pytest.approx(0.8)

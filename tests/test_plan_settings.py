"""One field makes the Python keyword, the option of commands and the key of a config."""

from dataclasses import fields
from typing import Any

import click
import pytest
from click.testing import CliRunner
from refusals import refused

from pipeloom import PlanSettings, plan
from pipeloom.cli import main
from pipeloom.commands.common import plan_options, settings_of
from pipeloom.ir.errors import ConfigError
from pipeloom.tracer.job import Job
from pipeloom.train.config import PipelineConfig, read_config

OTHER = {
    "ranks": 3,
    "replicas": 2,
    "schedule": "gpipe",
    "chunks": 2,
    "microbatches": 6,
    "microbatch_size": 5,
    "global_batch": 60,
    "lengths": "16:0.5,32:0.5",
    "split_backward": True,
    "weights": "stash",
    "master_weights": True,
    "shard_optimizer": True,
    "planner": "exact",
    "time_limit": 7,
    "delay_correction": 0.5,
    "warm_up_with_flush": 3,
    "granularity": "module",
    "branches": False,
    "split_words": "off",
    "memory": "3GiB",
    "treatments": "both",
    "cluster": "6 x a100-40",
    "compile": True,
}
"""Of each setting a value that is not its default, but for `offload_dir`, which excludes a cluster, and
`clips`, which a config has as the norm of its optimizer."""


def flags(values: dict[str, Any]) -> list[str]:
    words = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return words


def text(value: Any) -> str:
    """As TOML has it, quotes left out."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def taken(words: list[str]) -> PlanSettings:
    """What a command with all of the options makes of its command line."""

    @click.command()
    @plan_options()
    def command(**options: Any) -> PlanSettings:
        return settings_of(options)

    return command(words, standalone_mode=False)


def test_one_name_in_python_on_the_command_line_and_in_a_config() -> None:
    assert {one.name for one in fields(PlanSettings)} == {*OTHER, "offload_dir", "clips"}
    # A global batch excludes a number of micro-batches, and a cluster an `offload_dir`.
    apart = {"microbatches": OTHER["microbatches"], "offload_dir": "away"}
    for values in ({name: value for name, value in OTHER.items() if name not in apart}, apart):
        config = read_config(None, [(f"pipeline.{name}", value) for name, value in values.items()])
        texts = read_config(None, [f"pipeline.{name}={text(value)}" for name, value in values.items()])
        assert taken(flags(values | {"clips": True})) == PlanSettings(**values, clips=True)
        assert texts.pipeline == config.pipeline == PipelineConfig(**values)
    assert taken([]) == PlanSettings()


def test_commands_say_of_a_setting_what_its_field_says() -> None:
    for command in ("plan", "train", "bench"):
        said = "".join(CliRunner().invoke(main, [command, "--help"], terminal_width=200).output.split())
        for one in fields(PipelineConfig if command == "train" else PlanSettings):
            if one.name not in {"bench": ("cluster", "lengths"), "train": ("clips",)}.get(command, ()):
                assert "".join(one.metadata["help"].split()) in said, one.name
                assert f"--{one.name.replace('_', '-')}" in said


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"ranks": 0}, "ranks"),
        ({"ranks": 10**4, "replicas": 10**4}, "replicas"),
        ({"microbatches": 1.5}, "microbatches"),
        ({"weights": "2b"}, "2bw"),
        ({"delay_correction": 1.0}, "below 1"),
        ({"warm_up_with_flush": -1}, "warm_up_with_flush"),
        ({"treatments": "bth"}, "both"),
        ({"memory": "3 apples"}, "apples"),
        ({"lengths": "128:0.5,many:0.5"}, "many"),
        ({"split_words": "3 parts"}, "split_words"),
        ({"cluster": "2 x a100-40", "offload_dir": "."}, "cluster"),
        ({"replica": 2}, "replicas"),
        ({"stages": 2}, "ranks"),
    ],
)
def test_what_cannot_be_is_refused_in_python_as_in_a_config(values: dict[str, Any], word: str) -> None:
    job = Job(model=lambda: pytest.fail("it was built"), batch=lambda seed, rows: {})
    assert word in refused(ConfigError, plan, job, **values)
    refused(ConfigError, read_config, None, [(f"pipeline.{name}", value) for name, value in values.items()])


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ({}, 2),
        ({"cluster": "6 x a100-40"}, 6),
        ({"cluster": "2 nodes of 8 x h100", "replicas": 4}, 4),
        ({"cluster": "6 x a100-40", "ranks": 3}, 3),
    ],
)
def test_ranks_are_the_clusters_devices_unless_they_are_said(given: dict[str, Any], ranks: int) -> None:
    assert PlanSettings(**given).ranks == PlanSettings().changed(**given).ranks == ranks
    assert PlanSettings(**given).changed(microbatches=4).ranks == ranks
    wider = PlanSettings(**given).changed(cluster="12 x a100-40")
    assert wider.ranks == given.get("ranks", 12 // given.get("replicas", 1))
    assert settings_of({"ranks": None, "replicas": 1} | given).ranks == ranks

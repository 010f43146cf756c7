"""Numbers of devices, and of digits, that nobody means: they took all memory, or ended in a traceback."""

import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import zoo
from click.testing import CliRunner

from pipeloom import plan
from pipeloom.cli import main
from pipeloom.clusters.files import load_cluster
from pipeloom.clusters.names import cpu_cluster, find_cluster
from pipeloom.ir.cluster import Device, Link
from pipeloom.ir.errors import ConfigError, PlanError
from pipeloom.machine import detect

MANY = 10**10
HUGE = 10**400
CARD = '[[device]]\nname = "card"\nmemory = "1GiB"\n'
LINK = '[within_node]\nbandwidth = "12GB"\n'


@pytest.fixture
def little_memory() -> Iterator[None]:
    """What is refused before it is made takes next to none."""
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 << 20


def file_of(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{MANY} x a100-40", "10000000000 devices"),
        (f"{MANY} nodes of 8 x h100", "80000000000 devices"),
        ("60000 x a100-40 + 60000 x v100-32", "120000 devices"),
        (f"{MANY} x cpu", "10000000000 devices"),
        (f"{HUGE} x a100-40", "401 digits"),
        (f"{'9' * 5000} nodes of 2 x a100-40", "5000 digits"),
        (f"2 x a100-40 with {HUGE}GiB", "too large for a size"),
        (f"2 x a100-40 with {'9' * 5000}", "too large for a size"),
        (f"2 x a100-40 with {'9' * 1_000_001}", "1000001 digits"),
    ],
)
@pytest.mark.usefixtures("little_memory")
def test_clusters_by_name(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        find_cluster(text)
    assert len(str(caught.value)) < 200
    assert str(caught.value.hint) in ("describe at most 100000", "sizes are below 1e30 bytes")


@pytest.mark.parametrize("count", [MANY, HUGE, 10**5000], ids=["11", "401", "5001"])
@pytest.mark.usefixtures("little_memory")
def test_processes_of_this_machine(count: int) -> None:
    for make in (cpu_cluster, lambda n: cpu_cluster(n, memory="1GiB"), lambda n: detect(devices=n)):
        with pytest.raises(ConfigError, match="at most 100000"):
            make(count)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
@pytest.mark.parametrize("words", [["plan"], ["plan", "--cluster", "2 x a100-40"], ["verify"]])
def test_ranks_on_the_command_line(schedule: str, words: list[str]) -> None:
    done = CliRunner().invoke(main, [*words, "--ranks", str(MANY), "-s", schedule])
    assert done.exit_code == 2
    assert "10000000000" in done.output and ("to 100000" in done.output or words == ["verify"])


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_as_many_stages_as_devices_may_be(schedule: str) -> None:
    with pytest.raises(PlanError, match="100000"):
        plan(zoo.job("skips"), ranks=100_000, microbatch_size=2, cluster="2 x cpu", schedule=schedule)


@pytest.mark.parametrize("value", [f"{HUGE}", "0x" + "f" * 5000], ids=["decimal", "hexadecimal"])
@pytest.mark.parametrize(
    "row",
    [
        "memory = VALUE",
        "host_memory = VALUE",
        "host_memory = [VALUE]",
        "memory_bytes_per_s = VALUE",
        "launch_s = VALUE",
        "node = VALUE",
        "group = VALUE",
        "flops_per_s = { float32 = VALUE }",
        "efficiency = { matmul = VALUE }",
        "host_link = { bandwidth = VALUE }",
        "host_link = { bandwidth = 1, latency_s = VALUE }",
    ],
)
def test_numbers_of_hundreds_of_digits_in_files(tmp_path: Path, row: str, value: str) -> None:
    """The file, the device and the key are named, and the number in a few characters."""
    device = CARD.replace('memory = "1GiB"\n', "") if row.startswith("memory =") else CARD
    file = file_of(tmp_path, f"{device}{row.replace('VALUE', value)}\n{LINK}")
    with pytest.raises(ConfigError, match=re.escape(f"{file}: ")) as caught:
        load_cluster(file)
    said = caught.value.message
    assert "device 1" in said and row.partition(" ")[0] in said and caught.value.hint
    assert re.search(r"\d\.\d\de\+\d{3}|1000000\.\.\.0000000", said) and len(said) < len(str(file)) + 120


def test_figures_beyond_all_measure_are_refused() -> None:
    """A device that computes at no rate, and a latency that no clock can show."""
    with pytest.raises(ConfigError, match=r"flops_per_s\[float32\] = 0"):
        Device(name="card", memory_bytes=1, flops_per_s={"float32": 0.0})
    with pytest.raises(ConfigError, match=r"latency 1e\+308"):
        Link(bandwidth_bytes_per_s=1.0, latency_s=1e308)

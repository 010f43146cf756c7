"""Measuring the machine: shares from times that are given, figures that hang together, files as the tier."""

import os
from dataclasses import replace

import pytest
import torch

from pipeloom.ir.cluster import OP_CLASSES, Device
from pipeloom.ir.errors import ConfigError
from pipeloom.ir.graph import Op, Value
from pipeloom.ir.profile import OpCost
from pipeloom.profiler import detect, host_copies, measurement
from pipeloom.profiler.efficiency import ReferenceSizes, efficiency_by_class, measure_efficiency
from pipeloom.profiler.host_copies import gpu_links
from pipeloom.profiler.measure_op import Timer
from pipeloom.profiler.measurement import connected_components, usable_cores

CPU = torch.device("cpu")
TINY = ReferenceSizes(rows=2, length=16, width=32, vocabulary=64, channels=4, pixels=8)


def op(name: str, target: str) -> Op:
    return Op(name=name, target=target, inputs=(), outputs=(Value(name=name, shape=(4,), dtype="float32"),))


def test_the_share_makes_the_estimate_of_a_class_right():
    ops = (op("a", "aten.linear.default"), op("b", "aten.linear.default"), op("c", "aten.add.Tensor"))
    ideal = {"a": OpCost(forward_s=1, weight_grad_s=1), "b": OpCost(forward_s=3), "c": OpCost(forward_s=1)}
    both = OpCost(forward_s=2.5, weight_grad_s=2.5)
    real = {"a": both, "b": OpCost(forward_s=4.5), "c": OpCost(forward_s=2.5)}
    elementwise, matmul = efficiency_by_class(ops, ideal, real, launch_s=0.5)
    assert (elementwise.name, elementwise.value) == ("elementwise", 0.5)
    # Without the launches, 5 seconds at share 1 took 2 + 2 + 4.
    assert (matmul.name, matmul.value, matmul.low, matmul.high) == ("matmul", 5 / 8, 0.5, 0.75)
    assert matmul.of == "2 ops"


def test_views_and_kernels_that_the_estimate_does_not_have_are_left_out():
    ops = (replace(op("v", "aten.view.default"), view=True), op("a", "aten.add.Tensor"))
    ideal = {"v": OpCost(forward_s=1.0), "a": OpCost(forward_s=1.0)}
    real = {"v": OpCost(forward_s=9.0), "a": OpCost(forward_s=2.0, input_grad_s=7.0)}
    (elementwise,) = efficiency_by_class(ops, ideal, real, launch_s=0.0)
    assert elementwise.value == 0.5


def test_the_reference_has_ops_of_all_classes():
    device = Device(name="cpu", memory_bytes=1, flops_per_s={"float32": 1e10}, memory_bytes_per_s=1e10)
    found = {s.name: s for s in measure_efficiency(device, CPU, sizes=TINY, autocast=None, budget_s=0.5)}
    assert set(found) == set(OP_CLASSES) - {"default"}
    assert all(0 < share.low <= share.high for share in found.values())


def test_a_product_that_takes_twice_as_long_has_half_the_rate():
    class Said(Timer):
        """Runs what is to be measured, and takes the times that it is told."""

        def __init__(self, *seconds):
            super().__init__(CPU)
            self.seconds = list(seconds)

        def samples(self, run, budget_s):
            run()
            return self.seconds

    fast, slow = (
        detect.measured_product(torch.float32, timer, budget_s=0.2)
        for timer in (Said(1.0, 2.0, 4.0), Said(2.0, 4.0, 8.0))
    )
    assert fast.name == "flops_per_s.float32" and fast.unit == "FLOP/s"
    assert (fast.low, fast.high) == (fast.value / 2, fast.value * 2)
    assert slow.value == fast.value / 2


def test_a_directory_without_room_is_said(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match="missing: No such file"):
        host_copies.file_tier(tmp_path / "missing")
    monkeypatch.setattr(host_copies.os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match="No space left"):
        host_copies.file_tier(tmp_path)


def test_components():
    assert connected_components([], 3) == [0, 1, 2]
    assert connected_components([(1, 2), (0, 2)], 4) == [0, 0, 0, 3]
    assert connected_components([(3, 2), (1, 0), (3, 0)], 4) == [0, 0, 0, 0]


# Measured links of the GPUs of this machine.


def test_one_gpu_has_no_links_to_others() -> None:
    assert gpu_links([torch.device("cuda", 0)]) == ({}, [])


# How many cores a process may use.


ALLOWED = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("100000 100000", 1), ("50000 100000", 1), ("max 100000", ALLOWED), ("", ALLOWED), (None, ALLOWED)],
)
def test_a_quota_of_a_container_counts(quota, expected, monkeypatch, tmp_path) -> None:
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(measurement, "QUOTA", tmp_path / "cpu.max")
    assert usable_cores() == expected

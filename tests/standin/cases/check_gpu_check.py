"""bench/gpu_check.py runs, so that it does not fail for the first time on a rented machine."""

import gpu_check
import pytest
import standin

SETUP = gpu_check.Setup(standin.NAME, gpu_check.job_of(gpu_check.SMALL), gpu_check.SMALL.rows)


def test_numbers_are_those_of_torchs_autocast_on_the_device() -> None:
    findings = gpu_check.check(SETUP, ["numbers"])
    assert [f.what for f in findings] == [
        "float32: losses against plain PyTorch",
        "bfloat16: losses against plain PyTorch",
    ]
    float32, bfloat16 = (f.found for f in findings)
    assert float32 < 1e-6 and bfloat16 == 0  # 0 or 4e-8, by the machine's kernels


def test_peaks_are_the_devices() -> None:
    findings = gpu_check.check(SETUP, ["memory"])
    assert len(findings) == 11 and not [f for f in findings if f.problem]


@pytest.mark.parametrize(("phase", "count"), [("host", 3), ("speed", 12)])
def test_what_depends_on_speed_is_measured(phase: str, count: int) -> None:
    assert len(gpu_check.check(SETUP, [phase])) == count

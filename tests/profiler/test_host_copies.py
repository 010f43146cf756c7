"""Measured links of the GPUs of this machine."""

import torch

from pipeloom.profiler.host_copies import gpu_links


def test_one_gpu_has_no_links_to_others() -> None:
    assert gpu_links([torch.device("cuda", 0)]) == ({}, [])

"""Sample batches, without disturbing anybody's random numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from .job import Job
from .once import one_thread


@one_thread
def sample_batch(job: Job, seed: int, rows: int) -> dict[str, Tensor]:
    """`job.batch(seed, rows)`, with the default generators left as they were.

    A job may seed them to make its batch; a rank that is a thread must not do so while another initialises
    its weights.
    """
    with torch.random.fork_rng(devices=[]):
        return job.batch(seed, rows)

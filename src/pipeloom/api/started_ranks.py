"""Rank processes that start while the launching process still plans. Imports no torch."""

from __future__ import annotations

from ..tracer.job import Job


def build_once(job: Job) -> None:
    """Build a job's model on fake tensors and drop it: what its constructor imports is there from then on."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ..tracer.blueprint import make_blueprint

    make_blueprint(job.model, FakeTensorMode(allow_non_fake_inputs=True))

"""What imports the stand-in runs in processes of its own: it is their accelerator from then on, and other
tests would take it for a GPU."""

import os
import sys
from pathlib import Path

import pytest

collect_ignore = [] if "STANDIN" in os.environ else ["standin", "cases"]

if "STANDIN" in os.environ:
    import standin

    sys.path.append(str(Path(__file__).parent / "cases"))

    @pytest.fixture(autouse=True)
    def clean() -> object:
        """No test leaves a race, or a failed kernel, to the next one."""
        yield
        standin.torch.accelerator.synchronize()
        standin.raise_failure()
        assert not standin.reports

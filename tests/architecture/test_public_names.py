"""What `pipeloom` exports, pinned: a change here is a change for every user."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import pipeloom

ROOT = Path(__file__).parents[2]

PUBLIC = [
    "Cluster",
    "Device",
    "Job",
    "Link",
    "Options",
    "Pipeline",
    "PipeloomError",
    "Plan",
    "__version__",
    "capture",
    "load_plan",
    "plan",
    "profile",
    "search_schedule",
    "simulate",
    "verify",
]


def test_public_names_are_pinned() -> None:
    assert pipeloom.__all__ == PUBLIC
    assert dir(pipeloom) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_loads(name: str) -> None:
    value = getattr(pipeloom, name)
    assert value is getattr(pipeloom, name)
    home = getattr(value, "__module__", "pipeloom")
    assert home.startswith("pipeloom"), f"{name} is defined in {home}"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="No pipeloom attribute plann"):
        pipeloom.plann  # noqa: B018


def test_a_name_is_loaded_only_when_it_is_used() -> None:
    code = (
        "import sys, pipeloom; "
        "assert 'pipeloom.ir.cluster' not in sys.modules; "
        "pipeloom.Cluster; "
        "assert 'pipeloom.ir.cluster' in sys.modules and 'pipeloom.ir.plan' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_changelog_has_this_version_once_it_is_released() -> None:
    headings = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert headings[1:2] in ([], [pipeloom.__version__])

"""Which room may import which: the arrows of the design, as a table."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pipeloom

PACKAGE = Path(pipeloom.__file__).parent

PASSES = {
    "tracer",
    "profiler",
    "schedules",
    "lowering",
    "simulator",
    "planner",
    "runtime",
    "viewer",
}

MAY_IMPORT: dict[str, set[str]] = {
    "ir": set(),
    "tracer": {"ir"},
    "profiler": {"ir", "tracer"},
    "schedules": {"ir"},
    "lowering": {"ir"},
    "simulator": {"ir"},
    "planner": {"ir", "schedules", "lowering", "simulator"},
    "runtime": {"ir", "tracer"},
    "viewer": {"ir"},
    "api": {"ir", *PASSES},
    "train": {"ir", "api", "viewer", "tracer", "runtime"},
    "commands": {"ir", "api", "train", "tracer", "planner", "viewer", "runtime"},
    "cli": {"ir", "commands"},
    "__main__": {"cli"},
    "__init__": {"ir", "api", *PASSES},
}
"""Room -> the rooms it may import; every room may import the package itself, for its version."""


def room_of(file: Path, package: Path) -> str:
    first = file.relative_to(package).parts[0]
    return first.removesuffix(".py")


def imported_modules(file: Path, package: Path) -> Iterator[str]:
    """Dotted names, relative to the package, of what a file imports from it, wherever the import stands."""
    folder = ("pipeloom", *file.relative_to(package).parent.parts)
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.removeprefix("pipeloom.") for name in names if name.startswith("pipeloom."))


def violations(package: Path) -> list[str]:
    files = sorted(package.rglob("*.py"))
    assert files, f"no file found in {package}: this check would pass on nothing"
    rooms = {room_of(file, package) for file in files}
    found = [
        f"room {room!r} is new: say in MAY_IMPORT of {Path(__file__).name} which rooms it may import"
        for room in sorted(rooms - MAY_IMPORT.keys())
    ]
    for file in files:
        room = room_of(file, package)
        reached = {name.split(".")[0] for name in imported_modules(file, package)} & rooms - {room}
        extra = sorted(reached - MAY_IMPORT.get(room, rooms))
        if extra:
            allowed = ", ".join(sorted(MAY_IMPORT[room])) or "no other room"
            found.append(
                f"{file.relative_to(package)} imports {', '.join(extra)}; {room} may import {allowed}. "
                "Pass what it needs as an argument from api.py, or move a shared noun to ir/."
            )
    return found


def test_rooms_import_only_what_they_may() -> None:
    assert not violations(PACKAGE), "\n".join(violations(PACKAGE))


def test_no_room_reaches_a_room_that_reaches_it_back() -> None:
    """The table itself has no cycle."""
    waiting = {room: set(others) for room, others in MAY_IMPORT.items()}
    while ready := [room for room, others in waiting.items() if not others & waiting.keys()]:
        for room in ready:
            del waiting[room]
    assert not waiting, f"these rooms import each other: {sorted(waiting)}"


def plant(folder: Path, **files: str) -> Path:
    package = folder / "pipeloom"
    for name, text in files.items():
        file = package / (name.replace("__", "/") + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return package


def test_planted_violations_are_found_and_explained(tmp_path: Path) -> None:
    package = plant(
        tmp_path,
        simulator__clock="x = 1\n",
        viewer__absolute="from pipeloom.simulator.clock import x\n",
        viewer__relative="def late():\n    from ..simulator import clock\n",
        viewer__whole="import pipeloom.simulator.clock\n",
        viewer__fine="from ..ir.timeline import Timeline\nfrom .absolute import x\nimport json\n",
        ir__timeline="Timeline = 1\n",
        magic__spell="",
    )
    new_room, *rest = violations(package)
    assert new_room == "room 'magic' is new: say in MAY_IMPORT of test_imports.py which rooms it may import"
    assert [message.split(".py")[0] for message in rest] == [
        "viewer/absolute",
        "viewer/relative",
        "viewer/whole",
    ]
    assert rest[0] == (
        "viewer/absolute.py imports simulator; viewer may import ir. "
        "Pass what it needs as an argument from api.py, or move a shared noun to ir/."
    )


def test_no_folder_shares_its_name_with_a_public_name() -> None:
    folders = {f.name for f in PACKAGE.iterdir() if f.is_dir()}
    shadowed = sorted(folders & set(pipeloom.__all__))
    assert not shadowed, f"{shadowed} name a folder and a public function: one would hide the other"

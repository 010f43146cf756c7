"""Which room may import which: the table of CONTRIBUTING.md, enforced; and no circle of files."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import pipeloom

PACKAGE = Path(pipeloom.__file__).parent
ROOT = Path(__file__).parents[2]

BY_MODULE = {"ir", "commands", "cli"}
"""Rooms whose files are imported one by one, not through their `__init__`."""


def table(page: str) -> dict[str, set[str]]:
    """Room -> the rooms it may import, as the table on a page says."""
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", page, re.MULTILINE)
    return {room: set(re.findall(r"`(\w+)`", cell)) for room, cell in rows}


MAY_IMPORT = table((ROOT / "CONTRIBUTING.md").read_text()) | {"__main__": {"cli"}}
"""Every room may also import the package itself, for its version."""


def dotted(file: Path, package: Path) -> str:
    """The module of a file, relative to the package; of an `__init__` its folder."""
    parts = file.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: Path, package: Path) -> Iterator[tuple[str, str]]:
    """(module relative to the package, name) of what a file imports from it, wherever the import stands."""
    folder = ("pipeloom", *file.relative_to(package).parent.parts) if file.is_relative_to(package) else ()
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            names = [(module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in names:
            if module == "pipeloom" or module.startswith("pipeloom."):
                yield module.removeprefix("pipeloom").removeprefix("."), name


def rooms_reached(file: Path, package: Path, rooms: set[str]) -> set[str]:
    return {(module or name).split(".")[0] for module, name in imports(file, package)} & rooms


def violations(package: Path, may_import: dict[str, set[str]]) -> list[str]:
    files = sorted(package.rglob("*.py"))
    assert files, f"no file found in {package}: this check would pass on nothing"
    rooms = {dotted(file, package).split(".")[0] for file in files} - {""}
    found = [
        f"room {room!r} is new: say in the table of CONTRIBUTING.md which rooms it may import"
        for room in sorted(rooms - may_import.keys())
    ]
    for file in files:
        room = dotted(file, package).split(".")[0]
        extra = sorted(rooms_reached(file, package, rooms) - {room} - may_import.get(room, rooms))
        if extra and room:
            allowed = ", ".join(sorted(may_import[room])) or "no other room"
            found.append(
                f"{file.relative_to(package)} imports {', '.join(extra)}; {room} may import {allowed}. "
                "Pass what it needs as an argument from api/, or move a shared noun to ir/."
            )
    return found


def past_the_door(file: Path, package: Path) -> Iterator[str]:
    """Imports of a file inside a room, where its room's `__init__` should be asked."""
    own = dotted(file, package).split(".") if file.is_relative_to(package) else []
    if own and file.name != "__init__.py":
        own = own[:-1]
    for module, name in imports(file, package):
        parts = module.split(".")
        if not module or parts[0] in BY_MODULE or name.startswith("_"):
            continue
        outside = next((k for k, part in enumerate(parts) if own[k : k + 1] != [part]), len(parts))
        whole = package.joinpath(*parts)
        into = parts[outside:] if own else parts
        if len(into) > 1 and not whole.is_dir() or (not own and not whole.is_dir()):
            yield f"imports {name} from {module}: ask {'.'.join(parts[: outside + 1] if own else parts[:-1])}"


def test_rooms_import_only_what_they_may() -> None:
    found = violations(PACKAGE, MAY_IMPORT)
    assert not found, "\n".join(found)


def test_rooms_are_imported_through_their_doors() -> None:
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").glob("*.py")]
    found = [
        f"{file.relative_to(ROOT)} {text}" for file in sorted(files) for text in past_the_door(file, PACKAGE)
    ]
    assert not found, "\n".join(found)


def test_no_room_reaches_a_room_that_reaches_it_back() -> None:
    """The table itself has no cycle."""
    waiting = {room: set(others) for room, others in MAY_IMPORT.items()}
    while ready := [room for room, others in waiting.items() if not others & waiting.keys()]:
        for room in ready:
            del waiting[room]
    assert not waiting, f"these rooms import each other: {sorted(waiting)}"


def file_graph(package: Path) -> dict[str, set[str]]:
    """File -> the files that it imports; a name from a room's `__init__` counts as the file it comes from."""
    files = {dotted(f, package): f for f in package.rglob("*.py")}
    homes = {
        (dotted(stub.with_suffix(".py"), package), name): module
        for stub in package.rglob("__init__.pyi")
        for module, name in imports(stub, package)
    }
    graph: dict[str, set[str]] = {}
    for own, file in files.items():
        targets = set()
        for module, name in imports(file, package):
            inner = f"{module}.{name}".strip(".")
            target = homes.get((module, name)) or (inner if inner in files else module)
            targets.add(target)
        graph[own] = targets & files.keys() - {own}
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert not circle(file_graph(PACKAGE))


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
    arrows = {"viewer": {"ir"}, "simulator": {"ir"}, "ir": set()}
    new_room, *rest = violations(package, arrows)
    assert new_room == "room 'magic' is new: say in the table of CONTRIBUTING.md which rooms it may import"
    assert [message.split(".py")[0] for message in rest] == [
        "viewer/absolute",
        "viewer/relative",
        "viewer/whole",
    ]
    assert rest[0] == (
        "viewer/absolute.py imports simulator; viewer may import ir. "
        "Pass what it needs as an argument from api/, or move a shared noun to ir/."
    )


def test_planted_imports_past_the_door_are_found(tmp_path: Path) -> None:
    package = plant(
        tmp_path,
        simulator__clock="from .deep.tick import y\n",
        simulator__deep__tick="from ..clock import x\n",
        simulator__other="from .clock import x\nfrom .deep import y\n",
        viewer__far="from ..simulator.clock import x\n",
        viewer__near="from ..simulator import x\nfrom ..ir.plan import Plan\n",
    )
    found = [text for file in sorted(package.rglob("*.py")) for text in past_the_door(file, package)]
    assert found == [
        "imports y from simulator.deep.tick: ask simulator.deep",
        "imports x from simulator.clock: ask simulator",
    ]


def test_a_planted_circle_is_found(tmp_path: Path) -> None:
    package = plant(tmp_path, a__one="from .two import x\n", a__two="def f():\n    from .one import y\n")
    assert set(circle(file_graph(package))) == {"a.one", "a.two"}


def test_no_folder_shares_its_name_with_a_public_name() -> None:
    folders = {f.name for f in PACKAGE.rglob("*") if f.is_dir()}
    shadowed = sorted(folders & set(pipeloom.__all__))
    assert not shadowed, f"{shadowed} name a folder and a public function: one would hide the other"


@pytest.mark.parametrize("room", sorted(MAY_IMPORT.keys() - {"__main__", "cli"}))
def test_the_table_names_only_rooms_that_are_there(room: str) -> None:
    assert (PACKAGE / room / "__init__.py").is_file()

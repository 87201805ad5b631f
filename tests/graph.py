"""Print the size of each program and of its import graph: `python -m tests.graph [PACKAGE ...]`.

A room is a package or module directly below the program, an edge an import between two rooms, and
a layer a step of the longest chain of edges. Public names are functions, classes and constants of a
module without a leading underscore.
"""

import ast
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Final

import grimp

PROGRAMS: Final = [path for path in ("extender", "agent", "worker_device") if Path(path).is_dir()]

Edges = dict[str, Counter[str]]
"""Number of imports by importing and imported room."""


def room(module: str) -> str:
    """Return the room of a module, "(root)" for the program itself."""
    return ".".join(module.split(".")[1:2]) or "(root)"


def edges_of(program: str) -> Edges:
    """Count the imports between the rooms of a program."""
    graph = grimp.build_graph(program, cache_dir=None)
    edges: Edges = defaultdict(Counter)
    for importer in graph.modules:
        of_room = edges[room(importer)]
        for imported in graph.find_modules_directly_imported_by(importer):
            if room(imported) != room(importer):
                of_room[room(imported)] += 1
    return edges


def layers_of(edges: Edges) -> tuple[dict[str, int], set[str]]:
    """Return the layer of each room, 1 for one that imports no other, and the rooms in cycles."""
    layers: dict[str, int] = {}
    cyclic: set[str] = set()

    def layer(name: str, path: tuple[str, ...]) -> int:
        if name in path:
            cyclic.update(path[path.index(name) :])
            return 0
        if name not in layers:
            below = [layer(other, (*path, name)) for other in edges[name]]
            layers[name] = 1 + max(below, default=0)
        return layers[name]

    for name in sorted(edges):
        layer(name, ())
    return layers, cyclic


def public_names(path: Path) -> set[str]:
    """Return the public functions, classes and constants of a module."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]):
                names.add(name)
            case _:
                pass
    return {name for name in names if not name.startswith("_")}


def report(program: str) -> list[str]:
    """Describe a program: its totals, and a line for each room, the highest layer first."""
    edges = edges_of(program)
    layers, cyclic = layers_of(edges)
    files, lines, names = Counter[str](), Counter[str](), Counter[str]()
    for path in sorted(Path(program).rglob("*.py")):
        name = room(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
        files[name] += 1
        lines[name] += len(path.read_text(encoding="utf-8").splitlines())
        names[name] += len(public_names(path))
    text = [
        f"{program}: {lines.total():,} lines, {files.total()} files, {len(edges)} rooms, "
        f"{max(layers.values())} layers, {sum(map(len, edges.values()))} edges, "
        f"{names.total():,} public names; in cycles: {', '.join(sorted(cyclic)) or 'none'}",
        f"  layer {'room':<20} {'lines':>7} {'files':>6} {'names':>6}  imports",
    ]
    for name in sorted(edges, key=lambda one: (-layers[one], one)):
        size = f"{lines[name]:7,} {files[name]:6} {names[name]:6}"
        below = ", ".join(f"{other} {count}" for other, count in sorted(edges[name].items()))
        text.append(f"  {layers[name]:5} {name:<20} {size}  {below}")
    return text


if __name__ == "__main__":
    for package in sys.argv[1:] or PROGRAMS:
        sys.stdout.write("\n".join(report(package)) + "\n")

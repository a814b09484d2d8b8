"""The seams of kmodels, read off the syntax trees: every call of `backend_module`."""

import ast
import functools
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from source_tree import trees

SOURCE = Path(__file__).resolve().parents[1] / "src"
BACKENDS = ("jax", "torch", "tensorflow")
# What pyright compares: each file of a seam as a value of the seam's Protocol.
BODIES = Path(__file__).parent / "unit" / "core" / "seam_bodies.py"
HEADER = '''"""For the type checker: the files of each seam satisfy its Protocol. Never imported.

Written by `python tests/seams.py`; `test_seams.py` says when it has to be.
"""
'''


@dataclass(frozen=True, order=True)
class Seam:
    """One stem with its Protocol.

    Attributes:
        stem: dotted name of the files, without the suffix.
        module: where the Protocol stands.
        protocol: its name.
        optional: whether a backend may have no file.
    """

    stem: str
    module: str
    protocol: str
    optional: bool

    @property
    def files(self) -> dict[str, Path]:
        """The files that there are, by backend."""
        found = {b: SOURCE / f"{self.stem.replace('.', '/')}_{b}.py" for b in BACKENDS}
        return {b: path for b, path in found.items() if path.exists()}


def name_of(path: Path) -> str:
    """Dotted name of a module of the source."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file of the source."""
    return trees()[str(path.relative_to(SOURCE / "kmodels"))]


def calls() -> list[tuple[str, ast.Call, ast.Module]]:
    """Place, call and file of each `backend_module(...)`, under whatever name it was imported."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        if "backend_module" not in path.read_text() or path.name == "dispatch.py":
            continue
        tree = tree_of(path)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("backend_module"):
                found.append((f"{name_of(path)}:{node.lineno}", node, tree))
    return found


def seam_of(place: str, call: ast.Call, tree: ast.Module) -> Seam:
    """The seam that a call names, its Protocol by the module that defines it."""
    stem, protocol = call.args
    assert isinstance(stem, ast.Constant), f"{place}: give the stem as a literal"
    assert isinstance(protocol, ast.Name), f"{place}: give the Protocol by its name"
    options = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg == "optional"}
    module = place.partition(":")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and protocol.id in {a.name for a in node.names}:
            module = str(node.module)
    return Seam(str(stem.value), module, protocol.id, options.get("optional", False))


@functools.cache
def seams() -> list[Seam]:
    return sorted({seam_of(*call) for call in calls()})


def protocol_of(seam: Seam) -> ast.ClassDef:
    """The Protocol's syntax tree."""
    path = SOURCE / f"{seam.module.replace('.', '/')}.py"
    if not path.exists():
        path = path.with_suffix("") / "__init__.py"
    found = [
        node
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef) and node.name == seam.protocol
    ]
    assert found, f"{seam.module} defines no {seam.protocol}"
    return found[0]


def written() -> str:
    """What `seam_bodies.py` has to be."""
    imports, lines, protocols = set(), [], defaultdict(set)
    for seam in seams():
        protocols[seam.module].add(seam.protocol)
        for path in seam.files.values():
            folder, _, file = name_of(path).rpartition(".")
            alias = re.sub(r"\W", "_", f"{folder.removeprefix('kmodels.')}.{file}")
            imports.add(f"from {folder} import {file} as {alias}")
            lines.append(f"_{alias}: {seam.protocol} = {alias}")
    imports |= {f"from {k} import {', '.join(sorted(held))}" for k, held in protocols.items()}
    return "\n".join([HEADER, *sorted(imports), "", *lines, ""])


if __name__ == "__main__":
    BODIES.write_text(written())

"""Each file `<stem>_<backend>.py` has what the Protocol of its seam says, and none is without one.

pyright compares them too (`seam_bodies.py`), by types. Here names, kinds and defaults of parameters
are compared: on the running backend as Python has them, on the others as they are written.
"""

import ast
import importlib
import inspect
import re
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import keras
import pytest

from seams import BACKENDS, BODIES, SOURCE, calls, name_of, protocol_of, seams, tree_of, written
from source_tree import decorated

BACKEND = keras.backend.backend()
SEAMS = seams()
# Packages of no environment of the tests, without which a file cannot be imported.
NEEDS = {"kmodels.tools.compare_backends.openxla_torch": "torchax"}
# Files without a seam: what they hold is asked for by the framework's name, whatever runs.
WITHOUT_SEAM = {
    "kmodels.core.internals_torch": "dispatch.py, where a framework may be named, imports it",
    "kmodels.core.internals_tensorflow": "environment.py imports it",
    "kmodels.data.tensors_torch": "for tensors in the state of a loader under each backend",
    "kmodels.interop.host_tensorflow": "keras-cv's layers run on TensorFlow under each backend",
    "kmodels.models.blocks.preprocessing_tensorflow": "for tensors of tf.data under each backend",
    "kmodels.text.tokens_tensorflow": "for tensors of tf.data under each backend",
    "kmodels.weights.pickled_torch": "reads torch's files under each backend",
}
# (name, kind, default as it is written or None)
Parameters = list[tuple[str, str, str | None]]


def parameters(function: ast.FunctionDef, bound: bool) -> Parameters:
    """Those of a function as it is written, without `self` where it is bound."""
    given = function.args
    found = [(a.arg, "position") for a in given.posonlyargs] + [(a.arg, "any") for a in given.args]
    defaults = [None] * (len(found) - len(given.defaults)) + [*map(ast.unparse, given.defaults)]
    all_ = [(*a, default) for a, default in zip(found, defaults, strict=True)][bound:]
    all_ += [(given.vararg.arg, "*", None)] if given.vararg else []
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        all_.append((argument.arg, "keyword", ast.unparse(default) if default else None))
    return all_ + ([(given.kwarg.arg, "**", None)] if given.kwarg else [])


def fits(found: Parameters, wanted: Parameters) -> bool:
    """Whether a function can stand for another; names by position alone are free."""
    if all(kind == "position" for _, kind, _ in wanted):
        return len(found) == len(wanted)
    return found == wanted


def members(seam) -> dict[str, Parameters | None]:
    """What a Protocol asks for: parameters by the name of a function, None for other things."""
    found = {}
    for node in protocol_of(seam).body:
        if isinstance(node, ast.FunctionDef):
            constant = [ast.unparse(d) for d in node.decorator_list] == ["property"]
            found[node.name] = None if constant else parameters(node, bound=True)
    return found


def by_tree(path: Path) -> dict[str, Parameters | None]:
    """What a file has at its top: parameters by the name of a function or class defined there."""
    found: dict[str, Parameters | None] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = parameters(node, bound=False)
        elif isinstance(node, ast.ClassDef):
            made = [m for m in node.body if getattr(m, "name", "") == "__init__"]
            found[node.name] = parameters(made[0], bound=True) if made else None
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                found[ast.unparse(target)] = None
    return found


def differences(wanted: dict[str, Parameters | None], path: Path) -> list[str]:
    """What a file lacks of a Protocol, or has otherwise."""
    found, wrong = by_tree(path), []
    for name, given in wanted.items():
        if name not in found:
            wrong.append(f"{path.name} lacks {name}")
        elif (given and found[name]) and not fits(found[name], given):
            wrong.append(f"{path.name}: {name} takes {found[name]} in place of {given}")
    return wrong


def python_parameters(function) -> Parameters:
    """Those of a function or class in the same form, as Python has them."""
    forms = dict(
        zip(inspect._ParameterKind, ("position", "any", "*", "keyword", "**"), strict=True)
    )
    return [
        (p.name, forms[p.kind], None if p.default is p.empty else repr(p.default))
        for p in inspect.signature(function).parameters.values()
    ]


def test_every_call_names_its_protocol():
    assert len(SEAMS) > 10 and len(calls()) >= len(SEAMS)
    assert len({seam.stem for seam in SEAMS}) == len(SEAMS), "a stem has one Protocol, one optional"
    for seam in SEAMS:
        protocol = protocol_of(seam)
        assert [ast.unparse(base) for base in protocol.bases] == ["Protocol"], seam
        assert members(seam), f"{seam.protocol} asks for nothing"
        for node in (protocol, *protocol.body):
            told = isinstance(node, ast.Expr) or ast.get_docstring(node)
            assert told, f"{seam.protocol}: {ast.unparse(node)} has no docstring"


@pytest.mark.each_backend
@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.stem)
def test_files_have_what_the_protocol_says(seam):
    files = seam.files
    assert files, f"{seam.stem} has no file for any backend"
    assert seam.optional or set(files) == set(BACKENDS), f"{seam.stem}: say optional=True"
    wanted = members(seam)
    wrong = [line for path in files.values() for line in differences(wanted, path)]
    assert not wrong, "\n".join(wrong)
    if BACKEND not in files:
        return
    name = name_of(files[BACKEND])
    if find_spec(NEEDS.get(name, "keras")) is None:
        return
    module = importlib.import_module(name)
    for member, given in wanted.items():
        body = getattr(module, member)
        if given is None:
            continue
        if body.__module__ == name:
            assert fits(python_parameters(body), given), member
        else:  # of the framework, or of a module of ours, under a name of the seam's
            inspect.signature(body).bind(*given)


def test_a_parameter_less_is_seen(tmp_path):
    seam = next(seam for seam in SEAMS if seam.stem == "kmodels.core.processes")
    path = seam.files["torch"]
    text = path.read_text()
    for old, new, told in (
        ("text: str, seconds: float)", "text: str)", "exchange takes"),
        ("def give_up(", "def _give_up(", "lacks give_up"),
        ("def join(seconds: float)", "def join(seconds: float = 1.0)", "join takes"),
    ):
        assert old in text
        changed = tmp_path / path.name
        changed.write_text(text.replace(old, new))
        assert re.search(told, "\n".join(differences(members(seam), changed)))


def test_the_type_checker_compares_each_file():
    def statements(text: str) -> set[str]:
        found = set()
        for node in ast.parse(text).body:
            alone = (
                [ast.ImportFrom(node.module, [a]) for a in node.names]
                if isinstance(node, ast.ImportFrom)
                else [node]
            )
            found |= {ast.unparse(part) for part in alone}
        return found

    assert statements(BODIES.read_text()) == statements(written()), "run python tests/seams.py"
    settings = (SOURCE.parent / "pyproject.toml").read_text()
    assert str(BODIES.relative_to(SOURCE.parent)) in settings


def importers() -> dict[str, set[str]]:
    """By module of ours those that import it, or one of its names."""
    found = defaultdict(set)
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom):
                for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    found[name].add(name_of(path))
    return found


def test_no_file_of_a_backend_without_a_seam():
    """Each is a seam's, an override, a helper of other files of its backend, or named above."""
    bodies = {path for seam in SEAMS for path in seam.files.values()}
    overrides = set(decorated("overrides", "override").values())
    users, without = importers(), set()
    for path in SOURCE.rglob("*.py"):
        backend = path.stem.rpartition("_")[2]
        override = str(path.relative_to(SOURCE / "kmodels")) in overrides
        if backend not in BACKENDS or path in bodies or override:
            continue
        own = users[name_of(path)]
        if not own or any(not user.endswith(f"_{backend}") for user in own):
            without.add(name_of(path))
    assert without == set(WITHOUT_SEAM)

"""docs/architecture.md, held by the syntax trees: who may import what, and what it names.

Every parameter says its type, and overrides have the types of their op.
"""

import ast
import re
import subprocess

import pytest

from source_tree import (
    FRAMEWORKS,
    ROOT,
    ROW,
    SOURCE,
    circles_in,
    decorated,
    file_imports,
    imports,
    lookups,
    parameters,
    parameters_of,
    source_imports,
    trees,
    unit_of,
)

# Any of these would belong to one framework as well, though its name differs.
FRAMEWORK_PACKAGES = {*FRAMEWORKS, "jaxlib", "flax", "optax", "torchvision", "tensorflow_text"}
# What a backend's file says in place of `Tensor`.
OWN_TENSOR = re.compile(r"\b(?:torch\.Tensor|jax\.Array|tf\.Tensor)\b")
# Every look upwards that there is today: an import, or a name that something else looks up. A star
# stands for a name that is put together. This list only gets shorter.
UPWARD = {
    ("core/dispatch.py", "kmodels.overrides.*"),
    ("distribution/ray/start.py", "kmodels.runs.recipe"),
    ("registry.py", "kmodels.models.*"),
    ("training/__init__.py", "kmodels.*"),
}


def looks_up(file, name):
    """Whether a name of ours stands above the file that says it, or may."""
    parts = name.split(".")
    if parts[0] != "kmodels" or len(parts) < 2 or file == "__init__.py":
        return False
    unit, target = unit_of(file), parts[1]
    return target == "*" or ROW.get(target, -1) > ROW[unit]


def module_of(name):
    """The module in which an imported name stands."""
    modules = file_imports()
    while name not in modules and not name.endswith("*") and name.count(".") > 1:
        name = name.rpartition(".")[0]
    return name


def test_every_unit_has_its_row():
    unplaced = {unit_of(file) for file in trees()} - {"__init__", *ROW}
    assert not unplaced, f"say in ROWS where these stand: {sorted(unplaced)}"


def test_nothing_looks_up_in_any_spelling():
    named = [(file, line, module_of(name)) for file, line, name in source_imports()]
    named += [(file, line, name) for file, tree in trees().items() for line, name in lookups(tree)]
    found = {(file, name): line for file, line, name in named if looks_up(file, name)}
    new = [f"{key[0]}:{line} {key[1]}" for key, line in found.items() if key not in UPWARD]
    assert not new, new
    assert not UPWARD - set(found), f"take these off the list: {sorted(UPWARD - set(found))}"


def test_every_spelling_of_a_look_up_is_found():
    text = """
'''kmodels.models in a docstring'''
import kmodels
importlib.import_module("kmodels.lora.enable")
__import__("kmodels.models")
sys.modules["kmodels.runs"]
TABLE = {"vit": "kmodels.models.vit:ViT"}
import_module(f"kmodels.{name}")
import_module("kmodels.models." + name)
kmodels.task.Task
"""
    found = sorted(name for _, name in lookups(ast.parse(text)))
    assert found == [
        *("kmodels.*", "kmodels.lora.enable", "kmodels.models", "kmodels.models.*"),
        *("kmodels.models.vit", "kmodels.runs", "kmodels.task"),
    ]


def test_files_do_not_import_each_other_in_a_circle():
    assert circles_in({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    circles = circles_in(file_imports())
    assert not circles, "\n".join(" -> ".join(circle) for circle in circles)


def test_only_the_model_row_knows_a_family():
    shared = {"__init__", "__pycache__", "blocks", "interpret", "registry"}
    families = {path.stem for path in (SOURCE / "models").iterdir()} - shared
    assert {"gemma", "qwen3", "vit"} <= families
    wrong = [
        f"{file}:{line} imports {name}"
        for file, line, name in source_imports()
        if any(name.startswith(f"kmodels.models.{family}") for family in families)
        and unit_of(file) != "models"
    ]
    assert not wrong, "\n".join(wrong)


def test_frameworks_only_in_their_files():
    wrong = []
    for file, line, name in source_imports():
        package = name.split(".")[0]
        if package not in FRAMEWORK_PACKAGES or file == "core/dispatch.py":
            continue
        suffix = next((word for word in FRAMEWORKS if file.endswith(f"_{word}.py")), None)
        if suffix is None or not package.startswith(suffix):
            wrong.append(f"{file}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_private_keras_only_in_keras_internals():
    named = [
        str(path.relative_to(ROOT))
        for path in SOURCE.rglob("*.py")
        if "keras.src" in path.read_text() and path.name != "keras_internals.py"
    ]
    assert not named, f"name keras.src only in core/keras_internals.py: {named}"


def test_recipes_use_public_names():
    wrong = [
        f"{path.name}:{line} imports {name}"
        for path in sorted((ROOT / "recipes").rglob("*.py"))
        for line, name in imports(ast.parse(path.read_text()))
        if name.split(".")[0] in FRAMEWORK_PACKAGES
        or name.startswith("keras.src")
        or any(part.startswith("_") and part != "__version__" for part in name.split("."))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_path_of_one_machine():
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    names = [name for name in listed.stdout.split("\0") if name]
    machine = re.compile(r"(?<![\w.:/])/(?:home|Users|root|work)/\w")
    wrong = []
    for name in names:
        path = ROOT / name
        if path.suffix not in {".py", ".md", ".toml", ".txt", ".ipynb", ".json", ".sh", ""}:
            continue
        if path.is_file() and machine.search(path.read_text(errors="replace")):
            wrong.append(name)
    assert not wrong, f"these name a path that exists on one machine only: {wrong}"


def test_each_parameter_has_an_annotation():
    missing = [
        f"{file}:{parameter.lineno} {parameter.arg}"
        for file, tree in trees().items()
        for parameter in parameters(tree)
        if parameter.annotation is None
    ]
    assert not missing, "\n".join(missing)


def signature(tree: ast.Module, name: str) -> dict[str, str]:
    """The annotations of a function at the top of a file by its parameters, "return" its result."""
    function = next(
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name
    )
    found = {each.arg: ast.unparse(each.annotation) for each in parameters_of(function)}
    return {**found, "return": ast.unparse(function.returns)}


def test_overrides_have_the_types_of_their_op():
    """The type checker compares only results: a backend's own class is no `Tensor` to it."""
    compared = 0
    ops = decorated("ops", "op")
    for name, file in decorated("overrides", "override").items():
        op, found = name.rpartition("_")[0], signature(trees()[file], name)
        found = {name: OWN_TENSOR.sub("Tensor", text) for name, text in found.items()}
        assert found == signature(trees()[ops[op]], op), name
        compared += 1
    assert compared > 20


# === What the page names ===

TEXT = (ROOT / "docs" / "architecture.md").read_text()
WALKS = (
    *("A walk of a batch", "A walk of a checkpoint", "A walk of a mesh"),
    "Where things are decided",
)


def section(title: str) -> str:
    """The text from a heading to the next one."""
    return TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]


def files_in(text: str) -> list[str]:
    return [name for name in re.findall(r"`([\w/]+\.py)`", text) if not name.startswith("tests/")]


def definitions(file: str) -> set[str]:
    tree = ast.parse((SOURCE / file).read_text())
    return {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_names_files_that_are_there(walk):
    named = files_in(section(walk))
    assert len(named) >= 6, f"{walk} names {named}"
    missing = [name for name in named if not (SOURCE / name).is_file()]
    assert not missing, f"{walk} names {missing}"


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_names_what_its_files_define(walk):
    """Of "`name` in `file`" and "`name` (`file`)", the file defines the name."""
    pairs = re.findall(r"`(\w+)`\s+(?:in\s+|\()`([\w/]+\.py)`", section(walk))
    assert len(pairs) >= 4, f"{walk} names {pairs}"
    wrong = [f"{name} in {file}" for name, file in pairs if name not in definitions(file)]
    assert not wrong, f"{walk} names {wrong}"


def test_every_other_file_that_the_page_names_is_there():
    other = [name for name in files_in(TEXT) if "<" not in name and "/" in name]
    missing = [name for name in other if not (SOURCE / name).is_file()]
    assert not missing


def test_the_picture_has_every_room():
    picture = TEXT.partition("```\n")[2].partition("```")[0]
    named = set(re.findall(r"(\w+)(?=/|\b)", picture))
    rooms = {
        path.stem for path in SOURCE.iterdir() if path.name not in ("__pycache__", "__init__.py")
    }
    assert rooms <= named, f"the image lacks {sorted(rooms - named)}"

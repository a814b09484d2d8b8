"""The image in docs/architecture.md, held by the syntax trees: who may import what."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "src" / "kmodels"
FRAMEWORKS = ("jax", "torch", "tensorflow")
# Any of these would belong to one framework as well, though its name differs.
FRAMEWORK_PACKAGES = {*FRAMEWORKS, "jaxlib", "flax", "optax", "torchvision", "tensorflow_text"}

# Bottom to top. A unit is a module or folder of src/kmodels; it imports from its own row and below.
ROWS = (
    ("core",),
    ("ops", "overrides"),
    ("layers", "transforms"),
    (
        *("checkpoint", "data", "distribution", "generation", "lora", "memory", "text"),
        *("training", "weights"),
    ),
    ("callbacks", "task", "presets"),
    ("models",),
    ("interop", "runs", "tools"),
    ("__main__",),
)
# The ways up. presets/ finds the family by its name, a table look-up; a plan hands out the
# callback that keeps its run, which asks the processes of that run.
UPWARD = {
    *((f"presets/{name}.py", "models.registry") for name in ("find", "load", "save")),
    ("distribution/plan.py", "callbacks"),
}
MAXIMUM_LINES = {"src": 400, "recipes": 400, "tests": 450, "benchmarks": 450}
# Of src/kmodels itself, and of Python files in a room; the listing of overrides/ is a registry.
MAXIMUM_ENTRIES, MAXIMUM_FILES = 24, 24


def python_files(*folders: str) -> list[Path]:
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in files if not path.is_relative_to(ROOT / "tests" / ".references")]


def imports(path: Path, package: tuple[str, ...] = ()) -> list[tuple[int, str]]:
    """Line and dotted name of everything that a file imports, at its top or inside a function.

    `from a import b` gives a.b, since b may be a module; relative names are resolved. What stands
    under `if TYPE_CHECKING:` is not imported.
    """
    found = []
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*start, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def source_imports() -> list[tuple[str, int, str]]:
    found = []
    for path in python_files("src"):
        relative = path.relative_to(SOURCE)
        package = ("kmodels", *relative.parts[:-1])
        found += [(str(relative), line, name) for line, name in imports(path, package)]
    return found


def unit_of(relative: str) -> str:
    """The module or folder a file belongs to; precision_jax.py belongs to precision."""
    name = Path(relative).parts[0].removesuffix(".py")
    stem, _, suffix = name.rpartition("_")
    return stem if suffix in FRAMEWORKS else name


def row_of(unit: str) -> int | None:
    return next((index for index, row in enumerate(ROWS) if unit in row), None)


def test_every_unit_has_its_row():
    units = {unit_of(str(path.relative_to(SOURCE))) for path in python_files("src")} - {"__init__"}
    unplaced = {unit for unit in units if row_of(unit) is None}
    assert not unplaced, f"say in ROWS where these stand: {sorted(unplaced)}"


def own_imports() -> list[tuple[str, int, str, str]]:
    """File, line, unit and target unit of every import from one unit of kmodels into another."""
    found = []
    for relative, line, name in source_imports():
        parts = name.split(".")
        if parts[0] != "kmodels" or len(parts) < 2 or relative == "__init__.py":
            continue
        if any(relative == file and name.startswith(f"kmodels.{to}") for file, to in UPWARD):
            continue
        unit, target = unit_of(relative), parts[1]
        if row_of(target) is not None and target != unit:
            found.append((relative, line, unit, target))
    return found


def test_imports_point_downwards():
    wrong = [
        f"{relative}:{line} imports {target}"
        for relative, line, unit, target in own_imports()
        if row_of(target) > row_of(unit)
    ]
    assert not wrong, "\n".join(wrong)


def file_imports() -> dict[str, set[str]]:
    """Which modules of ours each of our modules imports, inside functions too."""
    modules = {}
    for path in python_files("src"):
        name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
        modules[name.removesuffix(".__init__")] = path
    edges = {}
    for module, path in modules.items():
        package = (
            tuple(module.split("."))
            if path.name == "__init__.py"
            else tuple(module.split(".")[:-1])
        )
        named = [name for _, name in imports(path, package)]
        # `from a import b` names b, which is a module or stands in a.
        found = {n if n in modules else n.rpartition(".")[0] for n in named} & modules.keys()
        edges[module] = found - {module}
    return edges


def circles_in(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (Tarjan's strongly connected components)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for target in sorted(edges[node]):
            if target not in order:
                visit(target)
                lowest[node] = min(lowest[node], lowest[target])
            elif target in stack:
                lowest[node] = min(lowest[node], order[target])
        if lowest[node] == order[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in edges:
        if node not in order:
            visit(node)
    return found


def test_files_do_not_import_each_other_in_a_circle():
    assert circles_in({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    circles = circles_in(file_imports())
    assert not circles, "\n".join(" -> ".join(circle) for circle in circles)


def test_only_the_model_row_knows_a_family():
    families = {path.parent.name for path in (SOURCE / "models").glob("*/family.py")}
    wrong = [
        f"{relative}:{line} imports {name}"
        for relative, line, name in source_imports()
        if any(name.startswith(f"kmodels.models.{family}") for family in families)
        and unit_of(relative) != "models"
    ]
    assert not wrong, "\n".join(wrong)


def test_frameworks_only_in_their_files():
    wrong = []
    for relative, line, name in source_imports():
        package = name.split(".")[0]
        if package not in FRAMEWORK_PACKAGES or relative == "core/dispatch.py":
            continue
        suffix = next((word for word in FRAMEWORKS if relative.endswith(f"_{word}.py")), None)
        if suffix is None or not package.startswith(suffix):
            wrong.append(f"{relative}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_private_keras_only_in_keras_internals():
    wrong = [
        f"{relative}:{line}"
        for relative, line, name in source_imports()
        if name.startswith("keras.src") and not relative.startswith("core/keras_internals/")
    ]
    assert not wrong, wrong
    named = [
        str(path.relative_to(ROOT))
        for path in python_files("src")
        if "keras.src" in path.read_text() and path.parent.name != "keras_internals"
    ]
    assert not named, f"name keras.src only in core/keras_internals: {named}"


def test_recipes_use_public_names():
    wrong = [
        f"{path.name}:{line} imports {name}"
        for path in python_files("recipes")
        for line, name in imports(path)
        if name.split(".")[0] in FRAMEWORK_PACKAGES
        or name.startswith("keras.src")
        or any(part.startswith("_") and part != "__version__" for part in name.split("."))
    ]
    assert not wrong, "\n".join(wrong)


def test_rooms_stay_small():
    assert len([path for path in SOURCE.iterdir() if path.name != "__pycache__"]) <= MAXIMUM_ENTRIES
    rooms = {path for path in SOURCE.rglob("*") if path.is_dir() and path.name != "overrides"}
    full = {
        str(room.relative_to(SOURCE)): files
        for room in rooms
        if (files := len(list(room.glob("*.py")))) > MAXIMUM_FILES
    }
    assert not full, f"over {MAXIMUM_FILES} files: {full}"


@pytest.mark.parametrize("folder", ["src", "recipes", "tests", "benchmarks"])
def test_files_stay_short(folder):
    long = {
        str(path.relative_to(ROOT)): lines
        for path in python_files(folder)
        if (lines := len(path.read_text().splitlines())) > MAXIMUM_LINES[folder]
    }
    assert not long, f"over {MAXIMUM_LINES[folder]} lines: {long}"


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

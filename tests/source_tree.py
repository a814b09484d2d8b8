"""What the syntax trees of src/kmodels say: imports, look-ups by name, rooms and their rows.

For tests of layering and for `make shape`.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "kmodels"
FRAMEWORKS = ("jax", "torch", "tensorflow")
# Bottom to top. A unit is a module or folder of src/kmodels; it imports from its own row and below.
ROWS = (
    ("core",),
    ("ops", "overrides"),
    ("layers", "transforms"),
    (
        *("checkpoint", "data", "distribution", "generation", "lora", "text"),
        *("training", "weights"),
    ),
    ("callbacks", "task", "presets", "registry"),
    ("models",),
    ("interop", "runs", "tools"),
    ("__main__", "registration"),
)
ROW = {unit: row for row, units in enumerate(ROWS) for unit in units}


@cache
def trees(folder: str = "") -> dict[str, ast.Module]:
    """The syntax tree of each source file in a folder, by its path below src/kmodels."""
    files = sorted((SOURCE / folder).rglob("*.py"))
    return {str(path.relative_to(SOURCE)): ast.parse(path.read_text()) for path in files}


def unit_of(file: str) -> str:
    """The module or folder that a file belongs to; precision_jax.py belongs to precision."""
    name = Path(file).parts[0].removesuffix(".py")
    stem, _, suffix = name.rpartition("_")
    return stem if suffix in FRAMEWORKS else name


def imports(tree: ast.Module, package: tuple[str, ...] = ()) -> list[tuple[int, str]]:
    """Line and dotted name of everything that a file imports, at its top or inside a function.

    `from a import b` gives a.b, since b may be a module; relative names are resolved. What stands
    under `if TYPE_CHECKING:` is not imported.
    """
    typed = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in typed:
            continue
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*start, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def decorated(folder: str, decorator: str) -> dict[str, str]:
    """The functions in a folder with this decorator, such as `op`, and the file of each."""
    return {
        node.name: file
        for file, tree in trees(folder).items()
        for node in tree.body
        if any(
            ast.unparse(mark).partition("(")[0] == decorator
            for mark in getattr(node, "decorator_list", ())
        )
    }


def source_imports() -> list[tuple[str, int, str]]:
    """File, line and dotted name of all imports of src/kmodels."""
    return [
        (file, line, name)
        for file, tree in trees().items()
        for line, name in imports(tree, ("kmodels", *Path(file).parts[:-1]))
    ]


def lookups(tree: ast.Module) -> list[tuple[int, str]]:
    """Line and module of ours of every look-up by name, in any spelling.

    Found are names in strings, whole ("kmodels.lora.enable", in `import_module`, `sys.modules` or a
    table) or put together (f"kmodels.{name}" is "kmodels.*"), and attributes of the package
    (`kmodels.models`). Docstrings are no look-ups.
    """
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = re.fullmatch(r"(kmodels(?:\.\w+)+)(?::\w+)?", node.value)
            if name and id(node) not in docstrings:
                found.append((node.lineno, name[1]))
        elif isinstance(node, ast.JoinedStr | ast.BinOp):
            first = node.values[0] if isinstance(node, ast.JoinedStr) else node.left
            text = getattr(first, "value", None)
            if isinstance(text, str) and re.fullmatch(r"kmodels\.(\w+\.)*", text):
                found.append((node.lineno, f"{text}*"))
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "kmodels":
            found.append((node.lineno, f"kmodels.{node.attr}"))
    return found


@cache
def file_imports() -> dict[str, set[str]]:
    """Which modules of ours each of our modules imports, inside functions too."""
    modules = {
        ".".join(("kmodels", *Path(file).with_suffix("").parts)).removesuffix(".__init__"): file
        for file in trees()
    }
    edges = {}
    for module, file in modules.items():
        package = ("kmodels", *Path(file).parts[:-1])
        named = [name for _, name in imports(trees()[file], package)]
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


def longest_chain(edges: dict[str, set[str]]) -> list[str]:
    """The longest way along imports; the edges have no circle."""
    ways: dict[str, list[str]] = {}

    def way(node: str) -> list[str]:
        if node not in ways:
            ways[node] = [node, *max((way(target) for target in edges[node]), key=len, default=[])]
        return ways[node]

    return max(map(way, edges), key=len)


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    """Each parameter but `self` and `cls`; `*args` and `**kwargs` are among them."""
    given = function.args
    beside = [each for each in (given.vararg, given.kwarg) if each is not None]
    found = [*given.posonlyargs, *given.args, *given.kwonlyargs, *beside]
    return [each for each in found if each.arg not in ("self", "cls")]


def parameters(tree: ast.AST) -> Iterator[ast.arg]:
    """Those of all functions and methods."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from parameters_of(node)

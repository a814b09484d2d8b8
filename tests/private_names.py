"""Finds private names of Keras and the frameworks in source files, by their syntax trees.

Seen, each at its line:
- imports of a private module or name, or of `keras.src` and `tensorflow.python`;
- `torch._x`, `torch.ops.y._x`, and private keyword arguments of what was imported from a framework;
- `anything._x`, and the string "_x" as getattr, setattr and vars take it, where a class of Keras or
  torch's tensors and modules have that name, and no class of the same file that is not Keras' has;
- methods and attributes `_x` of a class that is one of Keras', or becomes one by a subclass, where
  Keras' classes of that kind have the name;
- an assignment to `__class__`, and one to an attribute of a framework's class.

Not seen: what is reached by names put together while the program runs, private names of instances
of JAX and TensorFlow, public names that Keras does not document, and other packages' private names.
"""

import ast
from collections.abc import Iterator
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

FRAMEWORKS = ("keras", "torch", "jax", "jaxlib", "tensorflow")
_LAYER = ("layers/layer.py", "ops/operation.py", "backend/*/layer.py")
_MODEL = ("models/*.py", "ops/function.py", "trainers/trainer.py", "backend/*/trainer.py")
# Kinds of Keras' classes, by the public names they go by, and the files that define them.
KINDS = {
    "Model": (("keras.Model", "keras.Sequential"), (*_LAYER, *_MODEL)),
    "Layer": (("keras.Layer", "keras.layers."), _LAYER),
    "Optimizer": (
        ("keras.Optimizer", "keras.optimizers."),
        ("optimizers/*.py", "backend/*/*optimizer*.py", "backend/torch/optimizers/*.py"),
    ),
    "Metric": (("keras.Metric", "keras.metrics."), ("metrics/metric.py",)),
    "Loss": (("keras.Loss", "keras.losses."), ("losses/loss.py",)),
    "Callback": (("keras.callbacks.",), ("callbacks/callback.py", "callbacks/callback_list.py")),
    "Variable": (
        ("keras.Variable",),
        ("backend/common/variables.py", "backend/*/core.py", "backend/*/ops/core.py"),
    ),
    "Tensor": (("keras.KerasTensor",), ("backend/common/keras_tensor.py",)),
    "Adapter": ((), ("trainers/data_adapters/*_adapter.py", "trainers/epoch_iterator.py")),
    "Seed": (("keras.random.",), ("random/seed_generator.py",)),
    "Distribution": (("keras.distribution.",), ("distribution/distribution_lib.py",)),
}


class Found(NamedTuple):
    """A private name in a file."""

    line: int
    name: str
    how: str


class OwnClass(NamedTuple):
    """A class of ours: where it stands, and what it is made of."""

    file: str
    node: ast.ClassDef
    bases: set[str]


def is_private(name: str) -> bool:
    """Whether a name has an underscore in front, and is none of Python's own."""
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


@cache
def keras_names(kind: str) -> frozenset[str]:
    """Private names that the classes of one kind define in the installed Keras."""
    spec = find_spec("keras")
    assert spec is not None
    source = Path(str(spec.origin)).parent / "src"
    paths = [path for pattern in KINDS[kind][1] for path in source.glob(pattern)]
    found = set()
    for path in paths:
        if not path.name.endswith("_test.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    found |= defined(node)
    assert found, f"no private names of {kind}: Keras has other files now"
    return frozenset(found)


@cache
def all_names() -> frozenset[str]:
    """Those of all kinds, and those of torch's tensors and modules where torch is installed."""
    found = {name for kind in KINDS for name in keras_names(kind)}
    if find_spec("torch") is not None:
        import torch

        members = {*dir(torch.Tensor), *dir(torch.nn.Module()), *vars(torch.nn.Module())}
        found |= {name for name in members if is_private(name)}
    return frozenset(found)


def defined(node: ast.ClassDef) -> set[str]:
    """Private methods and attributes that a class defines, or puts into itself."""
    found = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            found |= {part.attr} if isinstance(part.value, ast.Name) else set()
    for part in node.body:
        targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == "__slots__":
            found |= {c.value for c in ast.walk(part.value) if isinstance(c, ast.Constant)}
    return {name for name in found if is_private(name)}


def dotted(node: ast.AST) -> str:
    """The name `a.b.c` of an expression, "" where it is something else."""
    if isinstance(node, ast.Name):
        return node.id
    before = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{before}.{node.attr}" if before and isinstance(node, ast.Attribute) else ""


def imported(tree: ast.Module) -> dict[str, str]:
    """What each imported name of a file stands for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname or a.name.split(".")[0]: a.asname and a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return {name: whole or name for name, whole in found.items()}


class Source:
    """Files that belong together, such as those of a package.

    Args:
        files: text by path; `package/module.py` is `package.module` in imports.
    """

    def __init__(self, files: dict[str, str]):
        self.trees = {file: ast.parse(text) for file, text in files.items()}
        self.imports = {file: imported(tree) for file, tree in self.trees.items()}
        self.classes: dict[str, list[OwnClass]] = {}
        for file, tree in self.trees.items():
            values: dict[str, list[ast.expr]] = {}
            for node in ast.walk(tree):
                if isinstance(node, ast.Assign):
                    pairs = [(target, node.value) for target in node.targets]
                elif isinstance(node, ast.AnnAssign) and node.value is not None:
                    pairs = [(node.target, node.value)]
                else:
                    continue
                for target, value in pairs:
                    both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
                    both = both and len(target.elts) == len(value.elts)
                    names = target.elts if both else [target]
                    parts = value.elts if both else [value]
                    for name, part in zip(names, parts, strict=True):
                        values.setdefault(dotted(name), []).append(part)
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    bases = {
                        name for base in node.bases for name in self._names(file, base, values)
                    }
                    self.classes.setdefault(node.name, []).append(OwnClass(file, node, bases))

    def _names(
        self, file: str, expression: ast.expr, values: dict[str, list[ast.expr]], depth: int = 4
    ) -> set[str]:
        """What a base may be: Keras' public names whole, of our own classes the last part."""
        found = set()
        for node in ast.walk(expression):
            if not (name := dotted(node)):
                continue
            root, _, rest = name.partition(".")
            whole = self.imports[file].get(root, root) + ("." + rest if rest else "")
            found.add(whole if whole.startswith("keras.") else whole.rpartition(".")[2])
            if depth:
                for value in values.get(name, []):
                    found |= self._names(file, value, values, depth - 1)
        return found

    @cached_property
    def kinds(self) -> dict[int, set[str]]:
        """Kinds of Keras' classes that each class is, or becomes part of by a subclass; by node."""
        every = [one for same in self.classes.values() for one in same]
        inherited = {id(one.node): self._kinds(one.bases) for one in every}
        # Of its subclasses; another subclass of the same base does not get them.
        joined: dict[int, set[str]] = {id(one.node): set() for one in every}
        before = -1
        while before < (size := sum(map(len, (*inherited.values(), *joined.values())))):
            before = size
            for one in every:
                for base in (other for name in one.bases for other in self.classes.get(name, [])):
                    inherited[id(one.node)] |= inherited[id(base.node)]
                    joined[id(base.node)] |= inherited[id(one.node)] | joined[id(one.node)]
        return {key: kinds | joined[key] for key, kinds in inherited.items()}

    @staticmethod
    def _kinds(names: set[str]) -> set[str]:
        starts = [(kind, start) for kind, (public, _) in KINDS.items() for start in public]
        return {
            kind
            for kind, start in starts
            for name in names
            if name == start or (start.endswith(".") and name.startswith(start))
        }

    def found(self, file: str) -> Iterator[Found]:
        """Private names of Keras and the frameworks in one of the files."""
        tree, names = self.trees[file], self.imports[file]
        kinds = self.kinds
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        own = {name for node in classes if not kinds[id(node)] for name in defined(node)}
        foreign = all_names() - own
        texts = [
            n for part in ast.walk(tree) if isinstance(part, ast.JoinedStr) for n in part.values
        ]
        for node in classes:
            theirs = {name for kind in kinds[id(node)] for name in keras_names(kind)}
            yield from _in_class(node, theirs)
        for node in ast.walk(tree):
            yield from _imports(node)
            for call in [node] if isinstance(node, ast.Call) else []:
                if _of_framework(dotted(call.func), names):
                    private = [k.arg for k in call.keywords if k.arg and is_private(k.arg)]
                    yield from (Found(node.lineno, name, "argument") for name in private)
            if isinstance(node, ast.Attribute):
                stored = isinstance(node.ctx, ast.Store)
                framework = _of_framework(dotted(node.value), names)
                in_class = dotted(node.value).rpartition(".")[2][:1].isupper()
                if stored and (node.attr == "__class__" or (framework and in_class)):
                    yield Found(node.lineno, node.attr, "assignment")
                elif is_private(node.attr) and framework:
                    yield Found(node.lineno, node.attr, "attribute")
                elif node.attr in foreign and dotted(node.value) not in ("self", "cls"):
                    yield Found(node.lineno, node.attr, "assignment" if stored else "attribute")
            elif isinstance(node, ast.Constant) and node not in texts and node.value in foreign:
                yield Found(node.lineno, str(node.value), "string")


def _of_framework(name: str, imports: dict[str, str]) -> bool:
    root = name.partition(".")[0]
    return imports.get(root, "").partition(".")[0] in FRAMEWORKS


def _in_class(node: ast.ClassDef, theirs: set[str]) -> Iterator[Found]:
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name in theirs:
            yield Found(part.lineno, part.name, "override")
        targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name) and target.id in theirs:
                yield Found(part.lineno, target.id, "override")
    for part in ast.walk(node):
        if not isinstance(part, ast.Attribute) or dotted(part.value) not in ("self", "cls"):
            continue
        if part.attr in theirs:
            yield Found(part.lineno, part.attr, "attribute")


def _imports(node: ast.AST) -> Iterator[Found]:
    wholes = []
    if isinstance(node, ast.Import):
        wholes = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
        wholes = [f"{node.module}.{alias.name}" for alias in node.names]
    for whole in wholes:
        private = any(is_private(part) for part in whole.split("."))
        inside = f"{whole}.".startswith(("keras.src.", "tensorflow.python."))
        if whole.split(".")[0] in FRAMEWORKS and (private or inside):
            yield Found(node.lineno, whole, "import")  # type: ignore[attr-defined]


def names_in(file: Path) -> Iterator[str]:
    """Names that a file reads, assigns, overrides or has as a string."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef):
            yield from (part.name for part in node.body if isinstance(part, ast.FunctionDef))
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value

"""Prints the shape of the code: `make shape`. Nobody has to meet a figure; each says where to look.

Files and lines by folder, the longest files, modules that one other imports, circles of rooms, the
longest chain of imports, parameters that are Any, and the files of kmodels that a reader of one
`fit` comes through. The backend is that of KERAS_BACKEND.
"""

import ast
import logging
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from source_tree import (
    ROOT,
    SOURCE,
    circles_in,
    file_imports,
    longest_chain,
    parameters,
    trees,
    unit_of,
)

LONGEST = 8
# A backend's body, or what loads its parts by name, has one user by design.
BACKENDS = ("_jax", "_torch", "_tensorflow")


def lines_of(*folders: str) -> dict[str, int]:
    """Lines of each Python file, by its path below the repository."""
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in paths
        if ".references" not in path.parts
    }


def rooms() -> dict[str, set[str]]:
    """Which unit of src/kmodels imports which."""
    found: dict[str, set[str]] = {}
    for module, targets in file_imports().items():
        parts = module.split(".")
        if len(parts) > 1:
            unit = unit_of(f"{parts[1]}.py")
            others = {unit_of(f"{t.split('.')[1]}.py") for t in targets if "." in t}
            found.setdefault(unit, set()).update(others - {unit})
    return {unit: targets & found.keys() for unit, targets in found.items()}


def names_of_any() -> set[str]:
    """`Any`, and what some file defines as another name of it: `Name = Any`, `Name: X = Any`."""
    found = {"Any"}
    for tree in trees().values():
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                named = isinstance(node.value, ast.Name | ast.Attribute)
                if named and is_any(node.value, {"Any"}):
                    found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def is_any(annotation: ast.expr | None, names: set[str]) -> bool:
    """Whether it is one of these names, also in quotes, behind a dot, or as a part of a union."""
    match annotation:
        case ast.Constant(value=str() as text):
            return is_any(ast.parse(text, mode="eval").body, names)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in names
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return is_any(left, names) or is_any(right, names)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inside):
            return is_any(inside, names)
    return False


def entered(call: Callable[[], object]) -> set[str]:
    """Files of kmodels of the functions that a call enters, in its thread and in new ones."""
    found = set()

    def note(frame, event, argument):
        if event == "call" and (file := frame.f_code.co_filename).startswith(f"{SOURCE}/"):
            found.add(file.removeprefix(f"{SOURCE}/"))

    former = sys.getprofile(), threading.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(former[0])
        threading.setprofile(former[1])
    return found


def files_of_fit(folder: Path) -> dict[str, set[str]]:
    """The files entered by a second `fit(x, y)`, by one with a Checkpoint, and by one that resumes.

    The model, a ViT classifier, was trained before, so that on JAX and TensorFlow the step is
    traced. On torch Python runs the network in each step: "beside the model" leaves out what one
    call of the model enters.
    """
    import keras
    import numpy as np

    from kmodels.callbacks import Checkpoint
    from kmodels.models import ViTImageClassifier

    logging.getLogger("kmodels").setLevel(logging.ERROR)
    model = ViTImageClassifier.from_preset("vit_debug", num_layers=1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    x = np.zeros((8, *model.backbone.config.image_shape), "float32")

    def fit(epochs=1, callbacks=None):
        model.fit(
            x, np.zeros(8, "int32"), batch_size=4, epochs=epochs, callbacks=callbacks, verbose=0
        )

    fit()
    return {
        "model": entered(lambda: model(x)),
        "plain": entered(fit),
        "saved": entered(lambda: fit(callbacks=[Checkpoint(folder)])),
        "resumed": entered(lambda: fit(2, [Checkpoint(folder, resume=True)])),
    }


def main() -> int:
    for folder in ("src", "tests", "recipes", "benchmarks"):
        lines = lines_of(folder)
        print(f"{folder:<12}{len(lines):6d} files{sum(lines.values()):9,d} lines")
    longest = Counter(lines_of("src", "tests")).most_common(LONGEST)
    print("longest      " + ", ".join(f"{name} {lines}" for name, lines in longest))
    edges = file_imports()
    users = Counter(target for targets in edges.values() for target in targets)
    single = [
        name
        for name in edges
        if users[name] == 1 and not name.endswith(BACKENDS) and name.count(".") > 1
    ]
    print(f"one importer {len(single)} modules of {len(edges)}")
    between = rooms()
    arrows = sum(map(len, between.values()))
    circles = [" - ".join(circle) for circle in circles_in(between)]
    print(f"rooms        {len(between)} with {arrows} arrows; in circles: {circles or 'none'}")
    chain = [name.removeprefix("kmodels.") for name in longest_chain(edges)]
    print(f"chain        {len(chain)} modules: {' > '.join(chain)}")
    names = names_of_any()
    of_any = [is_any(p.annotation, names) for tree in trees().values() for p in parameters(tree)]
    share = sum(of_any) / len(of_any)
    print(f"Any          {sum(of_any)} of {len(of_any):,} parameters, {share:.1%}")
    with tempfile.TemporaryDirectory() as folder:
        files = files_of_fit(Path(folder))
    for kind in ("plain", "saved", "resumed"):
        besides = len(files[kind] - files["model"])
        print(f"fit, {kind:<8}{len(files[kind])} files entered, {besides} beside the model")
    print(f"             on {os.environ.get('KERAS_BACKEND', 'the default backend')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

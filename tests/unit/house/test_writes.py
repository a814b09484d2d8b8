"""Files are written by kmodels.core.files: whole, never through a link, by the process's umask."""

import ast
from pathlib import Path

import kmodels

SOURCE = Path(kmodels.__file__).parent
# Calls whose argument or block writes to a temporary path.
SAFE = {"atomic_write", "atomic_directory", "write_file", "TemporaryDirectory"}
# Functions that write to a path from one of these calls, or to no file of a user.
EXCEPTIONS = {
    "weights/files.py write_safetensors": "writes the temporary path of its callers",
    "weights/native.py write_manifest": "writes into the temporary directory of its callers",
    "tools/convert/graphs_jax.py stablehlo": "writes into the temporary directory of its callers",
    "runs/history.py _rewrite": "is passed to atomic_write",
    "checkpoint/manager.py end": "writes into the directory that atomic_directory gave",
    "models/vit/weights/augreg.py write": "is passed to write_file",
    "tools/compare_backends/children.py __init__": "writes a log in a folder for temporary files",
    "runs/recipe.py _shown": "writes to os.devnull",
    "runs/terminal.py checked_output": "writes to os.devnull",
    "runs/terminal.py _fail": "writes to os.devnull",
    "core/files.py no_link": "is the helper",
}


def name_of(node):
    return getattr(node.func, "attr", None) or getattr(node.func, "id", None)


def writes(call):
    name = name_of(call)
    if name in ("write_text", "write_bytes", "touch", "mkstemp"):
        return True
    if name != "open" or any(keyword.arg == "opener" for keyword in call.keywords):
        return False
    if isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") == "os":
        return "O_RDONLY" not in ast.unparse(call)
    modes = [arg.value for arg in call.args[:2] if isinstance(arg, ast.Constant)]
    modes += [k.value.value for k in call.keywords if k.arg == "mode"]
    return any(isinstance(m, str) and len(m) < 4 and set(m) & set("wax+") for m in modes)


def unsafe(node, function):
    """Yields the function and line of each write that no safe call surrounds."""
    if isinstance(node, ast.FunctionDef):
        function = node.name
    if isinstance(node, ast.Call):
        if name_of(node) in SAFE:
            return
        if writes(node):
            yield function, node.lineno
    if isinstance(node, ast.With) and any(
        isinstance(item.context_expr, ast.Call) and name_of(item.context_expr) in SAFE
        for item in node.items
    ):
        return
    for child in ast.iter_child_nodes(node):
        yield from unsafe(child, function)


def test_no_write_bypasses_the_helper():
    found = {}
    for path in SOURCE.rglob("*.py"):
        for function, line in unsafe(ast.parse(path.read_text()), ""):
            found[f"{path.relative_to(SOURCE).as_posix()} {function}"] = line
    assert found.keys() == EXCEPTIONS.keys(), found

"""How many parameters say nothing of their type, and that overrides have the types of their op."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

SOURCE = Path(__file__).resolve().parents[3] / "src" / "kmodels"
# Of all parameters with an annotation, the largest share that may be Any. It only goes down.
MAXIMUM_SHARE = 0.05
WORST_FILES = 15
# What a backend's file says in place of `Tensor`.
OWN_TENSOR = re.compile(r"\b(?:torch\.Tensor|jax\.Array|tf\.Tensor)\b")


def trees() -> dict[str, ast.Module]:
    """The syntax tree of each source file, by its path below kmodels."""
    files = sorted(SOURCE.rglob("*.py"))
    return {str(path.relative_to(SOURCE)): ast.parse(path.read_text()) for path in files}


def of_function(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    """Each of its parameters but `self` and `cls`.

    `*args` and `**kwargs` are among them, also where they are handed on to Keras as they are.
    """
    given = function.args
    beside = [each for each in (given.vararg, given.kwarg) if each is not None]
    found = [*given.posonlyargs, *given.args, *given.kwonlyargs, *beside]
    return [each for each in found if each.arg not in ("self", "cls")]


def parameters(tree: ast.AST) -> Iterator[ast.arg]:
    """Those of all functions and methods."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from of_function(node)


def names_of_any(all_trees: dict[str, ast.Module]) -> set[str]:
    """`Any`, and what some file defines as another name of it: `Name = Any`, `Name: X = Any`."""
    found = {"Any"}
    for tree in all_trees.values():
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                named = isinstance(node.value, ast.Name | ast.Attribute)
                if named and is_any(node.value, {"Any"}):
                    found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def is_any(annotation: ast.expr, names: set[str]) -> bool:
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


def test_few_parameters_are_any():
    text = "def f(a: Any, b: 'Any', c: typing.Any | None, d: Other, *e: Any, f: list[Any]): ..."
    names = names_of_any({"": ast.parse("Other: TypeAlias = Any")})
    assert [p.arg for p in parameters(ast.parse(text)) if is_any(p.annotation, names)] == [
        *("a", "b", "c", "d", "e")
    ]
    all_trees = trees()
    names = names_of_any(all_trees)
    total, without_type = 0, Counter()
    for file, tree in all_trees.items():
        for parameter in parameters(tree):
            total += 1
            without_type[file] += is_any(parameter.annotation, names)
    share = without_type.total() / total
    worst = "\n".join(f"{n:4} {file}" for file, n in without_type.most_common(WORST_FILES))
    assert share <= MAXIMUM_SHARE, (
        f"{without_type.total()} of {total} parameters are Any, {share:.2%} where "
        f"{MAXIMUM_SHARE:.1%} may be; name their types, most of all in\n{worst}"
    )


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
    found = {each.arg: ast.unparse(each.annotation) for each in of_function(function)}
    return {**found, "return": ast.unparse(function.returns)}


def test_overrides_have_the_types_of_their_op():
    """The type checker compares only results: a backend's own class is no `Tensor` to it."""
    all_trees = trees()
    compared = 0
    for file, tree in all_trees.items():
        if not file.startswith("overrides/"):
            continue
        stem = file.removeprefix("overrides/").removesuffix(".py")
        for node in tree.body:
            decorators = getattr(node, "decorator_list", [])
            if any(ast.unparse(d).startswith("override(") for d in decorators):
                op, found = stem.rpartition("_")[0], signature(tree, node.name)
                found = {name: OWN_TENSOR.sub("Tensor", text) for name, text in found.items()}
                assert found == signature(all_trees[f"ops/{op}.py"], op), node.name
                compared += 1
    assert compared > 20

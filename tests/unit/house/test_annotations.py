"""Every parameter says its type, and overrides have the types of their op."""

import ast
import re

from source_tree import parameters, parameters_of, trees

# What a backend's file says in place of `Tensor`.
OWN_TENSOR = re.compile(r"\b(?:torch\.Tensor|jax\.Array|tf\.Tensor)\b")


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
    for file, tree in trees().items():
        if not file.startswith("overrides/"):
            continue
        stem = file.removeprefix("overrides/").removesuffix(".py")
        for node in tree.body:
            decorators = getattr(node, "decorator_list", [])
            if any(ast.unparse(d).startswith("override(") for d in decorators):
                op, found = stem.rpartition("_")[0], signature(tree, node.name)
                found = {name: OWN_TENSOR.sub("Tensor", text) for name, text in found.items()}
                assert found == signature(trees()[f"ops/{op}.py"], op), node.name
                compared += 1
    assert compared > 20

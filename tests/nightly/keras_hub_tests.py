"""Runs keras-hub's own tests with the classes of kmodels in place of those of the same names.

    git clone https://github.com/keras-team/keras-hub ../keras-hub  # of the installed version
    KERAS_BACKEND=torch .venv/full/bin/python tests/nightly/keras_hub_tests.py ../keras-hub

The test files of the families that both have are copied to a temporary folder, where only their
imports are changed. keras-hub's mocks of tokenizers become tokenizers of the same words. Tests that
download presets, that keras-hub skips on this machine, that use private names or layers of
keras-hub, and those of audio, video and the assistant are not counted. What does not pass is in
`KNOWN`, with the reason in docs/interop.md. The exit status is 1 if another test fails, or if one
of `KNOWN` passes.
"""

import argparse
import ast
import collections
import importlib
import inspect
import os
import re
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest

FAMILIES = ("vit", "deit", "dinov2", "dinov3", "clip", "siglip", "gemma", "gemma3", "gemma4")
FAMILIES = (*FAMILIES, "qwen3")
SOURCE = "keras_hub.src"
PRIVATE = re.compile(r"_[a-z]\w*$")
DOWNLOADS = ("extra_large", "kaggle_key_required")
# By file, the endings of the names of tests that do not pass.
KNOWN = {
    "dinov2_backbone": ("position_embedding_interpolation",),
    "gemma3_backbone": (
        *("architecture_characteristics_text_and_vision", "backbone_basics_text_and_vision"),
        "embedding_model",
    ),
    "gemma3_causal_lm": ("causal_lm_basics_text_and_vision",),
    "gemma3_causal_lm_preprocessor": (
        *("test_generate_postprocess", "test_generate_preprocess", "test_preprocessor_basics"),
    ),
    "gemma3_text_embedder": ("embedder_basics",),
    "gemma3_vision_encoder": ("vit_output_shape",),
    "gemma4_backbone": (
        *("architecture_characteristics_text_and_vision", "backbone_basics_text_and_vision"),
        *("architecture_characteristics_text_only", "double_wide_mlp", "embedding_model"),
    ),
    "gemma4_causal_lm_preprocessor": (
        *("test_generate_postprocess", "test_generate_preprocess", "test_preprocessor_basics"),
        *("text_preprocessor_basics", "preprocessor_images_input"),
    ),
    "gemma4_vision_encoder": ("encoder_output_shape", "encoder_saved_model"),
    "qwen3_text_embedder": ("embedder_basics",),
}
# Logits of images with texts are float32 in each policy; on torch the test does not try half.
if os.environ.get("KERAS_BACKEND") != "torch":
    KNOWN |= {"clip_backbone": ("backbone_basics",), "siglip_backbone": ("backbone_basics",)}


def __getattr__(name: str) -> Any:
    """Returns a tokenizer of the words of one of keras-hub's mocks, such as `MockGemma3Tokenizer`.

    The copied tests import the mocks from this module.
    """
    import tokenizers
    from tokenizers import AddedToken, Regex

    from kmodels import models

    if not name.startswith("Mock"):
        raise AttributeError(name)
    family = name.removeprefix("Mock").removesuffix("Tokenizer")
    mocks = importlib.import_module(f"{SOURCE}.tests.mocks.mock_{family.lower()}_tokenizer")
    words = getattr(mocks, name)().get_vocabulary()

    def mock() -> Any:
        vocabulary = {word: number for number, word in enumerate(words)}
        core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
        core.normalizer = tokenizers.normalizers.Replace(Regex("\n\n(?=<)|(?<=>)\n\n"), " \n\n ")
        core.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "removed")
        core.add_special_tokens(["<pad>", "<bos>", "<eos>"])
        core.add_tokens([AddedToken(word, normalized=False) for word in words if word[0] == "<"])
        return getattr(models, f"{family}Tokenizer")(core, start="<bos>", end="<eos>", pad="<pad>")

    return mock


def rewritten(text: str) -> str:
    """Returns a file of keras-hub that imports the classes that kmodels has from there."""
    from kmodels import models

    tree = ast.parse(text)
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(SOURCE):
            continue
        (name,) = [alias.name for alias in node.names]
        if name == "TestCase":
            node.module = "hub_test_case"
        elif name.startswith("Mock"):
            node.module = Path(__file__).stem
        elif name == "Tokenizer":
            node.module = "kmodels.text"
        elif hasattr(models, name):
            node.module = "kmodels.models"
    return ast.unparse(tree)


def copied(checkout: Path, folder: Path) -> None:
    """Writes the changed test files, and what they read, to a folder."""
    source = checkout / "keras_hub" / "src"
    for family in FAMILIES:
        for file in sorted((source / "models" / family).glob("*_test.py")):
            name = f"test_{family}__{file.stem.removesuffix('_test')}.py"
            (folder / name).write_text(rewritten(file.read_text()))
    test_case = (source / "tests" / "test_case.py").read_text()
    (folder / "hub_test_case.py").write_text(rewritten(test_case))
    (folder / "test_data").symlink_to(source / "tests" / "test_data")


def beyond(item: Any) -> str | None:
    """Returns why a test is not counted: it uses private names, or what kmodels does not have."""
    import keras_hub

    public = {name for room in (keras_hub.models, keras_hub.layers) for name in dir(room)}
    codes = [inspect.unwrap(code) for code in (item.function, item.cls.setUp)]
    own = [code for code in codes if code.__module__ == item.module.__name__]
    if codes[0] not in own:
        return "not of keras-hub"
    for code in own:
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(code)))):
            if PRIVATE.match(_name_in(node)):
                return "private names"
            value = vars(item.module).get(getattr(node, "id", ""))
            if str(getattr(value, "__module__", "")).startswith(f"{SOURCE}.models"):
                return "audio, video" if value.__name__ in public else "private names"
    return None


def _name_in(node: ast.AST) -> str:
    """Returns the name of an attribute or argument, or a text, in the syntax tree of a test."""
    if isinstance(node, ast.Attribute):
        of_test = isinstance(node.value, ast.Name) and node.value.id == "self"
        return "" if of_test else node.attr
    name = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
    return str(getattr(node, "arg", name) or "")


class Counts:
    """Plugin of pytest that leaves tests out, and keeps the results of the others."""

    def __init__(self) -> None:
        self.left: collections.Counter[str] = collections.Counter()
        self.passed: dict[str, bool] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        counted = []
        for item in items:
            downloads = any(item.get_closest_marker(mark) for mark in DOWNLOADS)
            if reason := "downloads" if downloads else beyond(item):
                self.left[reason] += 1
            else:
                counted.append(item)
        items[:] = counted

    def pytest_runtest_setup(self) -> None:
        """Draws the same numbers each time: some tests compare to the last bit."""
        import keras

        keras.utils.set_random_seed(0)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.skipped:
            self.left["skipped"] += 1
        elif report.when == "call" or report.failed:
            self.passed[report.nodeid] = report.passed


def known(test: str) -> bool:
    file, _, name = test.partition(".py::")
    return name.endswith(KNOWN.get(file.partition("__")[2], ())) and bool(file)


def main() -> int:
    """Runs the tests and prints how many pass by family."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkout", type=Path, help="a checkout of keras-hub")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, such as -k CLIP")
    options = parser.parse_args()
    counts = Counts()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copied(options.checkout.resolve(), folder)
        sys.path[:0] = [str(folder), str(Path(__file__).parent)]
        os.chdir(folder)
        arguments = ["-q", "--color=no", "--tb=line", "-p", "no:cacheprovider", "-p", "no:warnings"]
        pytest.main(
            [*arguments, "-c", os.devnull, "--rootdir", ".", *options.pytest, "."], [counts]
        )
    print(dict(counts.left), "are not counted")
    for family in FAMILIES:
        results = [x for test, x in counts.passed.items() if f"test_{family}__" in test]
        print(f"{family}: {sum(results)} of {len(results)}")
    print(f"{sum(counts.passed.values())} of {len(counts.passed)} pass")
    wrong = [test for test, passed in counts.passed.items() if passed == known(test)]
    for test in wrong:
        print(f"{test} {'passes, and is in KNOWN' if counts.passed[test] else 'does not pass'}")
    return len(wrong) > 0


if __name__ == "__main__":
    sys.exit(main())

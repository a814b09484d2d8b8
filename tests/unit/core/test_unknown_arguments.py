"""No argument is ignored: whatever a call does not use, it names."""

import ast

import pytest

from kmodels.core.errors import check_names
from kmodels.models import (
    CLIPPreprocessor,
    GemmaBackbone,
    GemmaCausalLM,
    GemmaTextEmbedder,
    ViTBackbone,
    ViTImageClassifier,
    ViTImageSegmenter,
    ViTMAEForPreTraining,
)
from kmodels.text.training import train_tokenizer
from pool import pool
from refusals import refused
from source_tree import FRAMEWORKS, trees

# Functions that look at names themselves or pass them on in a mapping, and who checks that.
PASS_ON = {
    "FitRequest.of": "_parameters, of Keras' own signature",
    "Layer.rematerialized_call": "Keras, which calls it",
    "CausalLMPreprocessor.chat_token_ids": "check_names, in _chats_written",
    "Adapters.quantize": "check_names",
    "DecoderBackbone.compute_output_spec": "Keras, which calls it",
    "TextEmbedder.compute_output_spec": "Keras, which calls it",
    "TextEmbedder.encode_query": "encode",
    "TextEmbedder.encode_document": "encode",
    "LayerTokenizer.__call__": "check_names",
    "LayerTokenizer.from_preset": "the constructor",
    "NaFlexViTBackbone.__init__": "ViTBackbone.make_config",
    "Gemma3ImageTextConfig.encoder": "the constructor",
    "presets": "the config of each preset",
    "tokens_per_image": "Gemma3VisionEncoder, which takes the same fields",
    "load": "_split",
    "Tokenizer.apply_chat_template": "check_names",
    "Tokenizer.render_chat": "chat_token_ids",
    "render": "apply_chat_template",
    "Task.save": "Keras, in _save",
    "Task.save_weights": "Keras, in _save",
}


def test_the_nearest_name_is_told():
    refused(r"f takes no poling; did you mean pooling\?", check_names, "f", ["poling"], ["pooling"])
    refused("f takes no x, y; it takes pooling", check_names, "f", ["y", "x"], ["pooling"])
    check_names("f", ["a"], ["a", "b"])


@pytest.mark.parametrize(
    ("task", "backbone", "arguments", "message"),
    [
        (ViTImageClassifier, ViTBackbone, {"num_classes": 3, "poling": "gap"}, "poling.*pooling"),
        (ViTImageClassifier, ViTBackbone, {"num_classes": 3, "dtype": "float16"}, "head_dtype"),
        (ViTImageSegmenter, ViTBackbone, {"num_classes": 3, "droput": 0.1}, "droput.*dropout"),
        (ViTMAEForPreTraining, ViTBackbone, {"mask_rate": 0.5}, "mask_rate.*mask_ratio"),
        (GemmaTextEmbedder, GemmaBackbone, {"pooling_mode": "cls"}, "pooling_mode.*pooling"),
        (GemmaCausalLM, GemmaBackbone, {"preprocesor": None}, "preprocesor.*preprocessor"),
    ],
)
def test_tasks_refuse_unknown_arguments(task, backbone, arguments, message):
    preset = "vit_debug" if backbone is ViTBackbone else "gemma3_debug"
    refused(message, task, backbone.from_preset(preset), **arguments)


def test_what_keras_takes_still_goes_to_keras():
    backbone = ViTBackbone.from_preset("vit_debug")
    task = ViTImageClassifier(backbone, 3, trainable=False, name="mine")
    assert task.name == "mine" and not task.trainable
    assert ViTImageClassifier.from_config(task.get_config()).name == "mine"


def test_quantize_refuses_what_it_does_not_follow():
    with pool("vit_debug", num_classes=3) as model:
        refused("quantize takes no filter; did you mean filters", model.quantize, "int8", filter="")
        refused("filters is 'zzz', which no linear", model.quantize, "int8", filters="zzz")


def test_clip_lowercases_all_texts():
    refused("to_lower is False, but", CLIPPreprocessor, train_tokenizer(["a"], 300), to_lower=False)


def _public(tree):
    """Yields (name, node) of public functions and methods with **keywords."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name, node
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and (
                    not part.name.startswith("_") or part.name in ("__init__", "__call__")
                ):
                    yield f"{node.name}.{part.name}", part


def _forwards(node):
    """Returns whether a function hands its keywords to another one by `**`."""
    name = node.args.kwarg.arg
    return any(
        keyword.arg is None
        and any(isinstance(x, ast.Name) and x.id == name for x in ast.walk(keyword.value))
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
        for keyword in call.keywords
    )


def test_every_public_function_with_keywords_hands_them_on_or_checks_them():
    found = {
        name
        for file, tree in trees().items()
        if not file.startswith(("tools", "runs", "overrides", "core"))
        and not file.removesuffix(".py").endswith(FRAMEWORKS)
        for name, node in _public(tree)
        if node.args.kwarg and not _forwards(node)
    }
    assert found == set(PASS_ON)

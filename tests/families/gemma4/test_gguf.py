"""GGUF files of Gemma 4: the vocabulary and the template, and models with images."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer as Core

from family_table import run
from gemma4_tokenizer import MARKED, TEMPLATE, write
from kmodels.core.errors import InputError
from kmodels.models import Gemma4ImageTextLM, GemmaCausalLM, GemmaTokenizer
from tolerances import tolerance

pytestmark = pytest.mark.needs("gguf")


def with_tokenizer(tokenizer, rows):
    model = GemmaCausalLM.from_preset("gemma4_debug", preprocessor=None, vocabulary_size=rows)
    model.preprocessor = model.preprocessor_class(tokenizer)
    return model


def test_a_file_of_a_model_with_images_holds_the_text_alone(tmp_path):
    model = Gemma4ImageTextLM.from_preset("gemma4_unified_debug", preprocessor=None)
    path = tmp_path / "text.gguf"
    for settings in ({}, {"mmproj": tmp_path / "mmproj.gguf"}):
        with pytest.raises(InputError, match=r"no file of llama\.cpp here; give text_only=True"):
            model.export_to_gguf(path, **settings)
    model.export_to_gguf(path, text_only=True, dtype="float32")
    ids = np.random.default_rng(0).integers(3, 310, (2, 18)).astype("int32")
    found, wanted = (run(one, ids) for one in (GemmaCausalLM.from_preset(path), model))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance("logits"))


def test_the_vocabulary_of_merges_and_the_template_go_along(tmp_path):
    import gguf

    write(tmp_path)
    tokenizer = GemmaTokenizer.from_file(tmp_path)
    model = with_tokenizer(tokenizer, tokenizer.vocabulary_size() + 3)
    path = model.export_to_gguf(tmp_path / "it.gguf")
    again = GemmaTokenizer.from_file(path)
    for text in MARKED:
        assert again.tokenize(text) == tokenizer.tokenize(text)
        ids = tokenizer.tokenize(text)
        assert again.detokenize(ids) == tokenizer.detokenize(ids)
    assert again.stop_token_ids == tokenizer.stop_token_ids
    assert again.chat_template == TEMPLATE
    reader = gguf.GGUFReader(path)
    value = {name: field.contents() for name, field in reader.fields.items()}
    assert value["tokenizer.ggml.model"] == "gemma4" and "tokenizer.ggml.pre" not in value
    assert value["tokenizer.ggml.eot_token_id"] == tokenizer.token_to_id("<turn|>")
    kinds = dict(
        zip(value["tokenizer.ggml.tokens"], value["tokenizer.ggml.token_type"], strict=True)
    )
    # The converter makes text of the marks that a parser of replies reads; 3 is control, 4 is text.
    assert kinds["<|turn>"] == 3 and kinds["<|channel>"] == kinds["<tool_call|>"] == 4


def test_merges_across_lines_are_refused(tmp_path):
    write(tmp_path)
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    model = described["model"]
    model["vocab"]["\nu"] = len(model["vocab"])
    model["merges"].append(["\n", "u"])
    core = Core.from_str(json.dumps(described))
    model = with_tokenizer(GemmaTokenizer(core), 500)
    with pytest.raises(InputError, match=r"this tokenizer merges '\\n' and 'u': write hf"):
        model.export_to_gguf(tmp_path / "it.gguf")

"""Trained rows of the embedding table, and whole tables, to PEFT itself and from it."""

import numpy as np
import pytest

from arrays import to_numpy
from kmodels.layers.changes import adapters
from kmodels.models import GemmaBackbone, GemmaCausalLM
from refusals import refused
from tolerances import tolerance

# PEFT asks transformers for an attribute that transformers 5 renamed, warns of a table that is
# trained and its head is not, and that a table is written.
pytestmark = [
    pytest.mark.across,
    pytest.mark.needs("peft"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
]
IDS = np.random.default_rng(0).integers(3, 96, (2, 12)).astype("int32")
IDS[:, ::4] = [[5, 91, 40]]
NEW = 100
ROWS = [91, 5, 7]
BOTH = {"embed_tokens": ROWS, "lm_head": ROWS}
TABLE = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
# Settings of PEFT, of its save_pretrained, and the rows of the resized table.
WRITTEN = {
    "rows": ({"trainable_token_indices": ROWS}, {}, 96),
    "rows of both": ({"trainable_token_indices": BOTH}, {}, 96),
    "rows and table": ({"trainable_token_indices": ROWS}, {"save_embedding_layers": True}, 96),
    "new rows": ({"trainable_token_indices": [96, 99]}, {"save_embedding_layers": True}, NEW),
    "table": (TABLE, {}, 96),
    "larger table": (TABLE, {"save_embedding_layers": True}, NEW),
    "larger base": ({}, {"save_embedding_layers": True}, NEW),
}
REFUSED = {
    "table alone": ({"modules_to_save": ["embed_tokens"]}, "left the other of table and lm_head"),
    "head alone": ({"modules_to_save": ["lm_head"]}, "left the other of table and lm_head"),
    "apart": ({"modules_to_save": ["embed_tokens", "lm_head"]}, "have a table each, and here"),
    "rows of the head": ({"trainable_token_indices": {"lm_head": ROWS}}, "give a list of ids"),
    "other rows": (
        {"trainable_token_indices": {"embed_tokens": ROWS, "lm_head": [91, 5, 8]}},
        "give a list of ids",
    ),
}


@pytest.fixture(scope="module")
def base(references):
    """Makes PEFT's base, with so many rows in its table."""
    from torchvision_cpu import define_torchvision_operators

    define_torchvision_operators()
    import transformers

    def make(rows, name="Gemma3ForCausalLM"):
        folder = references / "lora" / "gemma"
        model = getattr(transformers, name).from_pretrained(folder).eval()
        if rows != model.config.vocab_size:
            model.resize_token_embeddings(rows)
        return model

    return make


def by_peft(base, settings, saving, rows, folder):
    """Writes an adapter with random values; returns what the model gives."""
    import peft
    import torch

    model = base(rows)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], **settings)
    model = peft.get_peft_model(model, settings).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.3)
    model.save_pretrained(folder, **saving)
    return result(model, IDS)


def result(model, ids):
    import torch

    with torch.no_grad():
        found = model(torch.from_numpy(ids).long())
    return (found.logits if hasattr(found, "logits") else found.last_hidden_state).numpy()


def ours(references, rows, cls=GemmaCausalLM):
    settings = {"preprocessor": None} if cls is GemmaCausalLM else {}
    model = cls.from_preset(references / "lora" / "gemma", **settings)
    model.resize_token_embeddings(rows)
    return model


def outputs(model, ids=IDS):
    return to_numpy(model({"token_ids": ids, "padding_mask": np.ones_like(ids)}))


@pytest.mark.parametrize("case", WRITTEN)
def test_what_peft_writes_gives_its_logits(case, base, references, tmp_path):
    settings, saving, rows = WRITTEN[case]
    expected = by_peft(base, settings, saving, rows, tmp_path / "adapter")
    model = ours(references, rows)
    assert np.abs(outputs(model) - expected).max() > 0.01
    model.load_adapter(tmp_path / "adapter")
    np.testing.assert_allclose(outputs(model), expected, rtol=0, atol=tolerance("logits"))


@pytest.mark.parametrize("case", REFUSED)
def test_a_head_apart_from_its_table_is_refused(case, base, references, tmp_path):
    settings, message = REFUSED[case]
    by_peft(base, settings, {}, 96, tmp_path / "adapter")
    model = ours(references, 96)
    refused(message, model.load_adapter, tmp_path / "adapter")
    assert not adapters(model)


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({"trainable_token_indices": ROWS}, 96),
        ({"trainable_token_indices": [96, 99]}, NEW),
        ({"modules_to_save": ["token_embedding"]}, 96),
        ({"modules_to_save": ["token_embedding"]}, NEW),
        ({}, NEW),
    ],
)
@pytest.mark.parametrize("cls", [GemmaCausalLM, GemmaBackbone])
def test_what_is_written_here_gives_the_same_in_peft(
    settings, rows, cls, base, references, tmp_path
):
    import peft

    model = ours(references, rows, cls)
    model.enable_lora(2, **settings)
    rng = np.random.default_rng(5)
    for variable in model.trainable_weights:
        noise = rng.normal(size=variable.shape).astype("float32") * 0.3
        variable.assign(to_numpy(variable.value) + noise)
    model.save_adapter(tmp_path / "adapter")
    name = "Gemma3ForCausalLM" if cls is GemmaCausalLM else "Gemma3TextModel"
    ids = np.where(IDS % 6, IDS, rows - 1)
    theirs = base(rows, name)
    before = result(theirs, ids)
    expected = result(peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval(), ids)
    assert np.abs(before - expected).max() > 0.01
    np.testing.assert_allclose(outputs(model, ids), expected, rtol=0, atol=tolerance("logits"))

"""An EmbeddingGemma of sentence-transformers with its vectors, its losses and their gradients.

Each case is a folder: `model` (a directory as sentence-transformers writes it) and `expected.npz`
with `plain` (N, D) of the texts in texts.json, `query` and `document` with their prompts, `hidden`
of the padded `token_ids` under `padding_mask`, and `hidden64` and `hidden16` of the model in
float64 and bfloat16. `gemma` has losses of pairs besides, in float64: `loss_<name>` and
`gradient_<name>_<tensor>`, of `pairs` in texts.json. Windows are narrower than the texts, which
differ in length, and a text is longer than the model takes.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import sentence_transformers
import torch
import transformers
from sentence_transformers import losses
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

from references.common import save, save_json
from references.gemma import LAYERS, SIZES, WINDOWS, randomise
from references.gemma3_processor import tokenizer

WIDTH, MOST = 32, 20
TEXTS = [
    "a",
    "the quick brown fox jumps over the lazy dog",
    "caf\u00e9 na\u00efve \u65e5\u672c 2025",
    "it is raining cats and dogs, and the dogs are brown and the cats are quick and lazy today",
    "",
    "two words",
]
PAIRS = {
    "anchor": ["which animal is quick?", "rain", "a long question about nothing at all", "dog"],
    "positive": ["the fox is", "cats and dogs fall", "nothing", "a lazy brown animal"],
    "negative": ["the dog is not", "the sun", "all", "a fox"],
}
PROMPTS = {"query": "task: search result | query: ", "document": "title: none | text: "}
MATRYOSHKA = {"matryoshka_dims": [24, 8, 5], "matryoshka_weights": [1.0, 0.5, 2.0]}
IDENTITY, TANH = torch.nn.Identity(), torch.nn.Tanh()
CASES = {
    "gemma": ("mean", [(40, False, IDENTITY), (24, True, TANH)], True),
    "last": ("lasttoken", [], False),
    "first": ("cls", [(16, False, IDENTITY)], False),
}


def config(vocabulary: int) -> transformers.Gemma3TextConfig:
    sizes = {**SIZES, **WINDOWS, **LAYERS, "vocab_size": vocabulary}
    sizes |= {"max_position_embeddings": 64, "sliding_window": 6}
    return transformers.Gemma3TextConfig(**sizes, use_bidirectional_attention=True)


def made(folder: Path, name: str) -> sentence_transformers.SentenceTransformer:
    pooling, dense, normalizes = CASES[name]
    texts = [*TEXTS, *(text for column in PAIRS.values() for text in column)]
    ends, rules = "<bos> $A <eos>", {"by_word": False, "model_max_length": MOST}
    words = tokenizer(texts, [], size=310, template=ends, **rules)
    with TemporaryDirectory() as bare:
        words.save_pretrained(bare)
        backbone = transformers.AutoModel.from_config(config(len(words)))
        randomise(backbone).save_pretrained(bare)
        # The eager attention has its softmax in float32, and NaN for padding in float64.
        modules = [Transformer(bare, model_kwargs={"attn_implementation": "sdpa"})]
    modules.append(Pooling(WIDTH, pooling_mode=pooling))
    width = WIDTH
    for units, bias, activation in dense:
        modules.append(Dense(width, units, bias=bias, activation_function=activation))
        randomise(modules[-1])
        width = units
    modules += [Normalize()] if normalizes else []
    model = sentence_transformers.SentenceTransformer(
        modules=modules, prompts=PROMPTS, similarity_fn_name="dot" if name == "last" else "cosine"
    )
    model.max_seq_length = MOST
    model.save(str(folder / "model"))
    return model.eval()


def losses_of(model: sentence_transformers.SentenceTransformer) -> dict[str, np.ndarray]:
    """Losses and gradients in float64, by the names of the files' tensors."""
    plain = losses.MultipleNegativesRankingLoss(model)
    matryoshka = losses.MatryoshkaLoss(model, plain, **MATRYOSHKA)
    arrays = {}
    for name, columns, loss in (
        ("pairs", ("anchor", "positive"), plain),
        ("negatives", PAIRS, plain),
        ("matryoshka", PAIRS, matryoshka),
    ):
        model.zero_grad()
        value = loss([model.preprocess(PAIRS[column]) for column in columns], None)
        value.backward()
        arrays[f"loss_{name}"] = value.detach().numpy()
        for key, weight in model.named_parameters():
            if weight.grad is not None:
                arrays[f"gradient_{name}_{key}"] = weight.grad.numpy().copy()
    return arrays


def one(folder: Path, name: str) -> None:
    model = made(folder, name)
    # Before what follows rounds the weights.
    more = losses_of(model.double()) if name == "gemma" else {}
    model.float()
    features = model.preprocess(TEXTS)
    inputs = {key: features[key] for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        outputs = {
            "plain": model.encode(TEXTS),
            "query": model.encode_query(TEXTS),
            "document": model.encode_document(TEXTS),
            "token_ids": inputs["input_ids"],
            "padding_mask": inputs["attention_mask"],
            "hidden": model[0].model(**inputs).last_hidden_state,
        }
        outputs["similarity"] = model.similarity(outputs["plain"], outputs["query"])
        backbone = model[0].model.double()
        outputs["hidden64"] = backbone(**inputs).last_hidden_state
        outputs["hidden16"] = backbone.bfloat16()(**inputs).last_hidden_state.float()
    save(folder / "expected.npz", **outputs, **more)


def write(folder: Path) -> None:
    save_json(folder / "texts.json", {"texts": TEXTS, "pairs": PAIRS})
    for name in CASES:
        one(folder / name, name)

"""An EmbeddingGemma of sentence-transformers with its vectors, its losses and their gradients.

Each case is a folder: `model` (a directory as sentence-transformers writes it) and `expected.npz`
with `plain` (N, D) of the texts in texts.json, `query` and `document` with their prompts, `hidden`
of the padded `token_ids` under `padding_mask`, and `hidden64` and `hidden16` of the model in
float64 and bfloat16. `gemma` has losses of pairs besides, in float64: `loss_<name>` and
`gradient_<name>_<tensor>`, of `pairs` in texts.json. Windows are narrower than the texts, which
differ in length, and a text is longer than the model takes.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from references.gemma import randomise
from torchvision_cpu import define_torchvision_operators

define_torchvision_operators()
import sentence_transformers  # noqa: E402
import tokenizers  # noqa: E402
import transformers  # noqa: E402
from sentence_transformers import losses  # noqa: E402
from sentence_transformers.base.modules import Dense, Normalize, Transformer  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Pooling  # noqa: E402

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


def tokenizer(folder: Path) -> transformers.PreTrainedTokenizerFast:
    core = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    core.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=[*special, *(f"<0x{i:02X}>" for i in range(256))],
        show_progress=False,
    )
    texts = [*TEXTS, *(text for column in PAIRS.values() for text in column)]
    core.train_from_iterator(texts, trainer)
    core.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\u2581", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    )
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 2), ("<eos>", 1)]
    )
    names = dict(zip(("pad_token", "eos_token", "bos_token", "unk_token"), special, strict=True))
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, model_max_length=MOST, padding_side="right", **names
    )
    made.save_pretrained(folder)
    return made


def config(vocabulary: int) -> transformers.Gemma3TextConfig:
    return transformers.Gemma3TextConfig(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        query_pre_attn_scalar=7,
        max_position_embeddings=64,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        use_bidirectional_attention=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )


def made(folder: Path, name: str) -> sentence_transformers.SentenceTransformer:
    pooling, dense, normalizes = CASES[name]
    with TemporaryDirectory() as bare:
        words = tokenizer(Path(bare))
        backbone = transformers.AutoModel.from_config(config(len(words)))
        randomise(backbone)
        backbone.save_pretrained(bare)
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
    found = {}
    for name, columns, loss in (
        ("pairs", ("anchor", "positive"), plain),
        ("negatives", ("anchor", "positive", "negative"), plain),
        (
            "matryoshka",
            ("anchor", "positive", "negative"),
            losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), **MATRYOSHKA),
        ),
    ):
        model.zero_grad()
        value = loss([model.preprocess(PAIRS[column]) for column in columns], None)
        value.backward()
        found[f"loss_{name}"] = value.detach().numpy()
        for key, weight in model.named_parameters():
            if weight.grad is not None:
                found[f"gradient_{name}_{key}"] = weight.grad.numpy().copy()
    return found


def one(folder: Path, name: str) -> None:
    model = made(folder, name)
    # Before what follows rounds the weights.
    more = losses_of(model.double()) if name == "gemma" else {}
    model.float()
    features = model.preprocess(TEXTS)
    inputs = {key: features[key] for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        found = {
            "plain": model.encode(TEXTS),
            "query": model.encode_query(TEXTS),
            "document": model.encode_document(TEXTS),
            "token_ids": inputs["input_ids"].numpy(),
            "padding_mask": inputs["attention_mask"].numpy(),
            "hidden": model[0].model(**inputs).last_hidden_state.numpy(),
        }
        found["similarity"] = model.similarity(found["plain"], found["query"]).numpy()
        backbone = model[0].model.double()
        found["hidden64"] = backbone(**inputs).last_hidden_state.numpy()
        found["hidden16"] = backbone.bfloat16()(**inputs).last_hidden_state.float().numpy()
    np.savez(folder / "expected.npz", **found, **more)


def write(folder: Path) -> None:
    transformers.logging.set_verbosity_error()
    (folder / "texts.json").write_text(json.dumps({"texts": TEXTS, "pairs": PAIRS}))
    for name in CASES:
        one(folder / name, name)

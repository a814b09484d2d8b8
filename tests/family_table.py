"""The table of families: each directory of another package, how it is read, and what it gives.

A family adds rows to `FAMILIES`. `tests/families/test_families.py` has the checks; a row names the
ones that it passes, and what they need stands in it. References are those of `tests/references`.
"""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arrays import to_numpy
from family_images import ImageEncoder, MaskedAutoencoder, PatchRows, QuerySegmenter
from family_reference import Reference, Result, run
from family_towers import TextTower, TwoTowers
from kmodels.models import (
    CLIPTextModelWithProjection,
    EoMTImageSegmenter,
    Gemma3ImageTextLM,
    Gemma4ImageTextLM,
    GemmaCausalLM,
    GemmaTextEmbedder,
    ImageTextSimilarity,
    Llama3CausalLM,
    Qwen3CausalLM,
    ViTImageClassifier,
    ViTMAEForPreTraining,
)
from kmodels.weights import read_safetensors

USE = frozenset(("training", "export", "files", "lora"))
IMAGE_TEXT_CASES = ("none", "one", "two", "last")


def packed_rows(rows: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Texts behind one another in one row of a batch."""
    lengths = [len(row) for row in rows]
    return {
        "token_ids": np.concatenate(rows)[None].astype("int32"),
        "segment_ids": np.repeat(np.arange(len(rows)), lengths)[None].astype("int32"),
        "positions": np.concatenate([np.arange(n) for n in lengths])[None].astype("int32"),
    }


@dataclass
class Decoder(Reference):
    """A causal language model of transformers."""

    checks: frozenset[str] = frozenset(
        [
            "bfloat16",
            "greedy_tokens",
            "packed",
            "export",
            "peer_loads",
            "presets",
            "training",
            "files",
            "lora",
        ]
    )

    def batch(self) -> dict[str, Any]:
        """Arguments of `train_on_batch`: each token's label is the one behind it."""
        ids = self.inputs["token_ids"]
        return {"x": {name: x[:, :-1] for name, x in self.inputs.items()}, "y": ids[:, 1:]}

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        """Token ids of several rows without padding."""
        ids = self.expected["token_ids"].astype("int32")
        return {"token_ids": ids, "padding_mask": np.ones_like(ids)}

    def results(self) -> Iterator[Result]:
        """Each hidden state, in the order of computation, and the logits."""
        found = self.model.backbone.intermediates(self.inputs)
        assert len(found) == self.model.backbone.config.num_layers + 2
        names = {"token_embedding": "embedding", "final_norm": "final"}
        if "embedding" in self.expected:
            for name, value in found.items():
                expected = self.expected[names.get(name, name)]
                scale = max(1.0, np.abs(expected).std())
                yield name, to_numpy(value) / scale, expected / scale, "hidden"
        logits = to_numpy(self.model(self.inputs))
        assert logits.dtype == np.float32
        yield "logits", logits, self.expected["logits"], "logits"

    def errors_of_bfloat16(self) -> tuple[float, float]:
        """Distances of logits from float64's: ours and transformers'."""
        exact = self.expected["logits64"]
        found = to_numpy(self.read(dtype="bfloat16")(self.inputs))
        return np.abs(found - exact).mean(), np.abs(self.expected["logits16"] - exact).mean()

    def check_greedy_tokens(self) -> None:
        """Prompts at the left of their rows and at the right; each token the likeliest at once."""
        prompts = [self.expected[f"prompt_{j}"] for j in range(3)]
        new = len(self.expected["greedy_0"])
        width = max(map(len, prompts))
        ids, mask = np.zeros((2, 3, width), "int32"), np.zeros((2, 3, width), "int32")
        for j, prompt in enumerate(prompts):
            ids[0, j, : len(prompt)], mask[0, j, : len(prompt)] = prompt, 1
            ids[1, j, width - len(prompt) :], mask[1, j, width - len(prompt) :] = prompt, 1
        inputs = {"token_ids": ids.reshape(6, width), "padding_mask": mask.reshape(6, width)}
        found = self.model.generate(inputs, max_new_tokens=new, stop_token_ids=None)["token_ids"]
        whole = {"token_ids": found, "padding_mask": np.ones_like(found)}
        choice = run(self.model, whole).argmax(-1)
        for row, j in enumerate([0, 1, 2] * 2):
            begin = len(prompts[j])
            np.testing.assert_array_equal(found[row, :begin], prompts[j])
            tokens = found[row, begin : begin + new]
            np.testing.assert_array_equal(tokens, self.expected[f"greedy_{j}"])
            # Without a cache each of these tokens is the most likely one behind those before it.
            np.testing.assert_array_equal(choice[row, begin - 1 : begin + new - 1], tokens)

    def packed(self) -> list[Result]:
        """The beginning of a text and another text in one row."""
        ids, logits = self.expected["token_ids"], self.expected["logits"]
        found = run(self.model, packed_rows([ids[0, :10], ids[1]]))[0]
        return [("packed", found, np.concatenate([logits[0, :10], logits[1]]), "logits")]

    def result_of_peer(self, folder: Path) -> list[Result]:
        """What transformers computes with an exported directory: equal bit by bit."""
        import torch
        import transformers

        theirs = getattr(transformers, self.peer).from_pretrained(
            folder, attn_implementation="eager", experts_implementation="eager"
        )
        with torch.no_grad():
            ids = torch.as_tensor(self.expected["token_ids"])
            # Without hidden states another kernel runs, whose sums differ in their last bits.
            logits = theirs(ids, output_hidden_states=True).logits.numpy()
        return [("logits", logits, self.expected["logits"], "bits")]


@dataclass
class ImageText(Reference):
    """A model of texts and images of transformers, on texts with no, one and two images."""

    peer: str = "AutoModelForImageTextToText"
    # The token that stands for a piece of an image.
    image: int = 0
    # Cases whose roundings are compared with transformers', those of a string taken together.
    rounded: tuple[str, ...] = ("none one two last",)

    def pictures(self, case: str) -> dict[str, np.ndarray]:
        """The images of a case, as one row of a batch has them."""
        if "images" in self.expected:
            each = self.expected["features"].size // self.expected["features"].shape[-1]
            each //= len(self.expected["images"])
            count = (self.expected[f"{case}_ids"] == self.image).sum() // each
            return {"images": self.expected["images"][:count]}
        numbers = self.expected[f"{case}_numbers"].astype(int)
        return {
            "pixel_values": self.expected["pixel_values"][numbers],
            "pixel_position_ids": self.expected["places"][numbers].astype("int32"),
        }

    def inputs(self, *cases: str, length: int = 40) -> dict[str, np.ndarray]:
        """A batch of cases, each behind some padding, with room for two images."""
        ids, mask = (np.zeros((len(cases), length), "int32") for _ in range(2))
        batch = {"token_ids": ids, "padding_mask": mask}
        for number, case in enumerate(cases):
            row = self.expected[f"{case}_ids"][0]
            ids[number, length - len(row) :], mask[number, length - len(row) :] = row, 1
            for name, array in self.pictures(case).items():
                fill = -1 if name == "pixel_position_ids" else 0
                room = np.full((len(cases), 2, *array.shape[1:]), fill, array.dtype)
                batch.setdefault(name, room)[number, : len(array)] = array
        return {**batch, "vision_mask": (ids == self.image).astype("int32")}

    def batch(self) -> dict[str, Any]:
        """Arguments of `train_on_batch`: each token's label is the one behind it, images apart."""
        inputs = self.inputs("two", "one")
        labels = np.roll(inputs["token_ids"], -1, axis=1)
        weights = (labels != self.image) * inputs["padding_mask"]
        labels = np.where(labels == self.image, 0, labels)
        return {"x": inputs, "y": labels, "sample_weight": weights.astype("float32")}

    def results(self) -> Iterator[Result]:
        """Features of all images, and the logits of each case in one batch."""
        encoder = self.model.backbone.vision_encoder
        if "images" in self.expected:
            found = to_numpy(encoder(self.expected["images"][None]))[0]
            yield "features", found, self.expected["features"].reshape(found.shape), "hidden"
        else:
            places = self.expected["places"][None].astype("int32")
            found = to_numpy(encoder(self.expected["pixel_values"][None], places))[0]
            expected = np.concatenate([self.expected[f"features_{number}"] for number in range(3)])
            scale = np.abs(expected).max()
            yield "features", found[: len(expected)] / scale, expected / scale, "hidden"
        logits = run(self.model, self.inputs(*IMAGE_TEXT_CASES))
        assert logits.dtype == np.float32
        for row, case in zip(logits, IMAGE_TEXT_CASES, strict=True):
            expected = self.expected[f"{case}_logits"][0]
            yield case, row[-len(expected) :], expected, "logits"

    def errors_of_bfloat16(self) -> tuple[np.ndarray, np.ndarray]:
        """Distances of logits from float64's: ours and transformers'."""
        found = run(self.read(dtype="bfloat16"), self.inputs(*IMAGE_TEXT_CASES))
        errors = {}
        for row, case in zip(found, IMAGE_TEXT_CASES, strict=True):
            exact, rounded = (self.expected[f"{case}_logits{end}"][0] for end in ("64", "16"))
            both = row[-len(exact) :], rounded
            errors[case] = [np.abs(logits - exact).sum() for logits in both]
        groups = [[errors[case] for case in group.split()] for group in self.rounded]
        ours, theirs = np.array([np.sum(group, 0) for group in groups]).T
        return ours, theirs

    def check_greedy_tokens(self) -> None:
        """Rows of a batch go on as transformers' do alone."""
        new = len(self.expected["one_greedy"])
        inputs = self.inputs(*IMAGE_TEXT_CASES)
        rows = self.model.generate(inputs, max_new_tokens=new, stop_token_ids=None)["token_ids"]
        for row, case in zip(rows, IMAGE_TEXT_CASES, strict=True):
            begin = self.expected[f"{case}_logits"].shape[1]
            tokens = row[begin : begin + new]
            np.testing.assert_array_equal(tokens, self.expected[f"{case}_greedy"])

    def packed(self) -> list[Result]:
        """Texts and their images in one row."""
        cases = ("one", "two", "none", "last")
        pictures = [self.pictures(case) for case in cases]
        inputs = {
            **packed_rows([self.expected[f"{case}_ids"][0] for case in cases]),
            **{name: np.concatenate([x[name] for x in pictures])[None] for name in pictures[0]},
        }
        expected = np.concatenate([self.expected[f"{case}_logits"][0] for case in cases])
        return [("packed", run(self.model, inputs)[0], expected, "logits")]

    def places(self) -> list[Result]:
        """Places of tokens as keras-hub gives them, and left out."""
        inputs = self.inputs("two", "one")
        expected = run(self.model, inputs)
        mask = inputs.pop("vision_mask")
        places = np.zeros((2, mask.sum(1).max()), "int32")
        for row, there in zip(places, mask, strict=True):
            row[: there.sum()] = np.flatnonzero(there)
        return [
            (name, run(self.model, {**inputs, **more}), expected, "bits")
            for name, more in (("none", {}), ("vision_indices", {"vision_indices": places}))
        ]

    def case_of_adapter(self, expected: dict[str, np.ndarray]) -> tuple[Any, ...]:
        """Inputs, and the logits of their last tokens without the adapter and with it."""
        return self.inputs("two"), self.expected["two_logits"], expected["logits"]

    def export(self, model: Any, folder: Path) -> None:
        """Writes a model as transformers has it, without what was left aside."""
        if self.left:
            model.backbone.left_out = ()
        model.export_to_transformers(folder)

    def result_of_peer(self, folder: Path) -> list[Result]:
        """What transformers computes with an exported directory: equal bit by bit."""
        import torch
        import transformers

        theirs = getattr(transformers, self.peer).from_pretrained(
            folder, attn_implementation="eager"
        )
        pictures = {name: torch.as_tensor(x) for name, x in self.pictures("two").items()}
        ids = torch.as_tensor(self.expected["two_ids"]).long()
        if "images" in pictures:
            pixels = pictures["images"].permute(0, 3, 1, 2)
            seen = (ids == self.image).long()
            inputs = {"input_ids": ids, "pixel_values": pixels, "token_type_ids": seen}
        else:
            from references.gemma4_vision import given, masked

            pictures["image_position_ids"] = pictures.pop("pixel_position_ids").long()
            inputs = masked(theirs, given(theirs, ids, [0, 1], pictures))
        with torch.no_grad():
            logits = theirs(**inputs).logits.numpy()
        return [("two", logits, self.expected["two_logits"], "bits")]


@dataclass
class TextEmbedder(Reference):
    """A model of sentence-transformers, on texts of which one is longer than it takes."""

    checks: frozenset[str] = frozenset(("export", "peer_loads", "files"))

    @property
    def texts(self) -> list[str]:
        return json.loads((self.root / self.name).with_name("texts.json").read_text())["texts"]

    def batch(self) -> dict[str, Any]:
        """What the model is called on."""
        return {"x": self.inputs}

    def tensors(self, folder: Path) -> dict[str, Any]:
        """Those of the transformer, and of the modules behind it by the names of their folders."""
        found = super().tensors(folder)
        for path in folder.glob("*/model.safetensors"):
            tensors = read_safetensors(path).items()
            found |= {f"{path.parent.name}/{name}": tensor for name, tensor in tensors}
        return found

    def results(self) -> Iterator[Result]:
        """Hidden states of tokens, and the vectors of texts, plain and with prompts."""
        there = self.inputs["padding_mask"] == 1
        hidden = run(self.model.backbone, self.inputs)
        yield "hidden", hidden[there], self.expected["hidden"][there], "hidden"
        yield "called", run(self.model, self.inputs), self.expected["plain"], "hidden"
        for name, encode, size in (
            ("plain", self.model.encode, 32),
            ("query", self.model.encode_query, 2),
            ("document", self.model.encode_document, 3),
        ):
            found = encode(self.texts, batch_size=size, normalize_embeddings=False)
            yield name, found, self.expected[name], "hidden"

    def errors_of_bfloat16(self) -> tuple[float, float]:
        """Distances of hidden states from float64's: ours and transformers'."""
        there = self.inputs["padding_mask"] == 1
        exact, theirs = (self.expected[name][there] for name in ("hidden64", "hidden16"))
        found = to_numpy(self.read(dtype="bfloat16").backbone(self.inputs))[there]
        return np.abs(found - exact).mean(), np.abs(theirs - exact).mean()

    def result_of_peer(self, folder: Path) -> list[Result]:
        """What sentence-transformers computes with an exported directory."""
        import sentence_transformers

        theirs = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
        assert theirs.similarity_fn_name == self.model.similarity_fn_name
        assert theirs.max_seq_length == self.model.preprocessor.sequence_length == 20
        return [
            ("plain", theirs.encode(self.texts), self.expected["plain"], "hidden"),
            ("query", theirs.encode_query(self.texts), self.expected["query"], "hidden"),
        ]


def _decoders(folder: str, task: Any, names: str, **more: Any) -> list[Decoder]:
    return [Decoder(f"{folder}/{name}", task, **more) for name in names.split()]


# The text beside an image tower, which that leaves alone.
TEXT = ("text_model.", "text_projection.", "visual_projection.", "logit_scale", "logit_bias")
SOUNDS = ("model.audio_tower.", "model.embed_audio.")
HEADLESS = {"num_classes": 0}
NPZ = frozenset(("another_size",))
POOLER = ("pooler.dense.weight", "pooler.dense.bias")
EXPORT = frozenset(("export",))
FORWARD = frozenset(("export", "peer_loads"))
IMAGE_TEXT = FORWARD | USE | {"bfloat16", "greedy_tokens", "packed", "places"}


def _images(folder: str, names: str, **more: Any) -> list[ImageEncoder]:
    return [ImageEncoder(f"{folder}/{name}", ViTImageClassifier, **more) for name in names.split()]


def _image_texts(names: str, checks: frozenset[str], **more: Any) -> list[ImageText]:
    folders = [f"gemma4_vision/{name}" for name in names.split()]
    more["image"] = 155
    return [
        ImageText(folder, Gemma4ImageTextLM, checks, adapter=f"{folder}/adapter", **more)
        for folder in folders
    ]


FAMILIES: list[Reference] = [
    TextTower(
        *("clip/projected", CLIPTextModelWithProjection, TextTower.checks | {"bfloat16"}),
        adapter="clip/adapter",
        head="base_model.model.text_projection.weight",
    ),
    TextTower("clip/legacy", CLIPTextModelWithProjection, TextTower.checks | {"bfloat16"}),
    TextTower("clip/bare", CLIPTextModelWithProjection),
    *(
        TwoTowers(f"two_towers/{name}", ImageTextSimilarity, adapter=f"two_towers/{name}/adapter")
        for name in ("clip", "siglip", "siglip2")
    ),
    *_decoders("gemma", GemmaCausalLM, "gemma gemma2 gemma3"),
    *_decoders(
        *("gemma", GemmaCausalLM, "untied"),
        adapter="gemma/adapter",
        lora={"targets": ("query", "token_embedding", "reverse_embeddings")},
    ),
    TextEmbedder(
        *("embedding_gemma/gemma", GemmaTextEmbedder), TextEmbedder.checks | {"bfloat16", "presets"}
    ),
    TextEmbedder("embedding_gemma/last", GemmaTextEmbedder),
    TextEmbedder("embedding_gemma/first", GemmaTextEmbedder),
    *_decoders(
        *("gemma4", GemmaCausalLM, "all"),
        adapter="gemma4/adapter",
        lora={"targets": "all-linear", "trainable_token_indices": [5]},
    ),
    *_decoders(
        "gemma4",
        GemmaCausalLM,
        "plain heads key_is_value shared double_wide per_layer turned capped experts",
        checks=FORWARD,
    ),
    *_decoders(
        *("gemma4", GemmaCausalLM, "all_experts"),
        checks=FORWARD | USE | {"greedy_tokens", "presets"},
        adapter="gemma4/adapter_experts gemma4/adapter_some",
        lora={"alpha": 6, "target_parameters": ("experts/gate_up", "experts/down")},
    ),
    # Its export has names of transformers 4: tests/families/gemma_vision.
    ImageText(
        *("gemma3_vision", Gemma3ImageTextLM, IMAGE_TEXT - {"export"}),
        image=160,
        adapter="gemma3_vision/adapter",
        rounded=("two", "last"),
    ),
    *_image_texts("unified tower_small", IMAGE_TEXT, left=SOUNDS),
    *_image_texts("tower", FORWARD | {"greedy_tokens", "places", "presets"}),
    ImageText(
        *("gemma4_vision/unified_causal", Gemma4ImageTextLM, FORWARD | {"presets"}), image=155
    ),
    *_decoders("llama3", Llama3CausalLM, "tied bias"),
    *_decoders("llama3", Llama3CausalLM, "untied", adapter="llama3/adapter"),
    *_decoders("qwen3", Qwen3CausalLM, "tied bias"),
    *_decoders("qwen3", Qwen3CausalLM, "untied", adapter="qwen3/adapter"),
    *_images("vit", "hf_sharded hf_token"),
    *_images("vit", "hf_variants", zeros=9),
    *_images("vit", "npz_augreg npz_big_vision", checks=NPZ),
    *_images("vit", "hf_oblong", checks=FORWARD),
    *_images("vit", "hf_bfloat16 base small", checks=frozenset()),
    *_images(
        "vit",
        "timm_gap timm_gap_norm timm_map timm_oblong timm_registers timm_registers_gap timm_scale "
        "timm_tanh timm_token",
        peer="timm",
    ),
    *_images("vit", "timm_pre_norm", peer="timm", zeros=3),
    *_images("vit_kinds", "clip_projection deit deit_token dinov2"),
    *_images(
        "vit_kinds", "clip deit_model dinov2_giant dinov2_model siglip siglip2", settings=HEADLESS
    ),
    *_images(
        "vit_kinds", "clip_model siglip_model", settings=HEADLESS, left=TEXT, prefix="vision_model."
    ),
    *_images("vit_kinds", "clip_classes", checks=NPZ, left=(*TEXT, "vision_model.post_layernorm.")),
    *_images("vit_kinds", "siglip_classes", left=(*TEXT, "vision_model.head.")),
    *_images("vit_kinds", "npz_siglip", settings=HEADLESS, checks=NPZ),
    *_images("vit_kinds", "timm_clip timm_deit timm_map", peer="timm"),
    *_images("vit_kinds", "timm_dinov2 timm_siglip", settings=HEADLESS, peer="timm"),
    *_images(
        *("vit_recent", "dinov3 dinov3_gated ijepa"),
        settings=HEADLESS,
        checks=NPZ | FORWARD | {"presets"},
    ),
    *_images("vit_recent", "mae", settings=HEADLESS, missing=POOLER),
    *_images("vit_recent", "ijepa_classes"),
    *_images(
        *("vit_recent", "mae_pretraining"),
        settings=HEADLESS,
        missing=POOLER,
        left=("decoder.",),
        prefix="vit.",
        zeros=6,
    ),
    *_images("vit_recent", "timm_dinov3 timm_pe timm_pe_lang", settings=HEADLESS, peer="timm"),
    *_images("vit_recent", "timm_dinov3_gated timm_pe_classes", peer="timm"),
    *_images("vit_recent", "timm_rope timm_rope_unbiased timm_rope_ape", peer="timm"),
    MaskedAutoencoder("vit_mae/pixels", ViTMAEForPreTraining, EXPORT),
    MaskedAutoencoder("vit_mae/normalised", ViTMAEForPreTraining, EXPORT, zeros=12),
    *(
        QuerySegmenter(f"vit_eomt/{name}", EoMTImageSegmenter, EXPORT, {"preprocessor": None})
        for name in ("dinov2", "gated", "dinov3", "dinov3_gated", "dinov3_plain")
    ),
    PatchRows("naflex", ImageTextSimilarity, EXPORT),
]


def row_of(name: str, root: Path) -> Any:
    """The row of a reference in a folder of references."""
    row = next(row for row in FAMILIES if row.name == name)
    row.root = root
    return row


# One row of each forward pass. Others differ in their files alone, or mix what these have.
_NAMES = """
clip/bare clip/legacy clip/projected two_towers/clip two_towers/siglip
embedding_gemma/gemma gemma/gemma gemma/gemma2 gemma/gemma3 gemma/untied gemma3_vision gemma4/all
gemma4/all_experts gemma4_vision/tower gemma4_vision/unified llama3/bias llama3/untied naflex
qwen3/bias qwen3/untied
vit/hf_token vit/timm_gap vit/timm_map vit/timm_pre_norm vit/timm_registers vit/timm_scale
vit/timm_tanh vit_eomt/dinov2 vit_kinds/clip vit_kinds/deit_token vit_kinds/dinov2_giant
vit_kinds/siglip vit_mae/pixels vit_recent/dinov3_gated vit_recent/ijepa vit_recent/timm_pe
vit_recent/timm_rope
"""
FORWARD_PASSES = frozenset(_NAMES.split())


def rows(check: str, each_backend: Collection[str] | None = None) -> list[Any]:
    """The rows that pass a check, as parameters of its test; "results" and "adapter" are known.

    Args:
        check: name of the check.
        each_backend: names of the rows that run on each backend each time; the others do so in the
            nightly tests. By default all run on torch alone.
    """
    known = {"results": lambda row: True, "adapter": lambda row: bool(row.adapter)}
    applies = known.get(check, lambda row: check in row.checks)

    def marks(row: Reference) -> list[Any]:
        if each_backend is None:
            return []
        return [pytest.mark.each_backend(*([] if row.name in each_backend else ["nightly"]))]

    return [pytest.param(row, id=row.name, marks=marks(row)) for row in FAMILIES if applies(row)]

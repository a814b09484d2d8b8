"""The table of families: each directory of another package, how it is read, and what it gives.

A family adds rows to `FAMILIES`. `tests/families/test_families.py` has the checks; a row names the
ones that it passes, and what they need stands in it. References are those of `tests/references`.
"""

import functools
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from arrays import read_npz, to_numpy
from kmodels.models import GemmaCausalLM, Qwen3CausalLM, ViTImageClassifier

# A result beside its reference: name, what was found, what was expected, row of the tolerances.
Result = tuple[str, Any, np.ndarray, str]


def run(model: keras.Model, inputs: Any) -> Any:
    """What a model gives, as arrays; compiled on JAX, where that takes less than op after op."""
    if keras.backend.backend() == "jax":
        return model.predict(inputs, verbose=0)
    return keras.tree.map_structure(to_numpy, model(inputs))


@dataclass
class Reference:
    """A model of another package below the folder of references, with what it computes.

    Args:
        name: its folder below the references, which holds `model` and `expected.npz`.
        task: the class that reads it.
        checks: names of the checks of test_families.py that it passes beside "results".
        settings: arguments of `from_preset`.
        peer: the class that reads its export, of transformers, or "timm".
        adapter: the folder of an adapter of PEFT over it, beside which stands an .npz file.
    """

    name: str
    task: Any
    checks: frozenset[str]
    settings: dict[str, Any] = field(default_factory=dict)
    peer: str = "AutoModelForCausalLM"
    adapter: str = ""
    root: Path = Path()

    @property
    def path(self) -> Path:
        """The directory or file that another package wrote."""
        folder = self.root / self.name
        return folder / "model" if (folder / "model").is_dir() else folder / "model.npz"

    @functools.cached_property
    def expected(self) -> dict[str, np.ndarray]:
        """What the other package computes with it."""
        return read_npz(self.root / self.name / "expected.npz")

    def read(self, **settings: Any) -> Any:
        """A new model of the directory."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*tensors of MAE's pretraining alone")
            return self.task.from_preset(self.path, **{**self.settings, **settings})

    @functools.cached_property
    def model(self) -> Any:
        """The model of the directory, one in a process: whoever changes one reads a new one."""
        return self.read()

    def export(self, model: Any, folder: Path) -> None:
        """Writes a model as the other package has it."""
        (model.export_to_timm if self.peer == "timm" else model.export_to_transformers)(folder)


@dataclass
class Decoder(Reference):
    """A causal language model of transformers."""

    checks: frozenset[str] = frozenset(
        ("bfloat16", "greedy_tokens", "export", "peer_loads", "presets")
    )

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
        yield "logits", to_numpy(self.model(self.inputs)), self.expected["logits"], "logits"

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

    def result_of_peer(self, folder: Path) -> list[Result]:
        """What transformers computes with an exported directory, which is to be equal bit by bit."""
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
class ImageEncoder(Reference):
    """A vision transformer of transformers, timm or google-research."""

    checks: frozenset[str] = frozenset(("another_size", "export", "peer_loads"))
    # Tensors of the file that are left aside, by how their names begin.
    left: tuple[str, ...] = ()
    # What is taken off the names of the others.
    prefix: str = ""

    def results(self, start: str = "") -> Iterator[Result]:
        """Blocks in the order of computation, tokens, what is pooled, and logits.

        Args:
            start: "resized_" for the images of another size.
        """
        given = {
            name.removeprefix(start): x
            for name, x in self.expected.items()
            if name.startswith(start) and (start or not name.startswith("resized_"))
        }
        shape = {"image_shape": given["images"].shape[1:]}
        model = self.read(**shape) if start else self.model
        if start and model.preprocessor is not None:
            assert model.preprocessor.image_size == shape["image_shape"][:2]
        blocks = sorted(name for name in given if name.startswith("block_"))
        features = model.feature_model([*blocks, "sequence_output", "pooled_output"])
        together = keras.Model(model.input, {**features.output, "result": model.output})
        found = run(together, given["images"])
        for name in blocks:
            yield name, found[name], given[name], "hidden"
        if "final" in given:
            # CLIP in transformers gives the tokens as the last block leaves them.
            unnormed = self.name.startswith("vit_kinds/clip")
            last = found[blocks[-1] if unnormed else "sequence_output"]
            yield "final", last, given["final"], "hidden"
        if "pooled" in given and not self.left:
            # DINOv2's is the class token, of which ours is a part.
            pooled = found["pooled_output"][:, : given["pooled"].shape[-1]]
            yield "pooled", pooled, given["pooled"], "hidden"
        result = given.get("logits", given.get("pooled"))
        assert np.abs(result).max() > 0.3
        yield "result", found["result"], result, "logits"
        if "parameters" in given and not self.left:
            assert model.count_params() == given["parameters"]

    def result_of_peer(self, folder: Path) -> list[Result]:
        """What transformers or timm computes with an exported directory."""
        import torch

        images = torch.from_numpy(
            np.ascontiguousarray(self.expected["images"].transpose(0, 3, 1, 2))
        )
        if self.peer == "timm":
            import timm

            theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
            with torch.no_grad():
                result = self.expected.get("logits", self.expected.get("pooled"))
                return [("result", theirs(images).numpy(), result, "hidden")]
        import transformers

        from references.vit_kinds import rows_of

        described = json.loads((folder / "config.json").read_text())
        made = getattr(transformers, described["architectures"][0])
        theirs, told = made.from_pretrained(folder, output_loading_info=True)
        for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            assert not told[key], (key, told[key])
        with torch.no_grad():
            output = theirs(**rows_of(images)) if self.name.endswith("siglip2") else theirs(images)
        for name in ("logits", "image_embeds"):
            if output.get(name) is not None:
                return [(name, output[name].numpy(), self.expected["logits"], "hidden")]
        found = [("final", output.last_hidden_state.numpy(), self.expected["final"], "hidden")]
        if "pooled" in self.expected and output.get("pooler_output") is not None:
            found.append(
                ("pooled", output.pooler_output.numpy(), self.expected["pooled"], "hidden")
            )
        return found


def _decoders(folder: str, task: Any, names: str, **more: Any) -> list[Decoder]:
    return [Decoder(f"{folder}/{name}", task, **more) for name in names.split()]


# The text beside an image tower, which that leaves alone.
TEXT = ("text_model.", "text_projection.", "visual_projection.", "logit_scale", "logit_bias")
HEADLESS = {"num_classes": 0}
NPZ = frozenset(("another_size",))
FORWARD = frozenset(("export", "peer_loads"))


def _images(folder: str, names: str, **more: Any) -> list[ImageEncoder]:
    return [ImageEncoder(f"{folder}/{name}", ViTImageClassifier, **more) for name in names.split()]


FAMILIES: list[Reference] = [
    *_decoders("gemma", GemmaCausalLM, "gemma gemma2 gemma3"),
    *_decoders("gemma4", GemmaCausalLM, "all", adapter="gemma4/adapter"),
    *_decoders(
        "gemma4",
        GemmaCausalLM,
        "plain heads key_is_value shared double_wide per_layer turned capped experts all_experts",
        checks=FORWARD,
    ),
    *_decoders("qwen3", Qwen3CausalLM, "tied bias"),
    *_decoders("qwen3", Qwen3CausalLM, "untied", adapter="qwen3/adapter"),
    *_images("vit", "hf_sharded hf_token hf_variants npz_augreg npz_big_vision", checks=NPZ),
    *_images("vit", "hf_bfloat16 hf_oblong base small", checks=frozenset()),
    *_images(
        "vit",
        "timm_gap timm_gap_norm timm_map timm_oblong timm_registers timm_registers_gap timm_scale "
        "timm_tanh timm_token",
        peer="timm",
    ),
    # It has no biases where the export writes zeros.
    *_images("vit", "timm_pre_norm", checks=NPZ | {"peer_loads"}, peer="timm"),
    *_images("vit_kinds", "clip_projection deit deit_token dinov2"),
    *_images(
        "vit_kinds", "clip deit_model dinov2_giant dinov2_model siglip siglip2", settings=HEADLESS
    ),
    *_images(
        "vit_kinds",
        "clip_model siglip_model",
        settings=HEADLESS,
        left=TEXT,
        prefix="vision_model.",
    ),
    # transformers keeps a norm, or attention pooling, that its classifiers do not call.
    *_images("vit_kinds", "clip_classes", checks=NPZ, left=(*TEXT, "vision_model.post_layernorm.")),
    *_images("vit_kinds", "siglip_classes", left=(*TEXT, "vision_model.head.")),
    *_images("vit_kinds", "npz_siglip", settings=HEADLESS, checks=NPZ),
    *_images("vit_kinds", "timm_clip timm_deit timm_map", peer="timm"),
    *_images("vit_kinds", "timm_dinov2 timm_siglip", settings=HEADLESS, peer="timm"),
    *_images("vit_recent", "dinov3 dinov3_gated ijepa", settings=HEADLESS),
    *_images("vit_recent", "mae", settings=HEADLESS, checks=NPZ | {"export"}),
    *_images("vit_recent", "ijepa_classes"),
    *_images("vit_recent", "mae_pretraining", settings=HEADLESS, checks=NPZ, left=("decoder.",)),
    *_images("vit_recent", "timm_dinov3 timm_pe timm_pe_lang", settings=HEADLESS, peer="timm"),
    *_images("vit_recent", "timm_dinov3_gated timm_pe_classes", peer="timm"),
]


def rows(check: str, only: Callable[[Reference], bool] = lambda row: True) -> list[Any]:
    """The rows that pass a check, as parameters of its test; "results" and "adapter" are known."""
    known = {"results": lambda row: True, "adapter": lambda row: bool(row.adapter)}
    applies = known.get(check, lambda row: check in row.checks)
    return [pytest.param(row, id=row.name) for row in FAMILIES if applies(row) and only(row)]

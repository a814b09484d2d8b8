"""Rows of `tests/family_table.py` for image encoders, and for what stands on them."""

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np

from arrays import read_npz, to_numpy
from family_reference import Reference, Result, run
from kmodels.models import NaFlexViTImageClassifier


@dataclass
class ImageEncoder(Reference):
    """A vision transformer of transformers, timm or google-research."""

    checks: frozenset[str] = frozenset(("another_size", "export", "peer_loads"))
    # Weights that the class of transformers has and the file does not.
    missing: tuple[str, ...] = ()

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
            if not unnormed:
                # The call of a backbone walks through its steps, and its last block may leave
                # tokens out.
                called = model.backbone(given["images"], training=False)
                yield "called", to_numpy(called), given["final"], "hidden"
        assert all(np.abs(x).max() > 0.3 for name, x in given.items() if name != "parameters")
        # transformers keeps a norm, or attention pooling, that its classifiers do not call.
        unused = self.left and "logits" in given
        if "pooled" in given and not unused:
            # DINOv2's is the class token, of which ours is a part.
            pooled = found["pooled_output"][:, : given["pooled"].shape[-1]]
            yield "pooled", pooled, given["pooled"], "hidden"
        result = given.get("logits", given.get("pooled"))
        yield "result", found["result"], result, "logits"
        if "parameters" in given and not unused and not self.zeros:
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
        told["missing_keys"] -= set(self.missing)
        for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            assert not told[key], (key, told[key])
        with torch.no_grad():
            output = theirs(**rows_of(images)) if self.name.endswith("siglip2") else theirs(images)
        for name in ("logits", "image_embeds"):
            if output.get(name) is not None:
                return [(name, output[name].numpy(), self.expected["logits"], "hidden")]
        found = [("final", output.last_hidden_state.numpy(), self.expected["final"], "hidden")]
        has_pooler = output.get("pooler_output") is not None and not self.missing
        if "pooled" in self.expected and has_pooler:
            found.append(
                ("pooled", output.pooler_output.numpy(), self.expected["pooled"], "hidden")
            )
        return found


@dataclass
class MaskedAutoencoder(Reference):
    """MAE's pretraining in transformers, with the noise that hides patches."""

    def results(self) -> Iterator[Result]:
        """Pixels of all patches, which of them are hidden, and the loss."""
        images, noise = self.expected["images"], self.expected["noise"]
        pixels = to_numpy(self.model(images, noise=noise))
        yield "pixels", pixels, self.expected["logits"], "hidden"
        yield "mask", to_numpy(self.model.hidden(noise)), self.expected["mask"], "bits"
        loss = to_numpy(self.model.pretraining_loss(images, noise))
        yield "loss", loss, self.expected["loss"], "logits_across"


@dataclass
class QuerySegmenter(Reference):
    """EoMT of transformers."""

    def results(self) -> Iterator[Result]:
        """Masks and classes of the queries."""
        found = self.model.predict_queries(self.expected["images"])
        for name, theirs in (("masks_queries", "masks"), ("class_queries", "classes")):
            logits = found[f"{name}_logits"]
            assert logits.dtype == np.float32
            yield theirs, logits, self.expected[theirs], "logits"


@dataclass
class PatchRows(Reference):
    """SigLIP 2 of transformers on images of any aspect ratio, and a classifier beside it."""

    def patches(self, size: str) -> dict[str, np.ndarray]:
        """Images in rows of 24 or 60 patches."""
        names = ("pixel_values values", "pixel_attention_mask mask", "spatial_shapes shapes")
        pairs = [name.split() for name in names]
        return {name: self.expected[f"{size}_{held}"] for name, held in pairs}

    @functools.cached_property
    def pictures(self) -> list[np.ndarray]:
        """The images that the patches are of."""
        held = read_npz(self.root / self.name / "pictures.npz")
        return [held[str(i)] for i in range(len(held))]

    def results(self) -> Iterator[Result]:
        """Tokens of both lengths, embeddings of one, logits of the other, raw images, and classes.

        Each call beside the tokens is a graph of its own on JAX and TensorFlow.
        """
        ids, tower = self.expected["token_ids"].astype("int32"), self.model.backbone.vision_encoder
        for size in ("24", "60"):
            given = self.patches(size)
            mask = given["pixel_attention_mask"].astype(bool)
            tokens = to_numpy(tower.intermediates(given)["final_norm"])
            yield "tokens", tokens[mask], self.expected[f"{size}_tokens"][mask], "logits"
        embeds = self.model.encode_image(self.patches("24"), batch_size=3, normalize=False)
        yield "embeds", embeds, self.expected["24_embeds"], "logits"
        logits = self.model.predict({**self.patches("60"), "token_ids": ids[:4]}, verbose=0)
        yield "logits", logits, self.expected["60_logits"][:, :4], "logits"
        raw = self.model.similarity(self.pictures, ids)
        yield "raw", raw, self.expected["24_logits"], "logits"
        classifier = NaFlexViTImageClassifier.from_preset(self.root / self.name / "classes")
        classes = classifier.predict(self.pictures, verbose=0)
        yield "classes", classes, self.expected["24_classes"], "logits"

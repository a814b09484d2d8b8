"""Rows of `tests/family_table.py` for towers of texts, alone and beside one of images."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from arrays import to_numpy
from family_reference import Reference, Result, run


@dataclass
class TextTower(Reference):
    """CLIP's text tower of transformers, with a projection or without."""

    checks: frozenset[str] = frozenset(("export", "peer_loads", "presets"))

    def results(self) -> Iterator[Result]:
        """Hidden states under the mask and without it, and the vectors of texts."""
        backbone = self.model.backbone
        found = backbone.intermediates(self.inputs)
        assert list(found) == ["tokens", "block_0", "block_1", "block_2", "final_norm"]
        for name in ("block_0", "block_1", "block_2"):
            yield name, to_numpy(found[name]), self.expected[name], "hidden"
        yield "steps", to_numpy(found["final_norm"]), self.expected["hidden"], "hidden"
        yield "called", run(backbone, self.inputs), self.expected["hidden"], "hidden"
        ids = self.inputs["token_ids"]
        yield "unmasked", run(backbone, ids), self.expected["hidden_all"], "hidden"
        vectors = run(self.model, self.inputs)
        assert vectors.dtype == np.float32
        yield "vectors", vectors, self.expected.get("embeds", self.expected["pooled"]), "logits"

    def errors_of_bfloat16(self) -> tuple[float, float]:
        """Distances of vectors from float64's: ours and transformers'."""
        exact = self.expected["many64"]
        found = run(self.read(dtype="bfloat16"), self.ids("many"))
        assert found.dtype == np.float32
        return np.abs(found - exact).mean(), np.abs(self.expected["many16"] - exact).mean()

    def case_of_adapter(self, expected: dict[str, np.ndarray]) -> tuple[Any, ...]:
        """Inputs, and the vectors without the adapter and with it."""
        return expected["token_ids"].astype("int32"), expected["plain"], expected["embeds"]

    def result_of_peer(self, folder: Path) -> list[Result]:
        """What transformers computes with an exported directory: equal bit by bit."""
        import torch
        import transformers

        name = json.loads((folder / "config.json").read_text())["architectures"][0]
        theirs = getattr(transformers, name).from_pretrained(folder, attn_implementation="eager")
        ids, mask = (torch.as_tensor(self.expected[x]) for x in ("token_ids", "padding_mask"))
        with torch.no_grad():
            output = theirs(input_ids=ids, attention_mask=mask)
        kind = "embeds" if "embeds" in self.expected else "pooled"
        found = output.text_embeds if kind == "embeds" else output.pooler_output
        return [(kind, found.numpy(), self.expected[kind], "bits")]


@dataclass
class TwoTowers(Reference):
    """CLIP, SigLIP or SigLIP 2 of transformers with both towers."""

    checks: frozenset[str] = frozenset(("bfloat16", "export", "peer_loads", "presets"))

    @property
    def kind(self) -> str:
        """The folder's name, which is transformers' too."""
        return self.name.rpartition("/")[2]

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        """Four images and five texts."""
        return {"images": self.expected["images"], "token_ids": self.ids("token_ids")}

    @property
    def many(self) -> dict[str, np.ndarray]:
        """Enough images and texts for a mean of rounding errors."""
        return {"images": self.expected["many_images"], "token_ids": self.ids("many_ids")}

    def vectors(self, model: Any, inputs: dict[str, np.ndarray]) -> np.ndarray:
        """The vectors of images and texts, one behind the other, of length 1."""
        named = model.backbone.intermediates(inputs)
        x = np.concatenate([to_numpy(named[name]) for name in ("image_embeds", "text_embeds")])
        return x / np.linalg.norm(x, axis=1, keepdims=True)

    def results(self) -> Iterator[Result]:
        """Logits both ways, and those under a mask that hides tokens."""
        logits = self.expected["logits_per_image"]
        # Called, since `predict` asks for as many texts as images.
        found = self.model.backbone(self.inputs)
        found = {name: to_numpy(found[name]) for name in ("vision_logits", "text_logits")}
        assert found["vision_logits"].dtype == np.float32
        yield "vision_logits", found["vision_logits"], logits, "logits"
        yield "text_logits", found["text_logits"], logits.T, "logits"
        masked = self.model({**self.inputs, "padding_mask": self.ids("padding_mask")})
        assert np.abs(self.expected["masked"] - logits).max() > 0.1
        yield "masked", to_numpy(masked), self.expected["masked"], "logits"

    def errors_of_bfloat16(self) -> tuple[float, float]:
        """Distances of vectors from float64's: ours and transformers'."""
        model, exact = self.read(dtype="bfloat16"), self.expected["many64"]
        assert to_numpy(model(self.many)).dtype == np.float32
        found = self.vectors(model, self.many)
        return np.abs(found - exact).mean(), np.abs(self.expected["many16"] - exact).mean()

    def case_of_adapter(self, expected: dict[str, np.ndarray]) -> tuple[Any, ...]:
        """Inputs, and the logits without the adapter and with it."""
        inputs = {name: x[:4] for name, x in self.inputs.items()}
        return inputs, self.expected["logits_per_image"][:, :4], expected["logits"][:, :4]

    def result_of_peer(self, folder: Path) -> list[Result]:
        """What transformers computes with an exported directory: equal bit by bit."""
        import torch
        import transformers

        from references.two_towers import given

        theirs = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager")
        images = torch.as_tensor(self.expected["images"]).permute(0, 3, 1, 2)
        inputs = given(self.kind, torch.as_tensor(self.expected["token_ids"]), images)
        with torch.no_grad():
            logits = theirs(**inputs).logits_per_image.numpy()
        return [("logits", logits, self.expected["logits_per_image"], "logits")]

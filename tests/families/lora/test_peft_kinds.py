"""Adapters of each kind of ViT go to PEFT and come from it, over transformers' own models."""

import numpy as np
import pytest

from arrays import to_numpy
from kmodels.lora.enable import adapters
from kmodels.models import ViTBackbone, ViTImageClassifier
from tolerances import tolerance

# Class of transformers, class here, and the output that both give.
CASES = {
    "clip": ("CLIPVisionModel", ViTBackbone, "first token"),
    "clip_classes": ("CLIPForImageClassification", ViTImageClassifier, "logits"),
    "clip_projection": ("CLIPVisionModelWithProjection", ViTImageClassifier, "image_embeds"),
    "deit": ("DeiTForImageClassificationWithTeacher", ViTImageClassifier, "logits"),
    "deit_model": ("DeiTModel", ViTBackbone, "last_hidden_state"),
    "deit_token": ("DeiTForImageClassification", ViTImageClassifier, "logits"),
    "dinov2": ("Dinov2ForImageClassification", ViTImageClassifier, "logits"),
    "dinov2_giant": ("Dinov2WithRegistersModel", ViTBackbone, "last_hidden_state"),
    "dinov2_model": ("Dinov2Model", ViTBackbone, "last_hidden_state"),
    "dinov3": ("DINOv3ViTModel", ViTBackbone, "last_hidden_state"),
    "dinov3_gated": ("DINOv3ViTModel", ViTBackbone, "last_hidden_state"),
    "ijepa": ("IJepaModel", ViTBackbone, "last_hidden_state"),
    "ijepa_classes": ("IJepaForImageClassification", ViTImageClassifier, "logits"),
    "siglip": ("SiglipVisionModel", ViTBackbone, "last_hidden_state"),
    "siglip2": ("Siglip2VisionModel", ViTBackbone, "last_hidden_state"),
    "siglip_classes": ("SiglipForImageClassification", ViTImageClassifier, "logits"),
}
# Where the names of the others would mean SigLIP's attention pooling too, or are not there.
TARGETS = {
    "siglip": ["self_attn.q_proj", "self_attn.out_proj", "layers.0.mlp.fc1", "layers.1.mlp.fc2"],
    "dinov2_giant": ["q_proj", "o_proj", "gate_proj", "down_proj"],
    "dinov3": ["q_proj", "k_proj", "up_proj", "down_proj"],
    "dinov3_gated": ["q_proj", "k_proj", "gate_proj", "down_proj"],
}
RECENT = ("dinov3", "dinov3_gated", "ijepa", "ijepa_classes")
# PEFT asks transformers for an attribute that transformers 5 renamed.
pytestmark = [
    pytest.mark.needs("peft"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


def shake(model, seed):
    """Gives adapters values as after training."""
    rng = np.random.default_rng(seed)
    for adapter in adapters(model).values():
        for variable in adapter.variables:
            variable.assign(rng.normal(size=variable.shape).astype("float32") * 0.2)


class Theirs:
    """A model of transformers, and what it gives for NHWC images."""

    def __init__(self, folder, case):
        from torchvision_cpu import define_torchvision_operators

        define_torchvision_operators()
        import transformers

        name, _, self.output = CASES[case]
        self.case = case
        self.model = getattr(transformers, name).from_pretrained(folder / "model").eval()

    def __call__(self, images):
        import torch

        from references.vit_kinds import rows_of

        pictures = torch.from_numpy(images).permute(0, 3, 1, 2)
        given = rows_of(pictures) if self.case == "siglip2" else {"pixel_values": pictures}
        with torch.no_grad():
            found = self.model(**given)
        if self.output == "first token":
            return found.pooler_output.numpy()
        return getattr(found, self.output).numpy()


def result(model, case, images):
    found = to_numpy(model(images, training=False))
    return found[:, 0] if CASES[case][2] == "first token" else found


@pytest.mark.across
@pytest.mark.parametrize("case", CASES)
def test_adapters_go_there_and_come_from_there(case, references, tmp_path):
    import peft
    import torch

    folder = references / ("vit_recent" if case in RECENT else "vit_kinds") / case
    with np.load(folder / "expected.npz") as held:
        images = held["images"]
    ours = CASES[case][1].from_preset(folder / "model")
    base = result(ours, case, images)
    ours.enable_lora(2, alpha=3.0, targets="all-linear")
    shake(ours, 1)
    found = result(ours, case, images)
    assert np.abs(found - base).max() > 0.01
    ours.save_adapter(tmp_path / "ours")
    there = Theirs(folder, case)
    there.model = peft.PeftModel.from_pretrained(there.model, tmp_path / "ours").eval()
    np.testing.assert_allclose(found, there(images), rtol=0, atol=tolerance("logits"))

    there = Theirs(folder, case)
    targets = TARGETS["siglip"] if "siglip" in case else ["q_proj", "v_proj", "fc1", "fc2"]
    config = peft.LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=TARGETS.get(case, targets),
        rank_pattern={".*1.*q_proj": 2},
        alpha_pattern={"q_proj": 2.5},
    )
    wrapped = peft.get_peft_model(there.model, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape))
    wrapped.save_pretrained(tmp_path / "theirs")
    there.model = wrapped.eval()
    ours.load_adapter(tmp_path / "theirs")
    found = result(ours, case, images)
    assert np.abs(found - base).max() > 0.01
    np.testing.assert_allclose(found, there(images), rtol=0, atol=tolerance("logits"))

"""Adapters of each kind of model go to PEFT and come from it, over transformers' own models."""

import numpy as np
import pytest

from arrays import read_npz, to_numpy
from kmodels.models import (
    CLIPTextEncoder,
    CLIPTextModelWithProjection,
    GemmaCausalLM,
    ViTBackbone,
    ViTImageClassifier,
)
from tolerances import tolerance

# Class of transformers, class here, and the output that both give.
CASES = {
    "clip/bare": ("CLIPTextModel", CLIPTextEncoder, "last_hidden_state"),
    "clip/projected": ("CLIPTextModelWithProjection", CLIPTextModelWithProjection, "text_embeds"),
    "gemma/gemma3": ("Gemma3ForCausalLM", GemmaCausalLM, "logits"),
    "vit/hf_token": ("ViTForImageClassification", ViTImageClassifier, "logits"),
    "vit_kinds/clip": ("CLIPVisionModel", ViTBackbone, "first token"),
    "vit_kinds/clip_classes": ("CLIPForImageClassification", ViTImageClassifier, "logits"),
    "vit_kinds/clip_projection": (
        *("CLIPVisionModelWithProjection", ViTImageClassifier),
        "image_embeds",
    ),
    "vit_kinds/deit": ("DeiTForImageClassificationWithTeacher", ViTImageClassifier, "logits"),
    "vit_kinds/deit_model": ("DeiTModel", ViTBackbone, "last_hidden_state"),
    "vit_kinds/deit_token": ("DeiTForImageClassification", ViTImageClassifier, "logits"),
    "vit_kinds/dinov2": ("Dinov2ForImageClassification", ViTImageClassifier, "logits"),
    "vit_kinds/dinov2_giant": ("Dinov2WithRegistersModel", ViTBackbone, "last_hidden_state"),
    "vit_kinds/dinov2_model": ("Dinov2Model", ViTBackbone, "last_hidden_state"),
    "vit_kinds/siglip": ("SiglipVisionModel", ViTBackbone, "last_hidden_state"),
    "vit_kinds/siglip2": ("Siglip2VisionModel", ViTBackbone, "last_hidden_state"),
    "vit_kinds/siglip_classes": ("SiglipForImageClassification", ViTImageClassifier, "logits"),
    "vit_recent/dinov3": ("DINOv3ViTModel", ViTBackbone, "last_hidden_state"),
    "vit_recent/dinov3_gated": ("DINOv3ViTModel", ViTBackbone, "last_hidden_state"),
    "vit_recent/ijepa": ("IJepaModel", ViTBackbone, "last_hidden_state"),
    "vit_recent/ijepa_classes": ("IJepaForImageClassification", ViTImageClassifier, "logits"),
}
DORA = ("gemma/gemma3", "vit/hf_token")
SIGLIP = ["self_attn.q_proj", "self_attn.out_proj", "layers.0.mlp.fc1", "layers.1.mlp.fc2"]
GATED = ["q_proj", "v_proj", "gate_proj", "down_proj"]
# Where the names of the others would mean SigLIP's attention pooling too, or are not there.
TARGETS = {
    "gemma/gemma3": GATED,
    "vit_kinds/dinov2_giant": GATED,
    "vit_kinds/siglip": SIGLIP,
    "vit_kinds/siglip2": SIGLIP,
    "vit_kinds/siglip_classes": SIGLIP,
    "vit_recent/dinov3": ["q_proj", "k_proj", "up_proj", "down_proj"],
    "vit_recent/dinov3_gated": GATED,
}
# PEFT asks transformers for an attribute that transformers 5 renamed.
pytestmark = [
    pytest.mark.needs("peft"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


class Theirs:
    """A model of transformers, and what it gives for NHWC images or token ids."""

    def __init__(self, folder, case):
        from torchvision_cpu import define_torchvision_operators

        define_torchvision_operators()
        import transformers

        name, _, self.output = CASES[case]
        self.case = case
        self.model = getattr(transformers, name).from_pretrained(folder / "model").eval()

    def __call__(self, x):
        import torch

        from references.vit_kinds import rows_of

        given = torch.from_numpy(x)
        if x.ndim == 2:
            given = {"input_ids": given.long()}
        else:
            given = given.permute(0, 3, 1, 2)
            given = rows_of(given) if self.case.endswith("siglip2") else {"pixel_values": given}
        with torch.no_grad():
            found = self.model(**given)
        if self.output == "first token":
            return found.pooler_output.numpy()
        return getattr(found, self.output).numpy()


def result(model, case, x):
    given = {"token_ids": x, "padding_mask": np.ones_like(x)} if x.ndim == 2 else x
    found = to_numpy(model(given, training=False))
    return found[:, 0] if CASES[case][2] == "first token" else found


@pytest.mark.across
@pytest.mark.parametrize(
    ("case", "dora"), [*((case, False) for case in CASES), *((case, True) for case in DORA)]
)
def test_adapters_go_there_and_come_from_there(case, dora, references, tmp_path):
    import peft
    import torch

    folder = references / case
    expected = read_npz(folder / "expected.npz")
    x = expected["images"] if "images" in expected else expected["token_ids"].astype("int32")
    ours = CASES[case][1].from_preset(folder / "model")
    base = result(ours, case, x)
    ours.enable_lora(2, alpha=3.0, targets="all-linear", dora=dora)
    rng = np.random.default_rng(1)
    for variable in ours.trainable_variables:
        drawn = rng.normal(size=variable.shape).astype("float32")
        variable.assign(to_numpy(variable) + 0.2 * drawn)
    found = result(ours, case, x)
    assert np.abs(found - base).max() > 0.01
    ours.save_adapter(tmp_path / "ours")
    there = Theirs(folder, case)
    there.model = peft.PeftModel.from_pretrained(there.model, tmp_path / "ours").eval()
    np.testing.assert_allclose(found, there(x), rtol=0, atol=tolerance("logits"))

    there = Theirs(folder, case)
    config = peft.LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=TARGETS.get(case, ["q_proj", "v_proj", "fc1", "fc2"]),
        rank_pattern={".*1.*q_proj": 2},
        alpha_pattern={"q_proj": 2.5},
        use_dora=dora,
    )
    wrapped = peft.get_peft_model(there.model, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape))
    wrapped.save_pretrained(tmp_path / "theirs")
    there.model = wrapped.eval()
    ours = CASES[case][1].from_preset(folder / "model")
    ours.enable_lora(2)  # which the file replaces
    ours.load_adapter(tmp_path / "theirs")
    found = result(ours, case, x)
    assert np.abs(found - base).max() > 0.01
    np.testing.assert_allclose(found, there(x), rtol=0, atol=tolerance("logits"))

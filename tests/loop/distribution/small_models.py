"""The ViT and the Gemma that are trained here: small enough to compile in a second or two."""

from kmodels.layers.quantized import Quantization
from kmodels.lora.modules import linear_layers
from kmodels.models import GemmaBackbone, GemmaCausalLM, ViTBackbone, ViTImageClassifier

VIT = {"num_layers": 1, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
GEMMA = {"vocabulary_size": 50, "num_layers": 1, "num_query_heads": 2, "num_key_value_heads": 1}
GEMMA |= {"hidden_dim": 32, "intermediate_dim": 64, "head_dim": 16}


def vit(side: int, num_classes: int, **settings) -> ViTImageClassifier:
    """A classifier of images of so many pixels a side, of which four patches are made."""
    sizes = {"image_shape": (side, side, 3), "patch_size": side // 2, **VIT, **settings}
    return ViTImageClassifier(ViTBackbone(**sizes), num_classes)


def gemma(**settings) -> GemmaCausalLM:
    return GemmaCausalLM(GemmaBackbone(**{**GEMMA, **settings}))


def in_few_bits(model: GemmaCausalLM) -> GemmaCausalLM:
    """The model with its first block in nf4 and its second in int8, so that one run has both."""
    settings = Quantization("nf4", block=32), Quantization("int8")
    for block, each in zip(model.backbone.blocks, settings, strict=True):
        for layer in linear_layers(block).values():
            layer.quantize_kernel(each)
    return model

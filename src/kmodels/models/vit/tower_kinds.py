"""The vision towers of CLIP and SigLIP by keras-hub's names and arguments, each the one ViT."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.models.common.encoder.config import GELUS, check_gelu, config_field
from kmodels.models.common.hub_order import in_order
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.layers import Pooling
from kmodels.models.vit.model import ViTBackbone


@keras.saving.register_keras_serializable(package="kmodels")
class CLIPVisionEncoder(ViTBackbone):
    """CLIP's vision tower without its projection (Radford et al. 2021).

    Args:
        patch_size: side of the square patches, in pixels.
        hidden_dim: width of the tokens.
        num_layers: blocks.
        num_heads: attention heads.
        intermediate_dim: width of the MLP, `mlp_dim` elsewhere.
        intermediate_activation: "quick_gelu", "gelu" or "gelu_approximate".
        intermediate_output_index: None; `intermediates` returns the output of each block.
        image_shape: (height, width, channels) in pixels.
        **fields: of `ViTBackbone` and `ViTConfig`.

    Raises:
        InputError: for another activation, or an `intermediate_output_index`.
    """

    named_inputs = True
    intermediate_dim = config_field("mlp_dim")

    @in_order(
        *("patch_size", "hidden_dim", "num_layers", "num_heads", "intermediate_dim"),
        *(
            "intermediate_activation",
            "intermediate_output_index",
            "image_shape",
            "data_format",
            "dtype",
        ),
        *("name",),
    )
    def __init__(
        self,
        patch_size: int | Sequence[int] = 32,
        hidden_dim: int = 768,
        num_layers: int = 12,
        num_heads: int = 12,
        intermediate_dim: int = 3072,
        intermediate_activation: str = "quick_gelu",
        intermediate_output_index: None = None,
        image_shape: tuple[int, int, int] = (224, 224, 3),
        **fields: Any,
    ):
        check_gelu(intermediate_activation)
        if intermediate_output_index is not None:
            raise InputError(
                f"intermediate_output_index is {intermediate_output_index}; leave it out, and take "
                "the output of a block from intermediates(images)"
            )
        given: dict[str, Any] = {
            "patch_size": patch_size,
            "hidden_dim": hidden_dim,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "mlp_dim": intermediate_dim,
            "approximate_gelu": GELUS[intermediate_activation],
            "layer_norm_epsilon": 1e-5,
            "use_patch_bias": False,
            "pre_norm": True,
            "position_interpolation": "bicubic",
        }
        super().__init__(image_shape, **{**given, **fields})

    @classmethod
    def fits_preset(cls, name: str, fields: Mapping[str, Any]) -> bool:
        """Returns those of CLIP."""
        return name.startswith("clip_")


@keras.saving.register_keras_serializable(package="kmodels")
class SigLIPVisionEncoder(ViTBackbone):
    """SigLIP's vision tower with its attention pooling (Zhai et al. 2023).

    Args:
        patch_size: side of the square patches, in pixels.
        hidden_dim: width of the tokens.
        num_layers: blocks.
        num_heads: attention heads.
        intermediate_dim: width of the MLP, `mlp_dim` elsewhere.
        intermediate_activation: "gelu_approximate", "gelu" or "quick_gelu".
        layer_norm_epsilon: epsilon of the norms.
        image_shape: (height, width, channels) in pixels.
        **fields: of `ViTBackbone` and `ViTConfig`.

    Call:
        images (B, height, width, C), or {"images": ...} -> (B, hidden_dim).

    Raises:
        InputError: for another activation.
    """

    named_inputs = True
    intermediate_dim = config_field("mlp_dim")
    own_parts = ("pooling/",)

    @in_order(
        *("patch_size", "hidden_dim", "num_layers", "num_heads", "intermediate_dim"),
        *("intermediate_activation", "layer_norm_epsilon", "image_shape", "data_format", "dtype"),
        *("name",),
    )
    def __init__(
        self,
        patch_size: int | Sequence[int] = 16,
        hidden_dim: int = 768,
        num_layers: int = 12,
        num_heads: int = 12,
        intermediate_dim: int = 3072,
        intermediate_activation: str = "gelu_approximate",
        layer_norm_epsilon: float = 1e-6,
        image_shape: tuple[int, int, int] = (224, 224, 3),
        **fields: Any,
    ):
        check_gelu(intermediate_activation)
        given: dict[str, Any] = {
            "patch_size": patch_size,
            "hidden_dim": hidden_dim,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "mlp_dim": intermediate_dim,
            "approximate_gelu": GELUS[intermediate_activation],
            "layer_norm_epsilon": layer_norm_epsilon,
            "use_class_token": False,
            "position_interpolation": "bicubic",
        }
        super().__init__(image_shape, **{**given, **fields})

    @classmethod
    def fits_preset(cls, name: str, fields: Mapping[str, Any]) -> bool:
        """Returns those of SigLIP and SigLIP 2."""
        return name.startswith("siglip")

    @staticmethod
    def last_steps(config: ViTConfig, policy: keras.DTypePolicy) -> list[Any]:
        """Returns the attention pooling."""
        return [Pooling("map", config, name="pooling", dtype=policy)]

"""keras-hub's class names for kinds of ViT, with its arguments and defaults.

Each class is `ViTBackbone` with other defaults. It also takes the fields of `ViTConfig`, under
which its config is saved.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.models.blocks.encoder_config import GELUS, config_field
from kmodels.models.blocks.hub_order import in_order
from kmodels.models.vit.classifier import ViTImageClassifier
from kmodels.models.vit.model import ViTBackbone
from kmodels.models.vit.preprocessor import ViTImageClassifierPreprocessor, ViTImageConverter
from kmodels.models.vit.weights.dinov2 import gated_dim


@keras.saving.register_keras_serializable(package="kmodels")
class DeiTBackbone(ViTBackbone):
    """A ViT with a distillation token (Touvron et al. 2021).

    Args:
        intermediate_dim: width of the MLP, the `mlp_dim` of `ViTConfig`.
        **fields: of `ViTBackbone` and `ViTConfig`.

    Raises:
        InputError: for a checkpoint without a distillation token.
    """

    intermediate_dim = config_field("mlp_dim")

    @in_order(
        *("image_shape", "patch_size", "num_layers", "num_heads", "hidden_dim"),
        *("intermediate_dim", "dropout_rate", "attention_dropout", "layer_norm_epsilon"),
        *("use_mha_bias", "data_format", "dtype"),
    )
    def __init__(self, intermediate_dim: int = 3072, **fields: Any):
        defaults = {"mlp_dim": intermediate_dim, "use_distillation_token": True}
        super().__init__(**{**defaults, "position_interpolation": "bicubic", **fields})
        if not self.config.use_distillation_token:
            raise InputError("DeiTBackbone has a distillation token; without it take ViTBackbone")

    @classmethod
    def fits_preset(cls, name: str, fields: Mapping[str, Any]) -> bool:
        """Returns True if the preset has a distillation token."""
        return bool(fields.get("use_distillation_token"))


class PyramidBackbone(ViTBackbone):
    """A ViT with the outputs of all blocks under keras-hub's names.

    Args:
        apply_layernorm: applies the final norm to each of `pyramid_outputs`.
        **fields: of `ViTBackbone` and `ViTConfig`.
    """

    named_inputs = True

    def __init__(self, apply_layernorm: bool = False, **fields: Any):
        super().__init__(**fields)
        self.apply_layernorm = apply_layernorm

    @property
    def pyramid_outputs(self) -> dict[str, Any]:
        """The input of the first block and the outputs of all blocks."""
        names = {"tokens": "stem"} | {
            f"block_{i}": f"stage{i + 1}" for i in range(self.config.num_layers)
        }
        outputs = {name: self.stages[stage] for stage, name in names.items()}
        if self.apply_layernorm:
            outputs = {name: self.get_layer("final_norm")(x) for name, x in outputs.items()}
        return outputs

    def get_config(self) -> dict[str, Any]:
        """Returns the config's fields, the policy, the name and `apply_layernorm`."""
        return {**super().get_config(), "apply_layernorm": self.apply_layernorm}


@keras.saving.register_keras_serializable(package="kmodels")
class DINOV2Backbone(PyramidBackbone):
    """A ViT with layer scale, and optional registers or SwiGLU (Oquab et al. 2023).

    Args:
        intermediate_dim: width of the MLP; SwiGLU uses two thirds of it.
        layer_scale_init_value: initial value of the residual scales.
        position_embedding_shape: must be `image_shape`, or None: the table is of the size of the
            images, and files are resized when they are read.
        antialias_in_interpolation: how files are resized.
        **fields: of `ViTBackbone` and `ViTConfig`, and `apply_layernorm`, which applies the final
            norm to each of `pyramid_outputs`. By default `patch_size` is 14, `use_mask_token` is
            True, and `dropout_rate` is also that of the attention weights.

    Attributes:
        pyramid_outputs: symbolic outputs by name: "stem", "stage1", "stage2", ...

    Raises:
        InputError: for a table of positions of another size.
    """

    @in_order(
        *("patch_size", "num_layers", "hidden_dim", "num_heads", "intermediate_dim"),
        *("layer_scale_init_value", "num_register_tokens", "use_mask_token", "use_swiglu_ffn"),
        *("dropout_rate", "drop_path_rate", "image_shape", "position_embedding_shape"),
        *("antialias_in_interpolation", "apply_layernorm", "data_format", "dtype", "name"),
    )
    def __init__(
        self,
        intermediate_dim: int = 3072,
        layer_scale_init_value: float = 1.0,
        position_embedding_shape: Sequence[int] | None = None,
        antialias_in_interpolation: bool = False,
        **fields: Any,
    ):
        gated, smooth = fields.get("use_swiglu_ffn", False), antialias_in_interpolation
        defaults: dict[str, Any] = {
            "image_shape": (224, 224, 3),
            "patch_size": 14,
            "mlp_dim": gated_dim(intermediate_dim, 1) if gated else intermediate_dim,
            "layer_scale": layer_scale_init_value,
            "use_mask_token": True,
            "attention_dropout": fields.get("dropout_rate", 0.0),
            "position_interpolation": "bicubic_antialias" if smooth else "bicubic",
        }
        fields = {**defaults, **fields}
        images, table = tuple(fields["image_shape"]), position_embedding_shape
        if table is not None and tuple(table[:2]) != images[:2]:
            raise InputError(
                f"position_embedding_shape is {tuple(table)}; the table has the size of the "
                f"images, {images}: leave it out, files are resized when they are read"
            )
        super().__init__(**fields)

    @classmethod
    def fits_preset(cls, name: str, fields: Mapping[str, Any]) -> bool:
        """Returns True for presets of DINOv2."""
        return name.startswith("dinov2_")


@keras.saving.register_keras_serializable(package="kmodels")
class DINOV3Backbone(PyramidBackbone):
    """A ViT with rotary instead of learned positions (Simeoni et al. 2025).

    Args:
        intermediate_dim: width of the MLP.
        layer_scale_init_value: initial value of the residual scales.
        hidden_activation: "gelu", "gelu_approximate" or "quick_gelu"; with `use_gated_mlp` "silu".
        use_gated_mlp: SwiGLU instead of GELU.
        layer_norm_eps: epsilon of the norms, the `layer_norm_epsilon` of `ViTConfig`.
        **fields: of `ViTBackbone` and `ViTConfig`, and `apply_layernorm`, which applies the final
            norm to each of `pyramid_outputs`. By default there are four register tokens, a mask
            token, a `rope_theta` of 100, and images of 518 x 518 pixels.

    Attributes:
        pyramid_outputs: symbolic outputs by name: "stem", "stage1", "stage2", ...

    Call:
        images (B, height, width, C), or {"pixel_values": ...} -> tokens (B, prefix + P, D).

    Raises:
        InputError: for another activation.
    """

    input_name = "pixel_values"
    intermediate_dim = config_field("mlp_dim")
    layer_scale_init_value = config_field("layer_scale")
    use_gated_mlp = config_field("use_swiglu_ffn")
    layer_norm_eps = config_field("layer_norm_epsilon")

    @in_order(
        *("patch_size", "num_layers", "hidden_dim", "num_heads", "intermediate_dim"),
        *("layer_scale_init_value", "num_register_tokens", "use_mask_token", "hidden_activation"),
        *("use_gated_mlp", "use_query_bias", "use_key_bias", "use_value_bias", "use_proj_bias"),
        *("use_mlp_bias", "attention_dropout", "drop_path_rate", "layer_norm_eps", "image_shape"),
        *("rope_theta", "apply_layernorm", "data_format", "dtype", "name"),
    )
    def __init__(
        self,
        intermediate_dim: int = 3072,
        layer_scale_init_value: float = 1.0,
        hidden_activation: str = "gelu",
        use_gated_mlp: bool = False,
        layer_norm_eps: float = 1e-5,
        **fields: Any,
    ):
        known = ("silu",) if use_gated_mlp else tuple(GELUS)
        if hidden_activation not in known:
            raise InputError(
                f"hidden_activation is {hidden_activation!r} with use_gated_mlp={use_gated_mlp}; "
                f"choose one of {', '.join(known)}"
            )
        defaults: dict[str, Any] = {
            "image_shape": (518, 518, 3),
            "mlp_dim": intermediate_dim,
            "layer_scale": layer_scale_init_value,
            "num_register_tokens": 4,
            "use_mask_token": True,
            "approximate_gelu": GELUS.get(hidden_activation, False),
            "use_swiglu_ffn": use_gated_mlp,
            "layer_norm_epsilon": layer_norm_eps,
            "rope_theta": 100.0,
            "use_position_embedding": False,
        }
        super().__init__(**{**defaults, **fields})

    @classmethod
    def fits_preset(cls, name: str, fields: Mapping[str, Any]) -> bool:
        """Returns True for presets of DINOv3."""
        return name.startswith("dinov3_")


@keras.saving.register_keras_serializable(package="kmodels")
class DeiTImageConverter(ViTImageConverter):
    """`ViTImageConverter` by keras-hub's name for DeiT."""


@keras.saving.register_keras_serializable(package="kmodels")
class DINOV2ImageConverter(ViTImageConverter):
    """`ViTImageConverter` by keras-hub's name for DINOv2."""


@keras.saving.register_keras_serializable(package="kmodels")
class DINOV3ImageConverter(ViTImageConverter):
    """`ViTImageConverter` by keras-hub's name for DINOv3."""


@keras.saving.register_keras_serializable(package="kmodels")
class CLIPImageConverter(ViTImageConverter):
    """`ViTImageConverter` by keras-hub's name for CLIP."""


@keras.saving.register_keras_serializable(package="kmodels")
class SigLIPImageConverter(ViTImageConverter):
    """`ViTImageConverter` by keras-hub's name for SigLIP."""


@keras.saving.register_keras_serializable(package="kmodels")
class DeiTImageClassifierPreprocessor(ViTImageClassifierPreprocessor):
    """`ViTImageClassifierPreprocessor` by keras-hub's name for DeiT."""


@keras.saving.register_keras_serializable(package="kmodels")
class DeiTImageClassifier(ViTImageClassifier):
    """`ViTImageClassifier` of a `DeiTBackbone`, by default on the class token as in keras-hub."""

    backbone_class = DeiTBackbone
    preprocessor_class = DeiTImageClassifierPreprocessor
    __init__ = in_order(
        *("backbone", "num_classes", "preprocessor", "pooling", "activation", "dropout"),
        *("head_dtype",),
    )(ViTImageClassifier.__init__)

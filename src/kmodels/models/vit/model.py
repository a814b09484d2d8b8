"""The Vision Transformer, readable from images to tokens.

Differences from the plain transformer encoder:
- the sequence is the patches of an image, row by row, with learned positions;
- norms are before attention and MLP, and once more after the last block;
- the first token may be a class token, followed by a distillation token and registers;
- residual branches may have a learned scale (layer scale) and stochastic depth;
- queries and keys of the patches may have a rotary position embedding.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import keras

from kmodels.core import keras_internals, traced
from kmodels.core.errors import InputError
from kmodels.core.types import DTypeLike, Tensor, Tree
from kmodels.layers import Dropout, LayerNorm
from kmodels.layers.placement import of_family
from kmodels.models.blocks.encoder_block import NO_INFO, EncoderBlock, EncoderInfo
from kmodels.models.blocks.encoder_config import config_field
from kmodels.models.blocks.hub_order import in_order
from kmodels.models.blocks.sharding import BLOCKS, KERNEL
from kmodels.models.vit import fewer_tokens
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.fewer_tokens import PatchDropout
from kmodels.models.vit.layers import PatchCoordinates, PatchEmbedding, Pooling, Tokens
from kmodels.task import Backbone, Presets

T = TypeVar("T", bound=Presets)

# Meaning of each dimension of a variable, see `kmodels.distribution.layout`.
LAYOUT: dict[str, tuple[str | None, ...]] = {
    r"(?:.*/)?patch_embedding/kernel": (None, "embed"),
    r"(?:.*/)?tokens/.*": (None, None, "embed"),
    **BLOCKS,
    rf"(?:.*/)?(?:pre_logits|logits|distillation_logits|pixel_logits)/{KERNEL}": ("embed", None),
}


@keras.saving.register_keras_serializable(package="kmodels", name="ViTBlock")
class Block(EncoderBlock):
    """`EncoderBlock` of a `ViTConfig`.

    Call:
        as `EncoderBlock`; with a `fewer_tokens.Merging` as `info`, see
        `fewer_tokens.merging_block`.
    """

    config_class = ViTConfig
    config: ViTConfig

    def call(
        self, x: Tensor, info: Any = NO_INFO, training: bool = False, keep: int | None = None
    ) -> Any:
        """(B, T, D) -> (B, T, D), or (B, keep, D)."""
        if isinstance(info, fewer_tokens.Merging):
            return fewer_tokens.merging_block(self, x, info, training, keep)
        return super().call(x, info, training, keep)


def make_blocks(config: ViTConfig, policy: keras.DTypePolicy) -> list[Block]:
    """Returns the blocks; their stochastic depth grows linearly unless it is constant."""
    last = max(config.num_layers - 1, 1)
    shares = [1 if config.drop_path_constant else i / last for i in range(config.num_layers)]
    return [
        Block(config, config.drop_path_rate * share, name=f"block_{i}", dtype=policy)
        for i, share in enumerate(shares)
    ]


@keras.saving.register_keras_serializable(package="kmodels")
class ViTBackbone(Backbone):
    """A Vision Transformer without a head.

    Args:
        image_shape: (height, width, channels) in pixels.
        dtype: policy, such as "mixed_bfloat16"; Keras' global one by default.
        name: name of the model.
        data_format: "channels_last" or None.
        **sizes: the other fields of `ViTConfig`, each of which is also an attribute of the
            model.

    Attributes:
        named_inputs: True if the input is {"images": ...}, as in some classes of keras-hub.
        input_name: the key of the images in that dictionary.
        token_embedding: None, as in keras-hub's models of images.
        pools: True if attention pooling follows the final norm.

    Call:
        images (B, height, width, C), preprocessed floats, or {"images": ...} -> tokens
        (B, prefix + P, D), or with `keep` the first tokens only: (B, keep, D).

    Raises:
        InputError: for sizes that do not fit together, or names that `ViTConfig` lacks.

    Source:
        Dosovitskiy et al. 2021; variants as in timm's `vision_transformer`.
    """

    config_class = ViTConfig
    family = "vit"
    layout = LAYOUT
    named_inputs: ClassVar[bool] = False
    input_name: ClassVar[str] = "images"
    token_embedding = None
    pools: ClassVar[bool] = False

    @in_order(
        *("image_shape", "patch_size", "num_layers", "num_heads", "hidden_dim"),
        *("mlp_dim", "dropout_rate", "attention_dropout", "layer_norm_epsilon", "use_mha_bias"),
        *("use_mlp_bias", "use_class_token", "use_patch_bias", "data_format", "dtype"),
    )
    @of_family
    def __init__(
        self,
        image_shape: tuple[int, int, int] = (224, 224, 3),
        dtype: DTypeLike = None,
        name: str | None = None,
        data_format: str | None = None,
        **sizes: Any,
    ):
        if data_format not in (None, "channels_last"):
            raise InputError(
                f"data_format is {data_format!r}; images are (height, width, channels): leave it "
                "out"
            )
        config = self.make_config(image_shape=image_shape, **sizes)
        policy = keras.dtype_policies.get(dtype or keras.config.dtype_policy())

        # === Layers ===
        patch_embedding = PatchEmbedding(
            config.patch_size,
            config.hidden_dim,
            config.use_patch_bias,
            name="patch_embedding",
            dtype=policy,
        )
        tokens = Tokens(config, name="tokens", dtype=policy)
        dropout = Dropout(config.dropout_rate, name="token_dropout", dtype=policy)
        blocks = make_blocks(config, policy)

        def norm(name: str) -> LayerNorm:
            return LayerNorm(config.layer_norm_epsilon, name=name, dtype=policy)

        steps = [patch_embedding, tokens, dropout]
        drops = None
        if config.patch_drop_rate:
            drops = PatchDropout(config, name="patch_dropout", dtype=policy)
            steps.append(drops)
        steps += [norm("pre_norm")] if config.pre_norm else []
        steps += blocks
        steps += [norm("final_norm")] if config.final_norm else []
        if self.pools:
            steps.append(Pooling("map", config, name="pooling", dtype=policy))
        places = None
        if config.rope_theta is not None:
            places = PatchCoordinates(config, name="coordinates", dtype=policy)

        # === Graph ===
        dtype = "float64" if policy.compute_dtype == "float64" else "float32"
        x = images = keras.Input(config.image_shape, name=self.input_name, dtype=dtype)
        out = {}
        info = NO_INFO if places is None else EncoderInfo(coordinates=places(images))
        for step in steps:
            if drops is not None and step is drops:
                x, info = drops.thin(x, info)
                continue
            x = step(x, info=info) if step in blocks else step(x)
            if step is not dropout:
                out[step.name] = x
        inputs = {self.input_name: images} if self.named_inputs else images
        super().__init__(config=config, intermediates=out, inputs=inputs, outputs=x, name=name)

        # === Config ===
        self.stages = out
        self.blocks = blocks
        self.steps = steps
        self.coordinates = places
        self.dtype_policy = policy
        # What compiled steps follow, see `kmodels.core.traced`: `token_merging` may be set.
        self.variant = (config,)

    def call(
        self, inputs: Tree, training: bool | None = None, mask: Tree = None, keep: int | None = None
    ) -> Any:
        """Images to tokens; with `keep`, the last block computes the first `keep` tokens only.

        Earlier blocks compute all tokens, since each token attends to all others.
        """
        if keras_internals.has_mask(mask):
            return super().call(self._given(inputs), training=training, mask=mask)
        traced.note()
        (x,) = keras_internals.standardized(self, self._given(inputs))
        mode = {} if training is None else {"training": training}
        info = self.info(x, **mode)
        first, last = self.steps.index(self.blocks[0]), self.steps.index(self.blocks[-1])
        for step in self.steps[:first]:
            if isinstance(step, PatchDropout):
                x, info = step.thin(x, info, **mode)
            else:
                x = step(x, **mode)
        if self.config.token_merging:
            x = fewer_tokens.merge_through(self.blocks, x, info, keep, **mode)
        else:
            for block in self.blocks[:-1]:
                x = block(x, info=info, **mode)
            x = self.blocks[-1](x, info=info, keep=keep, **mode)
        for step in self.steps[last + 1 :]:
            x = step(x, **mode)
        return x

    def info(self, images: Tensor, **mode: bool) -> EncoderInfo:
        """Returns the `EncoderInfo` of the tokens of images (B, height, width, C)."""
        if self.coordinates is None:
            return NO_INFO
        return EncoderInfo(coordinates=self.coordinates(images, **mode))

    def compute_output_spec(
        self, inputs: Tree, training: bool | None = None, mask: Tree = None, keep: int | None = None
    ) -> Any:
        """Returns the symbolic output of `call`."""
        spec = super().compute_output_spec(self._given(inputs), training=training, mask=mask)
        if keep is None:
            return spec
        return keras.KerasTensor((spec.shape[0], keep, spec.shape[2]), spec.dtype)

    def intermediates(self, inputs: Tree) -> dict[str, Any]:
        """Returns every named intermediate of one forward pass, in the order of computation."""
        return super().intermediates(self._given(inputs))

    def _given(self, inputs: Any) -> Any:
        """Returns the images in the structure of the graph's input."""
        if isinstance(inputs, Mapping) == self.named_inputs:
            return inputs
        if self.named_inputs:
            return {self.input_name: inputs}
        return inputs[self.input_name]

    def resized(self: T, image_size: Sequence[int], patch_size: int | None = None) -> T:
        """Returns a copy for images, or patches, of another size.

        The position embedding is resized by its rule, the kernel of the patches by timm's, see
        `kmodels.models.vit.weights.resizing.resample`.

        Args:
            image_size: (height, width) in pixels.
            patch_size: side of a patch in pixels; None keeps it.

        Raises:
            InputError: for sides that the patch does not divide.
        """
        height, width = image_size
        backbone: Any = getattr(self, "backbone", self)
        fields: dict[str, Any] = {"image_shape": (height, width, backbone.config.image_shape[2])}
        fields |= {} if patch_size is None else {"patch_size": patch_size}
        # A preset follows adapters, quantized kernels and the rules for positions and patches.
        with tempfile.TemporaryDirectory() as folder:
            path = self.save_to_preset(Path(folder) / "model")
            return type(self).from_preset(path, dtype=backbone.dtype_policy, **fields)

    def feature_model(self, outputs: str | Sequence[str] = "sequence_output") -> keras.Model:
        """Returns a model of intermediate outputs that shares the weights.

        Args:
            outputs: "sequence_output", the output (B, prefix + P, D) of the backbone; or the name
                of a step, whose output is taken without the final norm: "tokens" (with positions,
                before the first block), "pre_norm" if there is one, "block_0", "block_1", ...;
                one name, or a list of names.

        Returns:
            images -> the output of that name, or a dictionary by name for several.

        Raises:
            InputError: for a name that is not there.
        """
        return feature_model(self, outputs)

    @staticmethod
    def peft_names(model: keras.Model) -> Sequence[Mapping[str, str]]:
        """See `Backbone.peft_names`."""
        from kmodels.models.vit.weights import module_names

        return module_names.names(model)

    def export_to_timm(self: keras.Model, directory: str | Path) -> Path:
        """Writes a directory that timm loads with equal results, atomically.

        It is for `timm.create_model("local-dir:<directory>")`; timm resizes position
        embeddings by its own rule, also those of other packages.

        Raises:
            InputError: lists settings that timm's ViT lacks, or files that would be lost.
        """
        from kmodels.models.vit.weights import timm_export

        return timm_export.export_to_timm(self, directory)

    def export_to_npz(self: keras.Model, path: str | Path) -> Path:
        """Writes an .npz file as vision_transformer does, without class token as big_vision.

        timm and big_vision read it, whose rule for resizing position embeddings holds from there.

        Raises:
            InputError: lists settings that such a file cannot express.
        """
        from kmodels.models.vit.weights import augreg

        return augreg.export_to_npz(self, path)

    def attention_maps(self, images: Tree) -> list[Any]:
        """Returns the attention weights of each block.

        Returns:
            One float32 array (B, N, T, T) per block: from the query (third axis) to the key.
        """
        stages = self.intermediates(images)
        inputs = [stages.get("pre_norm", stages["tokens"])]
        inputs += [stages[block.name] for block in self.blocks[:-1]]
        places = None if self.coordinates is None else self.coordinates(inputs[0])
        return [
            block.attention.probabilities(block.attention_norm(x), positions=places)
            for block, x in zip(self.blocks, inputs, strict=True)
        ]


def feature_model(
    backbone: keras.Model,
    outputs: str | Sequence[str],
    more: Mapping[str, Callable[[Any], Any]] | None = None,
) -> keras.Model:
    """Implements `ViTBackbone.feature_model`; `more` are outputs computed from the sequence.

    Raises:
        InputError: for a name that is not there.
    """
    further = dict(more or {})
    known = [*further, "sequence_output", *backbone.stages]
    names = [outputs] if isinstance(outputs, str) else list(outputs)
    if not names or (unknown := [name for name in names if name not in known]):
        shown = ", ".join(map(repr, unknown)) if names else "nothing"
        raise InputError(f"feature_model got {shown}; choose from {', '.join(known)}")
    sequence = backbone.output

    def output(name: str) -> Any:
        if name in further:
            return further[name](sequence)
        return sequence if name == "sequence_output" else backbone.stages[name]

    results = {name: output(name) for name in names}
    only = results[outputs] if isinstance(outputs, str) else results
    return keras.Model(backbone.input, only, name="features")


def _merge(model: ViTBackbone, number: int) -> None:
    model.config = replace(model.config, token_merging=number)
    for block in model.blocks:
        block.config = model.config
    model.variant = (model.config,)
    traced.changed()
    model.predict_function = None


for _name in ViTConfig.__dataclass_fields__:
    setattr(ViTBackbone, _name, config_field(_name))
ViTBackbone.token_merging = ViTBackbone.token_merging.setter(_merge)

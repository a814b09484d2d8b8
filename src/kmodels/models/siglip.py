"""The towers of SigLIP (Zhai et al. 2023) and SigLIP 2: the text tower, and keras-hub's ViT."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import keras
import tokenizers
from tokenizers import Regex, normalizers

from kmodels.core import protobuf
from kmodels.core.errors import InputError, check_whole
from kmodels.core.remote import local_copy
from kmodels.core.types import Tensor
from kmodels.layers import Dense
from kmodels.models.blocks.encoder_block import EncoderBlock
from kmodels.models.blocks.encoder_config import GELUS, TextEncoderConfig, check_gelu, config_field
from kmodels.models.blocks.hub_order import in_order
from kmodels.models.blocks.image_converter import ImageConverter
from kmodels.models.blocks.image_prompts import PromptsAndImages
from kmodels.models.blocks.sizes import encoder
from kmodels.models.blocks.text_encoder import TextEncoderBackbone
from kmodels.models.blocks.text_encoder_files import Setting, TextTowerFormat, peft_names
from kmodels.models.blocks.tokenizer import LayerTokenizer
from kmodels.models.vit.model import ViTBackbone
from kmodels.registry import Family
from kmodels.text import Tokenizer, sentencepiece
from kmodels.text import settings as described
from kmodels.text.pieces import SPACE
from kmodels.text.sentencepiece import model_class

# === Config ===


@dataclass(frozen=True)
class SigLIPTextConfig(TextEncoderConfig):
    """Sizes of a SigLIP text tower; names as in keras-hub.

    Args:
        vocabulary_size: rows of the embedding table. Other fields are those of `TextEncoderConfig`.
        projection_dim: width of the vector of a text; `hidden_dim` by default.

    Raises:
        InputError: for sizes that do not fit together.
    """

    intermediate_activation: str = "gelu_approximate"
    max_sequence_length: int = 64
    layer_norm_epsilon: float = 1e-6
    projection_dim: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.projection_dim is None:
            object.__setattr__(self, "projection_dim", self.hidden_dim)
        check_whole("projection_dim", self.projection_dim)


# === Model ===


def names_with_head(model: keras.Model) -> Sequence[Mapping[str, str]]:
    """See `Backbone.peft_names`. The head is part of the tower."""
    tables = peft_names(model)
    query = "block_{i}/attention/query"
    return [{**table, "head": f"{table[query].partition('encoder.')[0]}head"} for table in tables]


@keras.saving.register_keras_serializable(package="kmodels")
class SigLIPTextBlock(EncoderBlock):
    """`EncoderBlock` of a `SigLIPTextConfig`."""

    config_class = SigLIPTextConfig


@keras.saving.register_keras_serializable(package="kmodels")
class SigLIPTextEncoder(TextEncoderBackbone):
    """SigLIP's text tower with its head; inputs are those of `TextEncoderBackbone`.

    Attention is bidirectional and includes padding: the published towers were trained on rows of
    one length. The vector of a text is its last position after a linear layer. A "padding_mask"
    masks tokens, which differs from the trained model.

    Args:
        *args: see `TextEncoderBackbone`; they are in keras-hub's order, as its other arguments.
        **kwargs: the other fields of `SigLIPTextConfig`.

    Call:
        {"token_ids": (B, T) int, "padding_mask": (B, T) int or bool}, or token ids alone ->
        (B, projection_dim).

    Source:
        Zhai et al. 2023, arXiv:2303.15343; Transformers' `modeling_siglip`.
    """

    config_class = SigLIPTextConfig
    block_class = SigLIPTextBlock
    family = "siglip"
    peft_names = staticmethod(names_with_head)

    __init__ = in_order(
        *("vocabulary_size", "embedding_dim", "hidden_dim", "num_layers", "num_heads"),
        *("intermediate_dim", "intermediate_activation", "layer_norm_epsilon"),
        *("max_sequence_length", "projection_dim", "dtype", "name"),
    )(TextEncoderBackbone.__init__)

    @staticmethod
    def finish(hidden: Tensor, config: SigLIPTextConfig, policy: keras.DTypePolicy) -> Any:
        """Returns the head's output for the last position: (B, T, D) -> (B, projection_dim)."""
        width = config.projection_dim or config.hidden_dim
        return Dense(width, name="head", dtype=policy)(hidden[:, -1])

    def pool(self, hidden: Tensor, token_ids: Tensor) -> Any:
        """Returns `hidden`, which the model has pooled already: (B, P) -> (B, P)."""
        return hidden


@keras.saving.register_keras_serializable(package="kmodels")
class SigLIPVisionEncoder(ViTBackbone):
    """SigLIP's vision tower with its attention pooling (Zhai et al. 2023).

    Args:
        intermediate_dim: width of the MLP, the `mlp_dim` of `ViTConfig`.
        intermediate_activation: "gelu_approximate", "gelu" or "quick_gelu".
        **fields: of `ViTBackbone` and `ViTConfig`.

    Call:
        images (B, height, width, C), or {"images": ...} -> (B, hidden_dim).

    Raises:
        InputError: for another activation.
    """

    named_inputs = True
    intermediate_dim = config_field("mlp_dim")
    own_parts = ("pooling/",)
    pools = True

    @in_order(
        *("patch_size", "hidden_dim", "num_layers", "num_heads", "intermediate_dim"),
        *("intermediate_activation", "layer_norm_epsilon", "image_shape", "data_format"),
        *("dtype", "name"),
    )
    def __init__(
        self,
        intermediate_dim: int = 3072,
        intermediate_activation: str = "gelu_approximate",
        **fields: Any,
    ):
        check_gelu(intermediate_activation)
        defaults: dict[str, Any] = {
            "mlp_dim": intermediate_dim,
            "approximate_gelu": GELUS[intermediate_activation],
            "use_class_token": False,
            "position_interpolation": "bicubic",
        }
        super().__init__(**{**defaults, **fields})

    @classmethod
    def fits_preset(cls, name: str, fields: Mapping[str, Any]) -> bool:
        """Returns True for presets of SigLIP and SigLIP 2."""
        return name.startswith("siglip")


# === Text ===

log = logging.getLogger("kmodels")
PIECES = "spiece.model"
# End and padding token of SigLIP's own vocabulary; SigLIP 2 has Gemma's.
END = "</s>"
PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]\^_`{|}~]"""


@keras.saving.register_keras_serializable(package="kmodels")
class SigLIPTokenizer(LayerTokenizer):
    """A `kmodels.text.Tokenizer` of lowercased texts for SigLIP and SigLIP 2.

    SigLIP's own vocabulary ("spiece.model") has no punctuation: it is removed as in training, and
    runs of spaces are merged into one. If `do_lower_case` is false in the settings, texts are not
    lowercased. SigLIP 2 has Gemma's vocabulary and keeps punctuation.

    Args:
        proto: path of a SentencePiece model, its content as bytes or in base64, or a
            `tokenizers.Tokenizer`.
        **kwargs: arguments of `LayerTokenizer`.

    Raises:
        InputError: for a file that is not a SentencePiece model.
    """

    unknown_token = "<unk>"
    # Rows have no mask, so padding has one side.
    idle_at = {"padding_side": ("right",)}  # noqa: RUF012

    def __init__(self, proto: tokenizers.Tokenizer | str | Path | bytes, **kwargs: Any):
        if isinstance(proto, tokenizers.Tokenizer):
            core = proto
        else:
            content, origin = sentencepiece.content_of(proto)
            core, named = sentencepiece.parse(content, origin)
            if core.token_to_id(END) is not None:
                core.normalizer = _plain_words(content)
                named = {**named, "pad": END}
            kwargs = {**named, **kwargs}
        own, settings = core.normalizer, kwargs.get("settings") or {}
        keeps_case = core.token_to_id(END) is not None and settings.get("do_lower_case") is False
        # Lowercase must be the first step.
        if not keeps_case and (own is None or '"type":"Lowercase"' not in core.to_str()):
            steps = [normalizers.Lowercase(), *([] if own is None else [own])]
            core.normalizer = normalizers.Sequence(steps)
        super().__init__(core, **{**kwargs, "stop": ()})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Same as `Tokenizer.encode`; SigLIP's own vocabulary adds the end token."""
        ids, end = super().encode(text, add_special_tokens), self.core.token_to_id(END)
        return [*ids, end] if add_special_tokens and end is not None and ids[-1:] != [end] else ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Returns the ids of each text; a text without words is one space, as in transformers."""
        rows, blank = super().encode_batch(texts), self.core.token_to_id(SPACE)
        if blank is None or self.core.token_to_id(END) is None:
            return rows
        return [row or [blank] for row in rows]

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Same as `Tokenizer.from_file`; a directory may also hold spiece.model."""
        folder = local_copy(path)
        file = folder / PIECES if folder.is_dir() else folder
        if file.suffix not in (".model", ".spm") or not file.is_file():
            return super().from_file(folder)
        idle_at = {**cls.idle_at, "split_special_tokens": (False,)}
        settings = described.read(file.parent, idle_at)
        tokenizer = cls(file, settings=settings, **described.names(settings))
        added = described.added_tokens(file.parent).values()
        texts = {token.content for token in (*added, *described.control_tokens(settings))}
        usual = {*tokenizer.special_tokens, cls.unknown_token} - {tokenizer.pad_token}
        if more := texts - usual - {END}:
            log.warning(
                "%s names the tokens %s, which are not cut out of a text with SigLIP's own "
                "vocabulary; give the tokenizer.json of the model",
                file.parent / described.CONFIG,
                ", ".join(sorted(more)),
            )
        return tokenizer


@keras.saving.register_keras_serializable(package="kmodels")
class SigLIPPreprocessor(PromptsAndImages):
    """`PromptsAndImages` of SigLIP, by default for rows of 64 tokens without a start token.

    Args:
        tokenizer: a `SigLIPTokenizer`, another `kmodels.text.Tokenizer`, its `to_dict`, or a path.
        image_converter: a `SigLIPImageConverter`, or None for text only.
        sequence_length: tokens of a row.
        add_start_token: adds the start token to each text.
        add_end_token: adds the end token to each text.
        canonicalize_text: must be True, keras-hub's default: the tokenizer lowercases all texts,
            and SigLIP's own also removes punctuation.
        **kwargs: arguments of `keras.layers.Layer`.

    Raises:
        InputError: as `PromptsAndImages`, or for `canonicalize_text=False`.
    """

    family = "siglip"
    tokenizer_class = SigLIPTokenizer
    reader = "SigLIP"

    def __init__(
        self,
        tokenizer: Tokenizer | Mapping[str, Any] | str | Path,
        image_converter: ImageConverter | Mapping[str, Any] | None = None,
        sequence_length: int = 64,
        add_start_token: bool = False,
        add_end_token: bool = True,
        canonicalize_text: bool = True,
        **kwargs: Any,
    ):
        if not canonicalize_text:
            raise InputError(
                f"canonicalize_text is {canonicalize_text}, but SigLIP's tokenizer does it with "
                "all texts; leave it out"
            )
        ends = (add_start_token, add_end_token)
        super().__init__(tokenizer, image_converter, sequence_length, *ends, **kwargs)


def _plain_words(content: bytes) -> normalizers.Normalizer:
    """Returns the normalizer of a SentencePiece model: words without punctuation, after spaces."""
    rules = protobuf.parse(model_class(), content).normalizer_spec
    steps: list[normalizers.Normalizer] = [
        normalizers.Replace(Regex(PUNCTUATION), ""),
        normalizers.Replace(Regex(r"\s+"), " "),
        normalizers.Strip(left=False),
        normalizers.Prepend(SPACE),
    ]
    if rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


# === Hugging Face ===

FORMAT = TextTowerFormat(
    kinds=("siglip_text_model", "siglip", "siglip2_text_model", "siglip2"),
    architectures=("SiglipTextModel",),
    defaults={
        **{"vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 3072},
        **{"num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 64},
        **{"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "attention_dropout": 0.0},
        "projection_size": None,
    },
    others=("vision_model.", "logit_scale", "logit_bias"),
    settings={
        "projection_dim": Setting("projection_size", lambda path, width: width, lambda width: width)
    },
    layers={"head": "head"},
)

# === Presets ===


def _size(layers: int, heads: int, width: int, mlp: int, **more: Any) -> dict[str, Any]:
    return {
        **{"vocabulary_size": 32_000, "embedding_dim": width, "hidden_dim": width},
        **{"num_layers": layers, "num_heads": heads, "intermediate_dim": mlp},
        **more,
    }


# SigLIP 2 has Gemma's vocabulary.
GEMMA: dict[str, Any] = {"vocabulary_size": 256_000}
PRESETS: dict[str, dict[str, Any]] = {
    # Zhai et al. 2023 (arXiv:2303.15343): the text towers of ViT-B and ViT-L, and of the
    # shape-optimised ViT (Alabdulmohsin et al. 2023, arXiv:2305.13035); sizes of the published
    # config.json files.
    "siglip_text_base": _size(12, 12, 768, 3072),
    "siglip_text_large": _size(24, 16, 1024, 4096),
    "siglip_text_so400m": _size(27, 16, 1152, 4304),
    # Tschannen et al. 2025, arXiv:2502.14786.
    "siglip2_text_base": _size(12, 12, 768, 3072) | GEMMA,
    "siglip2_text_large": _size(24, 16, 1024, 4096) | GEMMA,
    "siglip2_text_so400m": _size(27, 16, 1152, 4304) | GEMMA,
    "siglip2_text_giant": _size(27, 16, 1152, 4304, projection_dim=1536) | GEMMA,
    # Below 100,000 parameters.
    "siglip_text_debug": _size(2, 2, 32, 64) | {"vocabulary_size": 320},
}

# === Family ===

FAMILY = Family(
    name="siglip",
    backbone=SigLIPTextEncoder,
    tasks=(),
    presets=PRESETS,
    formats=(FORMAT,),
    sizes=encoder,
    transformers_form=FORMAT.transformers_form,
)

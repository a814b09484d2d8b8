"""The GGUF file of a vision tower and its projector, as llama.cpp's converter writes it.

Its architecture is "clip". Names are those of the gguf package's table for a file of Hugging Face;
which tensors stay in another type than the rest is as in llama.cpp's `convert_hf_to_gguf.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.core.remote import write_file
from kmodels.models.blocks.encoder_rules import below
from kmodels.models.blocks.gguf.reading import IDLE_ANYWHERE, NOTES, OWNERS, lazy
from kmodels.models.blocks.gguf.writing import (
    FILES,
    KINDS,
    Setting,
    add_settings,
    add_tensors,
    check_file,
    check_package,
)
from kmodels.models.blocks.keras_hub_mapping import numbered
from kmodels.weights import LazyArray, Rule, engine
from kmodels.weights.gguf import Settings, open_gguf

ARCHITECTURE, ENCODER = "clip", "vision_encoder"
HALF = (0.5, 0.5, 0.5)
IDLE_AT: dict[str, tuple[object, ...]] = {
    **IDLE_ANYWHERE,
    "clip.has_vision_encoder": (True,),
    "clip.has_audio_encoder": (False,),
    "clip.has_llava_projector": (False,),
    "clip.use_silu": (False,),
}


@dataclass(frozen=True)
class Projector:
    """A vision encoder as its file says it.

    Args:
        kind: llama.cpp's name of the projector.
        settings: an encoder to the settings of its file, without "clip." in front, in order.
        fields: a reader of settings, by names without "clip.", to the arguments of an encoder here.
        table: an encoder to rules with names of Hugging Face.
        absent: an encoder to the names of settings that a file cannot store.
        types: parts of names in the file to the type of such tensors, which no dtype changes.
        todays: (tensors of a file, width of the tower) to the same by the names that are written.
    """

    kind: str
    settings: Callable[[Any], Mapping[str, Setting]]
    fields: Callable[[Callable[..., Any]], dict[str, Any]]
    table: Callable[[Any], Sequence[Rule]]
    absent: Callable[[Any], Sequence[str]]
    types: Mapping[str, str]
    todays: Callable[[Mapping[str, LazyArray], int], dict[str, LazyArray]]

    def check(self, model: keras.Model, path: str | Path, dtype: str) -> None:
        """Raises `InputError` if `write` would fail.

        That is another suffix or dtype, no gguf package, or an encoder that llama.cpp would take
        for another.
        """
        check_file(path, dtype)
        check_package()
        if lacks := self.absent(model.backbone.vision_encoder):
            raise InputError(
                f"llama.cpp's projector {self.kind} has no place for {', '.join(lacks)}; use "
                "export_to_transformers"
            )

    def write(self, model: keras.Model, path: str | Path, dtype: str) -> Path:
        """Writes the file of a model's vision encoder, atomically; `dtype` is a key of `KINDS`.

        Raises:
            InputError: as `check`.
        """
        self.check(model, path, dtype)
        encoder = model.backbone.vision_encoder
        tensors = engine.export(encoder, self.rules(encoder))
        converter = getattr(model.preprocessor, "image_converter", None)
        mean, std = (HALF, HALF) if converter is None else (converter.mean, converter.std)

        def write(temporary: Path) -> None:
            import gguf

            writer = gguf.GGUFWriter(temporary, ARCHITECTURE)
            writer.add_type(gguf.GGUFType.MMPROJ)
            writer.add_file_type(gguf.LlamaFileType[FILES[KINDS[dtype]]])
            writer.add_clip_has_vision_encoder(True)
            writer.add_clip_projector_type(self.kind)
            writer.add_vision_image_mean([float(x) for x in mean])
            writer.add_vision_image_std([float(x) for x in std])
            writer.add_vision_projection_dim(encoder.output_dim)
            add_settings(writer, ARCHITECTURE, self.settings(encoder))
            add_tensors(writer, tensors, KINDS[dtype], self.types)

        return write_file(path, write)

    def open(self, path: Path, width: int, weights: bool) -> "Opened":
        """Understands a file; `width` is that of the text.

        Raises:
            InputError: for a damaged file, or one of another projector or another text.
        """
        reader = open_gguf(path)
        settings = Settings(path, reader)

        def value(name: str, default: object = None) -> Any:
            return settings(f"{ARCHITECTURE}.{name}", default)

        kinds = settings("general.architecture"), value("projector_type")
        if kinds != (ARCHITECTURE, self.kind):
            raise InputError(
                f"{path} holds {kinds[0]!r} with the projector {kinds[1]!r}; the model reads "
                f"{ARCHITECTURE!r} with {self.kind!r}"
            )
        if (projection_dim := value("vision.projection_dim")) != width:
            raise InputError(
                f"{path} is of a text {projection_dim} wide, and the model beside it is {width} "
                "wide; give both files of one checkpoint"
            )
        fields = self.fields(value)
        tensors = {x.name: lazy(path, x) for x in reader.tensors} if weights else {}
        mean, std = value("vision.image_mean", HALF), value("vision.image_std", HALF)
        if weights:
            own = {f"{ARCHITECTURE}.vision.projector_type": (self.kind,)}
            settings.warn_of_others((*OWNERS, f"{ARCHITECTURE}."), NOTES, {**IDLE_AT, **own})
        return Opened(
            fields=fields,
            mean=mean,
            std=std,
            tensors=self.todays(tensors, fields["hidden_dim"]),
        )

    def rules(self, encoder: Any) -> list[Rule]:
        """Returns the table of a file, for the model that the encoder is in."""
        import gguf

        layers = encoder.num_layers
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, layers)
        table = []
        for rule in numbered(below(ENCODER, self.table(encoder)), layers, 0):
            # The matrix of the projector has no dot there. What llama.cpp has no name for is a part
            # of other towers.
            known = rule.source.replace("_weight", ".weight")
            if (name := names.get_name(known, (".weight", ".bias"))) is not None:
                table.append(replace(rule, source=name))
        return table


@dataclass(frozen=True)
class Opened:
    """A projector's file that was understood.

    Args:
        fields: arguments of the encoder here.
        mean: mean of each channel of the images.
        std: deviation of the same.
        tensors: tensors by their names in the file.
    """

    fields: dict[str, Any]
    mean: Sequence[float]
    std: Sequence[float]
    tensors: dict[str, LazyArray]

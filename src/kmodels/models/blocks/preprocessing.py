"""Preprocessors: Keras layers that turn raw data into inputs of a backbone, in NumPy."""

import inspect
import json
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import keras

from kmodels.core.arguments import Checked, Constructed
from kmodels.core.errors import InputError, check_names
from kmodels.core.files import atomic_write, local_path
from kmodels.core.schema import Needed, read_json, read_optional
from kmodels.core.types import Data, DTypeLike
from kmodels.data.pipeline import arrays
from kmodels.registry import Named
from kmodels.text.texts import in_graph

SETTINGS_FILE = "preprocessor.json"

# Arguments of `keras.layers.Layer` besides name and dtype.
_LAYER = ("activity_regularizer", "autocast", "trainable")
# Attributes that count what was done, which no argument changes.
_COUNTS = {"cut"}


# Layers have a metaclass with variables of Flax NNX.
_LayerType: Any = type(keras.layers.Layer)


class _Constructed(Constructed, _LayerType):
    pass


class Preprocessor(Checked, keras.layers.Layer, metaclass=_Constructed):
    """The base of every preprocessor and converter.

    A subclass computes in `call`, with NumPy; returns shapes and dtypes in `compute_output_spec`,
    for tf.data; and returns its arguments as plain values in `to_dict`. It has no weights. Setting
    an argument as an attribute later has the effect of another constructor call with it.

    Args:
        name: name of the layer.
        dtype: float32 or None; the model casts the outputs.
        **kwargs: of `keras.layers.Layer`.

    Attributes:
        family: the name of the family's folder, for `from_preset`.
        presets: the registered names of the family, each with the fields of its architecture.

    Call:
        x, y, sample_weight: raw data, as arrays or tensors of any framework, or as symbolic tensors
            inside `tf.data.Dataset.map`.

    Raises:
        InputError: for an argument that is not what its annotation says, another dtype, or a
            symbolic tensor of Keras.
    """

    family: ClassVar[str] = ""
    presets: ClassVar[Named] = Named()
    # This tells TensorFlow's autograph that there is nothing to translate: dataset.map would read
    # the source of all that is called here, and wrap its errors in some of its own.
    autograph_info__: ClassVar[dict[str, Any]] = {}

    def __init__(self, name: str | None = None, dtype: DTypeLike = None, **kwargs: Any):
        policy = keras.dtype_policies.get(dtype or "float32")
        if policy.compute_dtype != "float32":
            raise InputError(
                f"{type(self).__name__} has dtype {policy.name!r}; preprocessors give float32, and "
                "the model casts it: leave dtype out"
            )
        own = inspect.signature(type(self)).parameters
        check_names(type(self).__name__, kwargs, _LAYER, own)
        super().__init__(**{"name": name, "dtype": policy, **kwargs})
        self.built = True
        object.__setattr__(self, "_of_keras", frozenset(vars(self)))

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; an argument is checked, and what follows from it changes, too."""
        state = vars(self)
        has_setter = getattr(getattr(type(self), name, None), "fset", None) is not None
        if "_is_constructed" not in state or has_setter or name.startswith("_"):
            super().__setattr__(name, value)
            return
        own = inspect.signature(type(self)).parameters
        arguments = {**self._arguments(), **{key: state[key] for key in own if key in state}}
        open_ended = any(one.kind is one.VAR_KEYWORD for one in own.values())
        if name not in own and not (open_ended and name in arguments):
            super().__setattr__(name, value)
            return
        changed = type(self)(**{**arguments, name: value})
        if "_owner" in state and (owner := state["_owner"]()) is not None:
            owner.image_converter = changed
        for key in vars(changed).keys() - state["_of_keras"] - _COUNTS:
            object.__setattr__(self, key, vars(changed)[key])

    def _arguments(self) -> dict[str, Any]:
        """Returns the arguments that are not attributes; those that are take precedence."""
        return self.to_dict()

    def __call__(self, x: Data, y: Data = None, sample_weight: Data = None, **kwargs: Any) -> Any:
        """Makes inputs of the model from raw data, of which Keras' own call would make tensors."""
        columns = x if isinstance(x, dict) else {"": x}
        firsts = [_first(column) for column in columns.values()]
        if any(isinstance(first, keras.KerasTensor) for first in firsts):
            raise InputError(
                f"{type(self).__name__} works on data, not inside a model; call it on arrays, or "
                "hand it to a dataset's map"
            )
        if any(map(in_graph, firsts)):
            from kmodels.models.blocks import preprocessing_tensorflow

            functions = (partial(one, **kwargs) for one in (self.call, self.compute_output_spec))
            return preprocessing_tensorflow.call(*functions, x, y, sample_weight)
        return self.call(on_host(x), y, sample_weight, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Returns the arguments that make an equal one, as plain values."""
        raise NotImplementedError

    @classmethod
    def fitted(cls, arguments: dict[str, Any], config: object) -> dict[str, Any]:
        """Returns a checkpoint's arguments as this class takes them.

        Args:
            arguments: those of the checkpoint, for any class of the family.
            config: config of the backbone.
        """
        return dict(arguments)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments and the name."""
        return {"name": self.name, **self.to_dict()}

    @classmethod
    def from_preset(cls, preset: str | Path, **settings: Any) -> Self:
        """Makes the preprocessor that belongs to a checkpoint; `Preprocessor` finds its class.

        Args:
            preset: as in `from_preset` of the model, or a directory that `save_to_preset` of a
                preprocessor wrote.
            **settings: arguments to change.

        Raises:
            InputError: for an unknown name, or files of another preprocessor.
        """
        file = Path(preset) / SETTINGS_FILE
        if not cls.family:
            return cls._class_of(preset).from_preset(preset, **settings)
        if not file.is_file():
            from kmodels import presets

            return cls(**{**presets.preprocessor_settings(cls, preset), **settings})
        saved = read_json(file, {"class_name": Needed(str), "config": Needed({})})
        if saved.get("class_name") != cls.__name__:
            raise InputError(f"{file} holds a {saved.get('class_name')}, not a {cls.__name__}")
        return cls.from_config({**saved["config"], **settings})

    @classmethod
    def _class_of(cls, preset: str | Path) -> Any:
        """Returns the class below this base that a checkpoint or a saved preprocessor is for."""
        from kmodels import presets

        saved = read_optional(Path(preset) / SETTINGS_FILE).get("class_name")
        found = presets.class_named(str(saved))
        if isinstance(found, type) and issubclass(found, cls):
            return found
        return presets.class_below(cls, preset)

    def save_to_preset(self, directory: str | Path) -> None:
        """Writes the settings, and the files of a tokenizer, to a directory for `from_preset`.

        Raises:
            InputError: for the directory of a model, which has its preprocessor already.
        """
        folder = local_path(directory)
        if (folder / "config.json").is_file():
            raise InputError(
                f"{folder} holds a model, whose preprocessor is saved with it; set "
                "model.preprocessor and call model.save_to_preset, or give another directory"
            )
        folder.mkdir(parents=True, exist_ok=True)
        saved = {"class_name": type(self).__name__, "config": self._saved(folder)}
        text = json.dumps(saved, indent=2) + "\n"
        atomic_write(folder / SETTINGS_FILE, lambda at: at.write_text(text, encoding="utf-8"))

    def _saved(self, folder: Path) -> dict[str, Any]:
        return self.get_config()


class ImageClassifierPreprocessor(Preprocessor):
    """The base of preprocessors of classifiers; `from_preset` finds the class of a preset."""


class ImageSegmenterPreprocessor(Preprocessor):
    """The base of preprocessors of segmenters; `from_preset` finds the class of a preset."""


class ObjectDetectorPreprocessor(Preprocessor):
    """The base of preprocessors of detectors; `from_preset` finds the class of a preset."""


# The older name in keras-hub.
ImageObjectDetectorPreprocessor = ObjectDetectorPreprocessor


def on_host(x: Data) -> Any:
    """Returns data with tensors of TensorFlow as arrays, and ragged ones as lists of arrays."""
    if isinstance(x, dict):
        columns = {name: on_host(column) for name, column in x.items()}
        return columns if any(columns[name] is not x[name] for name in x) else x
    return arrays.on_host(x) if arrays.package(x) == "tensorflow" and not in_graph(x) else x


def _first(x: Data) -> Any:
    """Returns the first array, text or tensor of nested data."""
    while isinstance(x, dict | list | tuple) and len(x):
        x = next(iter(x.values())) if isinstance(x, dict) else x[0]
    return x

"""What every model can do, whatever its family."""

from pathlib import Path
from typing import Any, ClassVar, Self

import keras

from kmodels.errors import InputError


class Presets:
    """Making a model from a name or a file, and writing it to one."""

    @classmethod
    def from_preset(
        cls, preset: str | Path, dtype: Any = None, load_weights: bool = True, **overrides: Any
    ) -> Self:
        """Makes the model that a name or a directory describes.

        Args:
            preset: a registered name (an architecture with new weights), a directory written by
                `save_to_preset`, a checkpoint file or directory of another package, or an explicit
                "hf://" or "kaggle://" name. The network is used for the last two alone.
            dtype: policy, such as "mixed_bfloat16"; Keras' global one by default.
            load_weights: False gives the architecture with new weights.
            **overrides: fields of the config and arguments of the task to change.

        Raises:
            InputError: for an unknown name, or a file that does not fit; all that is wrong is
                listed, and nothing is half-loaded.
        """
        from kmodels import presets

        return presets.load(cls, preset, dtype=dtype, load_weights=load_weights, **overrides)

    def save_to_preset(self, directory: str | Path) -> Path:
        """Writes config and weights, atomically, to a directory that `from_preset` reads."""
        from kmodels import presets

        return presets.save(self, directory)

    def export_to_transformers(self, directory: str | Path) -> Path:
        """Writes a directory that Hugging Face transformers loads with equal logits."""
        from kmodels import presets

        return presets.export_to_transformers(self, directory)


class Backbone(Presets, keras.Model):
    """A model without a head, described by a frozen config.

    Attributes:
        config: the family's dataclass.
        family: the name of the family's folder.
    """

    config_class: ClassVar[type]
    family: ClassVar[str]

    def __init__(self, *, config: Any, intermediates: dict[str, Any], **kwargs: Any):
        super().__init__(**kwargs)
        self.config = config
        self._named = dict(intermediates)
        self._inspector: keras.Model | None = None

    @classmethod
    def make_config(cls, **fields: Any) -> Any:
        """The config of these fields; unknown names raise."""
        known = cls.config_class.__dataclass_fields__
        if unknown := sorted(set(fields) - set(known)):
            raise InputError(
                f"{cls.__name__} takes no {', '.join(unknown)}; it takes {', '.join(known)}"
            )
        return cls.config_class(**fields)

    def intermediates(self, inputs: Any) -> dict[str, Any]:
        """Every named intermediate of one forward pass, in the order of computation."""
        if self._inspector is None:
            self._inspector = keras.Model(self.input, self._named)
        found = self._inspector(inputs, training=False)
        return {name: found[name] for name in self._named}

    def get_config(self) -> dict[str, Any]:
        """The config's fields, the policy and the name."""
        return {
            **self.config.to_dict(),
            "dtype": keras.dtype_policies.serialize(self.dtype_policy),
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Self:
        """The model of `get_config`."""
        config = dict(config)
        if isinstance(config.get("dtype"), dict):
            config["dtype"] = keras.dtype_policies.deserialize(config["dtype"])
        return cls(**config)


class Task(Presets, keras.Model):
    """A backbone with a head, trained by `fit`.

    Attributes:
        backbone: the model without its head.
        preprocessor: applied by `fit`, `evaluate` and `predict` to what the user gives; None where
            the data comes preprocessed. Calling the task skips it.
    """

    backbone_class: ClassVar[type[Backbone]]
    preprocessor_class: ClassVar[type]
    settings: dict[str, Any]

    def __init__(self, *, backbone: Backbone, preprocessor: Any, **kwargs: Any):
        super().__init__(**kwargs)
        self.backbone = backbone
        self.preprocessor = preprocessor

    def fit(self, x: Any = None, y: Any = None, **kwargs: Any) -> Any:
        """Keras' `fit` on anything that yields batches.

        Args:
            x: arrays, a PyTorch DataLoader, tf.data, grain, a PyDataset, a Hugging Face dataset or
                any iterable of (x, y) or (x, y, sample_weight) batches, on every backend.
            y: labels, where x is arrays.
            **kwargs: as in `keras.Model.fit`; `validation_data` may be any of the above too.
        """
        # Keras' default; evaluate and predict have none, which is how the data knows fit.
        kwargs.setdefault("shuffle", True)
        if (held_out := kwargs.get("validation_data")) is not None:
            kwargs["validation_data"] = self._held_out(held_out, kwargs)
        return super().fit(**self._arrays(x, y, kwargs))

    def evaluate(self, x: Any = None, y: Any = None, **kwargs: Any) -> Any:
        """Keras' `evaluate` on anything that `fit` takes."""
        return super().evaluate(**self._arrays(x, y, kwargs))

    def predict(self, x: Any, **kwargs: Any) -> Any:
        """Keras' `predict` on anything that `fit` takes."""
        return super().predict(**self._arrays(x, None, kwargs))

    def _arrays(self, x: Any, y: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        from kmodels.data import adapters

        return adapters.fit_arguments(x, y, preprocess=self.preprocessor, **kwargs)

    def _held_out(self, data: Any, kwargs: dict[str, Any]) -> Any:
        from kmodels.data import adapters

        return adapters.validation_data(
            data,
            preprocess=self.preprocessor,
            batch_size=kwargs.get("validation_batch_size") or kwargs.get("batch_size"),
        )

    def get_config(self) -> dict[str, Any]:
        """The serialised backbone and the head's settings."""
        return {
            "backbone": keras.saving.serialize_keras_object(self.backbone),
            "preprocessor": None if self.preprocessor is None else self.preprocessor.to_dict(),
            "head_dtype": keras.dtype_policies.serialize(self.head_dtype),
            "name": self.name,
            **self.settings,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Self:
        """The task of `get_config`."""
        config = dict(config)
        config["backbone"] = keras.saving.deserialize_keras_object(config["backbone"])
        if config.get("preprocessor") is not None:
            config["preprocessor"] = cls.preprocessor_class(**config["preprocessor"])
        if isinstance(config.get("head_dtype"), dict):
            config["head_dtype"] = keras.dtype_policies.deserialize(config["head_dtype"])
        return cls(**config)

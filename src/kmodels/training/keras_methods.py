"""`fit` and its like on any data, with the parameters of Keras' own."""

from typing import Any

import keras

from kmodels.core import keras_internals, traced
from kmodels.core.files import local_path
from kmodels.distribution.rank_zero import without_distribution
from kmodels.training.signatures import like
from kmodels.weights import deferred, gather


class Predicts:
    """A base of a model whose `predict` takes no samples too, where Keras' own fails."""

    @like(keras.Model.predict)
    def predict(self, x: Any, **kwargs: Any) -> Any:
        """Keras' `predict`; of no samples no predictions."""
        from kmodels.data.fit import arrays

        if arrays.is_empty(x, None):
            return self.predict_on_batch(x)  # type: ignore[attr-defined]
        with keras_internals.keeping_values(self):
            return super().predict(x, **kwargs)  # type: ignore[misc]


class KerasMethods(traced.Follows):
    """First base of a model that preprocesses what it is given, and takes any data.

    Attributes:
        preprocessor: called as preprocessor(x, y, sample_weight), or None.
    """

    preprocessor: Any

    @like(keras.Model.fit)
    def fit(self, x: Any = None, y: Any = None, **kwargs: Any) -> Any:
        """Keras' `fit` on anything that yields batches.

        Args:
            x: arrays, a PyTorch DataLoader, tf.data, grain, a PyDataset, a Hugging Face dataset,
                any iterable of (x, y) or (x, y, sample_weight) batches, or a function that gives
                one for each epoch, on every backend.
            y: labels, where x is arrays.
            **kwargs: as in `keras.Model.fit`, by place or by name; `validation_data` may be any of
                the above too.
        """
        # Keras' default; evaluate and predict have none, which is how the data knows fit.
        kwargs.setdefault("shuffle", True)
        if (held_out := kwargs.get("validation_data")) is not None:
            kwargs["validation_data"] = self._held_out(held_out, kwargs)
        return self._run(super().fit, x, y, kwargs)

    @like(keras.Model.evaluate)
    def evaluate(self, x: Any = None, y: Any = None, **kwargs: Any) -> Any:
        """Keras' `evaluate` on anything that `fit` takes."""
        return self._run(super().evaluate, x, y, kwargs)

    @like(keras.Model.predict)
    def predict(self, x: Any, **kwargs: Any) -> Any:
        """Keras' `predict` on anything that `fit` takes; of no samples no predictions."""
        from kmodels.data.fit import arrays

        if arrays.is_empty(x, self.preprocessor):
            return self.predict_on_batch(x)
        return self._run(super().predict, x, None, kwargs)

    @like(keras.Model.train_on_batch)
    def train_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, **kwargs: Any
    ) -> Any:
        """Keras' `train_on_batch` on one batch of what `fit` takes, preprocessed as there."""
        batch = self._one_batch("train_on_batch", x, y, sample_weight)
        return super().train_on_batch(*batch, **kwargs)

    @like(keras.Model.test_on_batch)
    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, **kwargs: Any) -> Any:
        """Keras' `test_on_batch`; as `train_on_batch`."""
        batch = self._one_batch("test_on_batch", x, y, sample_weight)
        return super().test_on_batch(*batch, **kwargs)

    @like(keras.Model.predict_on_batch)
    def predict_on_batch(self, x: Any) -> Any:
        """Keras' `predict_on_batch`; as `train_on_batch`."""
        return super().predict_on_batch(self._one_batch("predict_on_batch", x)[0])

    @like(keras.Model.save)
    def save(self, filepath: Any, **kwargs: Any) -> None:
        """Keras' `save`; of several processes that hold all weights one may call it alone."""
        local_path(filepath)
        gather.check_whole(self, "save")
        with without_distribution():
            super().save(filepath, **kwargs)

    @like(keras.Model.save_weights)
    def save_weights(self, filepath: Any, **kwargs: Any) -> None:
        """Keras' `save_weights`; as `save`."""
        local_path(filepath)
        gather.check_whole(self, "save_weights")
        with without_distribution():
            super().save_weights(filepath, **kwargs)

    def _one_batch(self, method: str, *parts: Any) -> tuple[Any, ...]:
        from kmodels.data.fit import adapters

        deferred.check(self, method)
        return adapters.one_batch(parts, self.preprocessor)

    def _run(self, method: Any, x: Any, y: Any, kwargs: dict[str, Any]) -> Any:
        from kmodels.distribution.input import fit as feeding

        deferred.check(self, method.__name__)
        with keras_internals.keeping_values(self):
            return feeding.run(self, method, x, y, kwargs, self.preprocessor)

    def _held_out(self, data: Any, kwargs: dict[str, Any]) -> Any:
        from kmodels.data.fit import adapters

        return adapters.validation_data(
            data,
            preprocess=self.preprocessor,
            batch_size=kwargs.get("validation_batch_size") or kwargs.get("batch_size"),
        )

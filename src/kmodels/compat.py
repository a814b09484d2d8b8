"""The only place that looks inside Keras, for what its public interface does not give."""

from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.utils import rng_utils

__all__ = ["PyDatasetAdapter", "random_seed"]


def random_seed() -> int | None:
    """The seed given to `keras.utils.set_random_seed`, or None where none was."""
    return rng_utils.get_random_seed()

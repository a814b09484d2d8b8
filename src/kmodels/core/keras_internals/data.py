"""The base of data that Keras' own `fit` takes as it is."""

from typing import Any

from keras.src.trainers.data_adapters import data_adapter

# With the methods that Keras' trainers call on data.
DataAdapter: Any = data_adapter.DataAdapter

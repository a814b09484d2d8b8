"""What keras-hub's own tests assert of every preprocessor, backbone and task.

The functions carry the names of the helpers in keras-hub's `TestCase`, so that a test here and its
model there can be laid side by side.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import pytest

from tolerances import tolerance

# keras-hub leaves float16 out on torch, too: its kernels on a CPU do not support it.
POLICIES = ("mixed_bfloat16", "bfloat16")


def arrays(x: Any) -> Any:
    """Tensors of any kind as NumPy arrays, in the structure that they came in; texts stay texts."""

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, str | bytes | int | float | None):
            return leaf.decode() if isinstance(leaf, bytes) else leaf
        if keras.ops.is_tensor(leaf):
            return keras.ops.convert_to_numpy(leaf)
        found = leaf.numpy() if hasattr(leaf, "numpy") else np.asarray(leaf)
        if getattr(found, "dtype", None) is not None and found.dtype.kind in "OS":
            return [x.decode() if isinstance(x, bytes) else x for x in found.tolist()]
        return found

    return keras.tree.map_structure(plain, x)


def assert_close(found: Any, wanted: Any) -> None:
    """Compares two structures of arrays, numbers and texts; texts and whole numbers exactly."""
    found, wanted = arrays(found), arrays(wanted)
    if isinstance(wanted, Mapping):
        assert set(found) == set(wanted)
        for name in wanted:
            assert_close(found[name], wanted[name])
    elif isinstance(wanted, tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)
    elif wanted is None or isinstance(wanted, str):
        assert found == wanted
    elif np.asarray(wanted).dtype.kind in "OSU":
        assert np.asarray(found).tolist() == np.asarray(wanted).tolist()
    else:
        limit = tolerance("hub_case")
        np.testing.assert_allclose(
            np.asarray(found, "float64"), np.asarray(wanted, "float64"), limit, limit
        )


def batches(data: Any, size: int) -> Any:
    import tensorflow as tf

    if isinstance(data, tuple):  # labels may be a plain list
        data = tuple(np.asarray(x) if isinstance(x, list) else x for x in data)
    return tf.data.Dataset.from_tensor_slices(arrays(data)).batch(size)


def run_serialization_test(instance: Any) -> None:
    """The config makes an equal object, also through JSON and Keras' own serialization."""
    cls, config = type(instance), instance.get_config()
    text = json.dumps(config, sort_keys=True)
    names = set(dir(instance)) - {"__annotations__"}
    serialized = json.dumps(keras.saving.serialize_keras_object(instance), sort_keys=True)
    for again in (
        cls.from_config(config),
        keras.saving.deserialize_keras_object(json.loads(serialized)),
    ):
        assert type(again) is cls
        assert json.dumps(again.get_config(), sort_keys=True) == text
        assert set(dir(again)) - {"__annotations__"} == names


def run_preprocessing_layer_test(
    cls: type, init_kwargs: Mapping[str, Any], input_data: Any, expected_output: Any
) -> None:
    """A tokenizer or preprocessor gives the same directly and in a data set, in batches or not."""
    layer = cls(**init_kwargs)
    run_serialization_test(layer)
    output = layer(*input_data) if isinstance(input_data, tuple) else layer(input_data)
    if hasattr(layer, "detokenize"):
        assert_close(layer.detokenize(output), input_data)
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(input_data)
    assert_close(data.map(layer).ragged_batch(1000).get_single_element(), output)
    assert_close(data.batch(1000).map(layer).get_single_element(), output)
    assert_close(output, expected_output)


def run_backbone_test(
    cls: type,
    init_kwargs: Mapping[str, Any],
    input_data: Any,
    expected_output_shape: Any,
    variable_length_data: Any = None,
) -> None:
    """A backbone is restored by its config, called, and used by `predict` on arrays and data sets.

    Its name holds the class's, and its outputs follow the dtype policy.
    """
    input_data = keras.tree.map_structure(keras.ops.convert_to_tensor, input_data)
    backbone = cls(**init_kwargs)
    run_serialization_test(backbone)
    output = backbone(input_data)
    shapes = {k: tuple(v.shape) for k, v in output.items()} if isinstance(output, dict) else None
    assert (tuple(output.shape) if shapes is None else shapes) == expected_output_shape
    if getattr(backbone, "token_embedding", None) is not None:
        backbone.token_embedding(keras.ops.zeros((2, 3), "int32"))
        for batch in variable_length_data or [
            keras.tree.map_structure(lambda x, n=n: x[:, :n], input_data) for n in (2, 3, 4)
        ]:
            backbone(batch)
    whole = backbone.predict(arrays(input_data), verbose=0)
    assert_close(backbone.predict(batches(input_data, 2), verbose=0), whole)
    # Keras names a layer that nobody names after its class, with a number behind it.
    keras_name = type(cls.__name__, (keras.layers.Layer,), {})().name
    assert re.sub(r"_\d+$", "", keras_name) in backbone.name
    run_precision_test(cls, init_kwargs, input_data)


def run_vision_backbone_test(
    cls: type,
    init_kwargs: Mapping[str, Any],
    input_data: Any,
    expected_output_shape: Any,
    expected_pyramid_output_keys: Any = None,
    expected_pyramid_image_sizes: Any = None,
) -> None:
    """As `run_backbone_test`, and `pyramid_outputs` makes a model of every level."""
    run_backbone_test(cls, init_kwargs, input_data, expected_output_shape)
    if expected_pyramid_output_keys:
        backbone = cls(**init_kwargs)
        found = keras.Model(backbone.inputs, backbone.pyramid_outputs)(input_data)
        assert sorted(found) == sorted(expected_pyramid_output_keys)
        sizes = [tuple(found[name].shape[1:3]) for name in backbone.pyramid_outputs]
        assert sizes == expected_pyramid_image_sizes


def run_task_test(
    cls: type, init_kwargs: Mapping[str, Any], train_data: Any, expected_output_shape: Any
) -> None:
    """A task predicts and trains as it was made, on arrays, data sets, and preprocessed data sets.

    Made with `compile=False` it asks for `compile` before it trains.
    """
    task = cls(**init_kwargs)
    run_serialization_test(task)
    preprocessor = task.preprocessor
    data = batches(train_data, 2)
    x, y, weights = keras.utils.unpack_x_y_sample_weight(train_data)
    prepared = preprocessor(*train_data)[0]
    keras.tree.assert_same_structure(prepared, task._inputs_struct)

    output = task.predict(x, verbose=0)
    shapes = keras.tree.map_structure(lambda part: tuple(part.shape), output)
    assert shapes == expected_output_shape
    assert_close(task.predict(data, verbose=0), output)
    task.preprocessor = None
    assert_close(task.predict(data.map(preprocessor), verbose=0), output)
    task.preprocessor = preprocessor

    task.fit(x, y, sample_weight=weights, verbose=0)
    task.fit(data, verbose=0)
    task.preprocessor = None
    task.fit(data.map(preprocessor), verbose=0)
    task.preprocessor = preprocessor
    with pytest.raises(ValueError, match="You must call `compile"):
        cls(**init_kwargs, compile=False).fit(data, verbose=0)


def run_precision_test(cls: type, init_kwargs: Mapping[str, Any], input_data: Any) -> None:
    """Outputs, symbols, weights and all layers inside follow each dtype policy."""
    for name in POLICIES:
        policy = keras.DTypePolicy(name)
        model = cls(**{**init_kwargs, "dtype": policy})
        outputs = [model(input_data), model.compute_output_spec(input_data)]
        for tensor in keras.tree.flatten(outputs):
            dtype = keras.backend.standardize_dtype(tensor.dtype)
            assert dtype == policy.compute_dtype or "float" not in dtype
        for weight in model.weights:
            dtype = keras.backend.standardize_dtype(weight.dtype)
            assert dtype == policy.variable_dtype or "float" not in dtype
        for part in model._flatten_layers():
            if not isinstance(part, keras.layers.Softmax | keras.layers.InputLayer):
                assert (part.compute_dtype, part.variable_dtype) == (
                    policy.compute_dtype,
                    policy.variable_dtype,
                ), part.path

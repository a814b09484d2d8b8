"""A contract for each private name of Keras in `kmodels.core.keras_internals`.

Each test goes by the name: where Keras lacks it or means something else by it, that is said.
"""

import ast
import functools
import gc
import inspect
import operator
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest

from kmodels.core import keras_internals
from private_names import is_private, names_in

FILE = Path(keras_internals.__file__)
BACKEND = keras.backend.backend()
# Attributes of the room's own classes that some class of Keras has too, and one name of Python.
OWN = {"_count", "_first", "_found", "_model", "_names", "_numbers", "_over", "_path", "_step"}
OWN.add("_getframe")
CONTRACTS: dict[str, Callable[[], object]] = {}


def contract(*names, where=True):
    def keep(function):
        function = functools.cache(function)  # which several names share
        for name in names:
            assert name not in CONTRACTS
            CONTRACTS[name] = function if where else (lambda: None)
        return function

    return keep


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


def dense():
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    return layer


def trained(optimizer=None, **settings):
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    optimizer = optimizer or keras.optimizers.AdamW(0.1, amsgrad=True, **settings)
    # TensorFlow would trace a graph for one step.
    by_python = BACKEND == "tensorflow"
    model.compile(optimizer, "mse", metrics=["mae"], run_eagerly=by_python)
    model.train_on_batch(np.ones((2, 3)), np.ones((2, 1)))
    return model


def graph():
    inputs = keras.Input((3,))
    return keras.Model(inputs, keras.layers.Dense(2)(inputs))


@contract("_layers", "_flatten_layers")
def layers_below():
    model = trained()
    assert keras_internals.children(model.layers[0]) == []
    assert model.layers[0] in keras_internals.children(model)
    assert {id(model), id(model.layers[0])} <= set(map(id, keras_internals.sublayers(model)))


@contract("_trainable_variables", "_trainable")
def what_is_made_trainable_stays_known():
    layer = dense()
    keras_internals.set_trainable(layer, False)
    assert not layer.trainable and not layer.trainable_variables
    assert keras_internals.made_trainable(layer) == [layer.kernel, layer.bias]
    assert keras_internals.built_for(trained().optimizer)[0].shape == (3, 1)


@contract("_non_trainable_variables")
def all_variables_of_a_layer_are_listed_in_the_order_of_a_file():
    layer = keras.layers.BatchNormalization()
    layer.build((None, 3))
    store = {}
    layer.save_own_variables(store)
    own = keras_internals.own_variables(layer)
    assert len(own) == len(store) == 4
    for i, variable in enumerate(own):
        assert variable is [layer.gamma, layer.beta, layer.moving_mean, layer.moving_variance][i]


@contract("_tracker", "_track_variable", "_untrack_variable")
def a_built_layer_takes_and_gives_variables():
    layer, other = dense(), dense()
    with pytest.raises(ValueError):
        layer.add_weight(shape=(1,))
    with keras_internals.changing(layer):
        layer.add_weight(shape=(1,))
    keras_internals.attach(layer, [other.kernel])
    assert any(v is other.kernel for v in layer.weights) and len(layer.weights) == 4
    keras_internals.detach(layer, [other.kernel])
    assert len(layer.weights) == 3


@contract("_unconditional_dependency_names", "_delete_tracking")
def a_variable_that_was_detached_is_held_by_nobody():
    layer = keras.layers.BatchNormalization()
    layer.build((None, 3))
    gamma = weakref.ref(layer.gamma)
    keras_internals.detach(layer, [layer.gamma])
    with keras_internals.changing(layer):
        layer.gamma = None
    gc.collect()
    assert gamma() is None


@contract("_remat_mode", "_input_spec", "_dtype_policy")
def a_scope_makes_layers_rematerialized():
    assert set(keras_internals.CALL_ATTRIBUTES) <= vars(dense()).keys()
    assert "input spec" in (keras_internals.needs_keras_call(dense()) or "")
    with keras.RematScope("full"):
        layer = dense()
    assert keras_internals.is_rematerialized(layer)
    keras_internals.set_rematerialized(layer, False)
    assert not keras_internals.is_rematerialized(layer)


@contract("_clear_losses", "_losses")
def losses_are_let_go():
    layer = dense()
    kept = keras_internals.losses_of(layer)
    layer.add_loss(keras.ops.ones(()))
    assert layer.losses and kept
    keras_internals.forget_losses(layer)
    assert not layer.losses and not kept


@contract("_modules", "_torch_params", where=BACKEND == "torch")
def parameters_are_listed_anew():
    layer = dense()
    assert list(layer.parameters()) and "_torch_params" in vars(layer)["_modules"]
    keras_internals.forget_parameters(layer)
    assert "_torch_params" not in vars(layer)["_modules"]


@contract("_inbound_nodes", "_run_through_graph", "_shape", "_standardize_inputs")
@contract("_maybe_warn_inputs_struct_mismatch")
def graphs_are_gone_through():
    model = graph()
    ((_, (output,)),) = keras_internals.symbolic_calls(model.layers[-1])
    inputs = keras_internals.standardized(model, np.ones((2, 3)))
    assert output is model.outputs[0] and keras.ops.is_tensor(inputs[0])
    found = keras_internals.through_graph(model, inputs, lambda x: x, lambda f, *a, **k: f(*a, **k))
    assert keras.tree.flatten(found)[0].shape == (2, 2)
    keras_internals.give_shape(model.outputs[0], (None, 7))
    assert model.output_shape == (None, 7) or model.outputs[0].shape == (None, 7)
    with pytest.warns(UserWarning, match="structure"):
        keras_internals.warn_of_inputs(model, {"another": np.ones((2, 3))})


@contract("_value", "_initializer", "_initialize", "_deferred_initialize", "_direct_assign")
def values_wait():
    with keras_internals.without_values() as made:
        layer = dense()
    assert {id(v) for v in made} == {id(layer.kernel), id(layer.bias)}
    assert not keras_internals.has_value(layer.kernel)
    assert keras_internals.first_value(layer.bias, (5,)).shape == (5,)
    keras_internals.draw_values([layer.kernel])
    keras_internals.give_value(layer.bias, keras.ops.ones((2,)))
    assert all(map(keras_internals.has_value, made))
    taken = []
    kind = type("Taking", (keras_internals.OwnAssign,), {"take": lambda self, v: taken.append(v)})
    keras_internals.change_class(layer.bias, kind)
    layer.bias.assign(np.zeros(2))
    assert len(taken) == 1 and layer.bias.held.shape == (2,)


@contract("_initialize_with_initializer")
def an_initializer_fills_a_variable():
    assert parameters(keras.Variable._initialize_with_initializer) == ["initializer"]


@contract("_autocast", "_dtype")
def variables_say_whether_they_are_cast():
    kernel = dense().kernel
    with keras_internals.autocast(keras.DTypePolicy("bfloat16")):
        assert kernel.dtype == "bfloat16" and kernel._dtype == "float32"
    assert keras_internals.autocasts(kernel)
    assert not keras_internals.autocasts(keras.Variable(0.0, autocast=False))


@contract("_layout")
def a_variable_without_a_distribution_has_no_layout():
    variable = keras.Variable(0.0)
    assert keras_internals.layout_of(variable) is None
    source = inspect.getsource(sys.modules[keras.distribution.ModelParallel.__module__])
    assert "_layout" in source or BACKEND == "tensorflow"


@contract("_iterations", "_learning_rate", "_variables", "_trainable_variables_indices")
def an_optimizer_is_unbuilt_and_built():
    model = trained()
    optimizer = model.optimizer
    assert int(keras_internals.batches_seen(optimizer)) == 1
    keras_internals.unbuild(optimizer, restart=True)
    assert not optimizer.built and int(optimizer.iterations) == 0
    assert len(optimizer.variables) == 2
    optimizer.build(model.trainable_variables)
    assert keras_internals.variable_index(optimizer, model.trainable_variables[1]) == 1


@contract("_get_variable_index", "_momentums", "_velocities", "_velocity_hats")
def the_slots_of_adam_are_those_of_a_weight():
    model = trained()
    kernel = model.trainable_variables[0]
    slots = keras_internals.adam_slots(model.optimizer, kernel)
    assert [tuple(slot.shape) for slot in slots] == [(3, 1)] * 3
    assert {name for name, _ in keras_internals.slot_lists(model.optimizer)} >= {
        "_momentums",
        "_velocities",
    }


@contract("_model_variables_moving_average")
def averages_go_with_their_weights():
    pairs = keras_internals.moving_averages(trained(use_ema=True).optimizer)
    assert [weight.shape == average.shape for weight, average in pairs] == [True, True]
    assert keras_internals.moving_averages(trained().optimizer) == []


@contract("_accumulated_gradients")
def gradients_are_accumulated():
    model = trained(gradient_accumulation_steps=2)
    held = keras_internals.accumulated_gradient(model.optimizer, model.trainable_variables[0])
    assert np.any(keras.ops.convert_to_numpy(held) != 0)
    assert keras_internals.updates_next(model.optimizer)


@contract("_distribution_strategy", "_distributed_tf_update_step", where=BACKEND == "tensorflow")
@contract("_all_reduce_sum_gradients", where=BACKEND == "tensorflow")
def an_optimizer_knows_its_replicas():
    optimizer = trained().optimizer
    assert keras_internals.strategy_of(optimizer).num_replicas_in_sync == 1
    names = ["distribution", "grads_and_vars", "learning_rate"]
    assert parameters(optimizer._distributed_tf_update_step) == names
    assert parameters(optimizer._all_reduce_sum_gradients) == ["grads_and_vars"]


STEPS = {
    "_apply_weight_decay": ["variables"],
    "_backend_apply_gradients": ["grads", "trainable_variables"],
    "_backend_increment_gradient_accumulators": ["grads", "acc_grads"],
    "_backend_reset_gradient_accumulators": [],
    "_backend_update_step": ["grads", "trainable_variables", "learning_rate"],
    "_clip_gradients": ["grads"],
    "_update_model_variables_moving_average": ["trainable_variables"],
}
# Without an average, and where the backend accumulates in a way of its own.
UNASKED = {"_update_model_variables_moving_average"} | (
    {"_backend_increment_gradient_accumulators", "_backend_reset_gradient_accumulators"}
    if BACKEND == "jax"
    else set()
)


@functools.cache
def called_in_steps():
    """Returns the names that Keras calls in two steps: a replacement of each is called."""
    optimizer = keras.optimizers.AdamW(gradient_accumulation_steps=2, weight_decay=0.1)
    called = set()
    for name in STEPS:
        own = getattr(optimizer, name)
        vars(optimizer)[name] = lambda *args, name=name, own=own: called.add(name) or own(*args)
    trained(optimizer).train_on_batch(np.ones((2, 3)), np.ones((2, 1)))
    return called


def check_step(name):
    assert parameters(getattr(keras.optimizers.AdamW(), name)) == STEPS[name]
    assert name in called_in_steps() | UNASKED


CONTRACTS |= {name: functools.partial(check_step, name) for name in STEPS}


@contract("_parallel_update_step", where=BACKEND == "torch")
def the_parallel_step_takes_all_variables():
    found = parameters(keras.optimizers.AdamW()._parallel_update_step)
    assert found == ["grads", "variables", "learning_rate"]


@contract("_convert_input_args")
def a_layer_may_get_its_keywords_as_they_are():
    class Gives(keras.layers.Layer):
        def call(self, x, places):
            return keras.backend.standardize_dtype(places.dtype)

    places = keras.ops.ones((2,), "float32")
    converts, keeps = (Gives(dtype="bfloat16") for _ in range(2))
    keras_internals.keep_keywords(keeps)
    x = keras.ops.ones((2,), "bfloat16")
    assert converts(x, places=places) == "bfloat16" and keeps(x, places=places) == "float32"


@contract("_save_state")
def what_a_file_would_hold_is_listed():
    found = keras_internals.saved_arrays(trained())
    assert any(path.endswith("/vars/0") for path in found)


@contract("_set_monitor_op")
def a_monitor_keeps_its_best():
    callback = keras.callbacks.EarlyStopping("loss")
    callback.best = 0.5
    keras_internals.preserve_monitor(callback, ["best"])
    callback.set_model(trained())
    callback._set_monitor_op()
    assert callback.best == 0.5


@contract("_initial_epoch")
def fit_begins_where_it_is_told():
    model, seen = trained(), []
    note = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: seen.append(epoch))
    keras_internals.set_initial_epoch(model, 2)
    model.fit(np.ones((2, 3)), np.ones((2, 1)), epochs=3, verbose=0, callbacks=[note])
    assert seen == [2]


@contract("_compile_metrics", "_user_metrics", "_user_weighted_metrics", "_symbolic_build")
def metrics_are_built_and_let_go():
    model = trained()
    assert keras_internals.metrics_built(model)
    assert keras_internals.unweighted_metrics(model) == ["mae"]
    assert keras_internals.weighted_metrics(model) is None
    model.compile("adam", "mse", metrics=["mae"], weighted_metrics=["mse"])
    assert keras_internals.weighted_metrics(model) == ["mse"]
    assert not keras_internals.metrics_built(model)
    batch = keras.tree.map_structure(
        keras.ops.convert_to_tensor, (np.ones((2, 3), "float32"), np.ones((2, 1), "float32"))
    )
    keras_internals.symbolic_build(model, lambda: (*batch, None))
    assert keras_internals.metrics_built(model)
    keras_internals.forget_metrics(model)
    assert keras_internals.unweighted_metrics(model) is None


@contract("_loss_tracker")
def a_loss_tracker_takes_the_place():
    model, tracker = trained(), keras.metrics.Mean("loss")
    keras_internals.set_loss_tracker(model, tracker)
    assert keras_internals.loss_tracker(model) is tracker and tracker in model.metrics


@contract("_compile_loss")
def outputs_have_losses():
    x = keras.Input((3,))
    model = keras.Model(x, [keras.layers.Dense(1, name=name)(x) for name in "ab"])
    model.compile("sgd", ["mse", "mse"])
    model.train_on_batch(np.ones((2, 3)), [np.ones((2, 1))] * 2)
    names = [metric.name for metric in keras_internals.output_losses(model)]
    assert names == ["a_loss", "b_loss"]


@contract("_use_weight_decay")
def a_variable_is_excluded_from_decay():
    class Optimizer(keras_internals.OwnSteps, keras.optimizers.AdamW):
        pass

    optimizer, variables = Optimizer(), [keras.Variable(1.0, name=name) for name in "ab"]
    optimizer.exclude_from_weight_decay(var_names=["a"])
    optimizer.build(variables)
    assert [optimizer.may_decay(variable) for variable in variables] == [False, True]


@contract("_aggregate_additional_loss")
def additional_losses_are_scalars():
    layer = keras.layers.Dense(1, kernel_regularizer="l2")
    model = keras.Sequential([keras.layers.Input((3,)), layer])
    loss = keras_internals.with_additional_losses(model, keras.ops.zeros(()))
    assert tuple(loss.shape) == () and loss > 0


@contract("_compute_loss", "_call_has_training_arg")
def a_step_goes_by_the_arguments_that_a_subclass_has():
    class Model(keras.Sequential):
        def compute_loss(self, x, y, y_pred, sample_weight):
            return super().compute_loss(x, y, y_pred, sample_weight)

    class Deaf(Model):
        def call(self, x):
            return super().call(x)

    x, y = np.ones((2, 3), "float32"), np.ones((2, 1), "float32")
    for kind, dropped in ((Model, True), (Deaf, False)):
        model = kind([keras.layers.Input((3,)), keras.layers.Dropout(0.999)])
        model.compile("sgd", "mse")
        outputs = keras_internals.predictions(model, x, training=True)
        assert bool(keras.ops.any(keras.ops.equal(outputs, 0.0))) is dropped
        loss = keras_internals.loss_of(model, x, y, y + 2.0, None, training=True)
        assert float(loss) == 4.0


@pytest.mark.parametrize("name", sorted(CONTRACTS))
def test_keras_means_by_it_what_it_did(name):
    try:
        CONTRACTS[name]()
    except Exception as error:
        raise AssertionError(f"Keras {keras.__version__} changed {name}: {error}") from error


def test_each_private_name_has_a_contract():
    used = {n for n in names_in(FILE) if is_private(n)} - OWN
    assert used - CONTRACTS.keys() == set(), "these have no contract"
    assert CONTRACTS.keys() - used == set(), "these are used by nobody"


def imported_names():
    """Returns what the module takes from Keras' own modules, as dotted names below an import."""
    tree = ast.parse(FILE.read_text())
    roots = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keras.src")
        for alias in node.names
    }
    dotted = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return sorted(name for name in dotted if name.partition(".")[0] in roots)


@pytest.mark.parametrize("name", imported_names())
def test_keras_modules_have_what_is_read_from_them(name):
    operator.attrgetter(name)(keras_internals)


def test_each_conversion_asks_the_change():
    metric, asked = keras.metrics.Mean(), []
    keras_internals.change_conversion(lambda original, x, dtype: asked.append(x))
    try:
        keras.ops.convert_to_tensor(2.0)
        metric.update_state(3.0)
    finally:
        keras_internals.change_conversion(None)
    assert 2.0 in asked and 3.0 in asked
    asked.clear()
    keras.ops.convert_to_tensor(2.0)
    assert asked == []


@pytest.mark.skipif(BACKEND != "torch", reason="Keras puts tensors on a device by itself on torch")
def test_the_device_is_that_of_the_scope():
    with keras.device("meta"):
        assert str(keras_internals.device()).startswith("meta")

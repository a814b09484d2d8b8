"""Two replicas on TensorFlow train what one device trains; collects nothing on other backends."""

import json

import keras
import numpy as np
import pytest
import small_models
from input_cases import Batches, Samples, generated

from kmodels.callbacks import Checkpoint
from kmodels.checkpoint import state
from kmodels.core.errors import InputError
from kmodels.distribution import current, distribute
from kmodels.training import SGD, AdamW, TrainStep
from refusals import refused
from stopped_runs import put_back
from tolerances import tolerance

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    BATCH, ROWS = 8, 24
    rng = np.random.default_rng(0)
    IMAGES = rng.normal(size=(ROWS, 8, 8, 3)).astype("float32")
    LABELS = (np.arange(ROWS) % 3).astype("int32")
    IDS = rng.integers(3, 64, (ROWS, 9)).astype("int32")
    WEIGHTS = np.ones((ROWS, 8), "float32")
    WEIGHTS[::3, 2:] = 0.0
    SHORT = {"batch_size": BATCH, "epochs": 3, "verbose": 0}
    MEAN = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def vit(dtype="float32"):
        return small_models.vit(8, 3, hidden_dim=16, mlp_dim=24, dtype=dtype)

    def prepared(model):
        plan = current()
        return model if plan is None else plan.prepare(model)

    def everything_at_once():
        """Clipped after the sum of all replicas and of two batches; the rate decays."""
        model = prepared(vit())
        rate = keras.optimizers.schedules.CosineDecay(1e-2, 9)
        optimizer = AdamW(rate, clip_norm=0.2, accumulate=2, skip_non_finite=True, ema=0.9)
        model.compile(optimizer, MEAN, weighted_metrics=["accuracy"])
        # Evaluation has a short last batch.
        held_out = IMAGES[:13], LABELS[:13]
        history = model.fit(IMAGES, LABELS, validation_data=held_out, **SHORT).history
        predicted = model.predict(IMAGES[:13], batch_size=BATCH, verbose=0)
        average = [np.array(v) for v in optimizer._model_variables_moving_average]
        return model, {**history, "predicted": predicted, "average": average[0]}

    def half_precision():
        model = prepared(vit("mixed_bfloat16"))
        model.compile(SGD(0.05, momentum=0.9), MEAN)
        return model, model.fit(IMAGES, LABELS, **SHORT).history

    def short_batches():
        """tf.data goes to TensorFlow as it is: 8, 8 and 1 rows, the last for one replica alone."""
        model = prepared(vit())
        model.compile(SGD(0.1), MEAN, metrics=["accuracy"])
        data = tf.data.Dataset.from_tensor_slices((IMAGES[:17], LABELS[:17])).batch(BATCH)
        return model, model.fit(data, epochs=3, verbose=0).history

    def gemma_with_lora():
        model = small_models.gemma(
            vocabulary_size=64, head_dim=8, hidden_dim=16, intermediate_dim=32
        )
        model.enable_lora(2, targets="all-linear", trainable_token_indices=[5, 40])
        model = prepared(model)
        model.compile(AdamW(1e-2))
        inputs = {"token_ids": IDS[:, :-1], "padding_mask": np.ones((ROWS, 8), bool)}
        return model, model.fit(inputs, IDS[:, 1:], sample_weight=WEIGHTS, **SHORT).history

    def a_step_of_ones_own():
        model = vit()

        def mean(model, batch, training):
            images, labels = batch
            logits = model(images, training=training)
            each = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
            return keras.ops.mean(each), {"hits": (labels, logits)}

        step = prepared(TrainStep(model, mean))
        step.compile(
            SGD(0.1, accumulate=3), metrics={"hits": keras.metrics.SparseCategoricalAccuracy()}
        )
        return model, step.fit(IMAGES, LABELS, **SHORT).history

    CASES = (everything_at_once, half_precision, short_batches, gemma_with_lora, a_step_of_ones_own)

    @pytest.mark.each_time("everything_at_once", "a_step_of_ones_own")
    @pytest.mark.parametrize("case", CASES)
    def test_two_replicas_train_what_one_device_trains(case):
        found = {}
        for mesh in (None, "data=2"):
            distribute(mesh)
            keras.utils.set_random_seed(3)
            model, found[mesh] = case()
        assert found[None]["loss"][0] - found[None]["loss"][-1] > 1e-3
        dtype = "bfloat16" if case is half_precision else "float32"
        for name, wanted in found[None].items():
            atol, over = tolerance("losses_of_ranks", dtype), found["data=2"][name]
            if name == "perplexity":  # a loss, and as exact as one
                wanted, over = np.log(wanted), np.log(over)
            np.testing.assert_allclose(over, wanted, rtol=0, atol=atol, err_msg=name)
        for variable in model.variables:
            first, second = variable.value.values
            if "seed" not in variable.path:
                np.testing.assert_array_equal(first, second, err_msg=variable.path)

    def test_each_kind_of_data_trains_alike():
        plan = distribute("data=2", batch_size=BATCH)
        keras.utils.set_random_seed(3)
        model = prepared(vit())
        model.compile(SGD(0.1), MEAN)
        model.optimizer.build(model.trainable_variables)
        first = put_back(model)
        batches, _ = generated(IMAGES, LABELS, BATCH)
        kinds = {
            "arrays": (IMAGES, LABELS),
            "tensors": (tf.constant(IMAGES), tf.constant(LABELS)),
            "tf.data": (tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(BATCH),),
            "a PyDataset": (Batches(IMAGES, LABELS, BATCH),),
            "samples by number": (Samples(IMAGES, LABELS),),
            "batches": (list(batches()),),
            "a function": (batches,),
            "a part": (plan.shard(IMAGES, LABELS, batch_size=BATCH, shuffle=False),),
        }
        losses = {}
        for kind, data in kinds.items():
            first()
            single = kind in ("arrays", "tensors", "samples by number")
            size = {"batch_size": BATCH} if single else {}
            history = model.fit(*data, epochs=2, shuffle=False, verbose=0, **size).history
            losses[kind] = history["loss"]
        for kind, found in losses.items():
            np.testing.assert_allclose(
                found, losses["arrays"], rtol=0, atol=tolerance("losses_of_ranks"), err_msg=kind
            )

    def test_a_checkpoint_goes_on_exactly_and_on_one_device_too(tmp_path):
        distribute("data=2")
        keras.utils.set_random_seed(3)
        model = prepared(vit())
        model.compile(AdamW(1e-2), MEAN)
        model.optimizer.build(model.trainable_variables)
        first = put_back(model)

        def fit(folder, epochs):
            first()
            keras.utils.set_random_seed(3)
            settings = {**SHORT, "epochs": epochs, "callbacks": [Checkpoint(tmp_path / folder)]}
            history = model.fit(IMAGES, LABELS, **settings).history
            return state.weights_digest(model), history

        whole = fit("whole", 3)
        fit("cut", 1)
        assert fit("cut", 3) == whole
        slots = [np.array(v) for v in model.optimizer.variables]
        distribute(None)
        alone = vit()
        alone.compile(AdamW(1e-2), MEAN)
        alone.optimizer.build(alone.trainable_variables)
        Checkpoint(tmp_path / "cut").prepare(alone)
        assert state.weights_digest(alone) == whole[0]
        for value, variable in zip(slots, alone.optimizer.variables, strict=True):
            np.testing.assert_array_equal(value, np.array(variable))

    def test_each_replica_draws_by_itself():
        distribute("data=2")
        seed = keras.random.SeedGenerator(7)
        run = tf.distribute.get_strategy().run
        one, other = (tuple(part.numpy()) for part in run(seed.next).values)
        assert one == (7, 0)
        assert one != other
        assert [tuple(part.numpy()) for part in seed.state.value.values] == [(7, 1), (7, 1)]
        distribute(None)
        assert tuple(keras.random.SeedGenerator(7).next().numpy()) == (7, 0)

    @pytest.mark.parametrize(
        ("mesh", "message"),
        [
            ("fsdp=2", "the mesh fsdp=2 splits weights, .* KERAS_BACKEND=jax for fsdp and model"),
            ("model=2", "the mesh model=2 splits weights"),
            ("sequence=2", "sequence=2 cuts .* not supported on tensorflow: .*; set"),
            ("data=4", r"needs 4 devices and there are 2; .* with 4 tf\.config\.Logical"),
        ],
    )
    def test_meshes_that_cannot_be(mesh, message):
        refused(message, distribute, mesh)
        assert current() is None
        assert not tf.distribute.has_strategy()

    def test_several_hosts_are_refused(monkeypatch):
        cluster = {"cluster": {"worker": ["one:1", "two:1"]}, "task": {"type": "worker"}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
        with pytest.raises(InputError, match=r"TF_CONFIG names 2 hosts, .*keras#20585"):
            distribute("data=2")
        monkeypatch.setenv("TF_CONFIG", "[1]")
        refused(r"TF_CONFIG is '\[1\]', which names no cluster", distribute, "data=2")
        monkeypatch.delenv("TF_CONFIG")
        other = tf.distribute.MirroredStrategy(["CPU:0"]).scope()
        with other, pytest.raises(InputError, match=r"a strategy of tf\.distribute is in force al"):
            distribute("data=2")

    def test_what_was_made_before_is_found():
        before, optimizer = vit(), SGD(0.1)
        plan = distribute("data=2")
        refused("variables are not on the mesh data=2, the first", plan.prepare, before)
        model = plan.prepare(vit())
        model.compile(optimizer, MEAN)
        with pytest.raises(InputError, match="sgd was made before distribute; make it after"):
            model.fit(IMAGES, LABELS, batch_size=BATCH, verbose=0)
        distribute(None)
        refused("the mesh data=2 was dropped; call distribute again", plan.prepare, model)

    def test_what_would_be_wrong_in_each_replica_alone_is_refused():
        plan = distribute("data=2")
        normed = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(name="norm")])
        refused("norm would normalize by the rows of each device", plan.prepare, normed)
        synchronized = keras.layers.BatchNormalization(synchronized=True)
        plan.prepare(keras.Sequential([keras.Input((4,)), synchronized]))

        model = plan.prepare(vit())
        model.compile(keras.optimizers.AdamW(global_clipnorm=1.0), MEAN)
        with pytest.raises(InputError, match="AdamW with global_clipnorm looks at the gradients"):
            model.fit(IMAGES, LABELS, batch_size=BATCH, verbose=0)
        weighted = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        )
        model.compile(SGD(0.1), weighted)
        with pytest.raises(InputError, match="reduction='mean_with_sample_weight' would divide"):
            model.fit(IMAGES, LABELS, batch_size=BATCH, verbose=0)

        model.compile(keras.optimizers.LossScaleOptimizer(SGD(0.1, clip_norm=1.0)), MEAN)
        with pytest.raises(InputError, match="do not go with the scaled loss of mixed_float16 on"):
            model.fit(IMAGES, LABELS, batch_size=BATCH, verbose=0)

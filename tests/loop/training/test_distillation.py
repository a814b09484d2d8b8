"""`CausalLM.divergence`: a student learns from a teacher as it would from both models' logits."""

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels import generic_only
from kmodels.core.errors import InputError
from kmodels.training import SGD, TrainStep
from pool import pool
from tolerances import tolerance

ops = keras.ops
IDS = np.random.default_rng(0).integers(1, 250, (6, 9)).astype("int32")
WEIGHTS = (np.arange(8) < np.array([[8], [5], [3], [8], [0], [1]])).astype("float32")
INPUTS = {"token_ids": IDS[:, :-1], "padding_mask": np.ones((6, 8), "int32")}


def by_logits(student, teacher, x, weights, training):
    """KL(student | teacher) by whole logits, at a temperature of 1.5."""
    log_q = ops.log_softmax(student(x, training=training) / 1.5)
    log_p = ops.log_softmax(ops.stop_gradient(teacher(x, training=False)) / 1.5)
    return weights * ops.sum(ops.exp(log_q) * (log_q - log_p), axis=-1)


def by_parts(student, teacher, x, weights, training):
    settings = {"kind": "reverse_kl", "temperature": 1.5}
    return student.divergence(teacher, x, weights, training, **settings)


def trained(student, teacher, function):
    """Losses of four steps, and the variables that they trained."""

    def loss_fn(models, batch, training):
        x, weights = batch
        rows = function(models["student"], models["teacher"], x, weights, training)
        return ops.sum(rows) / ops.maximum(ops.sum(weights), 1.0), {}

    teacher.trainable = False
    step = TrainStep({"student": student, "teacher": teacher}, loss_fn)
    step.compile(SGD(0.3))
    before = [to_numpy(v) for v in teacher.variables]
    losses = step.fit(INPUTS, WEIGHTS, batch_size=3, epochs=4, shuffle=False, verbose=0)
    for old, new in zip(before, teacher.variables, strict=True):
        np.testing.assert_array_equal(old, to_numpy(new))
    return losses.history["loss"], [to_numpy(v) for v in student.trainable_variables]


@pytest.mark.each_time("adapters", "rows")
@pytest.mark.parametrize("trains", ["adapters", "rows", "all"])
def test_steps_are_those_of_whole_logits(trains):
    found = []
    for function in (by_logits, by_parts):
        with (
            pool("gemma3_debug", preprocessor=None, num_layers=1) as student,
            pool("gemma2_debug", preprocessor=None, num_layers=1) as teacher,
        ):
            if trains == "adapters":
                student.enable_lora(2, targets="all-linear")
            elif trains == "rows":
                student.enable_lora(2, trainable_token_indices=[3, 8])
                teacher.enable_lora(2, trainable_token_indices=[5])
                rows = teacher.backbone.token_embedding.rows.values
                rows.assign(rows + 1.0)
            found.append(trained(student, teacher, function))
    (losses, values), (others, expected) = found[1], found[0]
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(losses, others, rtol=tolerance("losses"))
    for ours, right in zip(values, expected, strict=True):
        bound = tolerance("losses") * max(1.0, np.abs(right).max())
        np.testing.assert_allclose(ours, right, rtol=0, atol=bound)


def test_generic_bodies_and_other_vocabularies():
    with pool("gemma3_debug", preprocessor=None, num_layers=1) as student:
        with pool("gemma2_debug", preprocessor=None, num_layers=1) as teacher:
            found = [to_numpy(student.divergence(teacher, INPUTS, kind="jsd"))]
            with generic_only():
                found.append(to_numpy(student.divergence(teacher, INPUTS, kind="jsd")))
            assert found[0].shape == (6, 8) and (found[0] > 0).all()
            np.testing.assert_allclose(*found, rtol=0, atol=tolerance("losses"))
        with (
            pool("gemma3_debug", preprocessor=None, vocabulary_size=128) as other,
            pytest.raises(InputError, match="320 tokens and the teacher 128; dist"),
        ):
            student.divergence(other, INPUTS)

"""DINO: the loss by the paper's equations, teachers that follow, whole steps in float64."""

import copy

import keras
import numpy as np
import pytest

from arrays import assert_equal, to_numpy
from kmodels.core.errors import InputError
from kmodels.data import Augment, ViewLoader
from kmodels.data.images.sources import ArraySource
from kmodels.models import DINOHead
from kmodels.training import DINOLoss, TrainStep, WeightAverage

rng = np.random.default_rng(0)
SOURCE = ArraySource(np.zeros((4, 8, 8, 1), "uint8"), np.zeros(4))
STUDENT, TEACHER = rng.normal(size=(5, 4, 7)), rng.normal(size=(5, 2, 7))


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def expected_loss(student, teacher, center, temperature, cold=0.1):
    """Equations 1 to 3: the pairs of different views, one after another."""
    total, pairs = 0.0, 0
    for g in range(teacher.shape[1]):
        wanted = softmax((teacher[:, g] - center) / temperature)  # eq. 1 of the teacher
        for v in range(student.shape[1]):
            if v != g:
                found = np.log(softmax(student[:, v] / cold))
                total, pairs = total - (wanted * found).sum(-1), pairs + 1
    return total / pairs


def sinkhorn_knopp(logits, temperature, iterations):
    """Equation 5 of SwAV in float64, as it is written: a matrix K by B, scaled from both sides."""
    q = np.exp(logits.reshape(-1, logits.shape[-1]) / temperature).T
    q /= q.sum()
    for _ in range(iterations):
        q /= q.sum(1, keepdims=True) * len(q)
        q /= q.sum(0, keepdims=True) * q.shape[1]
    return (q * q.shape[1]).T.reshape(logits.shape)


def test_sinkhorn_knopp_gives_each_number_its_share():
    given = TEACHER.astype("float32")
    loss = DINOLoss(7, teacher_temperature=0.5, centering="sinkhorn_knopp")
    wanted = sinkhorn_knopp(TEACHER, 0.5, 3)
    np.testing.assert_allclose(to_numpy(loss.probabilities(given)), wanted, rtol=0, atol=1e-6)
    sharp = DINOLoss(7, teacher_temperature=0.01, centering="sinkhorn_knopp", iterations=50)
    found = to_numpy(sharp.probabilities(np.repeat(given, 7, axis=0) * 1e-2))
    np.testing.assert_allclose(found.sum(-1), 1.0, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found.mean((0, 1)), 1 / 7, rtol=0, atol=1e-3)
    # Where exp is zero in float32, logarithms are not.
    far = np.array([[[1.0, -1.0]], [[0.9, -1.0]]], "float32")
    two = DINOLoss(2, 0.1, 0.01, 0.01, centering="sinkhorn_knopp", iterations=50)
    found = to_numpy(two.probabilities(far))
    assert found[0, 0, 0] > 0.95 and found[1, 0, 1] > 0.95
    rows = to_numpy(loss(STUDENT.astype("float32"), given, training=True))
    found = np.log(softmax(STUDENT / 0.1))
    pairs = [(g, v) for g in range(2) for v in range(4) if g != v]
    expected = -sum((wanted[:, g] * found[:, v]).sum(-1) for g, v in pairs) / len(pairs)
    np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=0)
    assert DINOLoss.from_config(loss.get_config()).centering == "sinkhorn_knopp"


def test_a_collapse_is_seen():
    flat, spread = np.zeros((6, 2, 8), "float32"), 9 * np.eye(8, dtype="float32")[:, None]
    # A number for all images, or none; and one for each.
    for given, entropy, marginal in ((flat + spread[3], 0, 0), (flat, 1, 1), (spread, 0, 1)):
        found = {name: float(to_numpy(x)) for name, x in DINOLoss(8).entropies(given).items()}
        assert found == pytest.approx({"entropy": entropy, "marginal_entropy": marginal}, abs=1e-3)


def test_the_head_is_a_product_with_directions_of_length_one():
    head = DINOHead(5, hidden_dim=6, bottleneck_dim=4)
    x = rng.normal(size=(3, 8)).astype("float32")
    found = to_numpy(head(x))
    assert found.shape == (3, 5) and np.abs(found).max() <= 1 + 1e-6
    # What is divided by its length is not short, however narrow the head.
    inner = [DINOHead(5, hidden_dim=n, bottleneck_dim=16) for n in (32, 128)]
    for wide in inner:
        wide.build((None, 64))
        assert 0.8 < 8 * to_numpy(wide.parts[0].kernel.value).std() < 1.2
    head.directions.assign(7 * head.directions)
    np.testing.assert_allclose(to_numpy(head(x)), found, rtol=0, atol=1e-6)


def made(seed):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(7, name="only")])


def loss_fn(models, batch, training):
    views, rows = keras.ops.reshape(batch, (-1, 4)), keras.ops.shape(batch)[0]
    shape = (rows, 4, 7)
    student = keras.ops.reshape(models["student"](views, training=training), shape)
    teacher = keras.ops.reshape(models["teacher"](views, training=False), shape)[:, :2]
    loss = models["loss"](student, teacher, training=training)
    return keras.ops.mean(loss), models["loss"].entropies(teacher)


def steps_in_float64(weights, teacher, batches, rate, momentum):
    """The same in NumPy: equations 1 to 4, gradient descent, and the teacher behind it."""
    center, losses = np.zeros(7), []
    for number, batch in enumerate(batches):
        x = batch.astype("float64")
        (w, b), (tw, tb) = weights, teacher
        given = x[:, :2] @ tw + tb
        logits = x @ w + b
        temperature = 0.04 + 0.03 * min(number / 2, 1)
        losses.append(expected_loss(logits, given, center, temperature).mean())
        # The gradient of a cross-entropy by its logits.
        wanted = softmax((given - center) / temperature)
        found = softmax(logits / 0.1)
        slope = np.zeros_like(logits)
        for g in range(2):
            for v in range(4):
                if v != g:
                    slope[:, v] += (found[:, v] - wanted[:, g]) / 0.1
        slope /= 6 * len(x)
        weights = [w - rate * np.einsum("bvd,bvk->dk", x, slope), b - rate * slope.sum((0, 1))]
        share = momentum(number)
        teacher = [share * t + (1 - share) * s for t, s in zip(teacher, weights, strict=True)]
        center = 0.8 * center + 0.2 * given.mean((0, 1))  # eq. 4
    return losses, weights, teacher, center


def test_steps_are_those_of_the_paper_and_the_teacher_follows():
    student, teacher, other = made(1), made(2), made(2)
    batches = rng.normal(size=(4, 3, 4, 4)).astype("float32")

    def momentum(step):
        return 0.9 + 0.02 * step

    first = [[to_numpy(w.value).astype("float64") for w in m.weights] for m in (student, teacher)]
    losses, weights, followed, center = steps_in_float64(*first, batches, 0.05, momentum)
    loss = DINOLoss(7, warmup_steps=2, center_momentum=0.8)
    # Outside of training nothing moves.
    loss(*(x.astype("float32") for x in (STUDENT, TEACHER)), training=False)
    models = {"student": student, "teacher": teacher, "loss": loss}
    averages = {"teacher": WeightAverage("student", momentum)}
    step = TrainStep(models, loss_fn, train=["student"], averages=averages)
    step.compile(keras.optimizers.SGD(0.05))
    logs = [step.fit(batch, batch_size=3, verbose=0).history for batch in batches]
    found = [log["loss"][0] for log in logs]
    np.testing.assert_allclose(found, losses, rtol=1e-5, atol=0)
    assert {"loss", "entropy", "marginal_entropy"} == set(logs[0])
    found = [*student.weights, *teacher.weights, loss.center]
    assert_equal(found, [*weights, *followed, center], 1e-5)
    assert DINOLoss.from_config(loss.get_config()).get_config() == loss.get_config()
    # It moved, and towards the student.
    assert np.abs(followed[0] - first[1][0]).max() > 1e-2
    assert np.abs(to_numpy(other.weights[0].value) - followed[0]).max() > 1e-2


FOLLOW = {"a": WeightAverage("b")}


@pytest.mark.once
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: WeightAverage("a", 1.5), r"momentum is 1\.5; give 0 to 1, or a function"),
        (lambda: TrainStep(made(1), len, averages=FOLLOW), "name 'a', which"),
        (
            lambda: TrainStep({"a": made(1), "b": made(2)}, len, ["a"], averages=FOLLOW),
            "a follows b and is trained too; name in train the models",
        ),
        (
            lambda: TrainStep(
                {"a": made(1), "b": DINOHead(2, 3, 4)}, len, ["b"], averages=FOLLOW
            )._players.averages.build(),
            "a cannot follow b, whose weights have other shapes",
        ),
        (lambda: DINOLoss(7, teacher_temperature=0), "teacher_temperature is 0; give a number"),
        (lambda: DINOLoss(7, centering="none"), "centering is 'none'; give mean or sinkhorn_knopp"),
        (lambda: DINOLoss(7, center_momentum=2), "center_momentum is 2; give a number from 0 to 1"),
        (
            lambda: DINOLoss(7)(np.zeros((2, 1, 7)), np.zeros((2, 1, 7))),
            "the student has 1 views and the teacher 1; give at least two",
        ),
        (
            lambda: DINOLoss(7)(np.zeros((2, 3, 6)), np.zeros((2, 2, 7))),
            r"the shapes \(2, 3, 6\) and \(2, 2, 7\); give \(batch, views, 7\)",
        ),
        (
            lambda: ViewLoader(SOURCE, 2, [Augment()], augment=Augment(flip=True)),
            "augment is set beside views; give each view its own Augment",
        ),
        (
            lambda: ViewLoader(SOURCE, 2, []),
            "views are none, or mix images",
        ),
    ],
)
def test_wrong_settings_are_refused(build, message):
    with pytest.raises(InputError, match=message):  # Keras adds lines where a layer was called
        build()


@pytest.mark.once
def test_views_are_of_the_same_images_and_draw_their_own_numbers():
    images = rng.integers(0, 255, (6, 8, 8, 1)).astype("uint8")
    source = ArraySource(images, np.arange(6))
    views = [Augment(), Augment(flip=True), Augment(random_resized_crop=(0.3, 0.6), flip=True)]
    loader = ViewLoader(source, 4, [*views, views[2]], shuffle=True, seed=3)
    found, labels = loader[0]
    assert found.shape == (4, 4, 8, 8, 1) and len(loader) == 2
    np.testing.assert_array_equal(np.rint(found[:, 0] * 255), images[labels])
    for plain, flipped in zip(found[:, 0], found[:, 1], strict=True):
        assert any(np.array_equal(flipped, x) for x in (plain, plain[:, ::-1]))
    assert np.abs(found[:, 2] - found[:, 3]).max() > 0.05
    again = copy.copy(loader)
    np.testing.assert_array_equal(again[0][0], found)
    loader.set_epoch(1)
    assert np.abs(loader[0][0] - found).max() > 0.05
    shares = ViewLoader(source, 4, views, shuffle=True, seed=3, one_hot=6)[0][1]
    np.testing.assert_array_equal(shares, np.eye(6)[labels])
    part = again.part(1, 2)
    np.testing.assert_array_equal(part[0][0], found[1:2])

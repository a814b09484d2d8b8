"""A run that was cut within an epoch draws the batches that are left, and ends alike bit by bit."""

import functools
import warnings

import keras
import numpy as np
import pytest

from any_data import run
from arrays import assert_equal
from kmodels.callbacks import Checkpoint
from kmodels.checkpoint import manager, state
from kmodels.data import ImageLoader, StatefulLoader, as_dataset
from kmodels.data.pipeline import position
from kmodels.models import ViTImageClassifier
from kmodels.text import TextLoader
from refusals import refused
from stopped_runs import JIT, Kill, Killed, put_back

BATCH, STEPS, EPOCHS, CUT = 4, 6, 2, 8
LEFT = STEPS - CUT % STEPS
rng = np.random.default_rng(0)
PIXELS = rng.integers(0, 256, (BATCH * STEPS, 8, 8, 3), "uint8")
X, Y = PIXELS.astype("float32") / 255, rng.integers(0, 3, BATCH * STEPS)


class Rows:
    """Samples by number, which notes those that are asked for."""

    def __init__(self):
        self.drawn = []

    def __len__(self):
        return len(X)

    def __getitem__(self, row):
        self.drawn.append(row)
        return X[row], Y[row]

    def batch(self, rows):
        pairs = [self[int(row)] for row in rows]
        return np.stack([x for x, _ in pairs]), np.array([y for _, y in pairs])


class Pictures(Rows):
    """The same samples as a source of an ImageLoader."""

    labels = Y

    def batch(self, indices):
        self.drawn += indices.tolist()
        return PIXELS[indices], Y[indices].astype("int32")


class Own:
    """A loader as users write them, in a new order each epoch."""

    def __init__(self, rows):
        self.rows, self.epoch, self.first, self.given = rows, 0, 0, 0

    def __len__(self):
        return STEPS

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        first, self.first = self.first, 0
        order = np.random.default_rng(self.epoch).permutation(len(X))
        for number in range(first, STEPS):
            self.given = number + 1
            yield self.rows.batch(order[number * BATCH : self.given * BATCH])

    def state_dict(self):
        return {"given": self.given, "more": (b"\x00", {1: np.arange(3)})}

    def load_state_dict(self, state_dict):
        assert state_dict["more"][0] == b"\x00" and state_dict["more"][1][1].tolist() == [0, 1, 2]
        self.first = state_dict["given"]


class Numbered(keras.utils.PyDataset):
    def __init__(self, rows, **workers):
        super().__init__(**workers)
        self.rows = rows

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        return self.rows.batch(np.arange(index * BATCH, (index + 1) * BATCH))


def with_workers(rows):
    return Numbered(rows, workers=2)


def image_loader(rows):
    return ImageLoader(rows, BATCH, shuffle=True, seed=3)


def listed(rows):
    """A list of batches has an index too; nothing is drawn in it."""
    return [Numbered(Rows())[number] for number in range(STEPS)]


def generator(rows):
    def batches():
        yield from (Numbered(rows)[number] for number in range(STEPS))

    return batches


def torch_loader(rows):
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    torch.manual_seed(5)  # Keras seeds torch's generator under its backend alone.
    return StatefulDataLoader(rows, BATCH, shuffle=True)


def torch_loader_with_generator(rows):
    """Its generator is drawn from for workers too, which torchdata does not count."""
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(rows, BATCH, shuffle=True, generator=torch.Generator().manual_seed(5))


def plain_torch_loader(rows):
    """It has no state, so that what was trained on is drawn again, by the same generator."""
    import torch

    return torch.utils.data.DataLoader(
        rows, BATCH, shuffle=True, generator=torch.Generator().manual_seed(5)
    )


def grain_dataset(rows):
    import grain

    return grain.MapDataset.source(rows).shuffle(seed=1).batch(BATCH)


def grain_loader(rows):
    import grain

    dataset = grain.MapDataset.source(rows).shuffle(seed=1).batch(BATCH)
    return dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))


def vit():
    """A task, whose `fit` takes any data."""
    model = ViTImageClassifier.from_preset(
        "vit_debug", image_shape=(8, 8, 3), num_layers=1, num_classes=3, dropout_rate=0.1
    )
    model.preprocessor = None
    return model


def tuned():
    """A task with adapters on a base in four bits."""
    model = vit()
    model.quantize("nf4")
    model.enable_lora(2, targets="all-linear", dropout=0.1)
    return model


def dense():
    """A plain model of Keras, in `kmodels.fit`."""
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Dropout(0.3, name="drop")(keras.layers.Flatten()(inputs))
    return keras.Model(inputs, keras.layers.Dense(3, name="out")(x))


def quick():
    """A model that compiles faster than a task, for the `fit` that tasks have."""
    return dense()


def compiled(make):
    """A model as a new process makes it."""
    keras.utils.set_random_seed(7)
    model = make()
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=JIT,
    )
    return model


_MADE = {}


def made(make):
    """The same, made once and put back to its first values, since compiling takes the time."""
    if make not in _MADE:
        model = compiled(make)
        model.optimizer.build(model.trainable_variables)
        # Otherwise the first `fit` looks at a batch, and the others do not.
        model.evaluate(X[:BATCH], Y[:BATCH], batch_size=BATCH, verbose=0)
        _MADE[make] = model, put_back(model)
    model, first = _MADE[make]
    first()
    return model


def train(make, loader, folder, cut=None, anew=False, **settings):
    """One process's part of a run: digest of the weights, history, and the batches drawn.

    With `anew` its model looks at a batch before it trains, to learn shapes, as in a new process.
    """
    rows = Pictures() if loader is image_loader else Rows()
    model = compiled(make) if anew else made(make)
    keras.utils.set_random_seed(7)  # what building draws is not drawn each time
    data = loader(rows)
    checkpoint = Checkpoint(folder, every=CUT)
    callbacks = [checkpoint, *([] if cut is None else [Kill(cut)])]
    settings = {"epochs": EPOCHS, "verbose": 0, "callbacks": callbacks, **settings}
    fit = model.fit if make in (vit, tuned) else functools.partial(run, model, "fit")
    if cut is None:
        history = fit(data, **settings)
        return state.weights_digest(model), history.history, len(rows.drawn)
    with pytest.raises(Killed):
        fit(data, **settings)
    checkpoint.wait()
    return None


@pytest.fixture(autouse=True)
def _prefetch(monkeypatch):
    """Batches are made ahead of the steps, as they are beside an accelerator."""
    monkeypatch.setenv("KMODELS_PREFETCH", "2")


def cut_and_continued(make, loader, folder, **settings):
    """A run that is cut within its second epoch and continued ends with the same bits."""
    whole = train(make, loader, folder / "whole", **settings)
    train(make, loader, folder / "cut", CUT + 1, **settings)
    assert manager.newest(folder / "cut")[1].step == CUT
    continued = train(make, loader, folder / "cut", **settings)
    assert continued[:2] == whole[:2]
    return whole[2], continued[2]


torch_loaders = [
    pytest.param(quick, each, {}, marks=pytest.mark.needs("torchdata"))
    for each in (torch_loader, torch_loader_with_generator)
]
grain_loaders = [
    pytest.param(quick, each, {}, marks=pytest.mark.needs("grain"))
    for each in (grain_loader, grain_dataset)
]


@pytest.mark.each_time(
    "vit-image_loader-settings0",
    "quick-Own-settings2",
    "quick-listed-settings4",
    "dense-image_loader-settings8",
    "quick-grain_loader-settings7",
    "quick-torch_loader-settings5",
    on=("jax", "tensorflow"),
)
@pytest.mark.parametrize(
    ("make", "loader", "settings"),
    [
        *((task, image_loader, {}) for task in (vit, tuned)),
        *((quick, loader, {}) for loader in (Own, Numbered, listed)),
        *torch_loaders,
        grain_loaders[0],
        (dense, image_loader, {"shuffle": False}),
        (dense, Numbered, {"shuffle": True}),
        pytest.param(dense, torch_loader, {"shuffle": False}, marks=pytest.mark.needs("torchdata")),
    ],
)
def test_only_the_batches_that_are_left_are_drawn(tmp_path, make, loader, settings):
    whole, continued = cut_and_continued(make, loader, tmp_path, anew=True, **settings)
    # What a fit draws before it trains, to learn shapes, it draws in both.
    looked = 0 if loader is listed else whole - EPOCHS * len(X)
    assert looked >= 0 and (make is dense or looked <= 3 * BATCH)
    expected = 0 if loader is listed else LEFT * BATCH
    assert expected <= continued <= expected + max(looked, BATCH)


class Ending(Own):
    """Notes how often more batches are asked for than a pass has."""

    ended = 0

    def __iter__(self):
        yield from super().__iter__()
        self.ended += 1


class EndingWithoutState(Ending):
    state_dict = load_state_dict = None


@pytest.mark.parametrize("loader", [Ending, EndingWithoutState])
def test_no_pass_is_asked_for_more_batches_than_it_has(tmp_path, loader):
    # torch's sampler draws from its generator then, and a thread may or may not come to it.
    loaders = []

    def noted(rows):
        loaders.append(loader(rows))
        return loaders[-1]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a loader without state is gone through again
        cut_and_continued(quick, noted, tmp_path)
    assert [one.ended for one in loaders] == [0, 0, 0]


def test_workers_begin_at_the_next_batch(tmp_path):
    whole, continued = cut_and_continued(dense, with_workers, tmp_path, shuffle=False)
    assert (whole, continued) == (EPOCHS * len(X), LEFT * BATCH)


class Noisy(Numbered):
    """Draws from NumPy's generator, in the order of its batches."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + np.random.normal(size=x.shape).astype("float32"), y


NOT_SOUGHT = r" cannot be sought; give it state_dict\(\) and load_state_dict\(\)"


@pytest.mark.parametrize(
    ("make", "loader", "settings", "reason"),
    [
        (quick, generator, {}, "batches" + NOT_SOUGHT),
        pytest.param(
            *(quick, plain_torch_loader, {}, "DataLoader" + NOT_SOUGHT),
            marks=pytest.mark.needs("torch"),
        ),
        (quick, Noisy, {}, "Noisy draws from the random generators of Py"),
    ],
)
def test_what_cannot_be_sought_is_gone_through_again_and_says_so(
    tmp_path, make, loader, settings, reason
):
    message = "this fit repeats the first 2 batches of its epoch, without training on them, since "
    with pytest.warns(UserWarning, match=message + reason) as told:
        _, continued = cut_and_continued(make, loader, tmp_path, **settings)
    assert len([one for one in told if "repeats the first" in str(one.message)]) == 1
    assert continued >= STEPS * BATCH


@pytest.mark.each_time("quick-Own-settings0", on=("jax", "tensorflow"))
@pytest.mark.parametrize(
    ("make", "loader", "settings"),
    [(quick, Own, {}), (vit, image_loader, {}), *torch_loaders, grain_loaders[1]],
)
def test_between_two_epochs(tmp_path, make, loader, settings):
    whole = train(make, loader, tmp_path / "whole")
    train(make, loader, tmp_path / "cut", epochs=1)
    assert train(make, loader, tmp_path / "cut")[:2] == whole[:2]


def test_a_checkpoint_without_the_state_of_its_data(tmp_path, monkeypatch):
    """As one of before there was any: what has an index is sought, the rest gone through."""
    monkeypatch.setattr("kmodels.data.pipeline.position.Position.state", lambda self: None)
    for loader in (image_loader, Own):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            cut_and_continued(quick, loader, tmp_path / loader.__name__)
        replays = [one for one in told if "repeats the first 2" in str(one.message)]
        assert len(replays) == (loader is Own)


def test_a_state_that_no_checkpoint_holds(tmp_path):
    class Wrong(Own):
        first_with = 0

        def state_dict(self):
            return {"object": self if self.given >= self.first_with else None}

        def __repr__(self):
            return "wrong,\nin two lines"

    holds = "the state of the data holds a Wrong; have state_dict.. give numbers, strings, "
    said = rf"^Wrong.state_dict.. returned ..object.: wrong, in two lines.: {holds}[a-z, ]+$"
    refused(said, train, quick, Wrong, tmp_path / "refused before the first step")
    assert not list(tmp_path.glob("*/step_*"))
    Wrong.first_with = 2  # Keras may look at the first batch before.
    refused(f"^{holds}", train, quick, Wrong, tmp_path / "refused at the first checkpoint")


def test_states_are_asked_for_only_where_a_checkpoint_is(tmp_path):
    class Asked(Own):
        asked = 0

        def state_dict(self):
            Asked.asked += 1
            return super().state_dict()

    data = as_dataset(Asked(Rows()))
    counts = []
    for callbacks in ([Checkpoint(tmp_path)], []):
        run(made(quick), "fit", data, verbose=0, callbacks=callbacks)
        counts.append(Asked.asked)
    assert counts[0] > STEPS and counts[1] == counts[0]


class Wrapper:
    """A loader around another one, which passes on what it does not have."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)

    def __getattr__(self, name):
        return getattr(self.loader, name)


@pytest.mark.once
def test_a_state_that_a_wrapper_passes_on_is_found():
    # `isinstance` of a protocol finds it up to Python 3.11 alone.
    accessors = position._accessors(Wrapper(image_loader(Pictures())))
    assert accessors is not None and accessors[0]()["batch"] == 0
    assert position._accessors(Wrapper([1])) is None


@pytest.mark.once
def test_our_loaders_have_a_state():
    rows = {"token_ids": np.arange(40).reshape(10, 4)}, np.ones((10, 4)), np.ones((10, 4))
    for make in (
        lambda: image_loader(Pictures()),
        lambda: TextLoader(rows, 2, shuffle=True, seed=1),
    ):
        loader, other = make(), make()
        assert isinstance(loader, StatefulLoader)
        loader.set_epoch(1)
        batches = [loader[number] for number in range(3)]
        assert loader.state_dict() == {"epoch": 1, "batch": 3}
        other.load_state_dict({"epoch": 1, "batch": 2})
        assert len(other) == len(loader) - 2
        assert_equal(*map(keras.tree.flatten, (other[0], batches[2])))
        assert other.state_dict() == {"epoch": 1, "batch": 3}
        other.load_state_dict({"epoch": 1, "batch": len(loader)})
        assert (other.state_dict(), len(other)) == ({"epoch": 2, "batch": 0}, len(loader))

"""Each kind of data × fit, evaluate, predict: the values that the model saw, and their order.

Inputs are named, the last batch is smaller, and there are two epochs. What needs other packages
than the backend runs where all are installed.
"""

import gc
import weakref

import keras
import numpy as np
import pytest

from any_data import run
from kmodels.data import TarShards, TFRecords
from record_files import write_shard, write_tfrecords
from refusals import refused

ROWS, BATCH = 11, 4
A = np.arange(2 * ROWS, dtype="float32").reshape(ROWS, 2)
B = (np.arange(ROWS, dtype="float32") ** 2 % 13)[:, None]
Y = (np.arange(ROWS) * 5 % 7).astype("int32")
KERNEL = np.array([[1.0], [3.0], [50.0]], "float32")
SEEN = np.concatenate([A, B], 1) @ KERNEL
PLACES = np.arange(1, ROWS + 1)
LOADED = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


class Seen(keras.metrics.Metric):
    """Sum of labels and outputs, each times its place in the epoch: lost, repeated, out of turn."""

    def __init__(self, name="seen"):
        super().__init__(name=name)
        self.total = self.add_variable(shape=(), initializer="zeros", name="total")
        self.place = self.add_variable(shape=(), initializer="zeros", name="place")

    def update_state(self, y_true, y_pred, sample_weight=None):
        values = 1000 * keras.ops.reshape(keras.ops.cast(y_true, "float32"), (-1,)) + y_pred[:, 0]
        ones = keras.ops.ones_like(values)
        places = self.place + keras.ops.cumsum(ones)
        self.total.assign_add(keras.ops.sum(places * values))
        self.place.assign_add(keras.ops.sum(ones))

    def result(self):
        return self.total + 0.0


class Total(keras.metrics.Sum):
    """Sum of squared labels, in whatever order: tells lost and repeated samples."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(keras.ops.cast(y_true, "float32") ** 2)


TOTAL = float((Y.astype("float32") ** 2).sum())
WANTED = float((PLACES * (1000 * Y + SEEN[:, 0])).sum())


@pytest.fixture(scope="module")
def model():
    inputs = {"a": keras.Input((2,), name="a"), "b": keras.Input((1,), name="b")}
    joined = keras.layers.Concatenate()([inputs["a"], inputs["b"]])
    dense = keras.layers.Dense(1, use_bias=False)
    model = keras.Model(inputs, dense(joined))
    dense.kernel.assign(KERNEL)
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[Seen(), Total("total")])
    return model


def named(rows):
    return {"a": A[rows], "b": B[rows], "label": Y[rows]}


def pair(rows):
    return {"a": A[rows], "b": B[rows]}, Y[rows]


class Samples:
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return named(index)


class Pairs(Samples):
    def __getitem__(self, index):
        return pair(index)


class Stream:
    def __init__(self, make):
        self.make = make

    def __iter__(self):
        return map(self.make, LOADED)


class Batches(Stream):
    def __len__(self):
        return len(LOADED)


class Python(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()

    def __len__(self):
        return len(LOADED)

    def __getitem__(self, index):
        return pair(LOADED[index])


def shard(folder):
    path = folder / "a-{000..001}.tar"
    for number, rows in enumerate((range(6), range(6, ROWS))):
        samples = {f"{i:04d}": {"a.npy": A[i], "b.npy": B[i], "cls": Y[i]} for i in rows}
        write_shard(folder / f"a-{number:03d}.tar", samples)
    return str(path)


def shards(folder):
    return TarShards(shard(folder), {"a": "a.npy", "b": "b.npy", "label": "cls"})


class WithAxis:
    """A feature of one number has no axis, which the inputs of the shared model have."""

    def __init__(self, records):
        self.records = records

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        sample = self.records[index]
        return {**sample, "b": sample["b"][None]}


def records(folder):
    samples = [{"a": A[i], "b": B[i], "label": Y[i]} for i in range(ROWS)]
    return WithAxis(TFRecords(str(write_tfrecords(folder / "a.tfrecord", samples))))


def endless():
    while True:
        yield from map(pair, LOADED)


def torch_loader(data, workers=0):
    def make(folder):
        from torch.utils.data import DataLoader

        return DataLoader(data(folder), BATCH, num_workers=workers, persistent_workers=workers > 0)

    return make


def web_dataset(folder):
    import webdataset

    made = webdataset.WebDataset(
        [str(folder / f"a-{n:03d}.tar") for n in range(2)], shardshuffle=False, empty_check=False
    )
    shard(folder)
    return made.decode().map(
        lambda sample: ({"a": sample["a.npy"], "b": sample["b.npy"]}, sample["cls"])
    ).batched(BATCH)  # fmt: skip


def web_loader(folder):
    import webdataset

    return webdataset.WebLoader(web_dataset(folder), batch_size=None)


def tf_data(make):
    def made(folder):
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices(make(slice(None))).batch(BATCH)

    return made


def grain_map(folder):
    import grain.python as grain

    return grain.MapDataset.source(Samples()).batch(BATCH)


def grain_iterable(folder):
    return grain_map(folder).to_iter_dataset()


def hugging_face(folder):
    import datasets

    columns = {name: values.tolist() for name, values in named(slice(None)).items()}
    datasets.Dataset.from_dict(columns).save_to_disk(folder / "arrow")
    return datasets.load_from_disk(folder / "arrow").with_format("numpy")


def hugging_face_iterable(folder):
    return hugging_face(folder).to_iterable_dataset()


# How it is made, and what else `fit` is told.
KINDS = {
    "arrays": (lambda folder: pair(slice(None)), {}),
    "tensors": (
        lambda folder: keras.tree.map_structure(keras.ops.convert_to_tensor, pair(slice(None))),
        {},
    ),
    "iterable": (lambda folder: Batches(pair), {}),
    "lists": (lambda folder: Batches(lambda rows: [*pair(rows)]), {}),
    "iterable of unknown length": (lambda folder: Stream(pair), {}),
    "named columns": (lambda folder: Batches(named), {}),
    "list of batches": (lambda folder: list(Batches(pair)), {}),
    "generator function": (lambda folder: lambda: iter(Batches(pair)), {}),
    "endless generator": (lambda folder: endless(), {"steps_per_epoch": 3}),
    "samples": (lambda folder: Samples(), {}),
    "samples in pairs": (lambda folder: Pairs(), {}),
    "PyDataset": (lambda folder: Python(), {}),
    "TarShards": (shards, {}),
    "TFRecords": (records, {}),
}
ELSEWHERE = {
    "DataLoader": (torch_loader(shards), {}),
    "DataLoader, named columns": (torch_loader(lambda folder: Samples()), {}),
    # The workers have to import the data, so it is of a package.
    "DataLoader, 2 workers": (torch_loader(shards, 2), {}),
    "WebDataset": (web_dataset, {}),
    "WebLoader": (web_loader, {}),
    "tf.data": (tf_data(pair), {}),
    "tf.data, named columns": (tf_data(named), {}),
    "grain, by number": (grain_map, {}),
    "grain, in turn": (grain_iterable, {}),
    "Hugging Face": (hugging_face, {}),
    "Hugging Face, in turn": (hugging_face_iterable, {}),
}


def halved(x, y=None):
    return x, y / 2


def check(model, folder, make, told, whole=True):
    """Goes through the data in `fit` and `predict`, and if `whole` with all that a user may ask."""

    def given():
        made = make(folder)
        return made if isinstance(made, tuple) else (made, None)

    def fit(**settings):
        if not told:  # an endless one to validate on would have to be told too
            data, labels = given()
            settings["validation_data"] = data if labels is None else (data, labels)
        return run(model, "fit", *given(), epochs=2, **settings, **told, **quiet).history

    quiet = {"batch_size": BATCH, "verbose": 0}
    steps = {"steps": told["steps_per_epoch"]} if told else {}
    history = fit(shuffle=False)
    assert history["seen"] == history.get("val_seen", [WANTED] * 2) == [WANTED] * 2
    predicted = run(model, "predict", given()[0], **quiet, **steps)
    np.testing.assert_array_equal(predicted, SEEN)
    if not whole:
        return
    logs = run(model, "evaluate", *given(), return_dict=True, **quiet, **steps)
    assert logs["seen"] == WANTED
    history = fit(shuffle=True, preprocess=halved)
    quarter = [TOTAL / 4] * 2
    assert history["total"] == history.get("val_total", quarter) == quarter


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.filterwarnings("ignore:the data makes its own batches:UserWarning")
def test_the_model_sees_every_value_in_turn(model, tmp_path, kind):
    check(model, tmp_path, *KINDS[kind])


@pytest.mark.each_time(
    "DataLoader",
    "tf.data, named columns",
    "grain, by number",
    "Hugging Face",
    "WebLoader",
    on=("jax", "tensorflow"),
)
@pytest.mark.across("jax", "torch", "tensorflow")
@pytest.mark.parametrize("kind", ELSEWHERE)
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # webdataset's shards
@pytest.mark.filterwarnings("ignore:the data makes its own batches:UserWarning")
def test_the_model_sees_every_value_of_other_packages_data_in_turn(model, tmp_path, kind):
    # Each loader starts workers of its own, which takes seconds.
    check(model, tmp_path, *ELSEWHERE[kind], whole="workers" not in kind)
    gc.collect()  # here, where what webdataset leaves open is allowed


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_nothing_holds_the_data_after_the_run(model, method):
    """Left to the garbage collector, a DataLoader waits 5 s for each of its workers."""
    data = Batches(pair)
    held = weakref.ref(data)
    gc.disable()
    try:
        run(model, method, data, verbose=0, **({"shuffle": False} if method == "fit" else {}))
        del data
        assert held() is None
    finally:
        gc.enable()


def test_what_is_no_data_or_ends(model):
    class Uneven(Samples):
        def __getitem__(self, index):
            return A[: 1 + index], index

    for message, data, epochs in (
        ("the generator is used up; give steps_per_epoch", map(pair, LOADED), 2),
        ("the data gives single samples; give batches", iter([pair(0)]), 1),
        ("samples of one batch differ in size", Uneven(), 1),
    ):
        refused(message, run, model, "fit", data, epochs=epochs, shuffle=False, verbose=0)


@pytest.mark.across("jax")
@pytest.mark.filterwarnings("ignore:Got pickle error when attempting to start a worker")
def test_data_that_workers_cannot_be_given(model):
    from torch.utils.data import DataLoader

    class Local(Samples):
        pass

    data = DataLoader(Local(), BATCH, num_workers=1)
    message = r"cannot be sent to workers .* set num_workers to 0"
    refused(message, run, model, "fit", data, shuffle=False, verbose=0)


@pytest.mark.across("torch")
def test_arrow_files_stay_on_the_disk(tmp_path):
    """Images of 6 MB, gone through batch by batch: Arrow holds none of them."""
    import datasets
    import pyarrow
    from PIL import Image

    from kmodels.data import as_dataset

    noise = np.random.default_rng(0).integers(0, 256, (32, 256, 256, 3), "uint8")
    columns = {"image": [Image.fromarray(pixels) for pixels in noise], "label": list(range(32))}
    made = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    made.save_to_disk(tmp_path / "arrow")
    del made, columns
    loaded = datasets.load_from_disk(tmp_path / "arrow")
    before = pyarrow.total_allocated_bytes()
    batches = as_dataset(loaded, batch_size=4)
    for index in range(batches.num_batches):
        images, labels = batches[index]
        np.testing.assert_array_equal(images, noise[labels])
        assert pyarrow.total_allocated_bytes() - before < noise.nbytes / 4

"""How fast is each kind of data, what do batches made ahead change, and how long do steps wait?

    python benchmarks/data.py [--backends torch,jax,tensorflow] [--write]

`kinds`: pictures per second of CPU time of this process, gone through as
`fit` does, from JPEG files of 96 x 96 pixels (from pixels for arrays), in batches of 32, resized to
64 x 64 with one function. `ahead`: seconds of an epoch of `fit` with two batches made ahead over
those without, in turns, medians over the rounds: for arrays, for pictures decoded in the process,
and for a source that waits as long for each batch as a step takes, as for a disk or a network.
`workers`: the share of the training time that steps waited, and the line that `fit` says, by
number of workers, for decoded pictures and for the source that waits.
"""

import argparse
import importlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import record

ROOT = Path(__file__).parent
BATCH, SIDE, INTO = 32, 96, 64


def small(x, y=None):
    """The same work for each kind: 64 x 64 pixels in -1..1."""
    from kmodels.data.images.resizing import resize

    pictures = np.stack([resize(np.asarray(picture), (INTO, INTO)) for picture in x])
    pictures = pictures.astype("float32") / 127.5 - 1
    return pictures if y is None else (pictures, np.asarray(y, "int32"))


class Waits:
    """A source that gives each batch after a while; picklable, of no framework."""

    def __init__(self, count: int, seconds: float):
        self.labels = np.zeros(count * BATCH, "int32")
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices):
        time.sleep(self.seconds)
        return np.zeros((len(indices), INTO, INTO, 3), "uint8"), self.labels[indices]


def jpegs(count: int) -> tuple[list[bytes], np.ndarray]:
    from PIL import Image

    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        picture = Image.fromarray(rng.integers(0, 256, (8, 8, 3), "uint8")).resize((SIDE, SIDE))
        stream = io.BytesIO()
        picture.save(stream, "JPEG", quality=90)
        found.append(stream.getvalue())
    return found, rng.integers(0, 10, count)


def write_files(folder: Path, count: int) -> None:
    sys.path.insert(0, str(ROOT.parent / "tests"))
    from record_files import write_shard, write_tfrecords  # pyright: ignore[reportMissingImports]

    pictures, labels = jpegs(count)
    for number, (content, label) in enumerate(zip(pictures, labels, strict=True)):
        path = folder / "folder" / "train" / f"c{label}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    pairs = list(enumerate(zip(pictures, labels, strict=True)))
    write_shard(folder / "a.tar", {f"{n:05d}": {"jpg": p, "cls": int(c)} for n, (p, c) in pairs})
    write_tfrecords(folder / "a.tfrecord", [{"image": p, "label": c} for _, (p, c) in pairs])


def kinds(folder: Path) -> dict:
    """Returns what makes each kind of data, for the backend in use."""
    from kmodels.data import ImageLoader, TarShards, TFRecords, open_dataset

    fields = {"image": "jpg", "label": "cls"}
    settings = {"validation_split": 0.0}

    def loader(spec, **more):
        size = {"image_size": (INTO, INTO)}
        return ImageLoader(open_dataset(spec, **settings, **size).train, BATCH, **size, **more)

    def arrays():
        shards = TarShards(str(folder / "a.tar"), fields)
        samples = [shards[n] for n in range(len(shards))]
        return np.stack([s["image"] for s in samples]), np.array([s["label"] for s in samples])

    def records():
        found = TFRecords(str(folder / "a.tfrecord"))

        class Decoded:
            def __len__(self):
                return len(found)

            def __getitem__(self, number):
                return found.picture(number), found.label(number)

        return Decoded()

    def hugging_face():
        import datasets

        files = TFRecords(str(folder / "a.tfrecord"))
        rows = [files[n] for n in range(len(files))]
        columns = {
            "image": [{"bytes": row["image"], "path": None} for row in rows],
            "label": [int(row["label"]) for row in rows],
        }
        made = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
        made.save_to_disk(folder / "arrow")
        return datasets.load_from_disk(folder / "arrow")

    def data_loader(workers):
        from torch.utils.data import DataLoader

        shards = TarShards(str(folder / "a.tar"), fields)
        return DataLoader(shards, BATCH, num_workers=workers, persistent_workers=workers > 0)

    def web_dataset():
        webdataset: Any = importlib.import_module("webdataset")
        made = webdataset.WebDataset(str(folder / "a.tar"), shardshuffle=False)
        return made.decode("rgb8").to_tuple("jpg", "cls").batched(BATCH)

    def grain():
        import grain.python as grain

        return grain.MapDataset.source(records()).batch(BATCH)

    def tf_data():
        import tensorflow as tf

        spec = {
            "image": tf.io.FixedLenFeature([], tf.string),
            "label": tf.io.FixedLenFeature([], tf.int64),
        }

        def parse(record):
            row = tf.io.parse_single_example(record, spec)
            return tf.io.decode_jpeg(row["image"], channels=3), row["label"]

        return tf.data.TFRecordDataset(str(folder / "a.tfrecord")).map(parse).batch(BATCH)

    return {
        "arrays": arrays,
        "ImageLoader, folder": lambda: loader(f"folder:{folder / 'folder'}"),
        "ImageLoader, tar shard": lambda: loader(str(folder / "a.tar")),
        "ImageLoader, TFRecord": lambda: loader(str(folder / "a.tfrecord")),
        "TarShards": lambda: TarShards(str(folder / "a.tar"), fields),
        "TFRecords": records,
        "Hugging Face, Arrow": hugging_face,
        "DataLoader": lambda: data_loader(0),
        "DataLoader, 1 worker": lambda: data_loader(1),
        "WebDataset": web_dataset,
        "grain": grain,
        "tf.data, TFRecord": tf_data,
    }


def measure_kinds(folder: Path, count: int, rounds: int) -> dict:
    from kmodels.data.pipeline.kinds import as_dataset, pipeline

    found = {}
    for name, make in kinds(folder).items():
        made = make()
        x, y = made if isinstance(made, tuple) else (made, None)
        feed = pipeline(as_dataset(x, y, batch_size=BATCH, preprocess=small))
        speeds = []
        for _ in range(rounds + 1):
            begun = time.process_time()
            seen = sum(len(batch[1]) for batch in feed.get_numpy_iterator())
            assert seen == count, (name, seen)
            speeds.append(count / (time.process_time() - begun))
        found[name] = round(statistics.median(speeds[1:]), 1)
        print(f"{name:<26} {found[name]:9.0f} pictures/s", file=sys.stderr, flush=True)
    return found


def make_model():
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((INTO, INTO, 3))])
    for width in (16, 32):
        model.add(keras.layers.Conv2D(width, 3, strides=2, activation="relu"))
    model.add(keras.layers.GlobalAveragePooling2D())
    model.add(keras.layers.Dense(10))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    return model


def measure_fit(folder: Path, rounds: int) -> dict:
    import data  # this file, under a name that workers know it by
    import keras

    import kmodels
    from kmodels.data import ImageLoader, open_dataset
    from kmodels.data.pipeline.kinds import pipeline
    from kmodels.data.pipeline.pipeline import Pipeline

    model, steps = make_model(), 16
    size = (INTO, INTO)
    pixels = np.zeros((steps * BATCH, INTO, INTO, 3), "float32")
    labels = np.zeros(steps * BATCH, "int32")

    class Arrays(keras.utils.PyDataset):
        def __len__(self):
            return steps

        def __getitem__(self, index):
            rows = slice(index * BATCH, (index + 1) * BATCH)
            return pixels[rows], labels[rows]

    def epoch(dataset) -> tuple[float, Pipeline]:
        feed = pipeline(dataset)
        begun = time.perf_counter()
        kmodels.fit(model, feed, verbose=0)
        return time.perf_counter() - begun, feed

    epoch(Arrays())
    step = min(epoch(Arrays())[0] for _ in range(3)) / steps
    train = open_dataset(f"folder:{folder / 'folder'}", validation_split=0.0, image_size=size).train

    def decoded(workers=0):
        return ImageLoader(train, BATCH, image_size=size, workers=workers)

    def waiting(workers=0):
        return ImageLoader(data.Waits(steps, step), BATCH, image_size=size, workers=workers)

    ahead: dict = {}
    for name, make in (("arrays", Arrays), ("decoded", decoded), ("waiting", waiting)):
        seconds: dict[str, list[float]] = {"0": [], "2": []}
        for _ in range(rounds):
            for count, taken in seconds.items():
                os.environ["KMODELS_PREFETCH"] = count
                taken.append(epoch(make())[0])
        without, with_two = (statistics.median(taken) for taken in seconds.values())
        ahead[name] = round(with_two / without, 3)
    os.environ.pop("KMODELS_PREFETCH")
    workers: dict[str, Any] = {}
    for name, make in (("decoded", decoded), ("waiting", waiting)):
        workers[name] = {}
        for count in (0, 1, 2):
            loader = make(count)
            epoch(loader)  # starts the workers
            taken = [epoch(loader) for _ in range(rounds)]
            loader.close()
            duration, feed = sorted(taken, key=lambda pair: pair[0])[len(taken) // 2]
            workers[name][count] = {
                "share": round(feed.clock.share, 3),
                "seconds": round(duration, 3),
                "said": feed.clock.line(),
            }
    return {"step_ms": round(1000 * step, 2), "ahead": ahead, "workers": workers}


def child(backend: str, what: str, folder: str, settings: dict) -> dict:
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, __file__, "--child", json.dumps([what, folder, settings])]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{backend} failed")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = record.flags(__doc__)
    parser.add_argument("--backends", default="torch,jax,tensorflow")
    parser.add_argument("--pictures", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        what, folder, settings = json.loads(options.child)
        if what == "kinds":
            print(json.dumps(measure_kinds(Path(folder), settings["pictures"], settings["rounds"])))
        else:
            print(json.dumps(measure_fit(Path(folder), settings["rounds"])))
        return
    settings = {"pictures": options.pictures, "rounds": options.rounds}
    backends = options.backends.split(",")
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), options.pictures)
        found: dict = {"kinds": child(backends[0], "kinds", folder, settings)}
        print(json.dumps(found), flush=True)
        for backend in backends:
            found[backend] = child(backend, "fit", folder, settings)
            print(backend, json.dumps(found[backend]), flush=True)
    if options.write:
        record.write(
            f"data_{'-'.join(backends)}_cpu",
            __doc__,
            ("keras", "numpy", "pillow", "datasets", "grain", "webdataset", *backends),
            cores=len(os.sched_getaffinity(0)),
            settings=settings,
            **found,
        )


if __name__ == "__main__":
    main()

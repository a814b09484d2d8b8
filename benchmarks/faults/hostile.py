"""Hostile `.keras`, HDF5, zip, npz, GGUF and pickled files, and mutated ones.

    python benchmarks/faults/hostile.py [--quick] [--write]

An audit hook notes what is run, imported or opened elsewhere while they are read; what HDF5 opens,
which Python does not see, is traced by strace where there is one. Prints counts.
"""

import contextlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import foreign
import h5py
import hostile_files as files
import keras
import numpy as np
import tally

from kmodels.checkpoint.keras_file import WEIGHTS
from kmodels.checkpoint.state import weights_digest
from kmodels.core.errors import InputError
from kmodels.data import ImageLoader, open_dataset
from kmodels.models import GemmaBackbone, ViTBackbone
from kmodels.training import load_keras_file
from kmodels.weights import read_npz, read_safetensors
from kmodels.weights.files import PICKLED

CANARY = files.CANARY
RUN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
)
_state: dict[str, Any] = {"folder": None, "found": []}


def _watch(event: str, arguments: tuple) -> None:
    folder = _state["folder"]
    if folder is None:
        return
    if event in RUN or (event == "import" and CANARY in str(arguments[0])):
        _state["found"].append((event, str(arguments)[:100]))
    if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        path = os.path.realpath(os.fsdecode(arguments[0]))
        allowed = (folder, os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix), SOURCE)
        inside = path.startswith((*allowed, "/proc/", "/sys/", "/dev/"))
        if not inside or CANARY in path:
            _state["found"].append((event, path))


SOURCE = str(Path(__file__).resolve().parents[2])


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[list]:
    """Notes what is run, and what is opened outside of a folder, Python and kmodels."""
    if not _state.get("on"):
        sys.addaudithook(_watch)
        _state["on"] = True
    _state.update(folder=os.path.realpath(folder), found=[])
    try:
        yield _state["found"]
    finally:
        _state["folder"] = None


def peak_mb() -> float:
    """The most memory that this process held since `forget_peak`, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def forget_peak() -> float:
    """Begins to measure anew, where the system lets us; files.MB held now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_mb()


class Reader:
    """Reads files one after the other and counts how that ended.

    Args:
        read: of a file or directory.
        unchanged: a digest of what a refusal must not change.
    """

    def __init__(self, read: Callable[[Path], object], unchanged: Callable[[], object] = str):
        self.read, self.unchanged = read, unchanged
        names = ("files", "loaded", "refused", "other errors", "changed by a refusal")
        self.counts: dict[str, Any] = dict.fromkeys(names, 0)
        self.slowest, self.work, self.most = (0.0, ""), 0.0, 0.0
        self.problems: list[str] = []

    def attempt(self, path: Path, name: str = "") -> bool:
        """Returns whether it was loaded."""
        self.counts["files"] += 1
        before, start, work = self.unchanged(), time.perf_counter(), time.process_time()
        held, loaded = forget_peak(), False
        try:
            self.read(path)
            loaded = True
            self.counts["loaded"] += 1
        except InputError as error:
            self.counts["refused"] += 1
            self.counts["changed by a refusal"] += self.unchanged() != before
            if "\n" in str(error):
                self.problems.append(f"{name}: more than a line")
        except Exception as error:
            self.counts["other errors"] += 1
            self.problems.append(f"{name}: {type(error).__name__}: {error}"[:160])
        self.slowest = max(self.slowest, (round(time.perf_counter() - start, 3), name))
        self.work = max(self.work, time.process_time() - work)
        self.most = max(self.most, peak_mb() - held)
        return loaded

    def report(self, **more: Any) -> dict[str, Any]:
        """The counts, with what the slowest took and the largest held."""
        # The work tells more than the clock on a machine that does other things too.
        seen = {"slowest s": self.slowest[0], "which was": self.slowest[1]}
        seen |= {"most CPU s": round(self.work, 3), "most MB": round(self.most)}
        return {**more, **self.counts, **seen, "problems": self.problems[:8]}


def small_model(units: int = 5) -> keras.Model:
    """A compiled model with a step behind it."""
    inputs = keras.Input((4,))
    x = keras.layers.Dense(units, name="first")(inputs)
    x = keras.layers.LayerNormalization(name="norm")(x)
    model = keras.Model(inputs, keras.layers.Dense(2, name="second")(x))
    model.compile(keras.optimizers.AdamW(0.01), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def keras_files(trials: int, size: int) -> dict[str, Any]:
    """Hostile and mutated `.keras` files, read into a model."""
    draw, model = random.Random(11), small_model()
    reader = Reader(lambda path: load_keras_file(path, model), lambda: weights_digest(model))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "inside"
        folder.mkdir()
        outside = Path(name) / f"{CANARY}.h5"
        with h5py.File(outside, "w") as file:
            file["data"] = np.full((4, 5), 7, "float32")
        outside.with_suffix(".raw").write_bytes(bytes(80))
        path = folder / "model.keras"
        model.save(path)
        with zipfile.ZipFile(path) as held:
            members = {member: held.read(member) for member in held.namelist()}
        weights, good = members[WEIGHTS], path.read_bytes()
        with watched(Path(tempfile.gettempdir())) as found:
            for what, config in files.dangerous_configs().items():
                content = config if isinstance(config, str) else json.dumps(config)
                path.write_bytes(files.repacked(members, **{"config.json": content}))
                # What they name is not looked at, and the weights are good.
                assert reader.attempt(path, what), what
            configs = reader.counts["files"]
            hostile = {
                **files.archives(WEIGHTS, weights, size),
                **{
                    what: files.repacked(members, **{WEIGHTS: content})
                    for what, content in files.hostile_h5(weights, outside).items()
                },
            }
            wrong = _all(reader, path, hostile)
            path.unlink()
            os.mkfifo(path)
            wrong += ["a pipe"] * reader.attempt(path, "a pipe")
            path.unlink()
            for number in range(trials):
                changed = foreign.mutated(weights if number % 2 else good, draw)
                if number % 2:
                    changed = files.repacked(members, **{WEIGHTS: changed})
                path.write_bytes(changed)
                reader.attempt(path, f"mutated {number}")
                if not number % 100:
                    path.write_bytes(good)
                    load_keras_file(path, model)
    return reader.report(
        configs=configs, handmade=len(hostile) + 1, mutated=trials, events=found[:8], which=wrong
    )


def _loads(reader: Reader, path: Path, content: bytes, name: str) -> bool:
    path.write_bytes(content)
    return reader.attempt(path, name)


def _all(reader: Reader, path: Path, contents: dict[str, bytes]) -> list[str]:
    """Returns which of them were loaded."""
    return [name for name, content in contents.items() if _loads(reader, path, content, name)]


def _tried(
    reader: Reader,
    name: str,
    good: bytes,
    hostile: dict[str, bytes],
    draw: random.Random,
    trials: int,
) -> dict[str, Any]:
    """Reads hostile files, and mutated ones of a good one, under the same name."""
    with tempfile.TemporaryDirectory() as folder, watched(Path(tempfile.gettempdir())) as found:
        path = Path(folder) / name
        wrong = _all(reader, path, hostile)
        for number in range(trials):
            _loads(reader, path, foreign.mutated(good, draw), f"mutated {number}")
    return reader.report(handmade=len(hostile), mutated=trials, events=found[:8], which=wrong)


def npz_files(trials: int, size: int) -> dict[str, Any]:
    """npz files as weights, and as a data set."""
    draw = random.Random(12)
    pictures, labels = np.zeros((12, 4, 4), "uint8"), np.arange(12) % 3
    stream = io.BytesIO()
    np.savez(stream, x=pictures, y=labels)
    good = stream.getvalue()

    def read(path: Path) -> None:
        errors = []
        for load in (
            lambda: [tensor.read() for tensor in read_npz(path).values()],
            lambda: open_dataset(f"npz:{path}"),
        ):
            try:
                load()
            except InputError as error:
                errors.append(error)
        if len(errors) == 2:
            raise errors[0]

    reader = Reader(read)
    return _tried(reader, "a.npz", good, files.hostile_npz(size), draw, trials)


def picture_zips(trials: int, size: int) -> dict[str, Any]:
    """Zips of pictures."""
    from PIL import Image

    draw, stream = random.Random(13), io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), 90, "uint8")).save(stream, "png")
    pairs = [(f"{kind}/{n}.png", stream.getvalue()) for kind in "ab" for n in range(4)]
    good = files.archive(pairs)

    def read(path: Path) -> None:
        bundle = open_dataset(f"folder:{path}", image_size=(8, 8), validation_split=0.0)
        loader = ImageLoader(bundle.train, 4, image_size=(8, 8), channels=3)
        for index in range(len(loader)):
            loader[index]

    hostile = files.hostile_pictures(pairs, size)
    reader = Reader(read)
    return _tried(reader, "a.zip", good, hostile, draw, trials)


def torch_files(trials: int, size: int) -> dict[str, Any]:
    """pytorch_model.bin, with torch installed."""
    import torch

    draw, stream = random.Random(14), io.BytesIO()
    torch.save({"a": torch.arange(6.0), "b": torch.ones(2, 2)}, stream)
    good, hostile = stream.getvalue(), files.hostile_pickles(size)
    reader = Reader(lambda path: [t.read() for t in read_safetensors(path.parent).values()])
    return _tried(reader, PICKLED, good, hostile, draw, trials)


def gguf_files(trials: int) -> dict[str, Any]:
    """GGUF files as weights; what is made of them is another matter."""
    from kmodels.models.gemma import gguf
    from kmodels.text import Tokenizer

    draw = random.Random(15)

    def read(path: Path) -> None:
        with contextlib.suppress(InputError):
            Tokenizer.from_file(path)
        for held in gguf.FORMAT.open_checkpoint(path, {}, {}, True).tensors.values():
            held.read()

    reader = Reader(read)
    with tempfile.TemporaryDirectory() as name, watched(Path(tempfile.gettempdir())) as found:
        path = Path(name) / "model.gguf"
        good = files.good_gguf(path)
        assert reader.attempt(path, "good")
        hostile = files.hostile_gguf()
        wrong = _all(reader, path, hostile)
        for number in range(trials):
            _loads(reader, path, foreign.mutated(good, draw), f"mutated {number}")
    return reader.report(handmade=len(hostile), mutated=trials, events=found[:8], which=wrong)


ENDINGS = (".keras", ".h5", ".pkl", ".pt", ".bin", ".npz", ".zip", ".gguf", ".safetensors")


def from_preset() -> dict[str, Any]:
    """Counts what `from_preset` says to files that no format of ours is."""
    reader = Reader(lambda path: [cls.from_preset(path) for cls in (ViTBackbone, GemmaBackbone)])
    with tempfile.TemporaryDirectory() as name, watched(Path(tempfile.gettempdir())) as found:
        for ending in ENDINGS:
            path = Path(name) / f"model{ending}"
            for content in (files.PAYLOAD, files.archive([("config.json", files.PAYLOAD)]), b""):
                _loads(reader, path, content, ending)
    return reader.report(events=found[:8])


def traced(folder: Path) -> dict[str, list[str]]:
    """Files outside that HDF5 opens for hostile weights, as strace sees it."""
    script = "import sys; sys.path[:0] = sys.argv[1:]; import hostile; hostile.keras_files(0, 0)"
    log = folder / "strace"
    command = ["strace", "--seccomp-bpf", "-f", "-e", "trace=openat,execve", "-o", log]
    command += [sys.executable, "-c", script, Path(__file__).parent]
    subprocess.run(command, check=True, timeout=280)
    lines = log.read_text().splitlines()
    # The script itself writes the files that the weights point to, after a look whether they are.
    made = ("O_CREAT", "O_TRUNC", "ENOENT")
    opened = [line for line in lines if CANARY in line and not any(flag in line for flag in made)]
    passwd = [line for line in lines if "/etc/passwd" in line]
    ran = [line for line in lines if "execve(" in line and "touch" in line]
    return {"canary opened": opened, "/etc/passwd opened": passwd, "run": ran}


def main() -> None:
    """Runs all and prints the counts."""
    options = tally.arguments(__doc__).parse_args()
    trials, size = (200, 80 * files.MB) if options.quick else (2000, 300 * files.MB)
    found: dict[str, Any] = {
        ".keras and HDF5": keras_files(trials, size),
        "npz": npz_files(trials // 2, size),
        "zips of pictures": picture_zips(trials // 4, size),
        "by name": from_preset(),
    }
    if find_spec("gguf"):
        found["GGUF"] = gguf_files(trials)
    if find_spec("torch"):
        found["torch's pickles"] = torch_files(trials // 2, size)
    found["canaries left"] = int((Path(tempfile.gettempdir()) / CANARY).exists())
    if shutil.which("strace"):
        with tempfile.TemporaryDirectory() as name:
            found["under strace"] = traced(Path(name))
    tally.report("hostile", found, options)


if __name__ == "__main__":
    main()

"""Damages files of models at random places and looks how their readers take it.

    KERAS_BACKEND=torch .venv/full/bin/python tests/nightly/mutations.py
    KERAS_BACKEND=torch .venv/full/bin/python tests/nightly/mutations.py --only config.json --seed 2

For each kind of file, and for each directory that has one, a copy is changed at one place: a value
of another type or size, a missing or new key, flipped bytes, an end that is cut off. Then the
directory is opened and used. What may happen: the model works, or one `InputError` of one line.
Anything else is printed with the seed and number that make it again: another exception, NaN in what
a model computes where the undamaged one has none, more than 30 seconds (more on a busy machine), a
dead process. The exit status is 1 if there was any. `python3 tests/run.py --references` makes the
directories.
"""

import argparse
import collections
import json
import math
import os
import random
import re
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))
REFERENCES = Path(os.environ.get("KMODELS_REFERENCES", TESTS / ".references"))
SECONDS, MEMORY = 30, 16 * 2**30
# What takes the place of a value in JSON.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 2**20, 2**31, 2**70, -(2**31), 0.5, 1e-30, -1.5, 1e308),
    *(math.nan, math.inf, "", "x", "1", "gelu", "\ud800", "../x", [], [1], [-1, 2], ["x"], [[[]]]),
    *([None], {}, {"x": 1}, {"1": [2]}, {"rope_type": "yarn"}, 10**400, "x" * 5000, "\n\x1b[31m"),
)
# Endings of the names of the files that are damaged; the rest of a directory is left alone.
DAMAGED = (
    ".json",
    ".safetensors",
    ".model",
    ".gguf",
    ".npz",
    ".npy",
    ".jinja",
    ".csv",
    ".txt",
    ".dat",
)
# Sizes and names stand at the beginning of a file, which is hit more often than the rest.
HEAD = 2048
# Behind it these hold numbers, where NaN is what the file says.
NUMBERS = (".safetensors", ".gguf", ".npz")


@dataclass(frozen=True)
class Subject:
    """A directory: what writes it, what opens it, and what is done with what that returns.

    Args:
        write: called with the path of the directory, which does not exist yet.
        open: called with the path; what it returns goes to `use`.
        use: returns arrays that the model computes.
    """

    write: Callable[[Path], object]
    open: Callable[[Path], Any]
    use: Callable[[Any], Any] = lambda opened: None


def subjects() -> dict[str, Subject]:
    """Directories by their names: references of other packages, and files made here."""
    found = {f"reference {row.name}": of_row(row) for row in rows()}
    for row in rows():
        for folder in row.adapter.split():
            found[f"adapter {folder}"] = of_adapter(row, REFERENCES / folder)
    return {**found, **made_here()}


def rows() -> list[Any]:
    from family_table import FAMILIES

    return [replace(row, root=REFERENCES) for row in FAMILIES]


def of_row(row: Any) -> Subject:
    """A directory of transformers or timm, or a file for ViT's npz formats."""

    def write(folder: Path) -> None:
        if row.path.is_dir():
            shutil.copytree(row.path, folder)
        else:
            folder.mkdir()
            shutil.copy(row.path, folder)

    def opened(folder: Path) -> Any:
        path = folder if row.path.is_dir() else folder / row.path.name
        return row.task.from_preset(path, **row.settings)

    return Subject(write, opened, lambda model: forward(row, model))


def of_adapter(row: Any, source: Path) -> Subject:
    """An adapter of PEFT over a model that stays."""

    def opened(folder: Path) -> Any:
        row.model.load_adapter(folder)
        return row.model

    return Subject(
        lambda folder: shutil.copytree(source, folder), opened, lambda model: forward(row, model)
    )


def forward(row: Any, model: Any) -> Any:
    """What a model computes of the inputs of its row, or of images of the size that it now has."""
    import numpy as np

    from family_images import ImageEncoder, MaskedAutoencoder, PatchRows, QuerySegmenter
    from family_table import IMAGE_TEXT_CASES, ImageText, TextEmbedder

    if isinstance(row, PatchRows):
        return None
    if isinstance(row, ImageEncoder | MaskedAutoencoder | QuerySegmenter):
        shape = model.backbone.config.image_shape
        return model(np.ones((1, *shape), "float32")) if math.prod(shape) < 2**20 else None
    if isinstance(row, TextEmbedder):
        return model.encode(row.texts)
    return model(row.inputs(*IMAGE_TEXT_CASES) if isinstance(row, ImageText) else row.inputs)


def made_here() -> dict[str, Subject]:
    """Directories in formats of kmodels, GGUF files, tokenizers, a run and arrays."""
    import numpy as np

    import kmodels.data as data
    from kmodels import models
    from kmodels.runs import report
    from kmodels.text import Tokenizer
    from sentencepiece_files import words_model

    sys.path += [str(TESTS / place) for place in ("unit/runs", "families", "families/weights")]
    import run_folders
    import test_four_bits
    import test_gguf_packed
    import test_gguf_quants

    prompt = "The quick brown fox"

    def chat(model: Any) -> Any:
        ids = np.arange(1, 9, dtype="int32")[None]
        inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
        model.generate(inputs, max_new_tokens=2, stop_token_ids=None)
        return model(inputs)

    def preset(task: Any, name: str, use: Callable[[Any], Any], **settings: Any) -> Subject:
        def write(folder: Path) -> None:
            task.from_preset(name, **settings).save_to_preset(folder)

        return Subject(write, task.from_preset, use)

    def gguf(task: Any, name: str) -> Subject:
        def write(folder: Path) -> None:
            folder.mkdir()
            task.from_preset(name).export_to_gguf(folder / "model.gguf", "float32")

        return Subject(write, lambda folder: task.from_preset(folder / "model.gguf"), chat)

    def packed_gguf(dtype: str) -> Subject:
        def write(folder: Path) -> None:
            folder.mkdir()
            model = models.Qwen3CausalLM.from_preset("qwen3_debug", **test_gguf_packed.WIDTHS)
            model.export_to_gguf(folder / "model.gguf", dtype)

        def opened(folder: Path) -> Any:
            return models.Qwen3CausalLM.from_preset(folder / "model.gguf", quantized=True)

        return Subject(write, opened, chat)

    def four_bits(written: Callable[..., tuple[Path, Path]], *settings: Any) -> Subject:
        def write(folder: Path) -> None:
            with tempfile.TemporaryDirectory() as temporary:
                source = test_four_bits.write_floats(Path(temporary) / "source")
                shutil.copytree(written(source, Path(temporary), *settings)[0], folder)

        return Subject(write, models.Qwen3CausalLM.from_preset, chat)

    def importance(form: str, name: str) -> Subject:
        def write(folder: Path) -> None:
            folder.mkdir()
            test_gguf_quants.matrix(folder / name, test_gguf_quants.columns(), form)

        def opened(folder: Path) -> Any:
            model = test_gguf_quants.weighted_model()
            model.export_to_gguf(folder / "model.gguf", "q4_k_m", imatrix=folder / name)
            return models.Qwen3CausalLM.from_preset(folder / "model.gguf")

        return Subject(write, opened, chat)

    def quantized(folder: Path) -> None:
        model = models.GemmaCausalLM.from_preset("gemma3_debug")
        model.quantize("nf4")
        model.save_to_preset(folder)

    def picture(model: Any) -> Any:
        shape = model.backbone.config.image_shape
        return model.predict(np.zeros((1, *shape), "uint8"), verbose=0)

    def both(folder: Path) -> None:
        folder.mkdir()
        model = models.Gemma3ImageTextLM.from_preset("gemma3_vision_debug")
        model.export_to_gguf(folder / "model.gguf", "float32", mmproj=folder / "mmproj.gguf")

    def exported(task: Any, name: str) -> Subject:
        def write(folder: Path) -> None:
            task.from_preset(name).export_to_transformers(folder)

        return Subject(write, task.from_preset, chat)

    def words(folder: Path) -> None:
        folder.mkdir()
        (folder / "tokenizer.model").write_bytes(words_model(["the", "fox"], ["<start_of_turn>"]))

    def encode(tokenizer: Any) -> None:
        ids = tokenizer.encode(f"{prompt} \u2028 the fox")
        tokenizer.decode(ids)
        if tokenizer.chat_template:
            tokenizer.apply_chat_template([{"role": "user", "content": prompt}])

    def arrays(folder: Path) -> None:
        folder.mkdir()
        x, y = np.zeros((8, 4, 4, 3), "uint8"), np.arange(8) % 2
        np.savez(folder / "data.npz", x=x, y=y)

    tokenizers = {
        f"tokenizer {name}": Subject(
            lambda folder, name=name: shutil.copytree(REFERENCES / name, folder),
            Tokenizer.from_file,
            encode,
        )
        for name in ("clip/tokenizer", "gemma3_processor/model", "gemma4_processor/model")
    }
    return {
        **tokenizers,
        "sentencepiece": Subject(
            words, lambda folder: Tokenizer.from_file(folder / "tokenizer.model"), encode
        ),
        "gguf gemma3": gguf(models.GemmaCausalLM, "gemma3_debug"),
        "gguf gemma4": gguf(models.GemmaCausalLM, "gemma4_debug"),
        "gguf llama3": gguf(models.Llama3CausalLM, "llama3_debug"),
        "gguf qwen3": gguf(models.Qwen3CausalLM, "qwen3_debug"),
        "gguf packed as q4_k_m": packed_gguf("q4_k_m"),
        "four bits of bitsandbytes": four_bits(test_four_bits.written),
        "four bits of gptq": four_bits(test_four_bits.written_in_ints, "gptq"),
        "four bits of awq": four_bits(test_four_bits.written_in_ints, "awq"),
        "eight bits of transformers": four_bits(test_four_bits.written_in_float8, "blocks"),
        "eight bits of compressed-tensors": four_bits(test_four_bits.written_in_float8, "groups"),
        "importance matrix": importance("imatrix", "importance.gguf"),
        "older importance matrix": importance("dat", "importance.dat"),
        "four bits of kmodels": Subject(quantized, models.GemmaCausalLM.from_preset, chat),
        "gguf with images": Subject(
            both, lambda folder: models.Gemma3ImageTextLM.from_preset(folder / "model.gguf")
        ),
        "exported gemma3": exported(models.GemmaCausalLM, "gemma3_debug"),
        "exported llama3": exported(models.Llama3CausalLM, "llama3_debug"),
        "exported qwen3": exported(models.Qwen3CausalLM, "qwen3_debug"),
        "preset gemma3": preset(models.GemmaCausalLM, "gemma3_debug", chat),
        "preset vit": preset(models.ViTImageClassifier, "vit_debug", picture, num_classes=3),
        "run": Subject(lambda folder: run_folders.images(folder), report.write),
        "arrays": Subject(arrays, lambda folder: data.open_dataset(f"npz:{folder}/data.npz")),
    }


# === Damage ===


def damaged(content: bytes, name: str, chance: random.Random) -> tuple[bytes, str]:
    """Returns a file's content with one change, and what was changed."""
    if name.endswith(".json") and chance.random() < 0.85:
        return damaged_json(content, chance)
    content = bytearray(content)
    way = chance.choice(("flip", "number", "cut", "text"))
    head = 8 + int.from_bytes(content[:8], "little") if name.endswith(".safetensors") else HEAD
    short = name.endswith(NUMBERS) or chance.random() < 0.7
    place = chance.randrange(min(len(content), head if short else len(content)))
    whole = whole_numbers(content, head) if name.endswith(".safetensors") else {}
    if whole and chance.random() < 0.3:
        place = chance.choice(chance.choice(chance.choice([*whole.values()])))
    if way == "cut":
        return bytes(content[:place]), f"cut at {place}"
    new = {
        "flip": bytes([content[place] ^ 1 << chance.randrange(8)]),
        "number": chance.choice((0, 1, 2**20, 2**31 - 1, 2**32 - 1)).to_bytes(4, "little"),
        "text": chance.choice((b"\xff\xfe", b"\0\0\0\0", b"{{", b"}", b"[", b"-1", b"99999999999")),
    }[way]
    content[place : place + len(new)] = new
    return bytes(content), f"{way} {new!r} at {place}"


def whole_numbers(content: bytes, head: int) -> dict[str, list[range]]:
    """Returns the places of a safetensors file's tensors of whole numbers, by ends of names.

    They may say where others belong, such as g_idx of GPTQ, or be a text, as bitsandbytes has one.
    """
    found: dict[str, list[range]] = collections.defaultdict(list)
    for name, tensor in json.loads(content[8:head]).items():
        start, end = (head + place for place in tensor.get("data_offsets", (0, 0)))
        if end > start and tensor["dtype"][0] in "IU":
            found[name.rpartition(".")[2]].append(range(start, end))
    return found


def damaged_json(content: bytes, chance: random.Random) -> tuple[bytes, str]:
    """Returns a JSON file with one other value, one key less or one more."""
    tree = json.loads(content)
    places = list(walk(tree))
    way, new = chance.choice(("value", "value", "value", "delete", "add")), chance.choice(VALUES)
    # Long lists, such as vocabularies, would take nearly all of the changes.
    depth = chance.randrange(1, 1 + max((len(keys) for keys in places), default=0))
    keys = chance.choice([keys for keys in places if len(keys) <= depth] or [()])
    if not keys:
        return json.dumps(new).encode(), f"{new!r:.60} in place of everything"
    owner = tree
    for key in keys[:-1]:
        owner = owner[key]
    if way == "delete":
        del owner[keys[-1]]
    elif way == "add" and isinstance(owner, dict):
        owner["x"] = new
    else:
        owner[keys[-1]] = new
    return json.dumps(tree).encode(), f"{way} {'.'.join(map(str, keys))}: {new!r:.60}"


def walk(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the keys that lead to each part of a tree, of long lists to the first ten."""
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    for i, (key, part) in enumerate(parts):
        if i >= 10 and not isinstance(part, dict | list) and len(value) > 200:
            continue
        yield (*keys, key)
        if isinstance(part, dict | list):
            yield from walk(part, (*keys, key))


# === The process that opens what is damaged ===


def child() -> None:
    """Reads which files to damage, a line of JSON for each, and writes what became of each."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    made = subjects()
    with tempfile.TemporaryDirectory() as temporary:
        for line in sys.stdin:
            subject, file, seed, number = json.loads(line)
            whole, folder = Path(temporary) / subject.replace("/", " "), Path(temporary) / "it"
            if not whole.exists():
                made[subject].write(whole)
                tried(made[subject], whole)  # imports what it needs before the time counts
            shutil.copytree(whole, folder)
            chance = random.Random(f"{seed} {subject} {file} {number}")
            content, what = damaged((whole / file).read_bytes(), file, chance)
            (folder / file).write_bytes(content)
            print(json.dumps({"what": what}), file=answers, flush=True)
            result, where = tried(made[subject], folder)
            print(json.dumps({"result": result, "where": where}), file=answers, flush=True)
            shutil.rmtree(folder, ignore_errors=True)


def tried(subject: Subject, folder: Path) -> tuple[str, str]:
    """Returns what becomes of a directory that is opened and used, and the message if any."""
    from kmodels.core.errors import InputError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ("works" if finite(subject.use(subject.open(folder))) else "NaN"), ""
    except InputError as error:
        return ("several lines" if "\n" in str(error) else "refused"), str(error)
    except Exception as error:
        steps = [f for f in traceback.extract_tb(error.__traceback__) if "kmodels" in f.filename]
        at = f" at {Path(steps[-1].filename).name}:{steps[-1].lineno}" if steps else ""
        return "foreign", f"{type(error).__name__}{at}: {error}"


def finite(value: Any) -> bool:
    """Returns whether what a model computes has no NaN."""
    import keras
    import numpy as np

    from arrays import to_numpy

    arrays = [to_numpy(x) for x in keras.tree.flatten(value) if hasattr(x, "shape")]
    return all(np.isfinite(x).all() for x in arrays if x.dtype.kind == "f")


# === The process that watches it ===


class Child:
    """A process that opens damaged directories, and another one once it hangs or has died."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, *job: Any) -> dict[str, Any]:
        """Returns what became of a file: subject, file, seed and number of the change."""
        if self.process is None:
            words = [sys.executable, str(Path(__file__).resolve()), "--child"]
            pipe, null = subprocess.PIPE, subprocess.DEVNULL
            # Without buffers, in which `select` would not see a line that is there.
            self.process = subprocess.Popen(words, 0, stdin=pipe, stdout=pipe, stderr=null)
        process, row = self.process, {"what": "before the change", "where": ""}
        lines, asked = process.stdout, process.stdin
        assert lines is not None and asked is not None
        asked.write(json.dumps(job).encode() + b"\n")
        # Other processes of a busy machine take their share of the time.
        busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        for seconds in (10 * SECONDS * busy, SECONDS * busy):
            there = select.select([lines], [], [], seconds)[0]
            line = lines.readline() if there else b""
            if not line:
                if not there:
                    process.kill()
                died = f"died with {process.wait()}" if there else "hangs"
                self.process = None
                return {**row, "result": died}
            row |= json.loads(line)
        return row


def main() -> None:
    """Damages the chosen files and prints what became of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--subjects", default="", help="only directories with this in their name")
    parser.add_argument("--only", default="", help="only files whose name ends with this")
    parser.add_argument("--count", type=int, default=300, help="changes of each kind of file")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.child:
        child()
        return
    # A kind of file is shared by directories, which share its number of changes.
    kinds: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
    for name, made in subjects().items():
        if options.subjects not in name:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            made.write(Path(temporary) / "whole")
            for path in sorted((Path(temporary) / "whole").rglob("*")):
                if path.suffix in DAMAGED and path.stat().st_size:
                    file = str(path.relative_to(Path(temporary) / "whole"))
                    kinds[re.sub(r"\d+", "0", path.name)].append((name, file))
    bad, process = 0, Child()
    for kind, places in kinds.items():
        if not kind.endswith(options.only):
            continue
        counts: collections.Counter[str] = collections.Counter()
        share = -(-options.count // len(places))
        for subject, file in places:
            for number in range(share):
                row = process.ask(subject, file, options.seed, number)
                counts[row["result"]] += 1
                if row["result"] not in ("works", "refused"):
                    bad += 1
                    told = f"{row['result']} {row['what']} {row['where']!r:.200}"
                    print(f"  {subject} {file} {options.seed}/{number}: {told}", flush=True)
        print(f"{kind}: {dict(sorted(counts.items()))} in {len(places)} directories", flush=True)
    print(f"{bad} were neither refused in a line nor worked")
    raise SystemExit(bad > 0)


if __name__ == "__main__":
    main()

"""The commands that use a model: `kmodels predict`, `kmodels generate` and `kmodels chat`."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from kmodels.core.errors import InputError, check_choice, check_whole, printable
from kmodels.core.files import atomic_write, check_output, local_path
from kmodels.runs.run_folder import MODEL, check_preprocessor, json_text, model_in
from kmodels.runs.terminal import option, refuse_idle

# Flags of every command that generates text.
Temperature: TypeAlias = Annotated[
    float | None, option("Sampling", "0: most likely token; default: generation_config.json.")
]
TopK: TypeAlias = Annotated[int | None, option("Sampling", "Sample from the k most likely tokens.")]
TopP: TypeAlias = Annotated[
    float | None,
    option("Sampling", "Nucleus sampling: the smallest set of tokens with this total probability."),
]
MinP: TypeAlias = Annotated[
    float | None,
    option("Sampling", "Min-p sampling: lower bound as a share of the largest probability."),
]
RepetitionPenalty: TypeAlias = Annotated[
    float | None, option("Sampling", "Penalty of repeated tokens, above 1.")
]
Seed: TypeAlias = Annotated[int | None, option("Sampling", "Random seed.")]
Stop: TypeAlias = Annotated[
    list[str] | None, option("Sampling", "Text that ends a reply; may be repeated.")
]
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def _sampling(context: typer.Context) -> dict[str, Any]:
    """Returns the arguments of a `Sampler`; those that are not given are None."""
    from kmodels.generation.sampler import Sampler

    given = {name: context.params[name] for name in SAMPLING}
    if given["temperature"] == 0:
        _refuse_draws(context)
    Sampler().changed(**given)  # checks the values
    return given


def _refuse_draws(context: typer.Context) -> None:
    names = ("top_k", "top_p", "min_p", "seed")
    refuse_idle(context, names, "at temperature 0, where nothing is drawn")


# === Images ===

# The method by which the kind of a model is known.
KINDS = ("decode_predictions", "segment", "detect", "classify")


def predict(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help=MODEL)],
    files: Annotated[list[str], typer.Argument(metavar="FILES...", help="Images, or folders.")],
    top: Annotated[int, typer.Option(help="Number of classes, or objects, shown per image.")] = 5,
    names: Annotated[
        str | None,
        typer.Option(help="Class names for CLIP or SigLIP, separated by commas: cat,dog."),
    ] = None,
    masks: Annotated[
        Path | None, typer.Option(help="Directory for the masks of a segmenter, as PNG files.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Images per batch.")] = 32,
    precision: Annotated[str, typer.Option(help="float32, bfloat16 or mixed_*.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Classify or segment images, or detect objects; exit with 2 if a file cannot be read."""
    from PIL import Image

    check_whole("--top", top)
    check_whole("--batch-size", batch_size)
    if masks is not None:
        check_output("--masks", masks, folder=True)
    listed = _images(files)
    reader = _reader(model_in(model), names, precision, top, masks)
    rows, written, bad = [], set[Path](), 0
    width = max(len(str(file)) for file in listed)
    for row in _predicted(reader, listed, batch_size):
        mask = row.pop("mask", None)
        if masks is not None and mask is not None:
            target = _mask_file(local_path(masks), Path(row["file"]).stem, written)
            check_output("--masks", target, inputs=listed)
            image = Image.fromarray(mask)
            atomic_write(target, lambda path, image=image: image.save(path, format="PNG"))
            row["mask"] = str(target)
        if "outputs" in row:
            refuse_idle(context, ("top",), "on a model without classes")
        if "error" in row:
            bad += 1
            print(f"kmodels: {row['error']}", file=sys.stderr)
        elif not as_json:
            # Names of files and classes are anybody's.
            print(printable(f"{row['file']:{width}}  {_line(row)}"), flush=True)
        rows.append(row)
    if as_json:
        print(json_text(rows, ensure_ascii=False))
    if bad:
        raise typer.Exit(2)


def _images(paths: Sequence[str]) -> list[Path]:
    """Returns files, and the images below folders in the order of their names.

    Raises:
        InputError: for a folder without images.
    """
    from kmodels.data.images.decoding import suffixes

    files: list[Path] = []
    for path in map(local_path, paths):
        if not path.is_dir():
            files.append(path)
            continue
        below = sorted(file for file in path.rglob("*") if file.suffix.lower() in suffixes())
        if not below:
            raise InputError(f"{path} has no images; give files, or a folder with images")
        files += below
    return files


# Each of these returns the row of each image.


def _classify(model: Any, top: int, images: list[Any]) -> list[dict[str, Any]]:
    """Predicts classes with probabilities, or the outputs of a regression."""
    outputs = model.predict(images, batch_size=len(images), verbose=0)
    if model.problem_type == "regression" or not model.num_classes:
        return [{"outputs": row.tolist()} for row in outputs]
    return [{"predictions": _labelled(pairs)} for pairs in model.decode_predictions(outputs, top)]


def _segment(model: Any, top: int, images: list[Any]) -> list[dict[str, Any]]:
    """Predicts the share of pixels of each class, and masks."""
    import numpy as np

    rows = []
    for mask in model.segment(images):
        counts = np.bincount(mask.ravel(), minlength=model.num_classes)
        order = np.argsort(-counts, kind="stable")[:top]
        pairs = [(model.class_name(i), counts[i] / mask.size) for i in order if counts[i]]
        pixels = mask.astype("uint8" if model.num_classes <= 256 else "uint16")
        rows.append({"predictions": _labelled(pairs), "mask": pixels})
    return rows


def _detect(model: Any, top: int, images: list[Any]) -> list[dict[str, Any]]:
    """Predicts objects, the most probable ones first, and boxes in pixels."""
    import numpy as np

    rows = []
    for objects in model.detect(images, batch_size=len(images)):
        order = np.argsort(-objects["scores"], kind="stable")[:top]
        pairs = [(model.class_name(objects["labels"][i]), objects["scores"][i]) for i in order]
        boxes = objects["boxes"][order].round(1).tolist()
        rows.append({"predictions": _labelled(pairs), "boxes": boxes})
    return rows


def _classify_by_names(
    model: Any, top: int, names: list[str], images: list[Any]
) -> list[dict[str, Any]]:
    import keras

    from kmodels.models.blocks.class_names import best

    logits = model.classify(images, names, batch_size=len(images))
    # SigLIP scores each pair of image and text independently.
    independent = model.preprocessor.kind == "siglip"
    shares = keras.ops.sigmoid(logits) if independent else keras.ops.softmax(logits, axis=-1)
    scores = keras.ops.convert_to_numpy(shares)
    return [{"predictions": _labelled(pairs)} for pairs in best(scores, names, top)]


def _reader(
    path: str, names: str | None, precision: str, top: int, masks: Path | None
) -> Callable[[list[Any]], list[dict[str, Any]]]:
    """Returns the function that makes rows of images with the model at a path.

    Raises:
        InputError: for a model of another kind, or without a preprocessor.
    """
    from kmodels import presets

    cls: Any = presets.class_of(path, whole=True)
    kinds = [name for name in KINDS if hasattr(cls, name)]
    if not kinds:
        instead = (
            "use kmodels generate or kmodels chat"
            if hasattr(cls, "generate")
            else "give a classifier, a segmenter, a detector, or two towers with --names"
        )
        raise InputError(f"{path} holds a {cls.__name__}; {instead}")
    if (names is None) == (kinds[0] == "classify"):
        raise InputError(
            f"{path} holds a {cls.__name__}, which has its own classes; leave --names out"
            if names is not None
            else f"{path} holds a {cls.__name__}; give the classes by --names cat,dog"
        )
    if masks is not None and kinds[0] != "segment":
        raise InputError(
            f"{path} holds a {cls.__name__}, which predicts no masks; leave --masks out"
        )
    model = cls.from_preset(path, dtype=precision)
    check_preprocessor(model, path)
    if names is not None:
        classes = [name.strip() for name in names.split(",") if name.strip()]
        return partial(_classify_by_names, model, top, classes)
    return partial({"segment": _segment, "detect": _detect}.get(kinds[0], _classify), model, top)


def _mask_file(folder: Path, name: str, written: set[Path]) -> Path:
    """Returns a file that is not written yet, numbered if several images have this name."""
    target, number = folder / f"{name}.png", 1
    while target in written:
        number += 1
        target = folder / f"{name}_{number}.png"
    written.add(target)
    return target


def _predicted(reader: Any, files: list[Path], batch_size: int) -> Iterator[dict[str, Any]]:
    """Yields a row for each file in order; an unreadable file has "error"."""
    from kmodels.data.images.any_picture import open_picture

    rest = iter(files)
    while batch := list(islice(rest, batch_size)):
        images, errors = {}, {}
        for file in batch:
            try:
                images[file] = open_picture(file)
            except InputError as error:
                errors[file] = str(error)
        rows = reader(list(images.values())) if images else []
        by_file = dict(zip(images, rows, strict=True))
        for file in batch:
            yield {"file": str(file), **(by_file.get(file) or {"error": errors.get(file)})}


def _labelled(pairs: Iterable[tuple[str, Any]]) -> list[dict[str, Any]]:
    return [{"label": label, "score": float(score)} for label, score in pairs]


def _line(row: dict[str, Any]) -> str:
    if "outputs" in row:
        return "  ".join(f"{value:.6g}" for value in row["outputs"])
    parts = [f"{one['label']} {one['score']:.1%}" for one in row["predictions"]]
    if "boxes" in row:
        places = (" ".join(f"{x:.0f}" for x in box) for box in row["boxes"])
        parts = [f"{part} at {place}" for part, place in zip(parts, places, strict=True)]
    return ", ".join(parts) + (f"  {row['mask']}" if "mask" in row else "")


# === Texts ===


def generate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help=MODEL)],
    prompts: Annotated[
        str,
        typer.Option(
            help="File with one prompt per line, or .jsonl or .json with records or messages; "
            "- for standard input."
        ),
    ],
    written_as: Annotated[
        str | None,
        typer.Option(
            "--as",
            help="Format of the prompts: chat (default with a chat template), instruction, or "
            "text, which is continued.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Largest number of tokens per reply.")] = 256,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    stop: Stop = None,
    adapter: Annotated[str | None, typer.Option(help="Directory with a LoRA adapter.")] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts per batch.")] = 8,
    precision: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line: prompt and reply.")
    ] = False,
) -> None:
    """Answer the prompts of a file with a language model."""
    from kmodels import presets
    from kmodels.generation.generation_config import sampler_of

    check_whole("--max-new-tokens", max_new_tokens)
    check_whole("--batch-size", batch_size)
    sampling = _sampling(context)
    if written_as is not None:
        check_choice("--as", written_as, ("chat", "instruction", "text"))
    texts = _prompts(prompts)
    if written_as is not None and not any(isinstance(prompt, str) for prompt, _ in texts):
        raise InputError(f"--as has no effect on the records of {prompts}; leave it out")
    path = model_in(model)
    cls: Any = presets.causal_lm_of(path)
    sampler = sampler_of(presets.generation_config_of(path)).changed(**sampling)
    if sampler.greedy:
        _refuse_draws(context)
    lm = cls.from_preset(path, dtype=precision)
    if lm.preprocessor is None:
        raise InputError(f"{path} holds no tokenizer; put tokenizer.json next to the weights")
    if adapter is not None:
        lm.load_adapter(adapter)
    lm.use_sampler(sampler)
    way = written_as or ("chat" if lm.preprocessor.tokenizer.chat_template else "text")
    rest = iter(texts)
    while batch := list(islice(rest, batch_size)):
        for prompt, reply in _answered(lm, batch, way, max_new_tokens, stop or None):
            if as_json:
                print(json.dumps({"prompt": prompt, "reply": reply}, ensure_ascii=False))
            else:
                text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
                print(f"> {text}\n{reply}\n", flush=True)


# A text, a record or a list of messages, and the fields that a chat template reads besides these.
Prompt: TypeAlias = tuple[Any, dict[str, Any]]


def _prompts(name: str) -> list[Prompt]:
    """Returns the prompts of a file.

    Raises:
        InputError: for a file without prompts, or a record without one.
    """
    from kmodels.core.remote import local_copy
    from kmodels.text.records import UNREAD, has_value, json_records

    if name != "-" and Path(name).suffix.lower() in (".json", ".jsonl"):
        try:
            entries = list(json_records(local_copy(name), name))
        except OSError as error:
            raise InputError(f"{name} cannot be read: {error.strerror}") from error
        prompts, unread = [], set[str]()
        for where, read in entries:
            try:
                prompts.append(_prompt(value := read()))
            except InputError as error:
                raise InputError(f"{where}: {error}") from error
            if isinstance(value, dict):
                unread |= {field for field in UNREAD if has_value(value, field)}
        if unread:
            fields = " and ".join(sorted(unread))
            line = f"{name} has {fields}, which kmodels does not read; give messages"
            print(f"kmodels: {line}", file=sys.stderr)
    else:
        try:
            text = sys.stdin.read() if name == "-" else local_copy(name).read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{name} cannot be read: {error}") from error
        prompts = [(line.rstrip("\r"), {}) for line in text.split("\n") if line.strip()]
    if not prompts:
        raise InputError(f"{name} holds no prompts; give one per line")
    return prompts


def _prompt(value: Any) -> Prompt:
    from kmodels.text.records import PICTURES, has_value, template_fields

    if isinstance(value, str) and value.strip():
        return value, {}
    if isinstance(value, dict):
        if pictures := [name for name in PICTURES if has_value(value, name)]:
            raise InputError(f"{pictures[0]} are read as parts of messages alone; give them there")
        options = template_fields(value)
        if isinstance(value.get("messages"), list) and value["messages"]:
            return value["messages"], options
        if extras := [name for name, part in options.items() if part]:
            raise InputError(f"{' and '.join(extras)} need messages; the record has texts")
        for key in ("prompt", "prompts", "text"):
            if isinstance(value.get(key), str) and value[key]:
                return value[key], {}
        if isinstance(value.get("instruction"), str):
            context = value.get("context") or value.get("input") or ""
            return {"instruction": value["instruction"], "context": context}, {}
    raise InputError("a record has no prompt; give a text, messages, prompt or instruction")


def _answered(
    model: Any, prompts: list[Prompt], way: str, tokens: int, stop: list[str] | None
) -> Iterator[tuple[Any, str]]:
    """Yields prompts and their replies in order."""
    replies: dict[int, str] = {}
    settings = {"max_new_tokens": tokens, "stop": stop}
    chats, others = {}, {}
    for i, (prompt, options) in enumerate(prompts):
        if isinstance(prompt, list) and options:
            values = options.get("chat_template_kwargs", {})
            replies[i] = model.chat(prompt, options.get("tools"), **settings, **values)
        elif isinstance(prompt, list):
            chats[i] = prompt
        elif isinstance(prompt, str) and way == "chat":
            chats[i] = [{"role": "user", "content": prompt}]
        elif isinstance(prompt, str) and way == "instruction":
            others[i] = {"instruction": prompt, "context": ""}
        else:
            others[i] = prompt
    texts = {i: prompt for i, prompt in others.items() if isinstance(prompt, str)}
    records = {i: prompt for i, prompt in others.items() if i not in texts}
    for group in (chats, texts, records):
        if group:
            answers = model.generate(list(group.values()), strip_prompt=True, **settings)
            replies |= dict(zip(group, answers, strict=True))
    for i, (prompt, _) in enumerate(prompts):
        yield prompt, replies[i]


# === Chats ===


def chat(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="Directory of a run or a model, .gguf file or hf:// name.")
    ],
    system: Annotated[str | None, typer.Option(help="Text of a system message.")] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(
            help="Image of the first question, for models with image inputs; may be repeated."
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Largest number of tokens per reply.")] = 256,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    stop: Stop = None,
    adapter: Annotated[str | None, typer.Option(help="Directory with a LoRA adapter.")] = None,
    assistant: Annotated[
        str | None, typer.Option(help="Smaller model that drafts tokens (assisted generation).")
    ] = None,
    num_assistant_tokens: Annotated[
        int, typer.Option(help="Tokens per draft of the assistant.")
    ] = 5,
    prompt_lookup_num_tokens: Annotated[
        int | None, typer.Option(help="Tokens per draft copied from earlier text (prompt lookup).")
    ] = None,
    precision: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    thinking: Annotated[
        bool | None,
        typer.Option("--thinking/--no-thinking", help="enable_thinking of the chat template."),
    ] = None,
) -> int:
    """Chat with a model; through a pipe, each line is a question."""
    from kmodels.tools import chat as chats

    if assistant is None:
        refuse_idle(context, ("num_assistant_tokens",), "without --assistant")
    opened = chats.open_conversation(
        model_in(model),
        chats.say,
        system=system,
        images=image or [],
        max_new_tokens=max_new_tokens,
        sampling=_sampling(context),
        stop=stop or None,
        adapter=adapter,
        assistant=assistant,
        num_assistant_tokens=num_assistant_tokens,
        prompt_lookup_num_tokens=prompt_lookup_num_tokens,
        precision=precision,
        values={} if thinking is None else {"enable_thinking": thinking},
    )
    if opened.model.sampler.greedy:
        _refuse_draws(context)
    return chats.run(opened)

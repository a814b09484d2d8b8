"""A recipe's settings: a dataclass, its flags as Typer parses them, and checks of their values."""

import dataclasses
import difflib
import inspect
import json
import typing
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
import yaml

from kmodels.core.environment import is_on
from kmodels.core.errors import HIDDEN, InputError, check_names, one_line
from kmodels.core.files import local_path
from kmodels.core.schema import read_json
from kmodels.runs.console import plain
from kmodels.runs.run_folder import OF_A_CALL
from kmodels.runs.terminal import GroupedCommand, invoke, option, typed
from kmodels.runs.trackers import MODULES

# The groups of --help and their flags; other flags are in the group "Options".
GROUPS = {
    "Data": (
        "data skip_bad held_out images image_size ignore reduce_labels class_names templates "
        "canonicalize sequence_length template pack batch_size workers"
    ),
    "Model": (
        "teacher_epochs preset weights train tune patch_size layers teacher_preset head teacher "
        "queries query_blocks upscale batch_norm hidden_dim units decoder_dim decoder_layers "
        "decoder_heads token_merging head_std pooled_norm positions kernel_std layer_scale"
    ),
    "LoRA": "rank alpha targets lora_dropout rslora dora quantize quantized",
    "Loss": (
        "loss_on loss_normalization label_smoothing loss beta temperature share points mask_ratio "
        "raw_pixels temperature_warmup student_temperature teacher_temperature first_temperature "
        "momentum centering center_momentum method length_normalized margin sft_weight "
        "reference_free desirable_weight undesirable_weight precompute_reference normalization "
        "epsilon scale_rewards epsilon_high count_ignored"
    ),
    "Rollouts": "reward group_size rollout_batches prompt_length max_new_tokens reward_timeout",
    "Optimizer": (
        "epochs steps optimizer learning_rate schedule warmup final_rate warmup_from weight_decay "
        "decay_vectors rates layer_decay corrected_epsilon clip_norm accumulate ema non_finite "
        "first_steps seed"
    ),
    "Augmentation": (
        "flip pad crop three_augment rand_augment_kind rand_augment erasing_noise erasing mixup "
        "cutmix repeats scale distort normalize interpolation aliased eval_crop local_views "
        "global_crop local_crop dropout drop_path_constant drop_path patch_drop head_dropout "
        "channel_dropout"
    ),
    "Memory": "precision matmul_precision memory_fraction remat ignore_memory_check",
    "Cluster": "mesh on resources max_failures",
    "Output": (
        "config out resume evaluate checkpoint_every keep log_every log_to export samples "
        "slide sample_tokens answers answer_tokens pooling probe_images neighbours license"
    ),
}
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names.split()}


def flag(
    default: object,
    text: str,
    *,
    choices: Sequence[Any] = (),
    small: object = None,
    needs: Sequence[Any] = (),
) -> Any:
    """Returns a field of a recipe's settings; its annotation decides the type of the flag.

    Args:
        default: value without the flag.
        text: text of --help.
        choices: allowed values.
        small: default under KMODELS_SMALL=1.
        needs: name of the flag that this one depends on, and its values with which this one has
            an effect; without values any true value of it.
    """
    metadata = {"help": text, "choices": tuple(choices), "small": small, "needs": tuple(needs)}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Common:
    """The flags of every recipe."""

    batch_size: int = flag(64, "examples per step, over all devices")
    steps: int | None = flag(None, "steps in total, instead of epochs")
    precision: str = flag("float32", "dtype policy", choices=("float32", "mixed_bfloat16"))
    matmul_precision: str = flag(
        "default",
        "precision of float32 matrix products (TF32 on GPUs)",
        choices=("highest", "high", "default"),
    )
    memory_fraction: float | None = flag(None, "share of the accelerator's memory to use")
    mesh: str | None = flag(None, "device mesh, e.g. data=4, fsdp=8 or data=2,model=2")
    workers: int = flag(0, "processes that prepare batches; with --on, processes that train")
    seed: int = flag(0, "random seed for initial weights, shuffling, augmentation and dropout")
    config: str | None = flag(None, "settings in YAML or JSON: a file, or a name of kmodels recipe")
    out: str | None = flag(None, "directory of the run; default: runs/<recipe>-<time>")
    resume: bool = flag(False, "continue from the newest checkpoint in --out, or of the newest run")
    evaluate: bool = flag(
        False, "only evaluate the newest checkpoint in --out, or --weights if there is none"
    )
    checkpoint_every: str = flag(
        "0", "steps or seconds (300s) between checkpoints; 0: one per epoch"
    )
    keep: int = flag(2, "newest checkpoints to keep")
    log_every: int = flag(10, "steps between fetches of the losses")
    log_to: str | None = flag(None, "experiment tracker", choices=tuple(MODULES))
    license: str | None = flag(None, "license of the trained model for its card, e.g. apache-2.0")
    on: str | None = flag(None, "run on a cluster", choices=("ray",))
    resources: str = flag(
        "CPU=1", "with --on: resources per Ray worker, e.g. GPU=1,CPU=4", needs=("on",)
    )
    max_failures: int = flag(3, "with --on: how often lost workers are replaced", needs=("on",))


def parse(
    settings: type,
    argv: Sequence[str] | None = None,
    description: str | None = "",
    recipe: str = "",
    program: str = "",
) -> Any:
    """Returns settings from the command line.

    Flags take precedence over the file of --config or --recipe, and the file over defaults. With
    --resume or --evaluate, missing flags have the values of the run in --out. --resume without
    --out continues the newest run of the recipe.

    Args:
        settings: a dataclass whose fields are made by `flag`.
        argv: arguments; those of the process by default.
        description: text of --help.
        recipe: name of the recipe.
        program: name of the program in --help; the recipe's file by default.

    Raises:
        InputError: for an unknown flag or setting, a wrong value, a flag without effect, or if no
            run can be continued.
    """
    defaults = _defaults(settings)
    program = program or (f"{recipe}.py" if recipe else "recipe")
    flags = _flags(settings, defaults, argv, description or "", program)
    stated = set(flags)
    if name := flags.pop("recipe", None):
        if name == "list":
            _list_published(recipe)
            raise SystemExit(0)
        if flags.get("config"):
            raise InputError("--recipe and --config are both given; choose one")
        values = _of_file(settings, _file_of_name(name, "--recipe"), recipe)
        flags = {**values, **flags, "config": name}
    elif flags.get("config"):
        values = _of_file(settings, settings_file(flags["config"]), recipe)
        _check_whole_addresses(values, flags)
        flags = {**values, **flags}
    if recipe and flags.get("resume") and not flags.get("out"):
        flags["out"] = _newest_run(recipe)
    if flags.get("out") and (flags.get("resume") or flags.get("evaluate")):
        former = _former(settings, local_path(flags["out"]) / "config.json")
        _check_whole_addresses(former, flags)
        defaults |= former
    parsed = settings(**{**defaults, **flags})
    for name, reason in _idle(parsed):
        if name in stated:
            no = "no-" if getattr(parsed, name) is False else ""
            raise InputError(f"--{no}{name.replace('_', '-')} has no effect {reason}; leave it out")
        if name in flags:  # A typed flag may have disabled it.
            print(f"{name} of {flags['config']} has no effect {reason}", flush=True)
    return parsed


def _idle(parsed: Any) -> Iterator[tuple[str, str]]:
    """Yields settings that differ from their defaults and have no effect, and the reasons."""
    defaults = _defaults(type(parsed))
    for field in dataclasses.fields(parsed):
        if not field.metadata["needs"] or getattr(parsed, field.name) == defaults[field.name]:
            continue
        name, *values = field.metadata["needs"]
        value = getattr(parsed, name)
        if value not in values if values else not value:
            other = f"--{name.replace('_', '-')}"
            yield field.name, f"with {other} {value}" if value else f"without {other}"


def _defaults(settings: type) -> dict[str, Any]:
    small = is_on("KMODELS_SMALL")
    return {
        field.name: field.metadata["small"]
        if small and field.metadata["small"] is not None
        else field.default
        for field in dataclasses.fields(settings)
    }


def _flags(
    settings: type,
    defaults: dict[str, Any],
    argv: Sequence[str] | None,
    description: str,
    program: str,
) -> dict[str, Any]:
    """Returns the values of the flags on the command line."""

    def collect(context: typer.Context, **values: object) -> dict[str, Any]:
        return {name: values[name] for name in typed(context)}

    # Typer reads the signature of a function; the fields make this one.
    function: Any = collect
    published = option("Output", "published settings by name; list shows them with their sources")
    function.__signature__ = inspect.Signature(
        [
            _parameter("context", typer.Context),
            *_options(settings, defaults),
            _parameter("recipe", typing.Annotated[str | None, published], None),
        ]
    )
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    names = {"help_option_names": ["-h", "--help"]}
    text = _examples_as_they_are(description)
    app.command(cls=GroupedCommand, help=text, context_settings=names)(function)
    values = invoke(app, argv, program)
    if not isinstance(values, dict):  # --help returns an exit code
        raise SystemExit(values)
    return values


def _options(settings: type, defaults: dict[str, Any]) -> list[inspect.Parameter]:
    hints, options = typing.get_type_hints(settings), []
    order = {name: number for number, name in enumerate(_GROUP_OF)}
    fields = dataclasses.fields(settings)
    for field in sorted(fields, key=lambda field: order.get(field.name, len(order))):
        kind, default = hints[field.name], defaults[field.name]
        if choices := field.metadata["choices"]:
            kind = typing.Literal[choices]
        # A switch that is off by default needs no flag to turn it off.
        name = [f"--{field.name.replace('_', '-')}"] if kind is bool and not default else []
        shown = "" if default in (None, "", False) else f" (default: {default})"
        text, group = field.metadata["help"] + shown, _GROUP_OF.get(field.name)
        flags = typer.Option(*name, help=text, show_default=False, rich_help_panel=group)
        options.append(_parameter(field.name, typing.Annotated[kind, flags], default))
    return options


def _parameter(name: str, kind: Any, default: object = inspect.Parameter.empty) -> Any:
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=kind)


def _examples_as_they_are(description: str) -> str:
    r"""Returns the text with \b before indented paragraphs, so that their lines are not wrapped."""
    paragraphs = description.strip().split("\n\n")
    return "\n\n".join("\b\n" + part if "\n " in f"\n{part}" else part for part in paragraphs)


def _newest_run(recipe: str) -> str:
    """Returns the directory in runs/ with the newest checkpoint of the recipe."""
    runs = [
        (max(step.stat().st_mtime for step in steps), str(file.parent))
        for file in Path("runs").glob("*/config.json")
        if (steps := list(file.parent.glob("checkpoints/step_*")))
        and read_json(file).get("recipe") == recipe
    ]
    if not runs:
        raise InputError(
            f"--resume found no run of {recipe} with a checkpoint in {Path('runs').resolve()}; "
            "give its directory with --out"
        )
    out = max(runs)[1]
    print(f"--resume continues with {out}, the newest run of {recipe}", flush=True)
    return out


def _former(settings: type, file: Path) -> dict[str, Any]:
    """Returns the settings of the continued run, except those of a single call."""
    config = read_json(file) if file.exists() else {}
    known = {field.name for field in dataclasses.fields(settings)}.difference(OF_A_CALL)
    return _checked(settings, {k: v for k, v in config.items() if k in known}, file)


# The origin of published settings in their file: the result is that of the source.
ORIGIN = ("result", "hardware", "hours", "paper", "code")
# Most bytes of a settings file.
LARGEST = 1_000_000
# Recipes and their settings have one source, recipes/ of the repository. A wheel holds copies in
# kmodels/recipes, an editable installation reads them in place.
PACKAGE = Path(__file__).parents[1]
FOLDERS = (PACKAGE / "recipes", PACKAGE.parents[1] / "recipes")


def shipped() -> dict[str, Path]:
    """Returns the settings files that come with kmodels, by name."""
    files = [file for folder in FOLDERS for file in (folder / "settings").glob("*.yaml")]
    return {file.stem: file for file in sorted(files, key=lambda file: file.stem)}


def settings_file(name: str) -> Path:
    """Returns the settings file of a path or of a name that `kmodels recipe` lists.

    Raises:
        InputError: if there is no such file.
    """
    path = local_path(name)
    return path if path.is_file() else _file_of_name(name, "--config", "neither a file nor")


def _file_of_name(name: str, flag: str, problem: str = "not") -> Path:
    files = shipped()
    if name in files:
        return files[name]
    near = difflib.get_close_matches(name, files, 1)
    instead = f"did you mean {near[0]}?" if near else f"names are {', '.join(files)}"
    raise InputError(f"{flag} {name} is {problem} a name of kmodels recipe; {instead}")


def _list_published(recipe: str) -> None:
    """Prints a table of the settings that come with kmodels for a recipe, with their origins."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    titles = ORIGIN[:-1]
    for title in ("name", *titles):
        table.add_column(title, no_wrap=title in ("name", "paper"))
    for name, path in shipped().items():
        content = _read(path)
        if content["recipe"] == recipe and "origin" in content:
            table.add_row(name, *(str(content["origin"][key]) for key in titles))
    console = plain()
    console.print(table)
    console.print("kmodels recipe NAME prints the settings and the address of the original code")


def _of_file(settings: type, path: Path, recipe: str) -> dict[str, Any]:
    """Returns the settings of a file of --config or --recipe, checked like flags."""
    content = {str(key).replace("-", "_"): value for key, value in _read(path).items()}
    owner = content.pop("recipe", recipe)
    origin = content.pop("origin", None) or {}
    if not isinstance(origin, dict):
        raise InputError(f"{path}: origin is {origin!r}; give lines such as paper: ADDRESS")
    check_names(f"{path}: origin", origin, list(ORIGIN))
    if owner != recipe:
        raise InputError(f"--config {path} has settings of the recipe {owner}; this is {recipe}")
    if path.name == "config.json":  # of a run, whose directory and resumption are its own
        content = {key: value for key, value in content.items() if key not in OF_A_CALL}
    hints = typing.get_type_hints(settings)
    check_names(f"{path}: the recipe {recipe}", content, list(hints))
    if content.get("config") is not None:
        raise InputError(f"{path}: config is {content['config']!r}; give --config only as a flag")
    return _checked(settings, content, path)


def _checked(settings: type, content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns the settings in a file, by the names of fields, checked like flags."""
    hints = typing.get_type_hints(settings)
    values, words = {}, []
    for key, value in content.items():
        switch = bool in (hints[key], *typing.get_args(hints[key]))
        if isinstance(value, list):  # as in [query, value] for "query,value"
            value = ",".join(map(str, value)) if all(map(_is_word, value)) else value
        if value is None or (switch and isinstance(value, bool)):
            values[key] = value
        elif not switch and _is_word(value):
            words.append(f"--{key.replace('_', '-')}={value}")
        else:
            allowed = "true or false" if switch else "a text or a number, in quotes"
            # A few aliases of YAML make objects whose text has millions of characters.
            nested = isinstance(value, list | dict)
            shown = f"a {type(value).__name__}" if nested else repr(value)
            raise InputError(f"{path}: {key} is {shown}; give {allowed}")
        if value is None and type(None) not in typing.get_args(hints[key]):
            raise InputError(f"{path}: {key} is null; give a value, or leave it out")
    try:
        values |= _flags(settings, _defaults(settings), words, "", "")
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return values


def _is_word(value: object) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


_TEXT = "tag:yaml.org,2002:str"


class _AsWritten(yaml.SafeLoader):
    """YAML whose numbers stay texts, since YAML reads 010 as 8 and 1:30 as 90, and flags do not."""

    yaml_implicit_resolvers: typing.ClassVar[dict[str, Any]] = {
        first: [(tag, form) for tag, form in forms if not tag.endswith((":int", ":float"))]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _read(path: Path) -> dict[Any, Any]:
    """Returns the mapping in a YAML or JSON file.

    Raises:
        InputError: for a file that is too large, has a key twice, or is not a mapping.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LARGEST + 1)
        if len(text) > LARGEST:
            raise InputError(f"--config {path} has more than {LARGEST:,} characters")
        if path.suffix == ".json":
            content = json.loads(text, object_pairs_hook=lambda pairs: _once(pairs, path))
        else:
            # PyYAML takes the last of equal keys, so the nodes are read first.
            loader = _AsWritten(text)
            node = loader.get_single_node()
            if isinstance(node, yaml.MappingNode):
                keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
                for key in keys:
                    key.tag = key.tag if key.value == "<<" else _TEXT
                _once([(key.value, None) for key in keys], path)
            content = None if node is None else loader.construct_document(node)
    except InputError:
        raise
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise InputError(f"--config {path} is not readable: {one_line(error)}") from None
    if not isinstance(content, dict):
        raise InputError(f"--config {path} is not a mapping; write lines such as epochs: 10")
    return content


def _once(pairs: list[tuple[Hashable, Any]], path: Path) -> dict[Any, Any]:
    """Returns pairs as a dictionary; raises InputError for a repeated key."""
    keys = [str(key).replace("-", "_") for key, _ in pairs]
    if repeated := [key for key in keys if keys.count(key) > 1]:
        raise InputError(f"--config {path} has {repeated[0]} twice")
    return dict(pairs)


def _check_whole_addresses(former: dict[str, Any], flags: dict[str, Any]) -> None:
    """Raises InputError if an address lost its password and is not given again."""
    for name in former.keys() - flags.keys():
        if HIDDEN in (value := str(former[name])) and ":/" in value:
            flag = name.replace("_", "-")
            raise InputError(
                f"--{flag} was {value}, and passwords are not saved; give --{flag} again"
            )


def texts_of(flag: str, value: str) -> list[str]:
    """Returns the texts of a flag: separated by "|", or the lines of a file that are not blank.

    Args:
        flag: as it is typed, for errors.
        value: the texts, or the path of a file in UTF-8.

    Raises:
        InputError: for a file that is missing, not text, or empty.
    """
    if "|" in value or "{}" in value:
        texts = value.split("|")
    else:
        try:
            texts = local_path(value).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{flag} {value} is not readable: {one_line(error)}") from None
    if not (texts := [text.strip() for text in texts if text.strip()]):
        raise InputError(f"{flag} {value} has no text; give one per line")
    return texts


def given(**values: object) -> dict[str, Any]:
    """Returns the values that are not None, so that the preset decides the others."""
    return {name: value for name, value in values.items() if value is not None}


def at_least(settings: Any, **limits: float) -> None:
    """Checks lower bounds: `at_least(settings, epochs=1)`."""
    for name, limit in limits.items():
        value = getattr(settings, name)
        if value is not None and not value >= limit:
            raise InputError(f"--{name.replace('_', '-')} is {value}; give at least {limit}")


def check_fractions(settings: Any, *names: str) -> None:
    """Checks that settings are in [0, 1)."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not 0 <= value < 1:
            raise InputError(f"--{name.replace('_', '-')} is {value}; give at least 0, below 1")


def numbers(settings: Any, name: str, *counts: int) -> tuple[float, ...] | None:
    """Returns a setting such as "2,9" as numbers; whole ones are int. None stays None.

    Args:
        settings: a `Common`.
        name: name of the setting.
        *counts: allowed numbers of numbers.
    """
    text = getattr(settings, name)
    if text is None:
        return None
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if len(values) not in counts:
        allowed = " or ".join(map(str, counts))
        raise InputError(
            f"--{name.replace('_', '-')} is {text!r}; give {allowed} numbers separated by commas"
        )
    return tuple(int(value) if value == int(value) else value for value in values)

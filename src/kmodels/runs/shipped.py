"""The recipes that `kmodels` runs by name: those of the wheel, or of the checkout in use.

`recipes/*.py` at the top of the repository is their one source. A wheel holds copies of them in
`kmodels/recipes`; an editable installation reads them where they are.
"""

import dataclasses
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from kmodels.core.errors import InputError
from kmodels.runs import flags, on_ray, recipe

PACKAGE = Path(__file__).parents[1]
FOLDERS = (PACKAGE / "recipes", PACKAGE.parents[1] / "recipes")
# What a recipe is called on the command line, and its file.
RECIPES = {
    "vit": "vit",
    "gemma": "gemma_lora",
    "probe": "vit_probe",
    "distill": "distill",
    "caption": "caption",
    "zero-shot": "zero_shot",
    "dpo": "dpo",
    "segment": "segment",
    "mae": "mae",
    "dino": "dino",
}
# What the command says of each.
SUMMARIES = {
    "vit": "Train a Vision Transformer to classify images.",
    "gemma": "Fine-tune a language model with LoRA on instructions or texts.",
    "probe": "Compare ways to use a pretrained backbone with few labels.",
    "distill": "Train a small classifier to imitate a large one.",
    "caption": "Train a Gemma 3 with its vision encoder on images with texts.",
    "zero-shot": "Train two towers on images with captions, to classify by names.",
    "dpo": "Train a language model on pairs of answers, by direct preference optimization.",
    "segment": "Train a Vision Transformer to tell the class of each pixel.",
    "mae": "Pretrain a Vision Transformer on images without labels, by hiding most of each.",
    "dino": "Pretrain a Vision Transformer on images without labels, by a teacher that follows.",
}


def run(command: str, arguments: Sequence[str]) -> int:
    """Runs a recipe with its own flags and returns its exit code.

    Args:
        command: a key of `RECIPES`.
        arguments: of the command line, after the recipe's name.

    Raises:
        InputError: if the file of the recipe is not installed.
    """
    name = RECIPES[command]
    module = load(name)
    # Examples are written for those who have the files.
    text = module.__doc__ or ""
    for other, file in RECIPES.items():
        text = text.replace(f"python recipes/{file}.py", f"kmodels {other}")
    program = f"kmodels {command}"
    return recipe.main(name, module.Settings, module.train, arguments, text, program)


def on_ray_of(command: str, arguments: Sequence[object], out: str | Path) -> Callable[[], None]:
    """Returns what each worker of Ray calls to run a recipe, see `kmodels.distribution.ray.run`.

    Args:
        command: a key of `RECIPES`.
        arguments: of the command line, without those of the cluster.
        out: directory of the run.

    Raises:
        InputError: for an unknown recipe or flag, or a directory that holds another run.
    """
    if command not in RECIPES:
        raise InputError(
            f"there is no recipe {command!r}; give a function, or one of {', '.join(RECIPES)}"
        )
    name = RECIPES[command]
    module, words = load(name), [str(word) for word in arguments]
    program = f"kmodels {command}"
    settings = flags.parse(module.Settings, words, module.__doc__ or "", name, program)
    if settings.on is not None:
        raise InputError("the recipe is started on Ray already; leave --on out")
    work = functools.partial(
        recipe.work, recipe=name, train=module.train, command=" ".join([program, *words])
    )
    given = dataclasses.replace(settings, out=os.fspath(out))
    return on_ray.of_workers(settings, module.train, work, on_ray.directory(name, given))


def load(name: str) -> ModuleType:
    """Returns a recipe's module.

    Args:
        name: of its file.

    Raises:
        InputError: if the file is not installed.
    """
    found = [folder / f"{name}.py" for folder in FOLDERS if (folder / f"{name}.py").is_file()]
    if not found:
        raise InputError(f"{name}.py is not in {FOLDERS[0]}; install kmodels again, from a wheel")
    spec = importlib.util.spec_from_file_location(f"kmodels_recipe_{name}", found[0])
    if spec is None or spec.loader is None:
        raise ImportError(f"Python cannot load {found[0]}")
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks the module of its annotations up here.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module

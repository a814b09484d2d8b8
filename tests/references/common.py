"""Helpers of the modules that write references: tiny sizes, random weights, images and files."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

PATCH, SIZE = 4, 32
RESIZED = (20, 44)  # a 5 x 11 grid from an 8 x 8 one: shrinks one axis, stretches the other
SIZES = {"": (SIZE, SIZE), "resized_": RESIZED}
IMAGES = ("images", "resized_images", "many_images")


def vision_sizes(**changes: object) -> dict:
    """Settings of a tiny image tower of transformers; None leaves a setting out."""
    sizes = {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 48,
        "image_size": SIZE,
        "patch_size": PATCH,
        **changes,
    }
    return {name: x for name, x in sizes.items() if x is not None}


def text_sizes(**changes: object) -> dict:
    """Settings of a tiny text tower of transformers; None leaves a setting out."""
    sizes = {
        "vocab_size": 50,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "max_position_embeddings": 12,
        "bos_token_id": 39,
        "eos_token_id": 40,
        "pad_token_id": 0,
        **changes,
    }
    return {name: x for name, x in sizes.items() if x is not None}


def randomise(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Weights that leave activations of order one, and norms and biases that are not trivial."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim in (2, 4):
                weight.copy_(noise / weight[0].numel() ** 0.5)
            elif name.endswith("weight") or "gamma" in name:
                weight.copy_(1.0 + 0.2 * noise)
            else:
                weight.copy_(0.3 * noise)
    return model.eval()


def parameters(model: torch.nn.Module) -> np.ndarray:
    return np.array(sum(x.numel() for x in model.parameters()))


def pictures(size: tuple[int, int], channels: int = 3, number: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size[0] * 1000 + size[1])
    return torch.randn((number, channels, *size), generator=generator)


def token_ids(low: int, high: int, shape: tuple[int, ...], seed: int = 5) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


@contextmanager
def recorded_blocks(blocks: Iterable[torch.nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """Outputs of blocks by name: the last of transformers' hidden states is already normalised."""
    outputs: dict[str, torch.Tensor] = {}
    hooks = [
        block.register_forward_hook(
            lambda _, __, out, i=i: outputs.__setitem__(
                f"block_{i}", out[0] if isinstance(out, tuple) else out
            )
        )
        for i, block in enumerate(blocks)
    ]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def at_both_sizes(run: Callable[[torch.Tensor], dict]) -> dict[str, torch.Tensor]:
    """The images of both sizes and the results of `run`, those of RESIZED named "resized_..."."""
    results: dict[str, torch.Tensor] = {}
    for prefix, size in SIZES.items():
        images = pictures(size)
        with torch.no_grad():
            named = {**run(images), "images": images}
        results |= {f"{prefix}{name}": x for name, x in named.items()}
    return results


def save(file: Path, **values: torch.Tensor | np.ndarray) -> None:
    """Writes an .npz file. Tensors named in IMAGES are NCHW and become NHWC."""
    values = {name: x.detach() if torch.is_tensor(x) else x for name, x in values.items()}
    for name in values.keys() & IMAGES:
        values[name] = values[name].permute(0, 2, 3, 1)
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, **{name: np.asarray(x) for name, x in values.items()})


def save_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content))


def save_model(model: torch.nn.Module, path: Path, **settings: object) -> None:
    """Saves a model of transformers together with the settings of its image processor."""
    model.save_pretrained(path, **settings)
    images = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2}
    save_json(path / "preprocessor_config.json", images)

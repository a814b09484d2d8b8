"""ViTs of transformers and timm, and `.npz` files as google-research writes them, read by timm.

Each case is a folder: `model` (a directory or file as its package writes it) and `expected.npz`
with `images` (NHWC), `block_<i>` and `final` where the package tells, `logits`, and for another
image size `resized_images` and `resized_logits`. Sizes are such that each feature changes the
result.
"""

import json
from pathlib import Path

import numpy as np
import torch

from torchvision_cpu import define_torchvision_operators

define_torchvision_operators()
import timm  # noqa: E402
import transformers  # noqa: E402

SIZE = 32
RESIZED = (20, 44)  # a 5 x 11 grid from an 8 x 8 one: shrinks one axis, stretches the other
TINY = {"patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 3, "mlp_ratio": 2}
TIMM = {
    "timm_token": {"img_size": SIZE},
    "timm_gap": {"img_size": SIZE, "global_pool": "avg", "class_token": False},
    "timm_gap_norm": {
        "img_size": SIZE,
        "global_pool": "avg",
        "class_token": False,
        "fc_norm": False,
    },
    "timm_registers": {"img_size": SIZE, "reg_tokens": 4, "no_embed_class": True},
    "timm_registers_gap": {
        "img_size": SIZE,
        "reg_tokens": 2,
        "no_embed_class": True,
        "class_token": False,
        "global_pool": "avg",
    },
    "timm_map": {"img_size": SIZE, "global_pool": "map", "class_token": False},
    "timm_scale": {"img_size": SIZE, "init_values": 0.1, "qk_norm": True},
    "timm_pre_norm": {"img_size": SIZE, "pre_norm": True, "qkv_bias": False},
    "timm_tanh": {"img_size": SIZE, "act_layer": "gelu_tanh"},
    "timm_oblong": {"img_size": (16, 40)},
}


def save_huggingface(model: torch.nn.Module, path: Path, **settings) -> None:
    """Saves a model of transformers together with the settings of its image processor."""
    model.save_pretrained(path, **settings)
    pictures = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2}
    (path / "preprocessor_config.json").write_text(json.dumps(pictures))


def randomise(model: torch.nn.Module, seed: int) -> None:
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
    model.eval()


def pictures(size: tuple[int, int], channels: int = 3, number: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size[0] * 1000 + size[1])
    return torch.randn((number, channels, *size), generator=generator)


def arrays(**tensors: torch.Tensor) -> dict[str, np.ndarray]:
    """NumPy arrays; images become NHWC."""
    found = {name: x.detach().numpy() for name, x in tensors.items()}
    for name in ("images", "resized_images"):
        if name in found:
            found[name] = np.ascontiguousarray(found[name].transpose(0, 2, 3, 1))
    return found


def blocks_of(blocks: torch.nn.ModuleList, run) -> dict[str, torch.Tensor]:
    """What each block gives while `run` is called, by hooks."""
    found, hooks = {}, []
    for i, block in enumerate(blocks):

        def keep(_, __, output, i=i):
            found[f"block_{i}"] = output

        hooks.append(block.register_forward_hook(keep))
    result = run()
    for hook in hooks:
        hook.remove()
    return {**found, "result": result}


# === transformers ===


def huggingface(folder: Path, name: str, seed: int, classifier: bool = True, **changes) -> None:
    settings = {
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "intermediate_size": 40,
        "image_size": SIZE,
        "patch_size": 4,
        "num_labels": 5,
    }
    save = changes.pop("save", {})
    dtype = changes.pop("dtype", torch.float32)
    config = transformers.ViTConfig(**{**settings, **changes})
    made = transformers.ViTForImageClassification if classifier else transformers.ViTModel
    model = made(config)
    randomise(model, seed)
    save_huggingface(model.to(dtype), folder / name / "model", **save)
    model.float()
    image = config.image_size
    size = tuple(image) if isinstance(image, list | tuple) else (image, image)
    images = pictures(size, config.num_channels)
    inner = model.vit if classifier else model
    with torch.no_grad():
        held = blocks_of(inner.layers, lambda: model(images))
        output = held.pop("result")
        held["images"] = images
        if classifier:
            held["logits"] = output.logits
            held["final"] = inner(images).last_hidden_state
        else:
            held["final"], held["pooled"] = output.last_hidden_state, output.pooler_output
        if size[0] == size[1]:
            held["resized_images"] = pictures(RESIZED, config.num_channels)
            other = model(held["resized_images"], interpolate_pos_encoding=True)
            key = "logits" if classifier else "last_hidden_state"
            held["resized_logits" if classifier else "resized_final"] = other[key]
    np.savez(folder / name / "expected.npz", **arrays(**held))


# === timm ===


def timm_case(folder: Path, name: str, seed: int, **changes) -> None:
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **{**TINY, **changes})
    randomise(model, seed)
    timm.models.save_for_hf(model, folder / name / "model", safe_serialization=True)
    size = model.patch_embed.img_size
    images, resized = pictures(size), pictures(RESIZED)
    with torch.no_grad():
        held = blocks_of(model.blocks, lambda: model(images))
        held["logits"] = held.pop("result")
        held["final"] = model.forward_features(images)
        model.set_input_size(img_size=RESIZED)
        held |= {"images": images, "resized_images": resized, "resized_logits": model(resized)}
    np.savez(folder / name / "expected.npz", **arrays(**held))


# === .npz ===


def npz_tensors(seed: int, big_vision: bool) -> dict[str, np.ndarray]:
    """A file of vision_transformer, or of big_vision with a MAP head, at the sizes of TINY."""
    rng = np.random.default_rng(seed)
    width, heads, patch, mlp = TINY["embed_dim"], TINY["num_heads"], TINY["patch_size"], 48
    rows = (SIZE // patch) ** 2

    def normal(*shape, fan):
        return (rng.normal(size=shape) / fan**0.5).astype("float32")

    def dense(name, *shape, fan, bias):
        return {f"{name}/kernel": normal(*shape, fan=fan), f"{name}/bias": normal(*bias, fan=9)}

    def norm(name):
        return {f"{name}/scale": 1 + normal(width, fan=25), f"{name}/bias": normal(width, fan=9)}

    def attention(name):
        split = (heads, width // heads)
        found = dense(f"{name}/out", *split, width, fan=width, bias=(width,))
        for part in ("query", "key", "value"):
            found |= dense(f"{name}/{part}", width, *split, fan=width, bias=split)
        return found

    def perceptron(name):
        return dense(f"{name}/Dense_0", width, mlp, fan=width, bias=(mlp,)) | dense(
            f"{name}/Dense_1", mlp, width, fan=mlp, bias=(width,)
        )

    held = dense("embedding", patch, patch, 3, width, fan=patch * patch * 3, bias=(width,))
    held |= norm("Transformer/encoder_norm") | dense("head", width, 5, fan=width, bias=(5,))
    mha, last, second = (0, 0, 1) if big_vision else (1, 3, 2)
    for i in range(TINY["depth"]):
        block = f"Transformer/encoderblock_{i}"
        held |= norm(f"{block}/LayerNorm_0") | norm(f"{block}/LayerNorm_{second}")
        held |= attention(f"{block}/MultiHeadDotProductAttention_{mha}")
        held |= perceptron(f"{block}/MlpBlock_{last}")
    if not big_vision:
        held["cls"] = normal(1, 1, width, fan=4)
        held["Transformer/posembed_input/pos_embedding"] = normal(1, rows + 1, width, fan=4)
        return held
    held["pos_embedding"] = normal(1, rows, width, fan=4)
    held["MAPHead_0/probe"] = normal(1, 1, width, fan=4)
    held |= attention("MAPHead_0/MultiHeadDotProductAttention_0") | norm("MAPHead_0/LayerNorm_0")
    # timm's MAP head takes its MLP's width from the blocks.
    held |= perceptron("MAPHead_0/MlpBlock_0")
    return {f"params/{name}": x for name, x in held.items()}


def npz_case(folder: Path, name: str, seed: int, big_vision: bool, **changes) -> None:
    (folder / name).mkdir(parents=True, exist_ok=True)
    file = folder / name / "model.npz"
    np.savez(file, **npz_tensors(seed, big_vision))
    held = {}
    for key, size in (("", (SIZE, SIZE)), ("resized_", RESIZED)):
        model = timm.create_model(
            "vit_tiny_patch16_224", num_classes=5, **{**TINY, **changes, "img_size": size}
        )
        model.load_pretrained(str(file))
        model.eval()
        held[f"{key}images"] = pictures(size)
        with torch.no_grad():
            held[f"{key}logits"] = model(held[f"{key}images"])
    np.savez(folder / name / "expected.npz", **arrays(**held))


# === Full size ===


def full_size(folder: Path) -> None:
    image = pictures((224, 224), number=1)
    base = transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000))
    small = timm.create_model("vit_small_patch16_224")
    base_path, small_path = folder / "base" / "model", folder / "small" / "model"
    for seed, model in enumerate((base, small)):
        randomise(model, seed)
    save_huggingface(base, base_path)
    timm.models.save_for_hf(small, small_path, safe_serialization=True)
    with torch.no_grad():
        base_logits, small_logits = base(image).logits, small(image)
    np.savez(folder / "base" / "expected.npz", **arrays(images=image, logits=base_logits))
    np.savez(folder / "small" / "expected.npz", **arrays(images=image, logits=small_logits))


def write(folder: Path) -> None:
    """Writes all cases."""
    transformers.utils.logging.disable_progress_bar()
    huggingface(folder, "hf_token", 1)
    huggingface(folder, "hf_sharded", 2, save={"max_shard_size": "16KB"}, layer_norm_eps=0.05)
    huggingface(folder, "hf_oblong", 3, image_size=[16, 40], num_channels=1)
    huggingface(folder, "hf_variants", 4, hidden_act="gelu_pytorch_tanh", qkv_bias=False)
    huggingface(folder, "hf_bfloat16", 5, dtype=torch.bfloat16)
    huggingface(folder, "hf_model", 6, classifier=False)
    for seed, (name, changes) in enumerate(TIMM.items()):
        timm_case(folder, name, seed, **changes)
    npz_case(folder, "npz_augreg", 20, False)
    npz_case(folder, "npz_big_vision", 21, True, global_pool="map", class_token=False)
    full_size(folder)
    versions = {"transformers": transformers.__version__, "timm": timm.__version__}
    (folder / "versions.json").write_text(json.dumps(versions) + "\n")

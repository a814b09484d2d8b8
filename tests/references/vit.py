"""ViTs of transformers and timm, and `.npz` files as google-research writes them, read by timm.

Each case is a folder: `model` (a directory or file as its package writes it) and `expected.npz`
with `images` (NHWC), `block_<i>` and `final` if the package gives them, `logits`, and for another
image size `resized_images` and `resized_logits`. Sizes are such that each feature changes the
result.
"""

from pathlib import Path

import numpy as np
import timm
import torch
import transformers

from references.common import (
    RESIZED,
    SIZE,
    at_both_sizes,
    pictures,
    randomise,
    recorded_blocks,
    save,
    save_json,
    save_model,
    vision_sizes,
)

TINY = {"patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 3, "mlp_ratio": 2}
PATCHES = {"class_token": False, "global_pool": "avg"}
TIMM = {
    "timm_token": {},
    "timm_gap": PATCHES,
    "timm_gap_norm": {**PATCHES, "fc_norm": False},
    "timm_registers": {"reg_tokens": 4, "no_embed_class": True},
    "timm_registers_gap": {**PATCHES, "reg_tokens": 2, "no_embed_class": True},
    "timm_map": {"global_pool": "map", "class_token": False},
    "timm_scale": {"init_values": 0.1, "qk_norm": True},
    "timm_pre_norm": {"pre_norm": True, "qkv_bias": False},
    "timm_tanh": {"act_layer": "gelu_tanh"},
    "timm_oblong": {"img_size": (16, 40)},
}


# === transformers ===


def huggingface(folder: Path, name: str, seed: int, classifier: bool = True, **changes) -> None:
    settings = vision_sizes(num_hidden_layers=3, intermediate_size=40, num_labels=5)
    shards = changes.pop("max_shard_size", "1GB")
    dtype = changes.pop("dtype", torch.float32)
    config = transformers.ViTConfig(**{**settings, **changes})
    kind = transformers.ViTForImageClassification if classifier else transformers.ViTModel
    model = randomise(kind(config), seed).to(dtype)
    save_model(model, folder / name / "model", max_shard_size=shards)
    model.float()
    image = config.image_size
    size = tuple(image) if isinstance(image, list | tuple) else (image, image)
    images = pictures(size, config.num_channels)
    inner = model.vit if classifier else model
    with torch.no_grad():
        with recorded_blocks(inner.layers) as outputs:
            output = model(images)
        outputs["images"] = images
        if classifier:
            outputs["logits"] = output.logits
            outputs["final"] = inner(images).last_hidden_state
        else:
            outputs |= {"final": output.last_hidden_state, "pooled": output.pooler_output}
        if size[0] == size[1]:
            outputs["resized_images"] = pictures(RESIZED, config.num_channels)
            other = model(outputs["resized_images"], interpolate_pos_encoding=True)
            key = "logits" if classifier else "last_hidden_state"
            outputs["resized_logits" if classifier else "resized_final"] = other[key]
    save(folder / name / "expected.npz", **outputs)


# === timm ===


def tiny_timm(**changes: object) -> torch.nn.Module:
    settings = {**TINY, "img_size": SIZE, "num_classes": 5, **changes}
    return timm.create_model("vit_tiny_patch16_224", **settings)


def timm_case(folder: Path, name: str, seed: int, **changes) -> None:
    model = randomise(tiny_timm(**changes), seed)
    timm.models.save_for_hf(model, folder / name / "model", safe_serialization=True)
    images, resized = pictures(model.patch_embed.img_size), pictures(RESIZED)
    with torch.no_grad():
        with recorded_blocks(model.blocks) as outputs:
            outputs["logits"] = model(images)
        outputs["final"] = model.forward_features(images)
        model.set_input_size(img_size=RESIZED)
        outputs |= {"images": images, "resized_images": resized, "resized_logits": model(resized)}
    save(folder / name / "expected.npz", **outputs)


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
    file = folder / name / "model.npz"
    save(file, **npz_tensors(seed, big_vision))

    def run(images: torch.Tensor) -> dict:
        model = tiny_timm(**changes, img_size=images.shape[2:])
        model.load_pretrained(str(file))
        return {"logits": model.eval()(images)}

    save(folder / name / "expected.npz", **at_both_sizes(run))


# === Full size ===


def full_size(folder: Path) -> None:
    images = pictures((224, 224), number=1)
    base = transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000))
    small = timm.create_model("vit_small_patch16_224")
    save_model(randomise(base, 0), folder / "base" / "model")
    path = folder / "small" / "model"
    timm.models.save_for_hf(randomise(small, 1), path, safe_serialization=True)
    with torch.no_grad():
        save(folder / "base" / "expected.npz", images=images, logits=base(images).logits)
        save(folder / "small" / "expected.npz", images=images, logits=small(images))


def write(folder: Path) -> None:
    huggingface(folder, "hf_token", 1)
    huggingface(folder, "hf_sharded", 2, max_shard_size="16KB", layer_norm_eps=0.05)
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
    save_json(folder / "versions.json", versions)

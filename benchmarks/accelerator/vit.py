"""Training steps of a ViT in bfloat16 through `fit`, beside plain loops of the peers.

All systems get the same batches of float32 images from the host, and AdamW. `model_operations` are
those of the products of a training step, three times the forward pass; MFU is their rate over the
rate of a large bfloat16 product, measured in the same process.
"""

from typing import Any

import numpy as np

from accelerator import clock
from accelerator.pieces import SMALL

CLASSES, RATE = 1000, 1e-4


def model_operations(config: Any, tokens: int) -> float:
    """Operations of one image's step in products."""
    width, mlp, patches = config.hidden_dim, config.mlp_dim, tokens - 1
    block = tokens * (8 * width**2 + 4 * width * mlp) + 4 * tokens**2 * width
    return 3.0 * (config.num_layers * block + 2 * patches * config.patch_size**2 * 3 * width)


def kmodels_fit(
    preset: str,
    images: Any,
    labels: Any,
    batch: int,
    jit: Any = "auto",
    dtype: str = "mixed_bfloat16",
) -> Any:
    """Returns the model and a run of one epoch."""
    import keras

    from kmodels import training
    from kmodels.models import ViTImageClassifier

    model = clock.build(ViTImageClassifier, preset, dtype, num_classes=CLASSES)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(training.AdamW(RATE), loss, jit_compile=jit)
    return model, lambda: model.fit(images, labels, batch_size=batch, shuffle=False, verbose=0)


def torch_loop(model: Any, images: Any, labels: Any, batch: int, compile_it: bool) -> clock.Run:
    import torch
    from torch.nn import functional

    device = clock.place()
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=clock.on_gpu())
    run = clock.compiled(model) if compile_it else model

    def epoch() -> None:
        for at in range(0, len(images), batch):
            x = torch.from_numpy(images[at : at + batch]).to(device).permute(0, 3, 1, 2)
            y = torch.from_numpy(labels[at : at + batch]).to(device).long()
            with torch.autocast(device, torch.bfloat16):
                logits = run(x)
            logits = getattr(logits, "logits", logits)
            loss = functional.cross_entropy(logits.float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return epoch


def torch_peers(
    config: Any, images: Any, labels: Any, batch: int, peers: Any
) -> dict[str, clock.Run]:
    from torchvision_cpu import define_torchvision_operators

    define_torchvision_operators()
    image, found = config.image_shape[0], {}
    if "timm" in peers and not clock.absent(timm="timm"):
        from timm.models import VisionTransformer

        for name in ("timm_eager", "timm_compiled"):
            model = VisionTransformer(
                img_size=image,
                patch_size=config.patch_size,
                num_classes=CLASSES,
                embed_dim=config.hidden_dim,
                depth=config.num_layers,
                num_heads=config.num_heads,
                mlp_ratio=config.mlp_dim / config.hidden_dim,
            )
            found[name] = torch_loop(model, images, labels, batch, name.endswith("compiled"))
    if "transformers" in peers and not clock.absent(transformers="transformers"):
        import transformers

        for name in ("transformers_sdpa", "transformers_compiled"):
            settings = transformers.ViTConfig(
                hidden_size=config.hidden_dim,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                intermediate_size=config.mlp_dim,
                image_size=image,
                patch_size=config.patch_size,
                num_labels=CLASSES,
                attn_implementation="sdpa",
            )
            model = transformers.ViTForImageClassification(settings)
            found[name] = torch_loop(model, images, labels, batch, name.endswith("compiled"))
    return found


def flax_peer(config: Any, images: Any, labels: Any, batch: int) -> dict[str, clock.Run]:
    if clock.absent(flax="flax", optax="optax"):
        return {}
    import jax
    import optax
    from vit_peers.common import Settings
    from vit_peers.flax_vit import ViT

    settings = Settings(
        "jax", config.hidden_dim, config.num_heads, config.mlp_dim, config.num_layers,
        config.image_shape[0], CLASSES, batch, "bfloat16", 0.0, "adamw", "", config.patch_size,
    )  # fmt: skip
    model = ViT(settings)
    tree = jax.jit(model.init)(jax.random.key(0), images[:1])["params"]
    update = optax.adamw(RATE)

    def step(tree: Any, slots: Any, x: Any, y: Any) -> Any:
        def loss_of(tree: Any) -> Any:
            logits = model.apply({"params": tree}, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        loss, gradients = jax.value_and_grad(loss_of)(tree)
        change, slots = update.update(gradients, slots, tree)
        return optax.apply_updates(tree, change), slots, loss

    run, held = jax.jit(step, donate_argnums=(0, 1)), [tree, jax.jit(update.init)(tree)]

    def epoch() -> Any:
        for at in range(0, len(images), batch):
            *held[:], loss = run(*held, images[at : at + batch], labels[at : at + batch])
        return loss

    return {"flax": epoch}


def run(settings: dict[str, Any]) -> clock.Parts:
    """Yields a row per system: milliseconds a step, images per second, MFU, peak."""
    preset, batch, steps = settings["preset"], settings["batch"], settings["steps"]
    rng = np.random.default_rng(0)
    rate = clock.matmul_rate(64 if SMALL else 8192)
    labels = rng.integers(0, 10, batch * steps).astype("int32")
    outline = shape_of(preset)
    images = rng.standard_normal((batch * steps, *outline.image_shape), "float32")
    tokens = (outline.image_shape[0] // outline.patch_size) ** 2 + 1
    operations = model_operations(outline, tokens)
    model, ours = kmodels_fit(preset, images, labels, batch)
    peers = settings["peers"] if clock.backend() == "torch" else ("flax", "optax")
    yield {
        "absent": clock.absent(**dict(zip(peers, peers, strict=True))),
        "matmul_operations_per_s": rate,
        "model_operations": operations,
        "parameters": model.count_params(),
    }
    systems = {"kmodels": ours}
    if clock.backend() == "torch":
        if not SMALL:  # a C++ compiler takes half a minute
            systems["kmodels_compiled"] = kmodels_fit(preset, images, labels, batch, True)[1]
        systems |= clock.optional(
            "torch_peers", lambda: torch_peers(outline, images, labels, batch, peers)
        )
    else:
        systems |= clock.optional("flax", lambda: flax_peer(outline, images, labels, batch))

    def rates(row: dict[str, Any]) -> dict[str, Any]:
        images_per_s = round(1e3 * batch / row["median_ms"], 1)
        return {"images_per_s": images_per_s, "mfu": round(operations * images_per_s / rate, 4)}

    case = f"{preset} x{batch}"
    yield from clock.measure(case, systems, settings["rounds"], steps, rates)


def shape_of(preset: str) -> Any:
    """The config of a preset, without weights."""
    from kmodels.core import keras_internals
    from kmodels.models import ViTBackbone

    with keras_internals.without_values():
        return ViTBackbone.from_preset(preset).config

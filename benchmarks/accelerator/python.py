"""What Python costs a step, on the device, and whether anything there waits for the host.

The models are those of benchmarks/overhead.py, whose kernels cost nothing; time is wall time here.
"""

from typing import Any

from accelerator import clock, waits
from accelerator.pieces import SMALL


def run(settings: dict[str, Any]) -> clock.Parts:
    """Yields times by question, and on torch two rows on synchronisation."""
    import keras
    import overhead

    if SMALL:
        overhead.DEPTH = overhead.CALLS = overhead.STEPS = overhead.NEW = 2
        overhead.COUNTS = dict.fromkeys(overhead.COUNTS, 2)
        overhead.IMAGES, overhead.LABELS = overhead.IMAGES[:6], overhead.LABELS[:6]
    keras.utils.set_random_seed(0)
    systems = on_torch(overhead) if clock.backend() == "torch" else overhead.on_jax()
    for question, members in systems.items():
        count = overhead.COUNTS[question]
        yield from clock.measure(question, members, settings["rounds"], count)
    if clock.backend() == "torch":
        yield {"rows": synchronisation(overhead)}


def on_torch(overhead: Any) -> dict[str, dict[str, clock.Run]]:
    import keras
    import torch

    from kmodels import training

    device = clock.place()
    model, language = overhead.vit(), overhead.gemma()
    images = keras.ops.convert_to_tensor(overhead.IMAGES[:1])
    tokens = keras.ops.convert_to_tensor(overhead.TOKENS)
    pairs = {"token_ids": tokens, "padding_mask": keras.ops.ones_like(tokens)}
    around, forward = overhead.around, overhead.forward
    found = {
        "vit_forward": {"kmodels": around(torch.no_grad, forward(model, images))},
        "vit_fit_step": {"kmodels": overhead.fitted(overhead.vit(), training.AdamW(overhead.RATE))},
        "gemma_forward": {"kmodels": around(torch.no_grad, forward(language, pairs))},
        "gemma_token": {"kmodels": overhead.generated(language)},
    }
    if clock.absent(transformers="transformers"):
        return found
    from accelerator.gemma import their_model

    import transformers  # isort: skip

    theirs = their_model(language, "sdpa").float().eval()
    vision = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            image_size=overhead.IMAGE,
            patch_size=overhead.PATCH,
            num_labels=overhead.CLASSES,
            hidden_size=overhead.WIDTH,
            num_hidden_layers=overhead.DEPTH,
            num_attention_heads=overhead.HEADS,
            intermediate_size=overhead.MLP,
            attn_implementation="sdpa",
        )
    ).to(device)
    channels_first, long = images.permute(0, 3, 1, 2).contiguous(), tokens.long()

    def calls(model: Any, **inputs: Any) -> clock.Run:
        def several() -> None:
            for _ in range(overhead.CALLS):
                model(**inputs)

        return around(torch.no_grad, several)

    def tokens_of_theirs() -> Any:
        new = {"max_new_tokens": overhead.NEW, "min_new_tokens": overhead.NEW}
        return theirs.generate(long, attention_mask=long > 0, do_sample=False, **new)

    found["vit_forward"]["transformers"] = calls(vision.eval(), pixel_values=channels_first)
    found["gemma_forward"]["transformers"] = calls(theirs, input_ids=long, use_cache=False)
    found["gemma_token"]["transformers"] = tokens_of_theirs
    return found


def synchronisation(overhead: Any) -> list[dict[str, Any]]:
    """Whether a forward pass and a step of `fit` leave the host free; `finding` says who waits."""
    import keras
    import torch

    from kmodels import training

    model = overhead.vit()
    images = keras.ops.convert_to_tensor(overhead.IMAGES[:1])

    def forward() -> None:
        with torch.no_grad():
            model(images, training=False)

    class Middle(keras.callbacks.Callback):
        """Is strict within the fourth step, its batch's way to the device included."""

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 3:
                waits.strict(True)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            waits.strict(False)

    def step() -> None:
        waits.strict(False)  # what comes before the first step may wait
        trained = overhead.vit()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trained.compile(training.AdamW(overhead.RATE), loss)
        # Keras' own list would read the logs of each step, in this thread for such a callback.
        callbacks = training.StepCallbacks([Middle()], trained, epochs=1, steps=6)
        options = {"batch_size": 1, "verbose": 0, "callbacks": callbacks}
        trained.fit(overhead.IMAGES[:6], overhead.LABELS[:6], **options)

    calls = {"forward pass of a ViT": forward, "step of fit": step}
    return [
        {"case": case, "system": "synchronisation", "finding": waits.finding(call)}
        for case, call in calls.items()
    ]

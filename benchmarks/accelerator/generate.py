"""Tokens per second of greedy generation, beside transformers with its static cache."""

from typing import Any

import numpy as np

from accelerator import clock
from accelerator.gemma import their_model
from accelerator.pieces import SMALL


def run(settings: dict[str, Any]) -> clock.Parts:
    """Yields a row per batch and system."""
    from kmodels.models import GemmaCausalLM

    prompt, new, preset = settings["prompt"], settings["new"], settings["preset"]
    model = clock.build(GemmaCausalLM, preset, "bfloat16", preprocessor=None)
    words = model.backbone.config.vocabulary_size
    on_torch = clock.backend() == "torch"
    absent = clock.absent(transformers="transformers") if on_torch else []
    yield {"absent": absent}
    theirs = their_model(model, "sdpa").eval() if on_torch and not absent else None
    for batch in settings["batches"]:
        ids = np.random.default_rng(0).integers(3, words, (batch, prompt)).astype("int32")
        systems = {"kmodels": ours(model, ids, new)}
        if theirs is not None:
            systems["transformers"] = transformers_run(theirs, ids, new, False)
            if settings["compiled"] and not SMALL and clock.on_gpu():
                systems["transformers_compiled"] = transformers_run(theirs, ids, new, True)

        def rate(row: dict[str, Any], batch: int = batch) -> dict[str, Any]:
            return {"tokens_per_s": round(1e3 * batch / row["median_ms"], 1)}

        case = f"{preset} x{batch}, {new} tokens"
        yield from clock.measure(case, systems, settings["rounds"], new, rate)


def ours(model: Any, ids: Any, new: int) -> clock.Run:
    room = ((0, 0), (0, new))
    inputs = {"token_ids": np.pad(ids, room), "padding_mask": np.pad(np.ones_like(ids), room)}
    model.compile(sampler="greedy")
    return lambda: model.generate(inputs, stop_token_ids=None)["token_ids"]


def transformers_run(model: Any, ids: Any, new: int, compiled: bool) -> clock.Run:
    import torch

    prompt = torch.from_numpy(ids.astype("int64")).to(clock.place())
    # transformers compiles a static cache on CUDA by itself.
    settings = {"disable_compile": not compiled}
    return lambda: model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        cache_implementation="static",
        **settings,
    )

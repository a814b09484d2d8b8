"""How near is the memory that `kmodels plan` foretells to the peak of a step?

    python benchmarks/memory_plan.py [--backends torch,jax,tensorflow] [--cases lora,full] [--write]

Each case is a process of its own that plans, builds the model, trains three steps through `fit` and
reads its peak (VmHWM). Both figures are in MiB and count from what the process held before the
model was built; `ratio` is planned over measured. Use environments with one backend only.
"""

import argparse
import json
import os
from pathlib import Path

import record

GEMMA = {
    "preset": "gemma3_debug",
    "num_layers": 8,
    "hidden_dim": 256,
    "intermediate_dim": 1024,
    "head_dim": 64,
    "vocabulary_size": 32768,
    "sliding_window_size": 128,
}
GEMMA_4 = {
    "preset": "gemma4_debug",
    "num_layers": 8,
    "num_query_heads": 8,
    "num_key_value_heads": 1,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "hidden_dim": 256,
    "intermediate_dim": 1024,
    "head_dim": 64,
    "global_head_dim": 128,
    "vocabulary_size": 32768,
    "num_kv_shared_layers": 4,
    "hidden_size_per_layer_input": 64,
    "sliding_window_size": 128,
}
# Widths of Gemma 3 1B, of which some layers show the kernels.
GEMMA_1B = {
    "preset": "gemma3_debug",
    "num_layers": 8,
    "num_query_heads": 4,
    "num_key_value_heads": 1,
    "hidden_dim": 1152,
    "intermediate_dim": 6912,
    "head_dim": 256,
    "vocabulary_size": 4096,
    "sliding_window_size": 128,
}
LORA_1B = {
    "batch_size": 1,
    "sequence_length": 128,
    "lora": {"rank": 4, "targets": ["all-linear"]},
    "precision": "bfloat16",
    "remat": "block",
}
VIT = {
    "preset": "vit_debug",
    "image_shape": [112, 112, 3],
    "patch_size": 8,
    "num_layers": 8,
    "num_heads": 4,
    "hidden_dim": 256,
    "mlp_dim": 1024,
}
# name -> (model, setup of the step)
CASES = {
    "lora": (GEMMA, {"batch_size": 4, "sequence_length": 512, "lora": {"rank": 4}}),
    "lora_bfloat16": (
        GEMMA,
        {"batch_size": 4, "sequence_length": 512, "lora": {"rank": 4}, "precision": "bfloat16"},
    ),
    "lora_block": (
        GEMMA,
        {"batch_size": 4, "sequence_length": 512, "lora": {"rank": 4}, "remat": "block"},
    ),
    "lora_attention": (
        GEMMA,
        {"batch_size": 4, "sequence_length": 512, "lora": {"rank": 4}, "remat": "attention"},
    ),
    "lora_int8": (
        GEMMA,
        {"batch_size": 4, "sequence_length": 512, "lora": {"rank": 4}, "quantize": "int8"},
    ),
    "lora_all_linear": (
        GEMMA,
        {"batch_size": 4, "sequence_length": 512, "lora": {"rank": 4, "targets": ["all-linear"]}},
    ),
    "lora_large_table": (
        {**GEMMA, "vocabulary_size": 262144},
        {"batch_size": 2, "sequence_length": 256, "lora": {"rank": 4}, "precision": "bfloat16"},
    ),
    "gemma_1b": (GEMMA_1B, LORA_1B),
    **{
        f"gemma_1b_{mode}": (GEMMA_1B, {**LORA_1B, "quantize": mode})
        for mode in ("int8", "int4", "nf4")
    },
    # With all layers of Gemma 3 1B the fixed costs of a framework weigh less.
    "gemma_1b_26": ({**GEMMA_1B, "num_layers": 26}, LORA_1B),
    "gemma_1b_26_nf4": ({**GEMMA_1B, "num_layers": 26}, {**LORA_1B, "quantize": "nf4"}),
    "full": (GEMMA, {"batch_size": 4, "sequence_length": 256}),
    "gemma4_lora": (GEMMA_4, {"batch_size": 4, "sequence_length": 512, "lora": {"rank": 4}}),
    "gemma4_lora_bfloat16": (
        GEMMA_4,
        {"batch_size": 4, "sequence_length": 512, "lora": {"rank": 4}, "precision": "bfloat16"},
    ),
    "gemma4_lora_block": (
        GEMMA_4,
        {"batch_size": 4, "sequence_length": 512, "lora": {"rank": 4}, "remat": "block"},
    ),
    "gemma4_lora_all_linear": (
        GEMMA_4,
        {"batch_size": 2, "sequence_length": 256, "lora": {"rank": 4, "targets": ["all-linear"]}},
    ),
    "gemma4_full": (GEMMA_4, {"batch_size": 4, "sequence_length": 256}),
    # For a test, which waits for its compilation.
    "small": (
        {**GEMMA, "num_layers": 4},
        {"batch_size": 2, "sequence_length": 512, "lora": {"rank": 4}},
    ),
    "vit": (VIT, {"batch_size": 32}),
    "vit_mixed": (VIT, {"batch_size": 32, "precision": "mixed_bfloat16"}),
    "vit_dropout": ({**VIT, "dropout_rate": 0.1}, {"batch_size": 32}),
}


def measure(model: dict, setup: dict) -> dict:
    """Plan, then train."""
    import keras
    import numpy as np

    from kmodels import training
    from kmodels.core import keras_internals, runtime
    from kmodels.layers import remat
    from kmodels.lora import LoraSettings
    from kmodels.models import GemmaCausalLM, ViTImageClassifier
    from kmodels.tools.plan import Plan, Setup

    preset = model.pop("preset")
    text = preset.startswith("gemma")
    if "lora" in setup:
        setup["lora"] = LoraSettings(**setup["lora"])
    chosen = Setup(**setup)
    found = Plan(preset, chosen, overrides=model).estimate
    base = record.status("VmRSS")

    with keras_internals.without_values() as made:
        cls = GemmaCausalLM if text else ViTImageClassifier
        task = cls.from_preset(preset, dtype=chosen.precision, **model)
    # Zeros of the system are not in memory before they are written.
    rng = np.random.default_rng(0)
    for variable in task.weights:
        values = np.full(variable.shape, rng.random() * 0.02, "float32")
        keras_internals.give_value(
            variable, keras.ops.convert_to_tensor(values, dtype=variable.dtype)
        )
    keras_internals.draw_values(made)
    del made, variable, values  # which a quantized model has no use for
    if chosen.quantize:
        task.quantize(chosen.quantize)
    if chosen.lora:
        task.enable_lora(chosen.lora.rank, targets=chosen.lora.targets)
    remat.rematerialize(task.backbone, chosen.remat)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    task.compile(training.AdamW(1e-4), loss)
    if text:
        shape = (3 * chosen.batch_size, chosen.sequence_length)
        ids = rng.integers(3, model["vocabulary_size"], shape).astype("int32")
        x, y = {"token_ids": ids, "padding_mask": np.ones_like(ids)}, ids
    else:
        x = rng.random((3 * chosen.batch_size, *task.backbone.config.image_shape), "float32")
        y = rng.integers(0, 1000, len(x)).astype("int32")
    runtime.malloc_trim()  # what building took is no part of a step
    built = record.status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    task.fit(x, y, batch_size=chosen.batch_size, verbose=0)
    peak = record.status("VmHWM")
    mib = 2**20
    return {
        "planned": round(found.bytes / mib),
        "measured": round((peak - base) / mib),
        "ratio": round(found.bytes / (peak - base), 2),
        "base": round(base / mib),
        "built": round((built - base) / mib),
        "parts": {name: round(size / mib, 1) for name, size in found.parts.items()},
    }


def main() -> None:
    parser = record.flags(__doc__)
    parser.add_argument("--backends", default="torch,jax,tensorflow")
    parser.add_argument("--cases", default=",".join(case for case in CASES if case != "small"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        model, setup = CASES[options.child]
        print(json.dumps(measure(dict(model), dict(setup))))
        return
    rows = []
    for case in options.cases.split(","):
        for backend in options.backends.split(","):
            # The plan reads XLA_FLAGS: compilers schedule memory by them.
            flags = {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "")}
            found = record.child(__file__, backend, "--child", case, **flags)
            rows.append({"case": case, "backend": backend, **found})
            print(json.dumps(rows[-1]), flush=True)
    if options.write:
        backends = options.backends.split(",")
        name = f"memory_plan_{'-'.join(backends)}_cpu"
        record.write(name, __doc__, ("keras", *backends), threads=1, rows=rows)


if __name__ == "__main__":
    main()

"""Fine-tune a language model with LoRA on rewards: group relative policy optimization (GRPO).

    python recipes/grpo.py        # a demonstration, offline: answer in digits
    python recipes/grpo.py --weights DIR_OR_GGUF --data FILE.jsonl \\
        --reward rewards.py:score --prompt-length 256 --max-new-tokens 256 \\
        --precision bfloat16 --learning-rate 1e-5

A line of FILE.jsonl holds a prompt, a text or messages with role and content, and any other fields.
The function score(prompts, completions, **fields) in rewards.py returns a number for each
completion, or None for one that it cannot judge. In each rollout the model answers some prompts
--group-size times, and learns to prefer the answers with more reward than the others of their
group. The run's directory gets result.json, report.html, the answers of each rollout in rollouts/,
the adapter in PEFT's format, and the merged model.

`policy_loss` below is the whole training step. The backend is KERAS_BACKEND's: jax, torch or
tensorflow. All flags: --help.
"""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kmodels.runs import recipe
from kmodels.runs.recipe import flag


@dataclass(frozen=True)
class Settings(recipe.Common):
    preset: str = flag(
        "gemma3_debug",
        "architecture of the demonstration, which --weights replace",
        needs=("weights", None),
    )
    weights: str | None = flag(None, "a Hugging Face directory, a .gguf file or a saved directory")
    data: str | None = flag(None, "a .jsonl file of prompts; default: those that come with kmodels")
    workers: int = flag(0, "with --on: processes that train", needs=("on",))
    reward: str | None = flag(
        None, "FILE.py:function that judges answers; default: share of digits"
    )
    reward_timeout: float = flag(300.0, "seconds after which the reward function has failed")
    held_out: float = flag(0.1, "share of prompts held out for evaluation")
    # Rollouts
    group_size: int = flag(8, "answers to each prompt")
    rollout_batches: int = flag(1, "steps on each rollout; above 1 old answers are learnt too")
    prompt_length: int = flag(64, "tokens of a prompt; of a longer one the end stays")
    max_new_tokens: int = flag(16, "tokens of an answer")
    temperature: float = flag(1.0, "sampling temperature")
    # Loss
    normalization: str = flag(
        "dapo", "mean over tokens", choices=("grpo", "bnpo", "dr_grpo", "dapo")
    )
    scale_rewards: str = flag(
        "group", "deviation that divides advantages", choices=("group", "batch", "none")
    )
    epsilon: float = flag(0.2, "clipping of the importance weight, below 1")
    epsilon_high: float | None = flag(None, "clipping above 1; default: epsilon")
    beta: float = flag(0.0, "weight of the KL divergence from the model without adapters")
    # LoRA and memory
    rank: int = flag(16, "LoRA rank")
    alpha: float | None = flag(32.0, "LoRA alpha, divided by the rank")
    targets: str = flag("all-linear", "layers with adapters: names or patterns, or all-linear")
    quantize: str | None = flag(
        None, "quantize the frozen base weights (QLoRA)", choices=("int8", "int4", "nf4", "fp4")
    )
    remat: str = flag(
        "none",
        "recompute activations in the backward pass to save memory (gradient checkpointing)",
        choices=("none", "block", "attention", "mlp"),
    )
    # Optimizer
    precision: str = flag("float32", "policy", choices=("float32", "bfloat16", "mixed_bfloat16"))
    batch_size: int = flag(64, "answers per step, over all devices")
    steps: int | None = flag(100, "training steps", small=3)
    learning_rate: float | None = flag(
        None, "highest learning rate; default: 5e-3, with --weights 1e-5"
    )
    schedule: str = flag(
        "cosine", "learning rate after the warm-up", choices=("cosine", "linear", "constant")
    )
    warmup: float = flag(0.05, "share of the steps used for learning-rate warm-up")
    clip_norm: float = flag(1.0, "gradient clipping: largest global norm; 0 for no limit")
    # Output
    samples: int = flag(3, "held-out prompts answered before and after training", small=1)
    first_steps: int = flag(
        300, "training steps of the demonstration's base model", small=2, needs=("weights", None)
    )
    ignore_memory_check: bool = flag(False, "start even if the estimate exceeds the memory")


# Settings that a resumed run must share with the one it continues; its checkpoint has a hash of the
# base weights.
FIXED = (
    *("preset", "data", "held_out", "reward", "group_size", "rollout_batches", "prompt_length"),
    *("max_new_tokens", "temperature", "normalization", "scale_rewards", "epsilon"),
    *("epsilon_high", "beta", "rank", "alpha", "targets"),
    *("quantize", "batch_size", "seed", "first_steps"),
)
VOCABULARY = 512
PROMPTS = 200


def policy_loss(policy: Any, temperature: float) -> Callable[[Any, Any, bool], Any]:
    """Returns the loss of a batch of `training.Rollouts`.

    Args:
        policy: a `training.GRPOLoss`.
        temperature: of the sampling.
    """
    from keras import ops

    from kmodels import lora

    def loss_fn(model: Any, batch: Any, training: bool) -> Any:
        inputs, labels, learnt = batch
        rows = {name: inputs[name] for name in ("token_ids", "padding_mask")}
        reference = None
        if policy.beta > 0:
            with lora.disabled(model):
                reference = model.log_probs(rows, labels, learnt, False, temperature)
                reference = ops.stop_gradient(reference)
        log_probs = model.log_probs(rows, labels, learnt, training, temperature)
        old = inputs.get("old_log_probs")
        loss, logs = policy(log_probs, old, inputs["advantages"], learnt, reference)
        logs |= {
            "reward": (inputs["rewards"], inputs["scored"]),
            "answer_tokens": (ops.sum(learnt, axis=1),),
        }
        return loss, logs

    return loss_fn


def train(settings: Settings, folder: recipe.Folder) -> None:
    recipe.at_least(
        settings, clip_norm=0, first_steps=1, samples=0, rollout_batches=1, reward_timeout=0
    )
    recipe.check_fractions(settings, "warmup", "held_out")
    import keras

    from kmodels import training
    from kmodels.layers import rematerialize
    from kmodels.lora import LoraSettings
    from kmodels.runs import plots, results

    recipe.prepare(settings)
    rate = 1e-5 if settings.weights else 5e-3
    settings = recipe.filled(settings, folder, learning_rate=rate)
    total = settings.steps or 100
    policy = training.GRPOLoss(
        settings.normalization,
        settings.epsilon,
        settings.epsilon_high,
        settings.beta,
        max_completion_length=(
            settings.max_new_tokens if settings.normalization == "dr_grpo" else None
        ),
    )
    reward = function_of(settings.reward) if settings.reward else digits

    # === Data ===
    recipe.working(f"reading the data: {settings.data or 'prompts that come with kmodels'}")
    trained_on, held_out = split(read(settings.data), settings)

    # === Model ===
    origin: Any = settings.weights or folder.path / "base"
    if settings.weights is None and not (origin / "config.json").is_file():
        recipe.say("demonstration: trains a small Gemma here, without Google's weights")
        first_training(settings).save_to_preset(origin)
    adapters = LoraSettings(
        settings.rank, alpha=settings.alpha, targets=settings.targets.split(",")
    )
    recipe.working("estimating the memory of a step")
    check_memory(settings, adapters)
    recipe.working(f"reading the weights of {settings.weights or 'the demonstration'}")
    model = recipe.causal_lm_of(origin).from_preset(origin, dtype=settings.precision)
    if model.preprocessor is None:
        raise recipe.InputError(
            f"{origin} holds no tokenizer; put tokenizer.json next to the weights"
        )
    if not recipe.can_generate(model):
        raise recipe.InputError("grpo needs all weights in each process; use a mesh of data alone")
    if settings.quantize:
        model.backbone.quantize(settings.quantize)
    model.enable_lora(**asdict(adapters))
    rematerialize(model.backbone, settings.remat)
    model.compile(sampler="random")

    # === Training ===
    schedule = training.WarmupSchedule(
        settings.learning_rate, total, round(settings.warmup * total), settings.schedule
    )

    def output(model: Any, inputs: Any, training: bool) -> Any:
        rows = {name: inputs[name] for name in ("token_ids", "padding_mask")}
        learnt = inputs["learnt"]
        return model.log_probs(rows, inputs["labels"], learnt, training, settings.temperature)

    loss = policy_loss(policy, settings.temperature)
    step = recipe.parallelize(training.TrainStep(model, loss, output=output))
    step.compile(
        training.AdamW(schedule, weight_decay=0.0, clip_norm=settings.clip_norm or None),
        metrics=[keras.metrics.Mean(name=name) for name in ("reward", "answer_tokens")],
    )
    rollouts = training.Rollouts(
        model,
        trained_on,
        reward,
        settings.batch_size,
        group_size=settings.group_size,
        batches=settings.rollout_batches,
        prompt_length=settings.prompt_length,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        scale=settings.scale_rewards,
        seed=settings.seed,
        folder=folder.path / "rollouts",
        timeout=settings.reward_timeout,
        log_probs=lambda inputs: step.predict(inputs, batch_size=settings.batch_size, verbose=0),
    )
    facts = {
        "source": settings.data or "prompts that come with kmodels",
        "unit": "prompts",
        "train": len(trained_on),
        "validation": len(held_out),
        "details": f"{settings.group_size} answers each, judged by {settings.reward or 'digits'}",
    }
    recipe.introduce(folder, model, facts, steps=total, steps_per_epoch=len(rollouts))
    recipe.working("answering the held-out prompts before the training")
    before, rewards_before = answers(settings, model, rollouts, held_out)
    callbacks = [rollouts.callback()]
    runner = recipe.fit(
        folder, step, rollouts, None, schedule, FIXED, origin=str(origin), callbacks=callbacks
    )

    # === Results ===
    recipe.working("answering the held-out prompts after the training")
    after, rewards_after = answers(settings, model, rollouts, held_out)
    metrics = dict(runner.metrics) if runner else {}
    metrics |= {"val_reward_before": rewards_before, "val_reward": rewards_after}
    recipe.working(None)
    recipe.say_metrics(metrics)
    content = results.result(folder, model, metrics, runner)
    content["samples"] = [
        {"prompt": recipe.as_text(record["prompt"]), "before": old, "after": new}
        for record, old, new in zip(held_out, before, after, strict=True)
    ][: settings.samples]
    if runner is None:
        folder.write_json("evaluation.json", content)
        return
    recipe.working("saving the adapter and the merged model")
    plots.curves(folder.path / "curves.png", runner.history.rows)
    adapter = folder.path / "adapter"
    model.save_adapter(adapter)
    if recipe.can_merge(model, origin, adapter):
        model.merge_lora()
        results.save_model(folder, model, content["metrics"])
    folder.write_json("result.json", content)


def check_memory(settings: Settings, lora: Any) -> None:
    """Raises InputError if a step needs clearly more memory than is available."""
    from kmodels.tools import plan

    if settings.ignore_memory_check:
        return
    setup = plan.Setup(
        settings.batch_size,
        settings.prompt_length + settings.max_new_tokens,
        precision=settings.precision,
        lora=lora,
        quantize=settings.quantize,
        remat=settings.remat,
    )
    estimate = plan.Plan(settings.weights or settings.preset, setup)
    plan.check(estimate, Settings, "--ignore-memory-check")


def answers(
    settings: Settings, model: Any, rollouts: Any, records: list[Any]
) -> tuple[list[str], float]:
    """Returns the most likely answers to prompts, and their mean reward."""
    import numpy as np

    prompts, size = [record["prompt"] for record in records], settings.batch_size
    texts = [""] * len(prompts)
    # Texts and chats are not generated together.
    for kind in (str, list):
        places = [i for i, prompt in enumerate(prompts) if isinstance(prompt, kind)]
        for part in (places[start : start + size] for start in range(0, len(places), size)):
            found = model.generate(
                [prompts[i] for i in part],
                strip_prompt=True,
                max_new_tokens=settings.max_new_tokens,
                temperature=0.0,
            )
            for i, text in zip(part, found, strict=True):
                texts[i] = text
    rewards = rollouts.rewards_of(records, texts)
    judged = rewards[~np.isnan(rewards)]
    return texts, float(judged.mean()) if len(judged) else 0.0


def digits(prompts: list[Any], completions: list[str], **fields: Any) -> list[float]:
    """The reward of the demonstration: the share of digits among the characters."""
    return [sum(one.isdigit() for one in text) / max(len(text), 1) for text in completions]


def function_of(address: str) -> Callable[..., Any]:
    """Returns the function of FILE.py:function; importing the file runs it."""
    file, _, name = address.rpartition(":")
    path = Path(file)
    if not name.isidentifier() or path.suffix != ".py" or not path.is_file():
        raise recipe.InputError(f"--reward is {address!r}; give FILE.py:function of a file here")
    spec = importlib.util.spec_from_file_location("kmodels_reward", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass finds the module of its annotations here.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise recipe.InputError(f"{path} raised {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise recipe.InputError(f"{path} has no function {name}; give FILE.py:function")
    return function


def read(path: str | None) -> list[dict[str, Any]]:
    """Returns records with a prompt."""
    from kmodels.text import demo, read_prompts

    if path is not None:
        return read_prompts(path)
    records = demo.instructions().rows[:PROMPTS]
    return [{"prompt": f"{row['instruction']}\n"} for row in records]


def split(records: list[Any], settings: Settings) -> tuple[list[Any], list[Any]]:
    """Splits records by the seed into training and held-out ones."""
    from kmodels.data import order

    if len(records) < 2:
        raise recipe.InputError(
            f"the data has {len(records)} prompts; give at least 2, one of them to hold out"
        )
    count = min(max(round(settings.held_out * len(records)), 1), len(records) - 1)
    indices = order(len(records), settings.seed, 0)
    return [records[i] for i in indices[count:]], [records[i] for i in indices[:count]]


def first_training(settings: Settings) -> Any:
    """Returns a small Gemma with its tokenizer, trained on the demonstration's texts."""
    from kmodels.models import GemmaCausalLM, GemmaCausalLMPreprocessor
    from kmodels.text import demo
    from kmodels.text.training import train_tokenizer

    rows = demo.instructions().rows[:PROMPTS]
    texts = [f"{row['instruction']}\n{row['response']}" for row in rows]
    text = GemmaCausalLMPreprocessor(train_tokenizer(texts, VOCABULARY), 128)
    model = GemmaCausalLM.from_preset(
        settings.preset, vocabulary_size=text.tokenizer.vocabulary_size(), preprocessor=text
    )
    return recipe.train_base(model, texts, settings.first_steps, settings.seed)


def main(argv: list[str] | None = None) -> int:
    return recipe.main("grpo", Settings, train, argv, __doc__)


if __name__ == "__main__":
    sys.exit(main())

"""Encoders in Hugging Face's files: rules for PyTorch's layers, and names of CLIP and SigLIP."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from kmodels.core.errors import InputError
from kmodels.weights import Rule, transpose

# `hidden_act` in config.json, and the `approximate` of `ops.gelu`; the last of two is written.
GELUS: dict[str, bool | str] = {
    "gelu": False,
    "gelu_new": True,
    "gelu_pytorch_tanh": True,
    "quick_gelu": "sigmoid",
}
HIDDEN_ACTS = {form: name for name, form in GELUS.items()}
# Names of the parts of a block in both towers of CLIP and SigLIP.
BLOCK = "encoder.layers.{i}"
LAYERS = {
    "attention/query": "self_attn.q_proj",
    "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj",
    "attention/output": "self_attn.out_proj",
    "mlp/up": "mlp.fc1",
    "mlp/down": "mlp.fc2",
}
NORMS = {"attention_norm": "layer_norm1", "mlp_norm": "layer_norm2"}


def dense(pairs: Mapping[str, str]) -> list[Rule]:
    """Returns weights and biases of linear layers, as PyTorch keeps them."""
    table = []
    for source, target in pairs.items():
        table.append(Rule(f"{source}.weight", f"{target}/kernel", transpose))
        table.append(Rule(f"{source}.bias", f"{target}/bias"))
    return table


def norms(pairs: Mapping[str, str]) -> list[Rule]:
    """Returns weights and biases of layer norms."""
    table = []
    for source, target in pairs.items():
        table.append(Rule(f"{source}.weight", f"{target}/scale"))
        table.append(Rule(f"{source}.bias", f"{target}/bias"))
    return table


def blocks() -> list[Rule]:
    """Returns the blocks of a tower of CLIP or SigLIP."""
    return [
        *dense({x: ours for ours, x in names().items()}),
        *norms({f"{BLOCK}.{x}": f"block_{{i}}/{ours}" for ours, x in NORMS.items()}),
    ]


def names() -> dict[str, str]:
    """Returns the names of linear layers in a tower of CLIP or SigLIP, by their paths here."""
    return {f"block_{{i}}/{ours}": f"{BLOCK}.{x}" for ours, x in LAYERS.items()}


def prefix_of(tensors: Iterable[str], prefix: str) -> str:
    """Returns `prefix` if a tensor has it, else an empty text."""
    return prefix if any(name.startswith(prefix) for name in tensors) else ""


def prefixed(prefix: str, table: Iterable[Rule]) -> list[Rule]:
    """Returns the rules with something in front of their names."""
    return [replace(rule, source=prefix + rule.source) for rule in table]


def below(name: str, rules: Iterable[Rule]) -> list[Rule]:
    """Returns the rules with a layer's name in front of their variables."""
    table = []
    for rule in rules:
        targets = [f"{name}/{target}" for target in rule.targets]
        table.append(replace(rule, target=targets if targets[1:] else targets[0]))
    return table


def approximate_gelu(path: Path, activation: str) -> bool | str:
    """Returns the form of GELU that a `hidden_act` names, as `ops.gelu` calls it."""
    if activation not in GELUS:
        raise InputError(
            f"{path}: hidden_act is {activation!r}; the model supports {', '.join(GELUS)}"
        )
    return GELUS[activation]

"""Rules for attention in files that keep the heads as an axis of their own."""

from kmodels.models.vit.config import ViTConfig
from kmodels.weights import Rule, reshape


def attention(config: ViTConfig, source: str, target: str, output: str = "out") -> list[Rule]:
    """Kernels (D, N, H) and biases (N, H) of query, key and value, and (N, H, D) of the output.

    Args:
        config: for the number of heads.
        source: path of the attention in the file.
        target: path of the attention here.
        output: what the output projection is called in the file.
    """
    width, heads = config.hidden_dim, config.num_heads
    kernel = reshape((width, heads, width // heads), (width, width))
    bias = reshape((heads, width // heads), (width,))
    joined = reshape((heads, width // heads, width), (width, width))
    table = [
        Rule(f"{source}/{output}/kernel", f"{target}/output/kernel", joined),
        Rule(f"{source}/{output}/bias", f"{target}/output/bias"),
    ]
    for part in ("query", "key", "value"):
        table.append(Rule(f"{source}/{part}/kernel", f"{target}/{part}/kernel", kernel))
        table.append(Rule(f"{source}/{part}/bias", f"{target}/{part}/bias", bias))
    return table

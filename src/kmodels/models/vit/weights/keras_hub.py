"""Paths of the variables in keras-hub's ViT, DeiT, DINOv2, DINOv3 and SigLIP (0.32)."""

from kmodels.models.common.keras_hub_mapping import numbered
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.heads import attention
from kmodels.weights import Rule, Transform, identity, leading_axes, reshape

GATED = ("block_{i}/mlp/gate", "block_{i}/mlp/up")
OUTPUT = "attention_output"
POSITIONS = "tokens/position_embedding"


def norm(source: str, target: str) -> list[Rule]:
    """Returns the rules of a norm with a bias."""
    return [Rule(f"{source}/gamma", f"{target}/scale"), Rule(f"{source}/beta", f"{target}/bias")]


def dense(source: str, target: str, kernel: Transform = identity) -> list[Rule]:
    """Returns the rules of a linear layer with a bias."""
    return [
        Rule(f"{source}/kernel", f"{target}/kernel", kernel),
        Rule(f"{source}/bias", f"{target}/bias"),
    ]


def patches(config: ViTConfig, source: str) -> list[Rule]:
    """Returns the rules of the convolution that cuts an image into patches."""
    width, patch, channels = config.hidden_dim, config.patch_size, config.image_shape[2]
    kernel = reshape((patch, patch, channels, width), (patch * patch * channels, width))
    return dense(source, "patch_embedding", kernel)


def vit(config: ViTConfig) -> list[Rule]:
    """Returns the table of `ViTBackbone` and `ViTImageClassifier`, whose blocks count from 1."""
    block, front = "vit_encoder/transformer_block_{i}", "vit_patching_and_embedding"
    table = [
        Rule(f"{front}/class_token", "tokens/class_token"),
        Rule(f"{front}/position_embedding/embeddings", POSITIONS, leading_axes(1)),
        *patches(config, f"{front}/patch_embedding"),
        *norm(f"{block}/ln_1", "block_{i}/attention_norm"),
        *attention(config, f"{block}/mha", "block_{i}/attention", OUTPUT),
        *norm(f"{block}/ln_2", "block_{i}/mlp_norm"),
        *dense(f"{block}/mlp/dense_1", "block_{i}/mlp/up"),
        *dense(f"{block}/mlp/dense_2", "block_{i}/mlp/down"),
        *norm("vit_encoder/ln", "final_norm"),
        *dense("pre_logits", "pre_logits"),
        *dense("predictions", "logits"),
    ]
    return numbered(table, config.num_layers, 1)


def deit(config: ViTConfig) -> list[Rule]:
    """Returns the table of `DeiTBackbone` and `DeiTImageClassifier`, whose blocks count from 1."""
    block, front = "deit_encoder/transformer_block_{i}", "deit_patching_and_embedding"
    table = [
        Rule(f"{front}/class_token", "tokens/class_token"),
        Rule(f"{front}/distillation_token", "tokens/distillation_token"),
        Rule(f"{front}/position_embedding", POSITIONS),
        *patches(config, f"{front}/patch_embedding"),
        *norm(f"{block}/ln_1", "block_{i}/attention_norm"),
        *attention(config, f"{block}/mha", "block_{i}/attention", OUTPUT),
        *norm(f"{block}/ln_2", "block_{i}/mlp_norm"),
        *dense(f"{block}/mlp/dense", "block_{i}/mlp/up"),
        *dense(f"{block}/output_layer/output", "block_{i}/mlp/down"),
        *norm("deit_encoder/ln", "final_norm"),
        *dense("predictions", "logits"),
    ]
    return numbered(table, config.num_layers, 1)


def dinov2(config: ViTConfig) -> list[Rule]:
    """Returns that of `DINOV2Backbone`, whose SwiGLU has the gate in front of its factor."""
    block = "encoder/layers_{i}"
    mlp = [
        *dense(f"{block}/mlp/fc1", "block_{i}/mlp/up"),
        *dense(f"{block}/mlp/fc2", "block_{i}/mlp/down"),
    ]
    if config.use_swiglu_ffn:
        kernels, biases = ([f"{path}/{part}" for path in GATED] for part in ("kernel", "bias"))
        mlp = [
            Rule(f"{block}/mlp/weights_in/kernel", kernels, axis=1),
            Rule(f"{block}/mlp/weights_in/bias", biases),
            *dense(f"{block}/mlp/weights_out", "block_{i}/mlp/down"),
        ]
    return [
        Rule("embeddings/cls_token", "tokens/class_token"),
        Rule("embeddings/mask_token", "tokens/mask_token", leading_axes(1)),
        Rule("embeddings/register_tokens", "tokens/register_tokens"),
        Rule("embeddings/interpolated_position_embeddings", POSITIONS),
        *patches(config, "embeddings/patch_embeddings/projection"),
        *norm(f"{block}/norm1", "block_{i}/attention_norm"),
        *attention(config, f"{block}/attention/attention", "block_{i}/attention", OUTPUT),
        Rule(f"{block}/layer_scale1/lambda1", "block_{i}/attention_scale/scale"),
        *norm(f"{block}/norm2", "block_{i}/mlp_norm"),
        *mlp,
        Rule(f"{block}/layer_scale2/lambda1", "block_{i}/mlp_scale/scale"),
        *norm("layernorm", "final_norm"),
    ]


def dinov3(config: ViTConfig) -> list[Rule]:
    """Returns that of `DINOV3Backbone`."""
    block = "encoder/layers_{i}"
    parts = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    layers = {f"attention/{ours}": f"attention/{theirs}" for ours, theirs in parts.items()}
    layers |= {f"mlp/{name}": f"mlp/{name}_proj" for name in ("gate", "up", "down")}
    return [
        Rule("embeddings/cls_token", "tokens/class_token"),
        Rule("embeddings/mask_token", "tokens/mask_token"),
        Rule("embeddings/register_tokens", "tokens/register_tokens"),
        *patches(config, "embeddings/patch_embeddings/projection"),
        *norm(f"{block}/norm1", "block_{i}/attention_norm"),
        *norm(f"{block}/norm2", "block_{i}/mlp_norm"),
        *(
            rule
            for ours, theirs in layers.items()
            for rule in dense(f"{block}/{theirs}", f"block_{{i}}/{ours}")
        ),
        Rule(f"{block}/layer_scale1/lambda1", "block_{i}/attention_scale/scale"),
        Rule(f"{block}/layer_scale2/lambda1", "block_{i}/mlp_scale/scale"),
        *norm("layernorm", "final_norm"),
    ]


def siglip(config: ViTConfig) -> list[Rule]:
    """Returns that of `SigLIPVisionEncoder`, whose attention pooling is a part of the backbone."""
    block = "encoder_block_{i}"
    return [
        Rule("embedding/position_embedding/embeddings", POSITIONS, leading_axes(1)),
        *patches(config, "embedding/patch_embedding"),
        *attention(config, f"{block}/self_attn", "block_{i}/attention", OUTPUT),
        *norm(f"{block}/layer_norm1", "block_{i}/attention_norm"),
        *dense(f"{block}/mlp/fc1", "block_{i}/mlp/up"),
        *dense(f"{block}/mlp/fc2", "block_{i}/mlp/down"),
        *norm(f"{block}/layer_norm2", "block_{i}/mlp_norm"),
        *norm("post_layer_norm", "final_norm"),
        Rule("head/probe", "pooling/probe"),
        *attention(config, "head/attention", "pooling/attention", OUTPUT),
        *norm("head/layernorm", "pooling/mlp_norm"),
        *dense("head/mlp/fc1", "pooling/mlp/up"),
        *dense("head/mlp/fc2", "pooling/mlp/down"),
    ]

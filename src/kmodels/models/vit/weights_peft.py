"""Names of a ViT's linear layers in transformers, under which PEFT keeps adapters."""

PREFIX = "vit."

# transformers 5, then transformers 4.
NAMES = (
    {
        "block_{i}/attention/query": "vit.layers.{i}.attention.q_proj",
        "block_{i}/attention/key": "vit.layers.{i}.attention.k_proj",
        "block_{i}/attention/value": "vit.layers.{i}.attention.v_proj",
        "block_{i}/attention/output": "vit.layers.{i}.attention.o_proj",
        "block_{i}/mlp/up": "vit.layers.{i}.mlp.fc1",
        "block_{i}/mlp/down": "vit.layers.{i}.mlp.fc2",
        "pre_logits": "vit.pooler.dense",
        "logits": "classifier",
    },
    {
        "block_{i}/attention/query": "vit.encoder.layer.{i}.attention.attention.query",
        "block_{i}/attention/key": "vit.encoder.layer.{i}.attention.attention.key",
        "block_{i}/attention/value": "vit.encoder.layer.{i}.attention.attention.value",
        "block_{i}/attention/output": "vit.encoder.layer.{i}.attention.output.dense",
        "block_{i}/mlp/up": "vit.encoder.layer.{i}.intermediate.dense",
        "block_{i}/mlp/down": "vit.encoder.layer.{i}.output.dense",
    },
)

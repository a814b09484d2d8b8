"""The description of the family that the loaders use."""

from kmodels.models.common.embedder.task import PARTS
from kmodels.models.common.sizes import sizes
from kmodels.models.qwen3.causal_lm import Qwen3CausalLM
from kmodels.models.qwen3.embedder import Qwen3TextEmbedder
from kmodels.models.qwen3.model import Qwen3Backbone
from kmodels.models.qwen3.presets import PRESETS
from kmodels.models.qwen3.weights import gguf, huggingface
from kmodels.models.registry import Family

FAMILY = Family(
    name="qwen3",
    backbone=Qwen3Backbone,
    tasks=(Qwen3CausalLM, Qwen3TextEmbedder),
    presets=PRESETS,
    formats=(huggingface.FORMAT, gguf.FORMAT),
    sizes=sizes,
    transformers_form=huggingface.transformers_form,
    parts=PARTS,
)

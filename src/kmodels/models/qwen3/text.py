"""Text to what a Qwen 3 takes, and back."""

import keras

from kmodels.models.common.preprocessor import CausalLMPreprocessor
from kmodels.models.common.tokenizer import BytePairTokenizer
from kmodels.text import Turns

BEGIN, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
# ChatML, as in the chat template of the checkpoints.
CHATS = {
    "qwen3": Turns(
        user="<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n",
        model=END,
        between="\n",
        tokens=(BEGIN, END),
    )
}
ROLES = {"end": END, "pad": PAD}


@keras.saving.register_keras_serializable(package="kmodels")
class Qwen3Tokenizer(BytePairTokenizer):
    """`BytePairTokenizer` whose texts end with <|im_end|>; <|endoftext|> fills rows."""

    roles = ROLES
    control_tokens = (PAD, BEGIN, END)


@keras.saving.register_keras_serializable(package="kmodels")
class Qwen3CausalLMPreprocessor(CausalLMPreprocessor):
    """`CausalLMPreprocessor` of Qwen 3, whose texts have no start token.

    The template "qwen3" is the chat format of the checkpoints, without thinking.
    """

    family = "qwen3"
    tokenizer_class = Qwen3Tokenizer
    chats = CHATS
    reader = "Qwen 3"

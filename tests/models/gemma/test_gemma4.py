"""Gemma 4 against transformers: each feature alone and all together, with a cache and without."""

import json
import shutil

import numpy as np
import pytest

from arrays import assert_same_tensors, read_npz, to_numpy
from decoder_case import DecoderCase
from kmodels.core.errors import InputError
from kmodels.models import GemmaBackbone, GemmaCausalLM
from kmodels.weights import read_safetensors
from tolerances import tolerance

LOCAL, GLOBAL = "sliding_attention", "full_attention"
FEATURES = (
    *("plain", "heads", "key_is_value", "shared", "double_wide", "per_layer", "turned", "capped"),
    "all",
)


@pytest.fixture(scope="module")
def whole(references):
    return DecoderCase(references / "gemma4" / "all", GemmaCausalLM)


@pytest.mark.parametrize("name", FEATURES)
def test_logits(references, name):
    DecoderCase(references / "gemma4" / name, GemmaCausalLM).check_logits()


def test_hidden_states_layer_by_layer(whole):
    whole.check_hidden_states()


def test_bfloat16_is_as_close_to_float64_as_transformers(whole):
    whole.check_bfloat16()

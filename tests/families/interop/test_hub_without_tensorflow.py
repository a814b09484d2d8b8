"""Where TensorFlow is not installed keras-hub's models and preprocessing work all the same."""

import os
from pathlib import Path

import pytest

from python_process import run_python

pytestmark = [pytest.mark.needs("keras_hub"), pytest.mark.across]
PROGRAM = """
import sys


class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, *rest):
        hidden = name.partition(".")[0] in ("tensorflow", "tensorflow_text")
        return None if hidden else self.finder.find_spec(name, *rest)


sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
import hub_models
import numpy as np

from kmodels.core.errors import InputError
from kmodels.interop import keras_hub
from kmodels.models import *
from kmodels.text import demo

sizes = {"patch_size": 8, "num_layers": 1, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 8}
images = ViTImageClassifierPreprocessor((16, 16))
ours = ViTImageClassifier(ViTBackbone((16, 16, 3), **sizes), 3, preprocessor=images)
theirs = keras_hub.to_hub(ours)
x = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3)).astype("uint8")
difference = abs(theirs.predict(x, verbose=0) - ours.predict(x, verbose=0)).max()
again = keras_hub.from_hub(theirs).preprocessor
print("images", difference <= 1e-4, again.to_dict() == images.to_dict())

tokenizer = hub_models.tokenizer(demo.texts())
sizes = {**hub_models.GEMMA, "vocabulary_size": 800, "num_layers": 1, "intermediate_dim": 16}
text = GemmaCausalLMPreprocessor(tokenizer, sequence_length=8)
theirs = keras_hub.to_hub(GemmaCausalLM(GemmaBackbone(**sizes), preprocessor=text))
found = theirs.preprocessor(["a b"])[0]["token_ids"]
print("text", (np.asarray(found) == text(["a b"])[0]["token_ids"]).all())

text = Gemma3CausalLMPreprocessor(tokenizer, sequence_length=8)
ours = Gemma3CausalLM(Gemma3Backbone(**sizes), preprocessor=text)
try:
    keras_hub.to_hub(ours)
except InputError as error:
    print("Gemma 3:", error)
print("Gemma 3", type(keras_hub.to_hub(ours, preprocessor=False)).__name__)
print("tensorflow" in sys.modules)
"""


def test_only_gemma_3s_preprocessor_needs_it():
    tests = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(tests)])
    done = run_python("-W", "ignore", "-c", PROGRAM, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [
        "images True True",
        "text True",
        "Gemma 3: keras-hub cannot make its Gemma3CausalLMPreprocessor: Gemma3CausalLMPreprocessor "
        "requires `tensorflow`. Run `pip install tensorflow` to install it. Or give "
        "preprocessor=False",
        "Gemma 3 Gemma3CausalLM",
        "False",
    ]

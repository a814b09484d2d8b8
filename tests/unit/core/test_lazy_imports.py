"""A process on JAX or torch leaves TensorFlow alone, where it happens to be installed."""

import keras
import numpy as np
import pytest

from kmodels.core import keras_internals
from python_process import run_python

PROGRAM = """
import sys
import keras, numpy as np
from kmodels.callbacks import Checkpoint
from kmodels.models import GemmaCausalLM, ViTImageClassifier
folder = sys.argv[1]
model = ViTImageClassifier.from_preset("vit_debug")
x = np.zeros((4, *model.backbone.config.image_shape), "float32")
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(x, np.zeros(4, "int32"), verbose=0, callbacks=[Checkpoint(folder + "/checkpoints")])
model.predict(x, verbose=0)
model.save(folder + "/model.keras")
keras.models.load_model(folder + "/model.keras")
keras.models.clone_model(model)
model.save_to_preset(folder + "/preset")
ViTImageClassifier.from_preset(folder + "/preset")
GemmaCausalLM.from_preset("gemma3_debug").backbone.enable_lora(2)
assert "tensorflow" not in sys.modules
import tensorflow as tf
assert keras.saving.serialize_keras_object(tf.TensorShape([1, 2])) == [1, 2]
print("done")
"""


@pytest.mark.across("jax", "torch")
@pytest.mark.needs("tensorflow")
def test_tensorflow_is_left_to_those_who_import_it(tmp_path):
    done = run_python("-c", PROGRAM, tmp_path)
    assert done.stdout.endswith("done\n"), done.stderr


def test_a_seed_gives_what_that_of_keras_gives():
    drawn = []
    for seed in (keras.utils.set_random_seed, keras_internals.set_random_seed):
        seed(3)
        ours = keras.ops.convert_to_numpy(keras.random.normal((3,)))
        drawn.append((ours, np.random.random(3)))
    np.testing.assert_array_equal(*[pair[0] for pair in drawn])
    np.testing.assert_array_equal(*[pair[1] for pair in drawn])

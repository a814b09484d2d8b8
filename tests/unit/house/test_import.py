"""What `import kmodels` costs: no other framework, nothing that only some tasks need."""

import os
from importlib.util import find_spec

import keras
import numpy as np
import pytest

from kmodels.core import keras_internals
from python_process import run_python

BACKENDS = ("jax", "torch", "tensorflow")
ENVIRONMENT = os.environ.get("KMODELS_ENVIRONMENT", "")
HEAVY = {
    *("matplotlib", "sklearn", "PIL", "pandas", "ray"),
    *("transformers", "timm", "peft", "keras_hub"),
}
# What keras itself loads is not ours to answer for, so each list is taken after it.
CHILD = """
import sys, keras
before = set(sys.modules)
assert not {"sklearn", "matplotlib"} & before
import kmodels
kmodels.models, kmodels.layers, kmodels.ops
print(*set(sys.modules) - before)
import matplotlib, sklearn
print(*set(sys.modules) - before)
"""
# A process on JAX or torch leaves TensorFlow alone, where it happens to be installed, and one on
# torch JAX, which tests/children/sitecustomize.py spares Keras.
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
assert keras.backend.backend() == "jax" or "jax" not in sys.modules
import tensorflow as tf
assert keras.saving.serialize_keras_object(tf.TensorShape([1, 2])) == [1, 2]
print("done")
"""


def test_import_loads_no_other_framework_and_nothing_heavy(backend):
    """Nor does Keras what tests/children/sitecustomize.py spares it; it is there for others."""
    done = run_python("-c", CHILD)
    assert done.returncode == 0, done.stderr
    loaded, asked = ({n.split(".")[0] for n in line.split()} for line in done.stdout.splitlines())
    assert "kmodels" in loaded and {"sklearn", "matplotlib"} <= asked
    unwanted = loaded & (HEAVY | set(BACKENDS) - {backend})
    assert not unwanted, f"import kmodels loads {sorted(unwanted)}"


def test_an_unknown_name_says_so():
    import kmodels

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = kmodels.no_such_name


def test_the_backend_is_the_one_asked_for_and_the_only_one_installed(backend):
    """Proves that the other frameworks are not needed, wherever the environment promises it."""
    assert keras.backend.backend() == backend
    if ENVIRONMENT in BACKENDS:
        assert backend == ENVIRONMENT
        assert not [name for name in BACKENDS if name != backend and find_spec(name)]


@pytest.mark.across
def test_everything_is_installed():
    for name in (*BACKENDS, "transformers", "timm", "peft"):
        assert find_spec(name), f"the full environment lacks {name}"


@pytest.mark.nightly("torch")
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

"""Private names of Keras and the frameworks stand in two rooms, where each has a contract test."""

from pathlib import Path

import pytest

from private_names import Source

SOURCE = Path(__file__).resolve().parents[3] / "src" / "kmodels"
ROOMS = ("core/keras_internals.py", "core/internals_")


def test_no_private_name_outside_its_room():
    files = {str(p.relative_to(SOURCE)): p.read_text() for p in sorted(SOURCE.rglob("*.py"))}
    source = Source(files)
    outside = [file for file in files if not file.startswith(ROOMS)]
    wrong = [
        f"{file}:{line} {how} {name}"
        for file in outside
        for line, name, how in sorted(set(source.found(file)))
    ]
    assert not wrong, "move these into core/keras_internals.py or internals_*.py:\n" + "\n".join(
        wrong
    )


# Kinds of uses by the way in which each is reported.
SEEN = {
    "import": {
        "an import of keras.src": "from keras.src.saving import saving_lib",
        "an import inside a function": "def f():\n    import torch._inductor.config",
        "a private name of a public module": "from torch.nn.modules.batchnorm import _NormBase",
        "tensorflow.python": "from tensorflow.python.eager import record",
    },
    "attribute": {
        "an attribute of a framework": "import torch\ntorch._foreach_add_([], [])",
        "one below a public module": "import torch\ntorch.ops.mkldnn._linear_pointwise()",
        "an attribute of an imported module": (
            "from torch.distributed import distributed_c10d as c\nc._get_default_store()"
        ),
        "an attribute of a tensor": "def f(x):\n    return x._base",
        "a read of an optimizer's": "def f(o):\n    return o._iterations",
        "a read through a call": "def f(m):\n    return m.optimizer()._variables",
        "a call of super": "class A:\n    def f(self):\n        super()._symbolic_build()",
        "a read on self": (
            "import keras\nclass A(keras.optimizers.SGD):\n"
            "    def f(self):\n        return self._iterations"
        ),
        "a name taken by chance": (
            "import keras\nclass A(keras.callbacks.Callback):\n"
            "    def f(self):\n        self._model = 1"
        ),
    },
    "argument": {"an argument": "from jax import jit\njit(f, _inner=True)"},
    "assignment": {
        "an assignment": "def f(slot):\n    slot._initializer = None",
        "another class": "def f(v, kind):\n    v.__class__ = kind",
        "a replaced method": "import keras\nkeras.random.SeedGenerator.next = print",
    },
    "string": {
        "getattr": "def f(v):\n    return getattr(v, '_layout', None)",
        "setattr": "def f(m, t):\n    object.__setattr__(m, '_loss_tracker', t)",
        "vars": "def f(v):\n    vars(v).pop('_value')",
    },
    "override": {
        "an override": "import keras\nclass A(keras.Model):\n    def _symbolic_build(self): ...",
        "an attribute of the class": "import keras\nclass A(keras.Layer):\n    _layers = ()",
        "an override in a mix-in": (
            "import keras\nclass M:\n    def _initialize(self, v): ...\n"
            "class A(M, keras.Variable): ..."
        ),
        "an override behind a value": (
            "import keras\nB = type(keras.optimizers.AdamW())\n"
            "class A(B):\n    def _clip_gradients(self, g): ..."
        ),
    },
}


@pytest.mark.parametrize(
    ("how", "text"),
    [pytest.param(how, text, id=what) for how, rows in SEEN.items() for what, text in rows.items()],
)
def test_each_kind_is_seen(how, text):
    found = list(Source({"some.py": text}).found("some.py"))
    assert [one.how for one in found] and {one.how for one in found} == {how}, found


NOT_MEANT = {
    "our own": "class A:\n    def __init__(self, o):\n        self._model = o._model",
    "our own in a callback": (
        "import keras\nclass A(keras.callbacks.Callback):\n    def f(self):\n        self._mine = 1"
    ),
    "a part of a text": "def f(name):\n    return f'{name}_loss'",
    "Python's": "class A:\n    def f(self):\n        return self.__class__.__name__",
    "a public import": "from torch.distributed.tensor import DTensor\nimport keras",
}


@pytest.mark.parametrize("what", NOT_MEANT)
def test_other_names_are_not(what):
    assert not list(Source({"some.py": NOT_MEANT[what]}).found("some.py"))

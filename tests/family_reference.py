"""What a row of `tests/family_table.py` is: a directory of another package, and what it gives."""

import functools
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

from arrays import read_npz, to_numpy
from kmodels.weights import read_safetensors

# A result beside its reference: name, what was found, what was expected, row of the tolerances.
Result = tuple[str, Any, np.ndarray, str]


def run(model: keras.Model, inputs: Any) -> Any:
    """What a model gives, as arrays; compiled on JAX, where that takes less than op after op."""
    if keras.backend.backend() == "jax":
        return model.predict(inputs, verbose=0)
    return keras.tree.map_structure(to_numpy, model(inputs))


@dataclass
class Reference:
    """A model of another package below the folder of references, with what it computes.

    Args:
        name: its folder below the references, which holds `model` and `expected.npz`.
        task: the class that reads it.
        checks: names of the checks of test_families.py that it passes beside "results".
        settings: arguments of `from_preset`.
        peer: the class that reads its export, of transformers, or "timm".
        adapter: folders of adapters of PEFT over it, beside each of which stands an .npz file.
        lora: arguments of `enable_lora` for the adapters that are trained here.
        left: beginnings of the names of tensors that are left aside.
        prefix: what is taken off the names of the other tensors.
        zeros: number of biases that the file leaves out, and that an export writes as zeros.
        head: name of the tensor of a head that is trained beside the adapters and goes with them.
    """

    name: str
    task: Any
    checks: frozenset[str]
    settings: dict[str, Any] = field(default_factory=dict)
    peer: str = "AutoModelForCausalLM"
    adapter: str = ""
    lora: dict[str, Any] = field(default_factory=lambda: {"targets": "all-linear"})
    left: tuple[str, ...] = ()
    prefix: str = ""
    zeros: int = 0
    head: str = ""
    root: Path = Path()

    @property
    def path(self) -> Path:
        """The directory or file that another package wrote."""
        folder = self.root / self.name
        return folder / "model" if (folder / "model").is_dir() else folder / "model.npz"

    @functools.cached_property
    def expected(self) -> dict[str, np.ndarray]:
        """What the other package computes with it."""
        return read_npz(self.root / self.name / "expected.npz")

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        return {name: self.ids(name) for name in ("token_ids", "padding_mask")}

    def ids(self, name: str) -> np.ndarray:
        """An array of whole numbers."""
        return self.expected[name].astype("int32")

    def read(self, **settings: Any) -> Any:
        """A new model of the directory."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*tensors of MAE's pretraining alone")
            warnings.filterwarnings("ignore", ".*the model takes only text and images")
            return self.task.from_preset(self.path, **{**self.settings, **settings})

    @functools.cached_property
    def model(self) -> Any:
        """The model of the directory, one in a process: whoever changes one reads a new one."""
        return self.read()

    def tensors(self, folder: Path) -> dict[str, Any]:
        """The tensors of a directory or file, by their names."""
        return read_safetensors(folder)

    def case_of_adapter(self, expected: dict[str, np.ndarray]) -> tuple[Any, ...]:
        """Inputs, and what comes last of the outputs without the adapter and with it."""
        return expected["inputs"].astype("int32"), expected["plain"], expected["logits"]

    def export(self, model: Any, folder: Path) -> None:
        """Writes a model as the other package has it."""
        (model.export_to_timm if self.peer == "timm" else model.export_to_transformers)(folder)

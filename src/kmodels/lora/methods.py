"""LoRA and quantized kernels as methods of every model."""

import logging
import zipfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, Self, cast

import h5py
import keras
import numpy as np

from kmodels.core import keras_internals
from kmodels.core.arguments import Checked
from kmodels.core.errors import InputError, check_names
from kmodels.core.files import hdf5_arrays
from kmodels.core.remote import local_copy, write_file
from kmodels.core.schema import Needed, read_json
from kmodels.distribution.rank_zero import write_on_rank_zero
from kmodels.layers import quantized
from kmodels.layers.adapter import ADAPTER, LoraSettings, matrices
from kmodels.layers.changes import (
    adaptable_layers,
    adapters,
    copies,
    describe_rows,
    put_adapters,
    quantized_layers,
    restore_rows,
    rows,
    trained_parts,
    trained_variables,
)
from kmodels.layers.copies import IDS, PREFIX, ROWS, shown
from kmodels.lora.adapter_files import load_adapter, save_adapter
from kmodels.lora.enable import enable, merge, unmerge
from kmodels.lora.modules import Ids, expert_layers, linear_layers, tables, trained_tables
from kmodels.weights import gather
from kmodels.weights.engine import warn_of_average

# keras-hub's names of layers of attention and MLP, and those of kmodels.
NAMES = {
    "query_dense": "query",
    "key_dense": "key",
    "value_dense": "value",
    "query_proj": "query",
    "key_proj": "key",
    "value_proj": "value",
    "attention_output": "output",
    "output_dense": "output",
    "out_proj": "output",
    "ffw_gating": "gate",
    "ffw_gating_2": "up",
    "ffw_linear": "down",
    "mlp_dense_1": "up",
    "mlp_dense_2": "down",
}
DEFAULT = ("query", "value")
ENDING = ".lora.h5"
# Of a .lora.h5: settings and matrices by path of the layer, or ids and rows by path of the table.
Saved = dict[str, tuple[Any, Any]]
SHOWN = 4
# Kernels that adapters on a quantized base are added to.
ONTO = ("dequantized", "original")
log = logging.getLogger("kmodels")


class Adapters(Checked):
    """Methods of a model for low-rank adaptation (LoRA) and quantization."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Returns a model whose `quantize` knows more modes than Keras, which wraps the method."""
        model = super().__new__(cls, *args, **kwargs)
        vars(model).pop("quantize", None)
        return model

    @property
    def trainable(self) -> bool:
        """Whether the model is trained, as in Keras; with adapters, True never unfreezes the base.

        True then changes nothing unless it was False before. A model around this one sets it too.
        `trainable` of a layer also unfreezes its base.
        """
        return super().trainable  # type: ignore[misc]

    @trainable.setter
    def trainable(self, value: bool) -> None:
        adapted, backbone = trained_variables(self), cast(Any, getattr(self, "backbone", self))
        if value and adapted and self.trainable:
            return
        keras.Model.trainable.__set__(self, value)
        if value and adapted:
            for variable in backbone.weights:
                variable.trainable = id(variable) in adapted
            for part in copies(self).values():  # of the head, too
                part.on()

    def enable_lora(
        self,
        rank: int,
        alpha: float | None = None,
        dropout: float = 0.0,
        targets: str | Sequence[str] = ("query", "value"),
        rslora: bool = False,
        dora: bool = False,
        target_layer_names: Sequence[str] | None = None,
        trainable_token_indices: Ids | None = None,
        modules_to_save: Sequence[str] | None = None,
        target_parameters: str | Sequence[str] = (),
    ) -> None:
        """Freezes the backbone and adds two trainable matrices to each target layer.

        Outputs are unchanged until the first step. A task's head stays trainable. Call it before
        `compile`.

        Args:
            rank: rank of the matrices, (in, rank) and (rank, out).
            alpha: scales the adapter by alpha / rank; None for a scale of 1.
            dropout: dropout rate of the adapter's input.
            targets: names ("query"), ends of paths ("mlp/up"), regular expressions for whole paths
                (r"block_[0-3]/.*"), or "all-linear". In a model whose output layer has a table of
                its own also "token_embedding" and "reverse_embeddings", the two tables, which
                "all-linear" leaves out.
            rslora: alpha / sqrt(rank) instead of alpha / rank.
            dora: DoRA: trains magnitude and direction of the weights separately.
            target_layer_names: keras-hub's argument in place of `targets`; accepts its names too,
                such as "query_dense" or "ffw_gating".
            trainable_token_indices: PEFT's argument: ids of tokens whose rows of the embedding
                table are trained as well, such as those that `resize_token_embeddings` added. If
                the output layer is the same table, as in Gemma, it uses the same rows.
            modules_to_save: PEFT's argument: modules of which all weights are trained, as copies
                of the originals: names or ends of paths ("token_embedding", "mlp/down"), or
                PEFT's names ("embed_tokens", "lm_head", "classifier").
            target_parameters: PEFT's argument: kernels of experts that get adapters, a pair of
                matrices for each expert: "experts/gate_up" and "experts/down", or PEFT's names.
                `targets` may then be empty.

        Raises:
            InputError: for values out of range, unknown targets or tokens, or a model with
                adapters.
        """
        if target_layer_names is not None:
            if isinstance(target_layer_names, str):
                raise InputError(
                    f"target_layer_names is {target_layer_names!r}; give a list of names"
                )
            targets = tuple(dict.fromkeys(NAMES.get(n, n) for n in target_layer_names))
        settings = LoraSettings(rank, alpha, dropout, targets, rslora, dora, target_parameters)
        backbone: Any = getattr(self, "backbone", self)
        enable(backbone, settings, trainable_token_indices, modules_to_save, task=self)

    def default_lora_layer_names(self) -> list[str]:
        """Returns the default targets of `enable_lora`; keras-hub's method."""
        return list(DEFAULT)

    def save_lora_weights(self, filepath: str | Path) -> None:
        """Writes the adapters to one file, by the path of their layer.

        `save_adapter` writes PEFT's format. Files of keras-hub number the layers and share a matrix
        among heads, which these adapters do not; `kmodels.interop.keras_hub.read_lora` reads them.

        Args:
            filepath: ends in .lora.h5, local or an address.

        Raises:
            InputError: without adapters, or for another ending.
        """
        gather.check_whole(self, "save_lora_weights")
        own = adapters(self)
        if not own:
            raise InputError(
                "there are no lora-enabled layers in this model; call enable_lora first"
            )
        if not str(filepath).endswith(ENDING):
            raise InputError(f"the filename must end in {ENDING}; it is {filepath}")
        if whole := [*(layer.path for layer in trained_tables(self)), *copies(self)]:
            raise InputError(
                f"{ENDING} files have no place for {whole[0]}, which is trained as a whole; use "
                "save_adapter or save_to_preset"
            )
        arrays = {x: [gather.values(v) for v in adapter.variables] for x, adapter in own.items()}
        trained = {x: (part.ids, gather.values(part.values)) for x, part in rows(self).items()}

        def write(part: Path) -> None:
            with h5py.File(part, "w") as file:
                for name, matrices_of in arrays.items():
                    group = file.create_group(f"adapters/{name}")
                    for key, value in _described(own[name].settings).items():
                        group.attrs[key] = value
                    for part_name, array in zip(ADAPTER, matrices_of, strict=False):
                        group[part_name] = array
                for name, (ids, array) in trained.items():
                    group = file.create_group(f"rows/{name}")
                    group[IDS], group[ROWS] = np.array(ids, "int32"), array

        write_file(filepath, write)

    def load_lora_weights(self, filepath: str | Path) -> None:
        """Loads adapters from a file of `save_lora_weights`; enables them if the model has none.

        Raises:
            InputError: lists all mismatches; the model is then unchanged.
        """
        gather.check_whole(self, "load_lora_weights")
        saved, saved_rows = _read(local_copy(filepath))
        layers, own = adaptable_layers(self), adapters(self)
        ends = tuple(sorted({name.rpartition("/")[2] for name in saved}))
        settings = {
            name: LoraSettings(**_plain(described), targets=ends)
            for name, (described, _) in saved.items()
        }
        problems = [f"{name} is not a linear layer here" for name in saved if name not in layers]
        if own:
            problems += [f"{name} has an adapter only here" for name in own if name not in saved]
            problems += [f"{name} has an adapter only there" for name in saved if name not in own]
        for name, wanted in settings.items():
            if name in own and (rank := own[name].settings.rank) != wanted.rank:
                problems.append(
                    f"{name} has rank {rank} here and {wanted.rank} there, and the ranks must match"
                )
            elif name in own and _described(own[name].settings) != _described(wanted):
                problems.append(f"{name} was enabled there with {_described(wanted)}")
            elif name in layers:
                shapes = [shape for shape, _ in matrices(layers[name], wanted.rank).values()]
                shapes += [(layers[name].units,)] if wanted.dora else []
                if [array.shape for array in saved[name][1]] != shapes:
                    problems.append(f"{name} has other sizes there")
        problems += _other_rows(self, saved_rows, bool(own))
        if problems:
            raise InputError(f"{filepath} does not fit the model: {'; '.join(problems[:4])}")
        if not own:
            put_adapters(self, {name: (layers[name], settings[name]) for name in saved})
            restore_rows(self, {name: ids for name, (ids, _) in saved_rows.items()})
        for name, trained in rows(self).items():
            trained.values.assign(saved_rows[name][1])
        for name, (_, arrays) in saved.items():
            for variable, array in zip(layers[name].adapter.variables, arrays, strict=True):
                variable.assign(array)

    def quantize(
        self,
        mode: str | None = None,
        config: Any = None,
        block: int | None = None,
        double: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Quantizes the kernels of the backbone's linear layers to 8 or 4 bits (QLoRA's base).

        Adapters and head stay floats. After `merge_lora` it rounds the merged kernels, which
        `unmerge_lora` then cannot take apart.

        Args:
            mode: "int8", one scale per output; or, with one scale per output and block of inputs,
                "int4", or "nf4" and "fp4" with the codes and scales of bitsandbytes.
            config: Keras' argument: an `Int8QuantizationConfig` or `Int4QuantizationConfig`. As
                activations stay floats, of their settings only `block_size` may differ from its
                default.
            block: inputs that share a scale; None for 128 with "int4", 64 with "nf4" and "fp4".
            double: whether "nf4" and "fp4" store scales in 8 bits as well; None for True.
            **kwargs: Keras' other arguments: `filters`, a regular expression for names of layers,
                several of them or a function of a layer, and `type_check`.

        Raises:
            InputError: for other modes, configs or blocks, filters that no layer passes, or a model
                that is quantized or sharded over processes; the model is then unchanged.
        """
        check_names("quantize", kwargs, ("filters", "type_check"))
        settings = quantized.Quantization.of_keras(mode, config, block, double)
        gather.check_whole(self, "quantize")
        quantized.quantize(getattr(self, "backbone", self), settings, kwargs.get("filters"))
        for part in trained_parts(self, merged=True):
            setattr(part.layer, part.merged_as, None)

    def load_weights(
        self, filepath: str | Path, skip_mismatch: bool = False, **kwargs: Any
    ) -> None:
        """Keras' `load_weights`, also for addresses; all arrays are compared before any is loaded.

        If only the file has adapters, they are added to the kernels, as Keras' own layers do. If
        only the model has adapters, they are reset.

        Raises:
            InputError: lists all mismatches in one line; the model is then unchanged.
        """
        filepath = local_copy(filepath)
        if not skip_mismatch and kwargs.get("objects_to_skip") is None:
            _check_weights(self, filepath)
        super().load_weights(filepath, skip_mismatch=skip_mismatch, **kwargs)  # type: ignore[misc]

    def dequantize(self) -> None:
        """Replaces quantized kernels by the floats that they stand for: same outputs, more memory.

        Raises:
            InputError: for a model that is not quantized, or sharded over processes.
        """
        gather.check_whole(self, "dequantize")
        if not quantized_layers(self):
            raise InputError("dequantize found no quantized kernels; call quantize first")
        quantized.to_floats(self)

    def merge_lora(self, onto: str | None = None, base: str | Path | None = None) -> None:
        """Adds the adapters to their kernels and removes them: same outputs, fewer variables.

        The kernels without adapters stay in host memory for `unmerge_lora`. The model stays as
        frozen as it is, also in a `.keras` file; from a directory of `save_to_preset` it comes back
        as a new model with all of its weights trainable.

        Args:
            onto: for a quantized model: "dequantized" adds the adapters to the floats that the
                numbers stand for, which changes no output; "original" adds them to the kernels
                before they were quantized, and a warning says by how much these differ.
            base: with "original": the model before it was quantized, a path that `from_preset`
                reads.

        Raises:
            InputError: for a model without adapters, or sharded over processes; for a quantized one
                without `onto`, for another one with it, and for a base of another architecture.
        """
        gather.check_whole(self, "merge_lora")
        if (onto == "original") != (base is not None) or onto not in (None, *ONTO):
            raise InputError(
                f"merge_lora got onto={onto!r} and base={base!r}; give onto='dequantized', or "
                "onto='original' with base, the model before it was quantized"
            )
        if onto is not None:
            layers = quantized_layers(self)
            if not layers or not adapters(self):
                lacks = "adapters" if layers else "quantized kernels, which onto is about"
                raise InputError(f"merge_lora found no {lacks}; call merge_lora() or dequantize()")
            kernels = None if base is None else self._kernels_of(base, layers)
            quantized.to_floats(self, kernels)
        merge(self)

    def _kernels_of(self, base: str | Path, layers: Collection[str]) -> dict[str, Any]:
        """Returns the kernels of another model by path, and warns of how far they are."""
        own: Any = getattr(self, "backbone", self)
        other = type(own).from_preset(base, dtype=own.dtype_policy, quantized=False)
        theirs, ours = ({**linear_layers(x), **expert_layers(x)} for x in (other, own))
        kernels = {path: theirs[path].kernel for path in layers if path in theirs}
        sizes = {path: (each.groups, each.input_dim, each.units) for path, each in ours.items()}
        fits = {path: (None, *x.shape)[-3:] == sizes[path] for path, x in kernels.items()}
        if wrong := sorted(path for path in layers if not fits.get(path)):
            raise InputError(f"{base} has no kernel for {wrong[0]} of this model; give its base")
        difference = largest = 0.0
        for path, kernel in kernels.items():
            kernels[path] = wide = keras.ops.convert_to_numpy(keras.ops.cast(kernel, "float32"))
            numbers: Any = ours[path].quantized
            packed = keras.ops.convert_to_numpy(numbers.wide())
            difference = max(difference, float(np.abs(wide - packed).max()))
            largest = max(largest, float(np.abs(wide).max()))
        log.warning(
            "merge_lora: the kernels of %s differ by up to %.2g (of %.2g) from the quantized ones, "
            "which the adapters were trained on",
            *(base, difference, largest),
        )
        return kernels

    def unmerge_lora(self) -> None:
        """Undoes `merge_lora`; the kernels are restored bit for bit.

        Raises:
            InputError: for a model without merged adapters.
        """
        gather.check_whole(self, "unmerge_lora")
        unmerge(self)

    def save_adapter(
        self, directory: str | Path, save_embedding_layers: bool | str = "auto"
    ) -> Path:
        """Writes the adapters, and a trained head, to a directory in PEFT's format, atomically.

        It includes trained rows of the embedding table, or all of it if it is trained.

        Args:
            directory: to make or replace, local or an address such as "gs://bucket/adapter".
            save_embedding_layers: PEFT's argument: whether a frozen embedding table is written as
                well; "auto" for one that `resize_token_embeddings` changed.

        Raises:
            InputError: for a model without adapters.
        """
        warn_of_average(self)
        return save_adapter(self, directory, write_on_rank_zero, save_embedding_layers)

    def load_adapter(self, directory: str | Path) -> None:
        """Loads adapters written by `save_adapter` or PEFT; they replace those of the model.

        Rank, alpha, targets and trained tokens come from the file. For a file with a larger
        embedding table, call `resize_token_embeddings` first.

        Raises:
            InputError: lists all mismatches; the model is then unchanged.
        """
        load_adapter(self, directory)


def _check_weights(model: keras.Model, path: Path) -> None:
    """Compares names, kernels, adapters and shapes of a model with those in a file of Keras.

    Keras would stop halfway with a message of many lines, and would ignore arrays that the model
    lacks. Missing files and those of another kind are left to Keras.

    Raises:
        InputError: names the mismatches, in one line.
    """
    with ExitStack() as opened:
        if not (files := _weight_files(path, opened)):
            return
        found = _by_group(files)
        saved = keras_internals.saved_arrays(model)
        groups = {id(variable): name.rpartition("/")[0] for name, variable in saved.items()}
        layers: list[Any] = [*linear_layers(model).values(), *expert_layers(model).values()]
        checks = [(x, next(iter(x.base_variables().values()))) for x in layers]
        checks += [(x, x.embeddings) for x in tables(model).values()]
        problems, checked = [], set()
        # Keras warns of another optimizer, and leaves it as it is.
        here, there = (sum(map(_of_optimizer, names)) for names in (saved, _names(found)))
        compared = [name for name in saved if here == there or not _of_optimizer(name)]
        for layer, variable in checks:
            checked.add(group := groups[id(variable)])
            if problem := layer.misfit(found.get(group, {})):
                problems.append(f"{layer.path}: {problem}")
        for name in compared:
            group, _, own = name.rpartition("/")
            if group in checked or own.startswith(PREFIX):
                continue
            shape = tuple(getattr(variable := saved[name], "shape", ()))
            stored = found.get(group, {}).get(own)
            if stored is None or tuple(stored.shape) != shape:
                there = "missing" if stored is None else tuple(stored.shape)
                problems.append(
                    f"{getattr(variable, 'path', name)} is {shape}, in the file {there}"
                )
        surplus = [
            name
            for name in _names(found)
            if name not in saved
            and not _of_optimizer(name)
            and name.rpartition("/")[0] not in checked
            and not name.rpartition("/")[2].startswith(PREFIX)
        ]
        problems += [f"the file also holds {name}" for name in surplus]
    if problems:
        more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise InputError(
            f"{path} does not fit the model: {'; '.join(problems[:SHOWN])}{more}; make the model "
            "as it was when it was saved, use save and keras.saving.load_model, or give "
            "skip_mismatch=True"
        )


def _weight_files(path: Path, opened: ExitStack) -> list[Any]:
    """Opens the HDF5 files of weights that Keras wrote; [] if there are none, or a damaged one."""
    sources: list[Any] = []
    if path.name.endswith(".weights.h5") and path.is_file():
        sources = [path]
    elif path.suffix == ".keras" and zipfile.is_zipfile(path):
        archive = opened.enter_context(zipfile.ZipFile(path))
        names = [name for name in archive.namelist() if name.endswith(".weights.h5")]
        sources = [opened.enter_context(archive.open(name)) for name in names]
    elif path.name.endswith(".weights.json") and path.is_file():
        listed = read_json(path, {"weight_map": Needed({"*": (str, [str])})})["weight_map"].values()
        names = sorted(
            {Path(one).name for one in chain(*([x] if isinstance(x, str) else x for x in listed))}
        )
        sources = [path.with_name(name) for name in names]
    try:
        return [opened.enter_context(h5py.File(source, "r")) for source in sources]
    except OSError:  # Keras says which
        return []


def _by_group(files: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Returns the arrays of files by name in each group."""
    groups: dict[str, dict[str, Any]] = {}

    def note(name: str, entry: "h5py.Dataset | h5py.Group") -> None:
        if isinstance(entry, h5py.Dataset):
            group, _, own = name.rpartition("/")
            groups.setdefault(group, {})[own] = entry

    for file in files:
        file.visititems(note)
    return groups


def _names(groups: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [f"{group}/{name}" for group, arrays in groups.items() for name in arrays]


def _of_optimizer(name: str) -> bool:
    return name.startswith("optimizer/")


# === Adapters in .lora.h5 files ===


def _described(settings: LoraSettings) -> dict[str, Any]:
    plain = {name: getattr(settings, name) for name in ("rank", "dropout", "rslora", "dora")}
    return {**plain, "alpha": settings.given_alpha}


def _other_rows(model: keras.Model, saved: Saved, enabled: bool) -> list[str]:
    """Returns the problems of the rows of a file, by path of their table, with a model."""
    here, there = describe_rows(model), {name: list(ids) for name, (ids, _) in saved.items()}
    if enabled and here != there:
        sides = (shown(chain(*described.values())) or "none" for described in (here, there))
        return ["rows {} are trained here and {} there".format(*sides)]
    sizes = {name: (x.input_dim, x.output_dim) for name, x in tables(model).items()}
    return [
        f"{name} has other sizes there, or is no embedding table here"
        for name, (ids, array) in saved.items()
        if name not in sizes
        or max(ids) >= sizes[name][0]
        or array.shape != (len(ids), sizes[name][1])
    ]


def _plain(described: dict[str, Any]) -> dict[str, Any]:
    return {key: getattr(value, "item", lambda v=value: v)() for key, value in described.items()}


def _read(path: Path) -> tuple[Saved, Saved]:
    saved: Saved = {}
    saved_rows: Saved = {}
    if not path.is_file() or not h5py.is_hdf5(path):
        raise InputError(f"{path} is not a file of save_lora_weights")
    with h5py.File(path) as file:
        if "lora" in file:
            raise InputError(
                f"{path} is a file of keras-hub, which numbers layers; read it with "
                "kmodels.interop.keras_hub.read_lora(model, file)"
            )
        if "adapters" not in file:
            raise InputError(f"{path} is not a file of save_lora_weights")
        groups: dict[str, dict[str, np.ndarray]] = {}
        for name, array in hdf5_arrays(file, path):
            group, _, own = name.rpartition("/")
            groups.setdefault(group, {})[own] = np.asarray(array)
        for group, arrays in sorted(groups.items()):
            kind, _, name = group.partition("/")
            if kind == "adapters" and ADAPTER[0] in arrays:
                matrices_of = [arrays[part] for part in ADAPTER if part in arrays]
                saved[name] = dict(file[group].attrs), matrices_of
            elif kind == "rows" and {IDS, ROWS} <= arrays.keys():
                saved_rows[name] = arrays[IDS].tolist(), arrays[ROWS]
    return saved, saved_rows

"""LoRA and quantized kernels as methods of every model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import keras

from kmodels import lora
from kmodels.core import keras_internals
from kmodels.core.errors import InputError, check_names
from kmodels.core.remote import local_copy
from kmodels.distribution.rank_zero import write_on_rank_zero
from kmodels.layers import kernels, quantized, rows
from kmodels.lora import keras_hub_names
from kmodels.lora.modules import tables
from kmodels.lora.targets import expert_layers, linear_layers
from kmodels.weights import gather

SHOWN = 4


class Adapters:
    """Methods of a model for low-rank adaptation (LoRA) and quantization."""

    def enable_lora(
        self,
        rank: int,
        alpha: float | None = None,
        dropout: float = 0.0,
        targets: str | Sequence[str] = ("query", "value"),
        rslora: bool = False,
        dora: bool = False,
        target_layer_names: Sequence[str] | None = None,
        trainable_token_indices: lora.Ids | None = None,
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
                PEFT's names ("embed_tokens", "lm_head", "input_layernorm").
            target_parameters: PEFT's argument: kernels of experts that get adapters, a pair of
                matrices for each expert: "experts/gate_up" and "experts/down", or PEFT's names.
                `targets` may then be empty.

        Raises:
            InputError: for values out of range, unknown targets or tokens, or a model with
                adapters.
        """
        backbone = getattr(self, "backbone", self)
        if target_layer_names is not None:
            targets = keras_hub_names.targets(target_layer_names)
        settings = lora.LoraSettings(rank, alpha, dropout, targets, rslora, dora, target_parameters)
        lora.enable(backbone, settings, trainable_token_indices, modules_to_save)

    def default_lora_layer_names(self) -> list[str]:
        """Returns the default targets of `enable_lora`; keras-hub's method."""
        return list(keras_hub_names.DEFAULT)

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
        keras_hub_names.save(self, filepath)

    def load_lora_weights(self, filepath: str | Path) -> None:
        """Loads adapters from a file of `save_lora_weights`; enables them if the model has none.

        Raises:
            InputError: lists all mismatches; the model is then unchanged.
        """
        gather.check_whole(self, "load_lora_weights")
        keras_hub_names.load(self, filepath)

    def quantize(self, mode: str | None = None, config: Any = None, **kwargs: Any) -> None:
        """Quantizes the kernels of the backbone's linear layers to 8 or 4 bits (QLoRA's base).

        Call it before `enable_lora`; adapters and head are not quantized.

        Args:
            mode: "int8", one scale per output, or "int4", one per output and up to 128 inputs.
            config: Keras' argument; only the default of the mode is supported.
            **kwargs: Keras' other arguments: `filters`, which must be None, and `type_check`.

        Raises:
            InputError: for a config or filters, other modes, or a model that is quantized, has
                adapters, or is sharded over processes.
        """
        check_names("quantize", kwargs, ("filters", "type_check"))
        # Keras passes the default config of the mode if the user passes none.
        own = config is not None and config.get_config() != type(config)().get_config()
        for name, is_set in (("config", own), ("filters", kwargs.get("filters") is not None)):
            if is_set:
                raise InputError(
                    f"quantize does not support {name}: all linear layers of the backbone are "
                    f'quantized by the mode alone; leave {name} out and give "int8" or "int4"'
                )
        backbone = getattr(self, "backbone", self)
        gather.check_whole(self, "quantize")
        quantized.quantize(backbone, mode)

    def load_weights(
        self, filepath: str | Path, skip_mismatch: bool = False, **kwargs: Any
    ) -> None:
        """Keras' `load_weights`, also for addresses; all shapes are compared before anything loads.

        If only the file has adapters, they are added to the kernels, as Keras' own layers do. If
        only the model has adapters, they are reset.

        Raises:
            InputError: lists all mismatches in one line; the model is then unchanged.
        """
        filepath = local_copy(filepath)
        if not skip_mismatch:
            _check_weights(self, filepath)
        super().load_weights(filepath, skip_mismatch=skip_mismatch, **kwargs)  # type: ignore[misc]

    def merge_lora(self) -> None:
        """Adds the adapters to their kernels and removes them: same outputs, fewer variables.

        The original kernels stay in host memory for `unmerge_lora`.

        Raises:
            InputError: for a model without adapters, quantized, or sharded over processes.
        """
        gather.check_whole(self, "merge_lora")
        lora.merge(self)

    def unmerge_lora(self) -> None:
        """Undoes `merge_lora`; the kernels are restored bit for bit.

        Raises:
            InputError: for a model without merged adapters.
        """
        gather.check_whole(self, "unmerge_lora")
        lora.unmerge(self)

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
        return lora.save_adapter(self, directory, write_on_rank_zero, save_embedding_layers)

    def load_adapter(self, directory: str | Path) -> None:
        """Loads adapters written by `save_adapter` or PEFT; they replace those of the model.

        Rank, alpha, targets and trained tokens come from the file. For a file with a larger
        embedding table, call `resize_token_embeddings` first.

        Raises:
            InputError: lists all mismatches; the model is then unchanged.
        """
        lora.load_adapter(self, directory)


def _check_weights(model: keras.Model, path: str | Path) -> None:
    """Compares kernels, adapters and shapes of a model with those in a .weights.h5.

    Keras would stop halfway, with a message of many lines.

    Args:
        model: a built model.
        path: path of the file; missing files and those of another kind are left to Keras.

    Raises:
        InputError: names the mismatches, in one line.
    """
    if not str(path).endswith(".h5") or not Path(path).is_file() or not h5py.is_hdf5(path):
        return
    saved = keras_internals.saved_arrays(model)
    groups = {id(variable): name.rpartition("/")[0] for name, variable in saved.items()}
    layers: list[Any] = [*linear_layers(model).values(), *expert_layers(model).values()]
    checks = [(x, next(iter(kernels.base(x).values())), kernels.misfit) for x in layers]
    checks += [(x, x.embeddings, rows.misfit) for x in tables(model).values()]
    problems, seen = [], set()
    with h5py.File(path) as file:
        for layer, variable, misfit in checks:
            group = groups[id(variable)]
            seen.add(group)
            if group in file and (problem := misfit(layer, file[group])):
                problems.append(f"{layer.path}: {problem}")
        for name, variable in saved.items():
            if name in file and name.rpartition("/")[0] not in seen:
                here, there = tuple(getattr(variable, "shape", ())), tuple(file[name].shape)
                if here != there:
                    problems.append(f"{variable.path} is {here}, in the file {there}")
    if problems:
        more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise InputError(
            f"{path} does not fit the model: {'; '.join(problems[:SHOWN])}{more}; make the model "
            "as it was when it was saved, or use save and keras.saving.load_model"
        )

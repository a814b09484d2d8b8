"""LoRA and quantized kernels as methods of every model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kmodels import lora
from kmodels.core.errors import InputError, check_names
from kmodels.core.remote import local_copy
from kmodels.distribution.rank_zero import write_on_rank_zero
from kmodels.layers import quantized
from kmodels.lora import hub_names, stored
from kmodels.weights import gather


class Adapters:
    """Training a few small matrices beside a frozen model (LoRA), and quantizing that model."""

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
        """Freezes the backbone and puts two trainable matrices beside each chosen linear layer.

        The model gives what it gave until the first step. A task's head stays trainable. Call it
        before `compile`.

        Args:
            rank: rank of the matrices, (in, rank) and (rank, out).
            alpha: the adapter counts alpha / rank times; None for `rank`, that is once.
            dropout: rate in front of the adapter, in training.
            targets: names ("query"), ends of paths ("mlp/up"), regular expressions for whole paths
                (r"block_[0-3]/.*"), or "all-linear". In a model whose output layer has a table of
                its own also "token_embedding" and "reverse_embeddings", the two tables, which
                "all-linear" leaves out.
            rslora: alpha / sqrt(rank) instead of alpha / rank.
            dora: learns the length of each output's weights too.
            target_layer_names: keras-hub's argument in place of `targets`; its names are understood
                too, such as "query_dense" or "ffw_gating".
            trainable_token_indices: PEFT's: ids of tokens whose rows of the embedding table are
                trained as well, such as those that `resize_token_embeddings` added. The output
                layer of a Gemma is the same table, and takes the same rows.
            modules_to_save: PEFT's: modules of which all weights are trained, as copies beside the
                originals: names or ends of paths ("token_embedding", "mlp/down"), or PEFT's names
                ("embed_tokens", "lm_head", "input_layernorm").
            target_parameters: PEFT's: kernels of experts that have adapters too, a pair of matrices
                for each expert: "experts/gate_up" and "experts/down", or PEFT's names. `targets`
                may be empty then.

        Raises:
            InputError: for values out of range, unknown targets or tokens, or a model with
                adapters.
        """
        backbone = getattr(self, "backbone", self)
        if target_layer_names is not None:
            targets = hub_names.targets(target_layer_names)
        settings = lora.LoraSettings(rank, alpha, dropout, targets, rslora, dora, target_parameters)
        lora.enable(backbone, settings, trainable_token_indices, modules_to_save)

    def default_lora_layer_names(self) -> list[str]:
        """Returns the names that `enable_lora` adapts by default, as keras-hub's method does."""
        return list(hub_names.DEFAULT)

    def save_lora_weights(self, filepath: str | Path) -> None:
        """Writes the adapters to one file, by the path of their layer.

        `save_adapter` writes them for PEFT. keras-hub's own files number the layers and share a
        matrix among heads, which adapters made here need not; `read_lora` of
        `kmodels.interop.keras_hub` reads them.

        Args:
            filepath: ends in .lora.h5, local or an address.

        Raises:
            InputError: without adapters, or for another ending.
        """
        gather.check_whole(self, "save_lora_weights")
        hub_names.save(self, filepath)

    def load_lora_weights(self, filepath: str | Path) -> None:
        """Fills the adapters from a file of `save_lora_weights`; enables them where none are.

        Raises:
            InputError: lists what does not fit; the model is unchanged then.
        """
        gather.check_whole(self, "load_lora_weights")
        hub_names.load(self, filepath)

    def quantize(self, mode: str | None = None, config: Any = None, **kwargs: Any) -> None:
        """Keeps the kernels of the backbone's linear layers in 8 or 4 bits (QLoRA's base).

        Call it before `enable_lora`: adapters and head stay as they are.

        Args:
            mode: "int8", one scale per output, or "int4", one per output and up to 128 inputs.
            config: Keras' argument; the mode's default, as there is nothing to set.
            **kwargs: Keras' other arguments: `filters`, which is None, and `type_check`.

        Raises:
            InputError: for a config or filters, other modes, a quantized model, one with adapters,
                or one in parts.
        """
        check_names("quantize", kwargs, ("filters", "type_check"))
        # Keras gives the default config of the mode where the user gives none.
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
        """Keras' `load_weights`, of an address too; first all kernels and adapters are compared.

        Adapters in the file of a model without them are added to its kernels, as Keras' own layers
        do; a file without adapters turns those of the model off.

        Raises:
            InputError: lists all that does not fit in one line; the model is unchanged then.
        """
        filepath = local_copy(filepath)
        if not skip_mismatch:
            stored.check(self, filepath)
        super().load_weights(filepath, skip_mismatch=skip_mismatch, **kwargs)  # type: ignore[misc]

    def merge_lora(self) -> None:
        """Adds the adapters to their kernels: same results, and the variables of the model without.

        The kernels as they were stay on the host for `unmerge_lora`.

        Raises:
            InputError: without adapters, on a quantized base, or for a model in parts.
        """
        gather.check_whole(self, "merge_lora")
        lora.merge(self)

    def unmerge_lora(self) -> None:
        """Undoes `merge_lora`: the kernels are what they were, bit for bit.

        Raises:
            InputError: where nothing was merged.
        """
        gather.check_whole(self, "unmerge_lora")
        lora.unmerge(self)

    def save_adapter(
        self, directory: str | Path, save_embedding_layers: bool | str = "auto"
    ) -> Path:
        """Writes the adapters, and a trained head, to a directory in PEFT's format, atomically.

        Trained rows of the embedding table, or all of it where it is trained, are in it too.

        Args:
            directory: to make or replace, local or an address such as "gs://bucket/adapter".
            save_embedding_layers: PEFT's: whether a frozen embedding table is written as well;
                "auto" where `resize_token_embeddings` made it another one than the base has.

        Raises:
            InputError: without adapters.
        """
        return lora.save_adapter(self, directory, write_on_rank_zero, save_embedding_layers)

    def load_adapter(self, directory: str | Path) -> None:
        """Puts adapters written by `save_adapter` or PEFT into the model.

        Rank, alpha, targets and trained tokens come from the file; adapters that the model has give
        way. A file with a larger embedding table wants `resize_token_embeddings` first.

        Raises:
            InputError: lists all that does not fit; the model is unchanged then.
        """
        lora.load_adapter(self, directory)

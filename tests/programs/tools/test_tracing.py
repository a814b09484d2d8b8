"""Models as other programs trace and keep them: read back, they give what they gave."""

import io

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels import models
from kmodels.core.errors import InputError
from tolerances import tolerance

BACKEND = keras.backend.backend()
RNG = np.random.default_rng(0)
pytestmark = pytest.mark.each_backend


def vit():
    model = models.ViTImageClassifier.from_preset("vit_debug", num_classes=3)
    return model, RNG.random((2, 16, 16, 3)).astype("float32")


def gemma(dtype="mixed_bfloat16"):
    """Of Gemma the grouped heads, a row that is padded on the left, and the other policy."""
    ids = RNG.integers(1, 50, (2, 6)).astype("int32")
    mask = np.ones((2, 6), "int32")
    mask[1, :2] = 0
    model = models.GemmaBackbone.from_preset("gemma_debug", dtype=dtype)
    return model, {"token_ids": ids, "padding_mask": mask}


def gemma_in_float32():
    """For ONNX, which Keras writes of float32 alone."""
    return gemma("float32")


def near(found, expected) -> None:
    found, expected = (to_numpy(keras.ops.stop_gradient(x)) for x in (found, expected))
    assert np.abs(expected).max() > 0.01
    assert found.dtype == expected.dtype
    limit = tolerance("logits_across")
    if found.dtype != "float32":
        limit = tolerance("logits", "bfloat16") * np.abs(expected.astype("float32")).max()
    assert np.abs(found.astype("float32") - expected.astype("float32")).max() < limit


def test_what_keras_cannot_export_is_told_in_a_line(tmp_path) -> None:
    form, reason = {
        "jax": ("litert", "litert` writes it from tensorflow"),
        "torch": ("litert", "litert` writes it from tensorflow"),
        "tensorflow": ("torch", "torch-export` writes it from torch"),
    }[BACKEND]
    model = vit()[0]
    with pytest.raises(InputError, match=f"not export {form} from {BACKEND} .*{reason}$"):
        model.export(tmp_path / "model", format=form, verbose=False)
    with pytest.raises(InputError, match=r"not export any .*; give one of tf_saved_model,onnx"):
        model.backbone.export(tmp_path / "model", format="any", verbose=False)


@pytest.mark.across("jax")
@pytest.mark.needs("tensorflow")
@pytest.mark.filterwarnings("default")  # of TensorFlow
def test_tensorflow_runs_a_saved_model_of_keras_export(tmp_path) -> None:
    import tensorflow as tf

    model, images = vit()
    model.export(tmp_path / "model", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "model")
    near(keras.ops.convert_to_tensor(loaded.serve(images).numpy()), model(images))


if BACKEND == "torch":
    import torch

    def tensors(inputs):
        return keras.tree.map_structure(torch.from_numpy, inputs)

    @pytest.mark.each_time("export-vit", "jit.trace-vit")
    @pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit")
    @pytest.mark.parametrize("make", [vit, gemma])
    @pytest.mark.parametrize("by", ["jit.trace", "export"])
    def test_torch_traces(make, by) -> None:
        model, inputs = make()
        held, given = io.BytesIO(), tensors(inputs)
        if by == "export":
            torch.export.save(torch.export.export(model, (given,)), held)
        else:
            torch.jit.save(torch.jit.trace(model, (given,), strict=False), held)
        held.seek(0)
        again = torch.export.load(held).module() if by == "export" else torch.jit.load(held)
        near(again(given), model(inputs))

    def test_model_export(tmp_path) -> None:
        """Keras traces a single image, and the program takes no more."""
        model, images = vit()
        model.export(tmp_path / "model.pt2", format="torch", verbose=False)
        program = torch.export.load(tmp_path / "model.pt2").module()
        near(program(torch.from_numpy(images[:1])), model(images[:1]))

    @pytest.mark.needs("onnxruntime")
    @pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
    @pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
    def test_onnx_of_a_causal_lm(tmp_path) -> None:
        """Keras traces one token, and the file takes longer rows and their masks."""
        import onnxruntime

        backbone, inputs = gemma_in_float32()
        model = models.GemmaCausalLM(backbone)
        expected = model(inputs)
        model.export(tmp_path / "model.onnx", format="onnx", verbose=False)
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
        near(keras.ops.convert_to_tensor(session.run(None, inputs)[0]), expected)

    def test_torch_func() -> None:
        """Its transforms cannot look into an autograd.Function; ops take their generic path."""
        model, images = vit()
        images = torch.from_numpy(images)
        found = torch.func.grad(lambda x: model(x).square().sum())(images)
        images.requires_grad_()
        (expected,) = torch.autograd.grad(model(images).square().sum(), images)
        assert (found - expected).abs().max() < tolerance("logits_across")


if BACKEND == "jax":
    import jax
    from jax import export

    @pytest.mark.parametrize("free", ["b, 6", "2, t", "b, t"])
    def test_jax_export_of_free_lengths(free) -> None:
        model, inputs = gemma()
        shape = export.symbolic_shape(free)
        spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(shape, x.dtype), inputs)
        near(export.export(jax.jit(lambda x: model(x)))(spec).call(inputs), model(inputs))


if BACKEND == "tensorflow":
    import tensorflow as tf

    @pytest.mark.each_time("vit")
    @pytest.mark.parametrize("make", [vit, gemma])
    def test_model_export(make, tmp_path) -> None:
        model, inputs = make()
        model.export(tmp_path / "model", format="tf_saved_model", verbose=False)
        again = tf.saved_model.load(tmp_path / "model")
        near(again.serve(keras.tree.map_structure(tf.constant, inputs)), model(inputs))

    @pytest.mark.each_time("vit")
    @pytest.mark.across("tensorflow")
    @pytest.mark.needs("onnxruntime")
    @pytest.mark.filterwarnings("ignore:In the future .np:FutureWarning")  # of tf2onnx
    @pytest.mark.parametrize("make", [vit, gemma_in_float32])
    def test_onnx(make, tmp_path) -> None:
        import onnxruntime

        model, inputs = make()
        expected = model(inputs)  # Keras exports no model to ONNX that was never called
        model.export(tmp_path / "model.onnx", format="onnx", verbose=False)
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
        given = inputs if isinstance(inputs, dict) else {session.get_inputs()[0].name: inputs}
        near(session.run(None, given)[0], expected)

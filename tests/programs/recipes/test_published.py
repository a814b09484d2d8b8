"""Published settings: the first losses and all tables beside the original code's, on a tiny ViT.

`ORIGINAL` has one row per setting, written from the source that its file names: the optimizer and
the schedule are those of timm or torch where the original uses them, and its formulas elsewhere.
"""

import functools
import math
import re
import string
from importlib import import_module

import keras
import numpy as np
import pytest
import yaml
from PIL import Image

from arrays import to_numpy
from kmodels.core.errors import InputError
from kmodels.data import made_scenes
from kmodels.models import (
    ImageTextPreprocessor,
    ImageTextSimilarity,
    ViTBackbone,
    ViTImageClassifier,
)
from kmodels.runs.settings import shipped
from kmodels.text.training import train_tokenizer
from recipe_modules import load, result
from tolerances import tolerance

STEPS, EPOCHS, BATCH = 20, 10, 8  # 2 steps per epoch
TINY = {
    **{"image_shape": (16, 16, 3), "patch_size": 8, "num_layers": 3},
    **{"num_heads": 2, "hidden_dim": 16, "mlp_dim": 32},
}


def timm_name(path):
    """The name of a variable in timm's ViT; query, key and value are one tensor there."""
    for ours, theirs in (
        (r"^patch_embedding", "patch_embed.proj"), (r"^tokens/class_token", "cls_token"),
        (r"^tokens/position_embedding", "pos_embed"), (r"^block_(\d+)", r"blocks.\1"),
        (r"pooled_norm", "fc_norm"), (r"final_norm", "norm"), (r"^logits", "head"),
        (r"attention/(query|key|value)", "attn.qkv"), (r"/", "."),
    ):  # fmt: skip
        path = re.sub(ours, theirs, path)
    return path


def forward(w, images, heads=2, patch=8, blocks=False):
    """A ViT in torch, by the paths of kmodels; its logits, or the tokens after each block."""
    torch = import_module("torch")
    f = torch.nn.functional

    def dense(x, name):
        return x @ w[f"{name}/kernel"] + w[f"{name}/bias"]

    def norm(x, name):
        return f.layer_norm(x, x.shape[-1:], w[f"{name}/scale"], w[f"{name}/bias"], 1e-6)

    n, side = len(images), images.shape[1] // patch
    x = images.reshape(n, side, patch, side, patch, 3).transpose(2, 3)
    x = dense(x.reshape(n, side * side, -1), "patch_embedding")
    position, token = w["tokens/position_embedding"], w.get("tokens/class_token")
    if token is not None:
        if position.shape[1] > x.shape[1]:
            x = torch.cat([token.expand(n, -1, -1), x], 1) + position
            if "tokens/register_tokens" in w:
                registers = w["tokens/register_tokens"].expand(n, -1, -1)
                x = torch.cat([x[:, :1], registers, x[:, 1:]], 1)
        else:
            x = torch.cat([token.expand(n, -1, -1), x + position], 1)
    else:
        x = x + position
    outputs = []
    for i in range(TINY["num_layers"]):
        y = norm(x, b := f"block_{i}/attention_norm")
        b = b.removesuffix("_norm")
        q, k, v = (
            dense(y, f"{b}/{part}").unflatten(-1, (heads, -1)).transpose(1, 2)
            for part in ("query", "key", "value")
        )
        y = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v
        y = dense(y.transpose(1, 2).flatten(2), f"{b}/output")
        x = x + y * w.get(f"block_{i}/attention_scale/scale", 1.0)
        y = f.gelu(dense(norm(x, f"block_{i}/mlp_norm"), f"block_{i}/mlp/up"))
        x = x + dense(y, f"block_{i}/mlp/down") * w.get(f"block_{i}/mlp_scale/scale", 1.0)
        outputs.append(x)
    if blocks:
        return [norm(x, "final_norm") for x in outputs]
    if "final_norm/scale" in w:
        x = norm(x, "final_norm")
    x = (
        x[:, 0]
        if token is not None and "pooled_norm/scale" not in w
        else x[:, -side * side :].mean(1)
    )
    x = norm(x, "pooled_norm") if "pooled_norm/scale" in w else x
    x = dense(x, "pre_logits").tanh() if "pre_logits/kernel" in w else x
    return dense(x, "logits")


class Original:
    """What the rows share: no decay of vectors, tokens and positions, one rate for all."""

    base, decay, clip, smoothing = 0.0, 0.0, None, 0.0

    def rate(self, step):
        raise NotImplementedError

    def scale(self, name):
        return 1.0

    def decayed(self, name, weight):
        return weight.ndim > 1 and name not in ("cls_token", "pos_embed")

    def loss(self, logits, targets):
        targets = targets * (1 - self.smoothing) + self.smoothing / targets.shape[-1]
        return -(targets * logits.log_softmax(-1)).sum(-1).mean()

    def optimizer(self, groups):
        return import_module("torch").optim.AdamW(groups, lr=self.base)


class BigVision(Original):
    """train.py, optax.py and utils.py of big_vision."""

    base, decay, clip = 1e-3, 1e-4, 1.0
    warmup, total = 4, STEPS

    def rate(self, step):
        done = min(max((step - self.warmup) / (self.total - self.warmup), 0), 1)
        return self.base * 0.5 * (1 + math.cos(math.pi * done)) * min(1, step / self.warmup)

    def decayed(self, name, weight):
        return name.endswith("kernel")

    def optimizer(self, groups):
        # The decay there is not multiplied by the rate, only by the schedule of 0 to 1.
        for group in groups:
            group["weight_decay"] /= self.base
        return super().optimizer(groups)


class Mae(Original):
    """main_finetune.py, util/lr_decay.py and util/lr_sched.py of MAE."""

    base, decay, smoothing = 2e-3, 0.05, 0.1

    def rate(self, step):
        epoch, warmup = step / 2, 0.05 * EPOCHS
        if epoch < warmup:
            return self.base * epoch / warmup
        done = (epoch - warmup) / (EPOCHS - warmup)
        return 1e-6 + (self.base - 1e-6) * 0.5 * (1 + math.cos(math.pi * done))

    def scale(self, name):
        layers = TINY["num_layers"] + 1
        if name in ("cls_token", "pos_embed") or name.startswith("patch_embed"):
            layer = 0
        else:
            layer = int(name.split(".")[1]) + 1 if name.startswith("blocks") else layers
        return 0.65 ** (layers - layer)


class Deit(Original):
    """timm's scheduler as main.py of DeiT steps it: once per epoch, after it, by its number."""

    warmup = 2

    def rate(self, step):
        torch, timm = import_module("torch"), import_module("timm.scheduler")
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=self.base)
        scheduler = timm.CosineLRScheduler(
            optimizer, EPOCHS, 1e-5, warmup_t=self.warmup, warmup_lr_init=1e-6
        )
        for epoch in range(step // 2):
            scheduler.step(epoch)
        return optimizer.param_groups[0]["lr"]


class Deit3(Deit):
    """DeiT III's pretraining; queries, keys and values of an attention are one tensor."""

    base, decay = 3e-3, 0.05

    def loss(self, logits, targets):
        bce = import_module("torch").nn.BCEWithLogitsLoss()
        return bce(logits, targets.gt(0.0).to(logits.dtype))

    def optimizer(self, groups):
        return import_module("timm.optim").Lamb(groups, lr=self.base, eps=1e-8)


class Deit3FineTuning(Deit):
    base, decay, smoothing, warmup = 1e-5, 0.1, 0.1, 2.5


class AugReg(Original):
    """train.py and utils.py of vision_transformer; optax.sgd has the momentum of gradients."""

    base, clip = 0.03, 1.0
    rate = BigVision.rate
    warmup, total = 4, STEPS

    def optimizer(self, groups):
        return import_module("torch").optim.SGD(groups, lr=self.base, momentum=0.9)


class TimmsMuon(Deit3FineTuning):
    """timm's Muon, without its rounding of products to bfloat16."""

    base = 1e-3

    def optimizer(self, groups):
        torch, muon = import_module("torch"), import_module("timm.optim.muon")
        exact = functools.partial(muon.zeropower_via_newtonschulz, dtype=torch.float64)
        optimizer = muon.Muon(groups, lr=self.base)
        step = optimizer.step

        def exact_step():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(muon, "zeropower_via_newtonschulz", exact)
                step()

        optimizer.step = exact_step
        return optimizer


ORIGINAL = {
    "vit_s16_i1k": BigVision(),
    "vit_fine_tune_mae": Mae(),
    "vit_deit3_b": Deit3(),
    "vit_fine_tune_deit3": Deit3FineTuning(),
    "vit_fine_tune_augreg": AugReg(),
    # Another optimizer beside the file.
    "vit_fine_tune_deit3 with muon": TimmsMuon(),
}
# Flags beside the file: no draws inside the model, and warm-ups that are over within 20 steps.
FLAGS = {
    "vit_s16_i1k": ["--warmup", "4"],
    "vit_deit3_b": ["--warmup", "0.2", "--ema", "0.99996"],
    "vit_fine_tune_augreg": ["--warmup", "4", "--steps", str(STEPS)],
    "vit_fine_tune_deit3 with muon": ["--optimizer", "muon", "--learning-rate", "1e-3"],
}
# torch runs all, the others one each.
ALSO = {"vit_s16_i1k": ["jax"], "vit_deit3_b": ["tensorflow"]}
CASES = [
    pytest.param(name, marks=pytest.mark.across("torch", *ALSO.get(name, [])), id=name)
    for name in ORIGINAL
]


class Stop(InputError):
    """Ends the recipe when its model has made its steps."""


def recorder(found):
    """Returns a runner that makes the first steps and writes down what the test compares."""

    class Runner:
        def __init__(self, model, path, loader, validation, schedule, **options):
            optimizer = model.optimizer
            optimizer.build(model.trainable_variables)
            paths = [v.path for v in model.trainable_variables]
            found["start"] = {v.path: to_numpy(v).astype("float64") for v in model.variables}
            found["scales"] = dict(zip(paths, optimizer._multipliers, strict=True))
            found["decays"] = {
                path: (optimizer.weight_decay or 0.0) * decays
                for path, decays in zip(paths, optimizer._decays, strict=True)
            }
            found["rates"] = [float(schedule(step)) for step in range(STEPS)]
            found["batches"], found["losses"] = [], []
            for step in range(STEPS):
                loader.set_epoch(step // len(loader))
                batch = loader[step % len(loader)]
                model.reset_metrics()
                logs = model.train_on_batch(*batch, return_dict=True)
                found["losses"].append(float(logs["loss"]))
                found["batches"].append(batch)
            found["averages"] = {v.path: to_numpy(x) for v, x in optimizer._averages()}
            found["end"] = {v.path: to_numpy(v) for v in model.trainable_variables}
            raise Stop("done")

    return Runner


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """Returns a function that runs a setting: start, batches, losses, rates and decays."""

    def run(name):
        more, name = FLAGS.get(name, []), name.split()[0]
        settings = yaml.safe_load(shipped()[name].read_text())
        if preset := settings.get("preset"):
            presets = import_module("kmodels.models.vit.presets").PRESETS
            fields = {**presets[preset], **TINY}
            fields |= {"task_intermediate_dim": 16} if "task_intermediate_dim" in fields else {}
            monkeypatch.setitem(presets, preset, fields)
            start = []
        else:
            keras.utils.set_random_seed(1)
            ViTImageClassifier.from_preset(
                "vit_debug", num_classes=4, layer_scale=0.1 if "deit3" in name else None, **TINY
            ).save_to_preset(tmp_path / "model")
            start = ["--weights", str(tmp_path / "model")]
        found = {}

        monkeypatch.setattr("kmodels.runs.runner.Runner", recorder(found))
        words = ["--recipe", name, "--data", f"synthetic:{2 * BATCH}", "--batch-size", str(BATCH)]
        words += ["--epochs", str(EPOCHS), "--image-size", "16", "--drop-path", "0"]
        words += ["--precision", "float32", "--out", str(tmp_path / "run"), *start]
        assert load("vit").main([*words, *more]) == 2
        return found

    return run


@pytest.mark.each_time("vit_fine_tune_deit3 with muon", "vit_fine_tune_mae", "vit_s16_i1k")
@pytest.mark.parametrize("name", CASES)
def test_first_losses_and_tables_are_the_originals(name, trained):
    torch, original = import_module("torch"), ORIGINAL[name]
    found = trained(name)
    assert len(found["losses"]) == STEPS
    rates = [original.rate(step) for step in range(STEPS)]
    allowed = tolerance("optimizer") * original.base
    np.testing.assert_allclose(found["rates"], rates, rtol=0, atol=allowed)
    # The tensors of the original: queries, keys and values are one if that counts.
    weights = {path: torch.tensor(value) for path, value in found["start"].items()}
    tensors, places = {}, {}
    for path, value in weights.items():
        tensors.setdefault(timm_name(path), []).append((path, value))
    for key, parts in tensors.items():
        tensors[key] = torch.nn.Parameter(torch.cat([value for _, value in parts], -1))
        places[key] = [path for path, _ in parts]
    fixed = weights.keys() - found["scales"].keys()
    groups = [
        {
            "params": [tensor], "name": key, "scale": original.scale(key),
            "weight_decay": original.decay * original.decayed(key, tensor),
        }
        for key, tensor in tensors.items() if not fixed & set(places[key])
    ]  # fmt: skip
    optimizer = original.optimizer(groups)
    for group in optimizer.param_groups:
        for path in places[group["name"]]:
            assert found["scales"][path] == pytest.approx(group["scale"]), path
            assert found["decays"][path] == pytest.approx(group["weight_decay"]), path
    holder, losses = torch.nn.ParameterList(tensors.values()), []
    average = import_module("timm.utils").ModelEmaV3(holder, decay=0.99996)
    for step, (images, targets) in enumerate(found["batches"]):
        w = {}
        for key, tensor in tensors.items():
            parts = tensor.chunk(len(places[key]), -1)
            w |= dict(zip(places[key], parts, strict=True))
        logits = forward(w, torch.tensor(images, dtype=torch.float64))
        targets = torch.tensor(targets)
        if targets.ndim == 1:
            targets = torch.nn.functional.one_hot(targets.long(), logits.shape[-1])
        loss = original.loss(logits, targets.double())
        optimizer.zero_grad()
        loss.backward()
        used = [group["params"][0] for group in groups]
        if original.clip:
            torch.nn.utils.clip_grad_norm_(used, original.clip)
        for group in optimizer.param_groups:
            group["lr"] = original.rate(step) * group["scale"]
        optimizer.step()
        average.update(holder, step=step + 1)
        losses.append(loss.item())
    if found["averages"]:
        for key, value in zip(tensors, average.module, strict=True):
            for path, part in zip(places[key], value.chunk(len(places[key]), -1), strict=True):
                allowed = tolerance("optimizer")
                wanted = part.detach().numpy()
                np.testing.assert_allclose(found["averages"][path], wanted, rtol=0, atol=allowed)
    np.testing.assert_allclose(found["losses"], losses, rtol=0, atol=tolerance("losses"))
    # The comparison means something: the losses move by more than the tolerance.
    assert max(losses) - min(losses) > 10 * tolerance("losses")


@pytest.mark.nightly("jax", "tensorflow")
@pytest.mark.across("torch", "jax", "tensorflow")
def test_the_grid_of_classifiers_is_dinov2s(monkeypatch, tmp_path):
    """dinov2/eval/linear.py: SGD at each rate, a cosine over all steps, no decay."""
    torch, found = import_module("torch"), {}
    keras.utils.set_random_seed(1)
    fields = {**TINY, "num_layers": 5, "layer_scale": 0.5, "num_register_tokens": 2}
    ViTImageClassifier.from_preset("vit_debug", num_classes=4, **fields).save_to_preset(
        tmp_path / "model"
    )
    monkeypatch.setitem(TINY, "num_layers", 5)
    monkeypatch.setattr("kmodels.runs.runner.Runner", recorder(found))
    words = ["--recipe", "vit_probe_dinov2", "--weights", str(tmp_path / "model"), "--steps"]
    words += [str(STEPS), "--data", f"synthetic:{2 * BATCH}", "--batch-size", str(BATCH)]
    assert (
        load("vit_probe").main([*words, "--image-size", "16", "--out", str(tmp_path / "run")]) == 2
    )
    rates = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
    w = {path: torch.tensor(value) for path, value in found["start"].items()}
    names = {(1, False): "1_blocks", (1, True): "1_blocks_mean", (4, False): "4_blocks",
             (4, True): "4_blocks_mean"}  # fmt: skip
    heads, groups = {}, []
    for name in names.values():
        kernels = w[f"{name}/kernel"].chunk(len(rates), -1)
        biases = w[f"{name}/bias"].chunk(len(rates), -1)
        for rate, *pair in zip(rates, kernels, biases, strict=True):
            pair = [x.clone().requires_grad_() for x in pair]
            heads[name, rate] = pair
            groups.append({"params": pair, "lr": rate * BATCH / 256})
    optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS, eta_min=0)
    losses = []
    for images, labels in found["batches"]:
        tokens = forward(w, torch.tensor(images, dtype=torch.float64), blocks=True)
        total = shown = 0.0
        for (count, pooled), name in names.items():
            x = torch.cat([x[:, 0] for x in tokens[-count:]], -1)
            x = torch.cat([x, tokens[-1][:, 3:].mean(1)], -1) if pooled else x
            for rate in rates:
                kernel, bias = heads[name, rate]
                target = torch.tensor(labels).long()
                loss = torch.nn.functional.cross_entropy(x @ kernel + bias, target)
                total, shown = total + loss, shown + rate * BATCH / 256 * loss.item()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        scheduler.step()
        losses.append(shown)
    np.testing.assert_allclose(found["losses"], losses, rtol=0, atol=tolerance("losses"))
    for name in names.values():
        for part, place in (("kernel", 0), ("bias", 1)):
            wanted = torch.cat([heads[name, rate][place] for rate in rates], -1).detach().numpy()
            allowed = {"rtol": 0, "atol": tolerance("optimizer")}
            np.testing.assert_allclose(found["end"][f"{name}/{part}"], wanted, **allowed)


@pytest.mark.nightly("tensorflow")
@pytest.mark.across("torch", "jax", "tensorflow")
def test_the_segmentation_head_is_dinov3s(monkeypatch, tmp_path):
    """dinov3/eval/segmentation: schedulers.py, loss.py, train.py and linear_head.py."""
    torch, found = import_module("torch"), {}
    keras.utils.set_random_seed(1)
    ViTBackbone.from_preset("vit_debug", **TINY).save_to_preset(tmp_path / "model")
    images, masks = made_scenes(2 * BATCH, (20, 26), seed=4)
    for kind, arrays in (("images", images), ("annotations", masks)):
        for part, rows in (("training", slice(None)), ("validation", slice(2))):
            folder = tmp_path / "data" / kind / part
            folder.mkdir(parents=True)
            for number, pixels in enumerate(arrays[rows]):
                Image.fromarray(pixels).save(folder / f"{number}.png")
    monkeypatch.setattr("kmodels.runs.runner.Runner", recorder(found))
    words = ["--recipe", "vit_segment_dinov3", "--weights", str(tmp_path / "model")]
    words += ["--data", f"folder:{tmp_path / 'data'}", "--steps", str(STEPS), "--warmup", "4"]
    words += ["--batch-size", str(BATCH), "--image-size", "16", "--channel-dropout", "0"]
    assert load("segment").main([*words, "--out", str(tmp_path / "run")]) == 2

    def rate(step):  # of WarmupOneCycleLR, which train.py moves from the second step on
        step = max(step - 1, 0)
        if step < 4:
            k = (1 - step / 4) * (1 - 1e-6)
            return 1e-3 * (1 - k) * (1 - step / STEPS)
        return 1e-3 / 2 * (1 + math.cos(math.pi * (step + 1) / STEPS))

    allowed = tolerance("optimizer") * 1e-3
    rates = [rate(step) for step in range(STEPS)]
    np.testing.assert_allclose(found["rates"], rates, rtol=0, atol=allowed)
    assert set(found["scales"].values()) == {1.0} and len(found["decays"]) == 4
    assert list(found["decays"].values()) == pytest.approx([1e-3] * 4)
    w = {path: torch.tensor(value) for path, value in found["start"].items()}
    learned = {path: w[path].clone().requires_grad_() for path in found["decays"]}
    names = {path.split("/", 1)[1] if path.count("/") > 1 else path for path in learned}
    assert {name.rsplit("/", 1)[-1] for name in names} == {"gamma", "beta", "kernel", "bias"}
    gamma, beta, kernel, bias = (
        next(x for path, x in learned.items() if path.endswith(end))
        for end in ("gamma", "beta", "kernel", "bias")
    )
    optimizer = torch.optim.AdamW(learned.values(), lr=1e-3, weight_decay=1e-3)
    losses, unlabeled = [], []
    for step, (pixels, labels) in enumerate(found["batches"]):
        tokens = forward(w, torch.tensor(pixels, dtype=torch.float64), blocks=True)[-1][:, -4:]
        x = tokens.transpose(1, 2).reshape(BATCH, -1, 2, 2)
        x = torch.nn.functional.batch_norm(x, None, None, gamma, beta, True, eps=1e-5)
        x = torch.nn.functional.conv2d(x, kernel.T[:, :, None, None], bias)
        x = torch.nn.functional.interpolate(x, (16, 16), mode="bilinear")
        target = torch.tensor(labels).long()
        each = torch.nn.functional.cross_entropy(x, target, reduction="none", ignore_index=255)
        loss = each.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
        losses.append(loss.item())
        unlabeled.append((labels == 255).mean())
        assert labels[labels != 255].max() < 4
    np.testing.assert_allclose(found["losses"], losses, rtol=0, atol=tolerance("losses"))
    assert max(losses) - min(losses) > 10 * tolerance("losses") and np.mean(unlabeled) > 0.1
    for path, value in learned.items():
        wanted, allowed = value.detach().numpy(), {"rtol": 0, "atol": tolerance("optimizer")}
        np.testing.assert_allclose(found["end"][path], wanted, **allowed)


@pytest.mark.nightly("jax", "tensorflow")
@pytest.mark.across("torch", "jax", "tensorflow")
def test_zero_shot_classes_are_siglips(tmp_path, capsys, monkeypatch):
    """big_vision's discriminative_classifier.py: means of unit vectors of canonical texts."""
    keras.utils.set_random_seed(1)
    tokenizer = train_tokenizer(["a photo of a red_fox. Itap!", "close-up"], 300)
    fields = ImageTextSimilarity.presets["siglip_debug"]
    text = {**fields["text_encoder"], "vocabulary_size": tokenizer.vocabulary_size()}
    towers = ImageTextSimilarity.from_preset(
        "siglip_debug",
        text_encoder=text,
        preprocessor=ImageTextPreprocessor(tokenizer, "siglip", image_size=(16, 16)),
    )
    towers.save_to_preset(tmp_path / "model")
    rng, names = np.random.default_rng(2), ["Red_Fox!", "great white-shark", "Owl"]
    images, labels = rng.integers(0, 256, (12, 20, 24, 3)).astype("uint8"), np.arange(12) % 3
    for number, (pixels, label) in enumerate(zip(images, labels, strict=True)):
        folder = tmp_path / "data" / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    (tmp_path / "names.txt").write_text("\n".join(names), encoding="utf-8")
    words = ["--recipe", "siglip2_zero_shot", "--weights", str(tmp_path / "model")]
    words += ["--data", f"folder:{tmp_path / 'data'}"]
    words += ["--class-names", str(tmp_path / "names.txt"), "--out"]
    asked = []
    embed = ImageTextSimilarity.class_embeddings

    def class_embeddings(self, names, templates, batch_size):
        asked.append((names, templates, embed(self, names, templates, batch_size)))
        return asked[-1][-1]

    monkeypatch.setattr(ImageTextSimilarity, "class_embeddings", class_embeddings)
    assert load("zero_shot").main([*words, str(tmp_path / "run")]) == 0
    found = result(tmp_path / "run")["metrics"]
    templates = yaml.safe_load(shipped()["siglip2_zero_shot"].read_text())["templates"].split("|")
    assert len(templates) == 81

    def canonical(text):
        text = "".join(x for x in text.replace("_", " ") if x not in string.punctuation)
        return re.sub(r"\s+", " ", text.lower()).strip()

    def mean(name, templates):
        texts = [canonical(text.replace("{}", f" {name} ")) for text in templates]
        vectors = towers.encode_text(texts).mean(0)
        return vectors / np.linalg.norm(vectors)

    vectors = towers.encode_image(images)
    keys = ("test_accuracy", "test_accuracy_of_one_template")
    for key, ways, (_, _, embedded) in zip(keys, (templates, templates[:1]), asked, strict=True):
        classes = np.stack([mean(name, ways) for name in names])
        np.testing.assert_allclose(embedded, classes, rtol=0, atol=tolerance("hidden"))
        assert found[key] == pytest.approx(((vectors @ classes.T).argmax(1) == labels).mean())
    assert asked[0][0] == ["red fox", "great whiteshark", "owl"]
    assert {"a closeup photo of a {}", "itap of my {}", "{}"} < set(asked[0][1])
    # A file of another number of names, and flags without effect.
    (tmp_path / "names.txt").write_text("one\ntwo")
    capsys.readouterr()
    assert load("zero_shot").main([*words, str(tmp_path / "wrong")]) == 2
    assert "has 2 names for 3 classes" in capsys.readouterr().err

"""Torch: two and four processes train what one alone trains, and are equal bit by bit."""

import keras
import numpy as np
import pytest
import small_models
from launch import Process, launch, torch_ranks

import kmodels
from kmodels.models import GemmaCausalLM
from tolerances import tolerance

if keras.backend.backend() != "torch":
    pytest.skip("torchrun is torch's", allow_module_level=True)

import ddp_cases
import parts_torch
import torch

from kmodels.core import seeds_torch

# Layers over `model` are Keras' own; the pinned one says that it has none, see below.
SPLITS = keras.__version__ >= "3.16"
TWO = {
    "data=-1": [*ddp_cases.CASES, "few_bits", "refused"],
    "fsdp=2": [*parts_torch.CASES, "refused_in_parts"],
}
FOUR = {"data=2,fsdp=2": ["lora"]}
if SPLITS:
    TWO["model=2"] = ["split", "gemma_lora"]
    FOUR["data=2,model=2"] = ["split"]
# Random numbers differ from those of one process, and a mistake trains nothing.
OWN = ("dropped", "refused", "refused_in_parts")
RUNS = [f"{m}:{n}" for m, names in (TWO | FOUR).items() for n in names if n not in OWN]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    keras.utils.set_random_seed(2)
    path = tmp_path_factory.mktemp("ranks") / "gemma"
    model = GemmaCausalLM.from_preset(parts_torch.PRESET)
    model.save_to_preset(path)
    small_models.in_few_bits(model).save_to_preset(path.with_name("few_bits"))
    return path


@pytest.fixture(scope="module")
def alone(folder):
    parts_torch.folder = folder
    cases = ddp_cases.CASES | parts_torch.CASES
    cases |= {"split": ddp_cases.split} if SPLITS else {}
    return {name: case(None) for name, case in cases.items()}


@pytest.fixture(scope="module")
def ranks(folder):
    """What each process of the runs with two and with four found, by mesh and name."""
    two, four = _run(2, folder, TWO), _run(4, folder, FOUR)
    return {
        run: [rank[run] for rank in (two if run in two[0] else four)] for run in two[0] | four[0]
    }


def _run(count, folder, meshes):
    runs = [":".join([mesh, *names]) for mesh, names in meshes.items()]
    process = Process(parts_torch.__file__, [str(folder), *runs], ranks=torch_ranks(count))
    return [output.result() for output in launch([process], 280)]


def _same_numbers(found, wanted, atol, step_of_counts=0.0):
    """Compares numbers; those that count tokens may differ by a step."""

    def same(numbers, expected, name):
        allowed = max(atol, step_of_counts) if name.endswith("accuracy") else atol
        np.testing.assert_allclose(numbers, expected, atol=allowed, rtol=0, err_msg=name)

    assert found["history"].keys() == wanted["history"].keys()
    for name, values in _losses(wanted["history"]).items():
        same(_losses(found["history"])[name], values, name)
    for step, numbers in zip(found["steps"], wanted["steps"], strict=True):
        assert _losses(step) == pytest.approx(_losses(numbers), abs=atol, rel=0)
    if "scores" in wanted:
        assert found["scores"].keys() == wanted["scores"].keys()
        for name, value in _losses(wanted["scores"]).items():
            same(_losses(found["scores"])[name], value, name)
    if "logits" in wanted:
        assert found["logits"] == pytest.approx(wanted["logits"], abs=atol, rel=0)


def _losses(logs):
    """Logs with the logarithm of a perplexity, which is a loss and as exact as one."""
    return {k: np.log(v) if k.endswith("perplexity") else v for k, v in logs.items()}


def _same_ranks(first, *others):
    for other in others:
        for what in ("history", "steps", "digest"):
            assert other[what] == first[what]


@pytest.mark.parametrize("run", RUNS)
def test_ranks_are_equal_and_train_what_one_trains(run, alone, ranks):
    name = run.rpartition(":")[2]
    _same_ranks(*ranks[run])
    dtype = "bfloat16" if name in ("half", "drawn") else "float32"
    # In bfloat16 two logits may tie, and one token more or less is counted as right.
    tokens = alone[name].get("tokens") if dtype == "bfloat16" else None
    step = 1.001 / tokens if tokens else 0.0
    _same_numbers(ranks[run][0], alone[name], tolerance("losses_of_ranks", dtype), step)


def test_inner_steps_of_accumulation_reduce_nothing(ranks):
    """What is summed is each process's own until the last step, and nothing after it."""
    for name, steps in (("accumulated_by_keras", 2), ("accumulated_by_kmodels", 4)):
        first, second = (rank["accumulated"] for rank in ranks[f"data=-1:{name}"])
        assert len(first) == 8
        for step, (one, other) in enumerate(zip(first, second, strict=True)):
            inner = (step + 1) % steps != 0
            assert (one != other) == inner, f"{name}, step {step}"
    skipping = [rank["accumulated"] for rank in ranks["data=-1:accumulated_or_skipped"]]
    assert skipping[0] == skipping[1]


def test_dropout_differs_between_ranks_and_can_be_repeated(alone, ranks):
    one, first, second = alone["dropped"], *ranks["data=-1:dropped"]
    for run in (one, first, second):
        assert run["first"] == run["second"]
    _same_ranks(first["first"], second["first"])
    assert first["drawn"] == one["drawn"]
    assert all(a != b for a, b in zip(first["drawn"], second["drawn"], strict=True))
    # The state is saved once, and restored by all.
    assert first["state"] == second["state"] == one["state"]
    assert first["first"]["history"] != one["first"]["history"]


# torch's compiler warns of its own code.
@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_draw_what_others_do():
    def drawn(seed):
        return kmodels.ops.dropout(torch.ones(64), 0.5, seed)

    compiled = torch.compile(drawn, backend="aot_eager", fullgraph=True)
    found = {}
    for rank in (0, 1):
        seeds_torch.draw_as(rank)
        try:
            draws = [draw(keras.random.SeedGenerator(7)) for draw in (drawn, compiled)]
        finally:
            seeds_torch.draw_as(0)
        assert torch.equal(*draws)
        found[rank] = draws[0]
    assert not torch.equal(found[0], found[1])


def test_adapters_alone_are_reduced(ranks):
    for rank in ranks["data=-1:gemma_lora"]:
        assert rank["frozen"]
        assert rank["reduced"] == [rank["trained"]]


@pytest.mark.parametrize("name", ["lora", "tied", "drawn"])
def test_models_wait_for_their_weights_and_get_those_of_one_process(name, alone, ranks):
    assert alone[name]["waiting"][0] == 0
    for rank in ranks[f"fsdp=2:{name}"]:
        # Of the model with adapters all but those, which are made after it was loaded.
        waiting, weights = rank["waiting"]
        assert waiting == weights - (8 if name == "lora" else 0)
        assert rank["begun"] == alone[name]["begun"]
        assert rank["frozen"]


@pytest.mark.parametrize(
    ("run", "count"), [("fsdp=2:tied", 2), ("fsdp=2:few_bits", 2), ("data=2,fsdp=2:lora", 4)]
)
def test_each_rank_holds_its_half_alone(run, count, ranks):
    assert len(ranks[run]) == count
    for rank in ranks[run]:
        for what in ("weights", "slots"):
            own, whole = rank[what]
            assert own == pytest.approx(whole / 2, rel=0.01)


def test_gradients_of_adapters_travel_once_for_four_steps(ranks):
    counts = ranks["fsdp=2:lora"][0]["reduced"]
    blocks = counts[3]
    assert blocks > 0
    assert counts == [0, 0, 0, blocks] * 2
    # Of a model that is trained as a whole, whole gradients would take more room than it does.
    assert min(ranks["fsdp=2:tied"][0]["reduced"]) > blocks


def test_halves_travel_and_sums_are_made_in_float32(ranks):
    travelled = ranks["fsdp=2:drawn"][0]["travelled"]
    assert "all_gather_single torch.bfloat16" in travelled
    reduced = [name for name in travelled if name.startswith("reduce")]
    assert reduced == ["reduce_scatter_single torch.float32"]


REFUSED = {
    "bare": "got Sequential, whose step is Keras' own; give a task of kmodels",
    "norm": r"BatchNormalization, which would normalize by.*or use .*torch.nn.SyncBatchNorm\(4\)",
    "wrapped": "BatchNorm1d.*use torch.nn.SyncBatchNorm",
    "sum": "reduction 'sum', which parts of a batch cannot compute",
    "other": r"differs between the processes: 1 variables.*on process 1 what",
    "idle": "leaves 1 of 2 processes without work; start 1, or give data=-1",
} | ({} if SPLITS else {"model": "which torch has from Keras 3.16 on"})
REFUSED_IN_PARTS = {
    "late": "8 weights were made after plan.prepare: .*call enable_lora and the like before",
    "thawed": "1 weights became trainable after plan.prepare: block_0/attention_norm/scale",
    "graph": "jit_compile=True got blocks whose weights are gathered as they run",
    "slots": "Adafactor keeps more than arrays of the weights' shapes.*use AdamW or SGD",
    "matrices": "Lamb needs whole matrices, which fsdp shards; use AdamW or SGD",
    "float16": '"mixed_bfloat16" with fsdp',
    "fit": r"call plan.prepare\(model\) first",
    "saving": r"saving found a model that waits for its weights.*plan.prepare\(model\) first",
    "own": "belong to no layer of their own.*scale; keep each in one layer",
    "mixed": "trainable weights of bfloat16 and float32 in block_0",
    "dora": "leave dora out, or load a model that was saved with it",
    "quantize": r"quantize found a model that waits.*plan.prepare\(model\) first",
    "generate": "generate needs all weights on one device.*plan.export",
    "merge": "merge_lora needs all weights on one device.*plan.export",
}


@pytest.mark.parametrize(
    ("run", "parts"), [("data=-1:refused", REFUSED), ("fsdp=2:refused_in_parts", REFUSED_IN_PARTS)]
)
def test_what_cannot_be_is_said_in_one_line(run, parts, ranks):
    for rank in ranks[run]:
        assert rank.keys() == parts.keys()
        for name, part in parts.items():
            with pytest.raises(AssertionError, match=part):
                raise AssertionError(rank[name])
            assert "\n" not in rank[name]

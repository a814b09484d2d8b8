"""Runs of several processes: saved in parts, left, continued, read on any mesh and backend.

Processes are killed in `tests/nightly/launch`, whose runs end as others do.
"""

import shutil
import signal
import warnings

import keras
import numpy as np
import pytest
import run_in_parts
from launch import ROOT, Process, jax_cache, jax_ranks, launch, torch_ranks

from kmodels.checkpoint import format, manager, state
from kmodels.core import processes
from kmodels.core.files import atomic_directory
from kmodels.distribution import distribute
from kmodels.models import ViTImageClassifier
from kmodels.weights.files import read_parts, write_parts
from refusals import refused

MESHES = {"jax": "fsdp=4", "torch": "fsdp=2"}
OTHERS = {"jax": ["data=2,fsdp=2", "data=4"], "torch": ["data=2"]}
SCRIPT = ROOT / "tests" / "loop" / "distribution" / "run_in_parts.py"


def in_parts(test):
    """A test of a run of several processes, which TensorFlow has not."""
    return test if keras.backend.backend() in MESHES else pytest.mark.across("jax", "torch")(test)


def start(backend, folder, *told, check=True):
    env = {"KERAS_BACKEND": backend, "KMODELS_PROCESS_SECONDS": "20", **jax_cache(folder / "cache")}
    ranks = jax_ranks(2, 2) if backend == "jax" else torch_ranks(2)
    return launch([Process(SCRIPT, [str(folder), *told], env, ranks=ranks)], 240, check)


@pytest.fixture(scope="module")
def ran(backend, tmp_path_factory, exchange):
    """Folder, mesh and what the processes found, all in one start: their imports cost most."""
    folder, mesh = tmp_path_factory.mktemp("parts"), MESHES[backend]
    told = [f"{act}:{mesh}" for act in ("cut", "whole", "exported", "stopped", "refused")]
    told.append("restored:" + "+".join([mesh, *OTHERS[backend]]))
    if backend == "torch":
        told += ["cut:data=2", "whole:data=2", f"dcp:{mesh}"]
    both = start(backend, folder, *told)
    resumed = f"resumed from {folder}/cut {mesh}/step_00000005 at step 5"
    assert [resumed in output.stdout for output in both] == [True, False]
    found, other = (output.result() for output in both)
    assert found == other
    _share(exchange, backend, folder)
    return folder, mesh, found


def _share(exchange, backend, folder):
    """Leaves the checkpoint, and what it was made of, for the other backends."""
    whole = folder / f"{run_in_parts.WHOLE} {MESHES[backend]}"
    with atomic_directory(exchange / backend / "parts") as new:
        shutil.copytree(whole, new / "run")
        shutil.copy(f"{whole}.npz", new / "expected.npz")


@in_parts
def test_a_run_that_was_left_ends_with_the_bits_of_an_undisturbed_one(ran):
    _, _, found = ran
    runs = [name for name in found if name.startswith("cut ")]
    assert runs
    for run in runs:
        assert found[run] == found[run.replace("cut", "whole")]


@in_parts
@pytest.mark.nightly
def test_a_killed_process_ends_the_others_too(backend, tmp_path):
    survivor, dead = start(backend, tmp_path, f"killed:{MESHES[backend]}", check=False)
    assert dead.status == -signal.SIGKILL and not survivor.late
    assert survivor.status not in (0, None)


@in_parts
def test_it_is_restored_on_any_mesh(ran, backend):
    folder, mesh, found = ran
    restored = {name: wrong for name, wrong in found.items() if name.startswith("restored")}
    assert len(restored) > 1 and not any(restored.values()), restored
    run = folder / f"{run_in_parts.WHOLE} {mesh}"
    # In one process, without a mesh and over its own devices.
    for other in (None, "fsdp=2,model=2") if backend == "jax" else (None,):
        _, model = run_in_parts.make(other)
        path, described, _ = run_in_parts.newest(run)
        manager.restore(path, described, model)
        with np.load(f"{run}.npz") as expected:
            assert run_in_parts.differing(model, expected) == []
    distribute(None)


@in_parts
def test_export_is_one_ordinary_directory(ran):
    folder, _, found = ran
    model = ViTImageClassifier.from_preset(folder / "exported")
    assert state.weights_digest(model) == found["exported"]
    assert found["kernels in parts"] > 0
    assert found["no export"]["disk is full"].startswith("cannot write /dev/full")
    assert "save_weights needs all weights on one device" in found["no export"]["in parts"]
    names = {"config.json", "manifest.json", "model.safetensors"}
    assert {path.name for path in (folder / "exported").iterdir()} == names


@in_parts
def test_what_does_not_fit_is_refused_by_all(ran):
    _, _, found = ran
    said = found["refused"]
    assert "the optimizer was AdamW 'adamw', not Adam 'adamw'; give" in said["class"]
    assert "the optimizer was AdamW 'adamw', not AdamW 'other'; give" in said["name"]
    assert "process 1 cannot see what the first one writes to" in said["apart"]
    damaged, good, reasons = found["damaged"]
    assert (damaged, good, len(reasons)) == ("step_00000008", "step_00000005", 1)
    assert "step_00000008/model-00001" in reasons[0]


@in_parts
def test_a_signal_to_one_process_stops_all(ran):
    _, _, found = ran
    assert found["stopped"] == 143
    assert 2 <= found["stopped at"] < run_in_parts.STEPS * run_in_parts.EPOCHS


@pytest.mark.across(*MESHES, "tensorflow")
def test_another_backend_goes_on_with_it(exchange, tmp_path):
    for name in MESHES:
        folder = exchange / name / "parts"
        if not folder.exists():
            made = tmp_path / name
            start(name, made, f"whole:{MESHES[name]}")
            _share(exchange, name, made)
        _, model = run_in_parts.make(None)
        path, described, _ = run_in_parts.newest(folder / "run")
        manager.restore(path, described, model)
        with np.load(folder / "expected.npz") as expected:
            assert run_in_parts.differing(model, expected) == []


@in_parts
def test_torch_reads_and_writes_the_same_files(ran, backend):
    if backend != "torch":
        return
    import torch
    import torch.distributed.checkpoint as dcp

    folder, mesh, _ = ran
    run = folder / f"{run_in_parts.WHOLE} {mesh}"
    with np.load(f"{run}.npz") as arrays:
        expected = {
            name.removeprefix("model "): arrays[name]
            for name in arrays
            if name.startswith("model ")
        }
    held = {name: torch.from_numpy(np.zeros_like(array)) for name, array in expected.items()}
    reader = dcp.HuggingFaceStorageReader(str(run / "step_00000008"))
    with warnings.catch_warnings():
        # It says that there is one process.
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(held, storage_reader=reader, no_dist=True)
    written = read_parts(sorted((folder / "dcp").glob("*.safetensors")))
    assert written.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(held[name].numpy(), array)
        np.testing.assert_array_equal(written[name].read(), array)


@pytest.mark.once
def test_any_cut_of_parts_gives_the_whole(tmp_path):
    rng = np.random.default_rng(0)
    whole = {"a": rng.normal(size=(5, 4)), "b": rng.integers(0, 9, (3,)), "c": np.array(2.5)}
    files = [{"a": ((0, 0), whole["a"][:3, :1]), "c": ((), whole["c"])}]
    files += [{"a": ((3, 0), whole["a"][3:, :1]), "b": ((0,), whole["b"][:2])}]
    files += [{"a": ((0, 1), whole["a"][:, 1:]), "b": ((2,), whole["b"][2:])}]
    paths = [tmp_path / f"{number}.safetensors" for number in range(len(files))]
    for path, parts in zip(paths, files, strict=True):
        write_parts(path, parts)
    found = read_parts(paths)
    for name, array in whole.items():
        np.testing.assert_array_equal(found[name].read(), array)
    for rows, columns in [((0, 5), (0, 4)), ((2, 4), (0, 2)), ((4, 5), (1, 3)), ((1, 1), (0, 4))]:
        index = slice(*rows), slice(*columns)
        np.testing.assert_array_equal(found["a"].part(index), whole["a"][index])
    refused(f"{tmp_path} lacks parts of a; copy the directory", read_parts, paths[:2] + paths[:1])


@pytest.mark.once
def test_a_run_of_fewer_or_more_processes_takes_what_differs(tmp_path, monkeypatch):
    def be(index, count):
        monkeypatch.setattr(processes, "index", lambda: index)
        monkeypatch.setattr(processes, "count", lambda: count)

    for index in range(3):
        be(index, 3)
        for part in ("metrics", "optimizer", "other"):
            format.write(tmp_path, part, {format.here("x"): np.array([1.0, 10.0 * index])})
    expected = {
        ("metrics", 1): [[3.0, 30.0]],
        ("metrics", 2): [[2.0, 20.0], [1.0, 10.0]],
        ("metrics", 4): [[1.0, 0.0], [1.0, 10.0], [1.0, 20.0], [0.0, 0.0]],
        ("optimizer", 1): [[1.0, 10.0]],
        ("optimizer", 2): [[1.0, 10.0]] * 2,
        ("optimizer", 3): [[1.0, 0.0], [1.0, 10.0], [1.0, 20.0]],
        ("other", 4): [[1.0, 0.0], [1.0, 10.0], [1.0, 20.0], [1.0, 0.0]],
    }
    for (part, count), wanted in expected.items():
        for index in range(count):
            be(index, count)
            found = format.read(tmp_path, part)["x"].read()
            np.testing.assert_array_equal(found, wanted[index])


@pytest.mark.once
@pytest.mark.parametrize("kind", ["averages of the own rows", "averages over all rows"])
def test_what_one_process_counted_is_counted_once(kind, tmp_path, monkeypatch):
    own = kind == "averages of the own rows"
    format.write(tmp_path, "metrics", {"x": np.array([3.0, 30.0])})
    monkeypatch.setattr(processes, "count", lambda: 2)
    for index, wanted in enumerate([[3.0, 30.0], [0.0, 0.0] if own else [3.0, 30.0]]):
        monkeypatch.setattr(processes, "index", lambda index=index: index)
        found = format.read(tmp_path, "metrics", ["x"] if own else [])["x"].read()
        np.testing.assert_array_equal(found, wanted)

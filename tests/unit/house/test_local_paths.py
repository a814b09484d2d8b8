"""Addresses such as "gs://bucket" are read or refused in a line, and leave no folder "gs:".

tests/programs/everyday/test_remote_storage.py reads and writes at addresses whose package is there.
"""

from pathlib import Path

import pytest

import kmodels
from kmodels import data, training
from kmodels.core.files import check_output, local_path
from kmodels.core.schema import read_json
from kmodels.runs import recipe, report
from kmodels.tools.compare_backends import report as comparisons
from refusals import refused

LOCAL = "is an address, and kmodels reads and writes only local"


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.iterdir())


def test_which_are_addresses():
    for address in ("gs://b/x", "s3://b", "memory://x", "file://x", Path("gs://b")):
        refused(LOCAL, local_path, address)
    for path in ("x", "/x/y", "C:/x", "a:b", "run: 3/x"):
        assert local_path(path) == Path(path)
    assert local_path("~/x") == Path.home() / "x"


@pytest.mark.parametrize("name", ["/dev/zero", "file:///dev/zero", "zero.json"])
def test_devices_are_refused(tmp_path, name):
    """A device may have no end, and a file that replaces one would take its name."""
    link = tmp_path / "zero.json"
    link.symlink_to("/dev/zero")
    refused("zero.* is a device; give a file or a directory", local_path, name)
    refused("zero.json is not readable JSON: it is a device", read_json, link)
    refused("zero.json is a device", check_output, "--out", link)
    link.unlink()


def test_what_takes_local_paths_alone():
    refused(LOCAL, kmodels.models.GemmaTokenizer.save, None, "gs://b/x")
    refused(LOCAL, recipe.Folder, "vit", "gs://b/x", None)
    refused(LOCAL, report.write, "gs://b/x")
    refused(LOCAL, comparisons.write, {}, "gs://b/x")
    refused(
        r"data 'gs://b/x\.npz' is unknown; give one of digits", data.open_dataset, "gs://b/x.npz"
    )


def test_a_storage_whose_package_is_missing_is_said():
    backbone = kmodels.models.ViTBackbone(
        image_shape=(8, 8, 3), patch_size=4, num_layers=1, num_heads=1, hidden_dim=4, mlp_dim=8
    )
    for act, argument in (
        (kmodels.models.ViTBackbone.from_preset, "gs://b/x"),
        (backbone.save_to_preset, Path("s3://b/x")),
        (kmodels.models.ViTImageClassifier(backbone, 2).save_weights, "gs://b/x.weights.h5"),
        (training.Checkpoint, "gs://b/x"),
        (data.open_dataset, "idx:gs://b"),
        (data.TarShards, "gs://b/{0..3}.tar"),
    ):
        refused("needs (one more|the) package", act, argument)

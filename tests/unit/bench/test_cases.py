"""Which rows there are, what is refused, and what a run's files hold; nothing is measured."""

import json
import math

import pytest
from rich.console import Console

from kmodels.core.errors import parse_bytes
from kmodels.tools.compare_backends import bench, report
from kmodels.tools.compare_backends.bench import Refused, differences, largest, result, times
from kmodels.tools.compare_backends.options import ENVIRONMENT, BenchOptions
from refusals import refused

ALL = {"jax", "torch", "tensorflow", "keras"}


@pytest.fixture
def there(monkeypatch):
    """Says which packages are installed, by interpreter; "" is any that is not named."""

    def say(**found):
        def installed(python, packages):
            return set(packages) & found.get(python.strip("/"), found.get("", ALL))

        monkeypatch.setattr(bench, "installed", installed)
        monkeypatch.delenv(ENVIRONMENT, raising=False)

    return say


def labels(**settings):
    rows, notes = bench.make_cases(BenchOptions("vit_debug", **settings))
    return [row.label for row in rows], notes


def test_rows_are_all_combinations_by_precision(there):
    there()
    rows, notes = labels(
        backends="torch,jax", precisions=("float32", "bfloat16"), attention=("generic", "fused")
    )
    assert rows == [
        f"{backend} · {precision} · auto · {ops}"
        for precision in ("float32", "bfloat16")
        for backend in ("torch", "jax")
        for ops in ("generic attention", "override")
    ]
    assert not notes


def test_paths_that_are_the_same_are_one_row(there):
    there()
    rows, _ = labels(backends="jax", attention=("fused", "generic"), ops=("override", "generic"))
    paths = [row.rpartition(" · ")[2] for row in rows]
    assert paths == ["override", "generic", "generic attention"]


def test_what_is_not_installed_is_left_out_or_an_error(there):
    there(**{"": {"jax", "keras"}})
    rows, notes = labels()
    assert rows == ["jax · float32 · auto · override"]
    assert notes[0] == "left out: torch is not installed: pip install 'kmodels[torch]'"
    refused(r"torch is not installed: pip install 'kmodels\[torch\]'", labels, backends="jax,torch")


def test_a_backend_takes_the_modes_that_it_has(there):
    there()
    rows, notes = labels(compile=("none", "inductor"))
    modes = [" ".join(row.split(" · ")[:3:2]) for row in rows]
    assert modes == ["jax auto", "torch none", "torch inductor", "tensorflow none"]
    assert notes == [
        "jax has no none or inductor: its default is measured",
        "left out: tensorflow has no inductor",
    ]
    message = "compile is inductor, which no backend here has: jax has"
    refused(message, labels, backends="jax", compile=("inductor",))


def test_openxla_needs_torchax_which_may_be_elsewhere(there, monkeypatch):
    there(there={"torch", "torchax", "jax"})
    rows, notes = labels(backends="torch", compile=("none", "openxla"))
    assert rows == ["torch · float32 · none · override"]
    assert notes[0].startswith("left out: openxla needs torchax; make an environment for it")
    refused("openxla needs torchax", labels, backends="torch", compile=("openxla",))
    modes = ("none", "openxla")
    for python in (("openxla=/there",), ()):
        options = BenchOptions("vit_debug", backends="torch", compile=modes, python=python)
        found, notes = bench.make_cases(options)
        assert [row.compile for row in found] == ["none", "openxla"]
        assert found[1].python == "/there" != found[0].python
        assert found[1].hidden == ["tensorflow"]
        assert found[0].hidden == ["jax", "tensorflow"]
        assert not notes
        monkeypatch.setenv(ENVIRONMENT, "openxla=/there")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backends": "jax,theano"}, "backends is 'theano'; give some of jax, torch, tensorflow"),
        ({"backends": "jax,jax"}, "backends names jax twice"),
        ({"precisions": ("float33",)}, "precision is 'float33'; give some of float32, tf32"),
        ({"precisions": ()}, "precision is empty; give some of"),
        ({"compile": ("jit",)}, "compile is 'jit'; give some of auto, inductor, none"),
        ({"attention": ("flash",)}, "attention is 'flash'; give some of fused, generic"),
        ({"ops": ("fast",)}, "ops is 'fast'; give some of override, generic"),
        ({"optimizer": "lion"}, "optimizer is 'lion'; give some of adamw, sgd"),
        ({"batch_size": 0}, "batch_size is 0; give at least 1"),
        ({"check_steps": 1}, "check_steps is 1; give at least 2"),
        ({"limit": 0.0}, "the limit is 0.0; give seconds above 0"),
        ({"threads": 10_000}, "threads is 10000; this process may use"),
        ({"python": ("openxla",)}, "the interpreter 'openxla' is not NAME=PATH"),
        ({"python": ("mxnet=/x",)}, "the interpreter 'mxnet=/x' is not NAME=PATH"),
        ({"python": ("openxla=/x",)}, "--python openxla=/x has no effect: openxla is not compared"),
    ],
)
def test_wrong_settings_are_one_line(settings, message):
    def read():
        options = BenchOptions("vit_debug", **settings)
        options.interpreters()
        assert options.cpus

    refused(message, read)


def test_lists_and_sizes():
    assert bench.numbers("workers", "0, 2") == (0, 2)
    refused("workers is two; give whole numbers", bench.numbers, "workers", "0,two")
    assert parse_bytes("1.5GiB") == 3 * 2**29
    refused("'much' is not an amount of memory; give one such as 80GiB", parse_bytes, "much")


WITHIN = "; the allowed relative difference is 0.0001"


def row(label, precision="float32", losses=(6.9, 6.8, 6.7), **facts):
    same = {"parameters": 10, "dropout": {}, "threads": 2, "keras": "3", "text": False}
    facts = {**same, "variables": "float32", "compute": "float32", **facts}
    return {"label": label, "precision": precision, "losses": list(losses), "facts": facts}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (row("b", parameters=11), "b: parameters is 11, a has 10"),
        (row("b", dropout={"x": 0.1}), "b: dropout is {'x': 0.1}, a has {}"),
        (row("b", threads=1), "b: threads is 1, a has 2"),
        (row("b", keras="4"), "b: keras is '4', a has '3'"),
        (row("b", compute="bfloat16"), "b: compute is 'bfloat16', a has 'float32'"),
        (row("b", losses=(6.9, 6.79, 6.7)), "b: the loss of step 2 is 6.79, a has 6.8" + WITHIN),
        (row("b", losses=(math.nan, 6.8, 6.7)), "b: the loss of step 1 is nan, a has 6.9" + WITHIN),
    ],
)
def test_what_differs_is_told(other, message):
    assert differences([row("a"), other]) == [message]
    assert Refused([message]).lines == [message]


def test_rows_that_are_alike_differ_in_nothing():
    rows = [row("a"), row("b", losses=(6.9, 6.8, 6.7 * (1 + 5e-5)))]
    rows.append(row("c", "mixed_bfloat16", losses=(6.8, 6.8, 6.6), compute="bfloat16"))
    assert not differences(rows)
    # With dropout the losses without it are compared.
    first = row("a", dropout={"x": 0.1}, evaluated=6.5)
    second = row("b", losses=(1, 2, 3), dropout={"x": 0.1}, evaluated=6.5)
    assert not differences([first, second])
    second["facts"]["evaluated"] = 6.4
    assert "b: the loss of step 1 is 6.4, a has 6.5" in differences([first, second])[0]


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 8, 9, 31, 100, 1000])
@pytest.mark.parametrize("start", [1, 8, 50])
def test_the_largest_that_fits(limit, start):
    tried = []

    def fits(size):
        assert size not in tried
        tried.append(size)
        return size <= limit

    found = largest(fits, start)
    assert found <= limit <= found + max(1, found // 16)
    assert not limit or found in tried
    assert len(tried) <= 2 * math.log2(max(limit, start)) + 3
    assert largest(lambda size: True, 8) == 2**20  # an endless memory ends the search


@pytest.fixture
def measured():
    """A run of two rows, one that failed, and one with a loader."""
    elsewhere = ("openxla=/opt/mine/python",)
    options = BenchOptions("vit_debug", precisions=("float32",), python=elsewhere)
    rows = []
    for name, seconds in (("torch", [0.2, 0.1, 0.4]), ("jax", [0.05, 0.05])):
        values = {**row(f"{name} · row"), "backend": name, "compile": "none", "ops": "override"}
        values |= {"workers": None, "failed": None, "group": 0, "largest_batch": 1024}
        values |= {"peak_memory_mb": 1234.5, "loss_difference": 1e-6, "build_s": 1.0}
        values |= {"took": {"attention": "was slower"}} if name == "jax" else {"took": {}}
        values["facts"]["device"] = "cpu x1"
        rows.append(values | times(seconds, 2.0, options, False))
    rows[1] |= {"workers": 2}
    rows.append({"failed": "tensorflow: no answer for 900 s, so it was killed"})
    return result(options, rows, ["left out: something"])


def test_the_numbers_of_a_row(measured):
    first = measured["rows"][0]
    assert first["rate"] == 40.0
    assert first["step_s"] == {"median": 0.2, "low": 0.15, "high": 0.3}
    assert first["compile_s"] == 1.8
    text = times([0.2], 0.1, BenchOptions("gemma_debug", sequence_length=64), True)
    assert text["rate"] == 8 * 64 / 0.2
    assert text["compile_s"] == 0


def test_the_table_holds_the_rows_and_what_is_missing(measured, capsys):
    report.show(measured, Console(width=100))
    printed = capsys.readouterr().out
    title = "vit_debug, batch 8, adamw, cpu x1"
    for word in (title, "images/s", "200 (150–300)", "1,234", "1,024"):
        assert word in printed
    for line in (
        "losses agree; largest relative difference: float32 1e-06",
        "attention is generic in jax · row: was slower",
        "left out: something",
        "failed: tensorflow: no answer for 900 s, so it was killed",
    ):
        assert line in printed.splitlines()


def test_the_files_are_whole(measured, tmp_path):
    for out, name in ((tmp_path / "folder", "folder/bench.json"), (tmp_path / "x.json", "x.json")):
        path, picture = report.write(measured, out)
        assert path == tmp_path / name
        assert json.loads(path.read_text()) == json.loads(json.dumps(measured))
        assert picture == path.with_suffix(".png")
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert "/opt/mine" not in path.read_text()
    assert {key for key in measured if key not in ("rows", "options")} == {
        *("kind", "format", "preset", "unit", "hardware", "date", "tolerances", "left_out")
    }
    failed = {**measured, "rows": measured["rows"][-1:]}
    assert len(report.write(failed, tmp_path / "none")) == 1

"""How rows are started, grouped, timed and dropped, with children that only pretend."""

import pytest

from kmodels.core.environment import BACKENDS
from kmodels.tools.compare_backends import bench
from kmodels.tools.compare_backends.children import ChildError, LeftOut, OutOfMemory

FACTS = {
    **{"parameters": 10, "dropout": {}, "text": False, "compile": "none", "device": "cpu x1"},
    **{"cpu": True, "host_bytes": 2**34, "variables": "float32", "compute": "float32"},
}
MIB = 2**20


class Machine:
    """What the children tell, and what became of them."""

    def __init__(self):
        self.alive, self.most, self.order, self.troubles = 0, 0, [], {}
        self.peak_mb, self.largest, self.host_bytes = 100.0, 37, 2**34


@pytest.fixture
def machine(monkeypatch):
    made = Machine()

    class Pretended:
        def __init__(self, name, module, job, **settings):
            assert module == "kmodels.tools.compare_backends.work"
            self.name, self.job, self.settings = name, job, settings
            self.memory, self.turns = None, 0

        def __enter__(self):
            made.alive += 1
            made.most = max(made.most, made.alive)
            return self

        def __exit__(self, *_):
            made.alive -= 1

        def _trouble(self, moment):
            for word, (when, error) in made.troubles.items():
                if word in self.name and when == moment:
                    raise error(f"{self.name}: {moment}")

        def started(self):
            self._trouble("starts")
            facts = {**FACTS, "threads": int(self.settings["environment"]["OMP_NUM_THREADS"])}
            return {"facts": {**facts, "host_bytes": made.host_bytes}, "build_s": 1.0}

        def ask(self, steps):
            self._trouble("compiles" if not self.turns else f"turn {self.turns}")
            if self.job["batch_size"] > made.largest:
                raise OutOfMemory("no more")
            made.order.append(self.name)
            first, self.turns = self.turns == 0, self.turns + 1
            seconds = [5.0 if first else 0.1] + [0.1] * (steps - 1)
            peak = {"peak_memory_mb": made.peak_mb, "host_bytes": made.host_bytes}
            return {"losses": [6.9] * steps, "seconds": seconds, "ops": {}, **peak}

    monkeypatch.setattr(bench, "Child", Pretended)
    monkeypatch.setattr(bench, "installed", lambda python, packages: set(packages))
    return made


def run(**settings):
    return bench.run(bench.BenchOptions("vit_debug", **settings))


def test_rows_take_turns_each_round_in_another_order(machine):
    found = run(rounds=3, steps=2)
    jax, torch, tensorflow = (f"{name} · float32 · auto · override" for name in BACKENDS)
    once, turned = [jax, torch, tensorflow], [torch, tensorflow, jax, tensorflow, jax, torch]
    assert machine.order == [*once, *once, *turned]
    assert machine.alive == 0 and machine.most == 3
    for row in found["rows"]:
        assert len(row["seconds"]) == 6
        assert (row["rate"], row["compile_s"], row["group"]) == (80.0, 4.9, 0)
        assert row["label"] == f"{row['backend']} · float32 · none · override"


def test_no_more_are_alive_than_may_be_or_find_memory(machine):
    found = run(together=2, rounds=1)
    assert machine.most == 2
    assert [row["group"] for row in found["rows"]] == [0, 0, 1]
    machine.most, machine.host_bytes = 0, int(1.2 * 100 * MIB)
    found = run(precisions=("float32", "bfloat16"), rounds=1)
    assert machine.most == 1
    assert [row["group"] for row in found["rows"]] == [0, 1, 2, 3, 4, 5]


def test_a_row_that_fails_leaves_the_others(machine):
    machine.troubles = {"jax": ("compiles", ChildError), "torch": ("turn 2", ChildError)}
    jax, torch, tensorflow = run(rounds=4)["rows"]
    assert jax["failed"] == "jax · float32 · auto · override: compiles"
    assert torch["failed"] == "torch · float32 · auto · override: turn 2"
    assert tensorflow["failed"] is None and len(tensorflow["seconds"]) == 4
    assert machine.alive == 0


def test_tf32_is_asked_for_once_on_each_backend(machine):
    machine.troubles = {"tf32": ("starts", LeftOut)}
    found = run(precisions=("tf32", "float32"), attention=("generic", "fused"), rounds=1)
    assert {row["precision"] for row in found["rows"]} == {"float32"}
    assert found["left_out"] == [
        f"left out: {name} · tf32 · auto · generic attention: starts" for name in BACKENDS
    ]


def test_losses_that_differ_end_it_before_anything_is_timed(machine, monkeypatch):
    monkeypatch.setattr(bench, "differences", lambda rows: ["a differs", "b differs"])
    with pytest.raises(bench.Refused, match=r"^a differs; b differs$"):
        run()
    assert machine.alive == 0 and len(machine.order) == 3


@pytest.mark.parametrize(("memory", "expected"), [(None, 37), (100 * MIB, 37), (99 * MIB, 0)])
def test_the_largest_batch_is_looked_for_in_other_processes(machine, memory, expected):
    found = run(backends="torch", largest_batch=True, memory=memory, rounds=1)
    row = found["rows"][0]
    assert 0 <= expected - row["largest_batch"] <= expected / 16
    assert machine.alive == 0 and machine.most == 1

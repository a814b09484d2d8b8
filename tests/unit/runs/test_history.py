"""history.csv: its columns, and what a resumed run keeps of it."""

import csv

from kmodels.runs.history import COLUMNS, History


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def step(number, **values):
    return {"row": "step", "epoch": 1, "step": number, "loss": 0.5, **values}


def test_metrics_of_its_own_get_a_column_each(tmp_path):
    path = tmp_path / "history.csv"
    history = History(path)
    history.add([step(1), step(2)])
    assert list(read(path)[0]) == list(COLUMNS)
    history.add([{"row": "epoch", "epoch": 1, "step": 2, "loss": 0.5, "margin": 0.1 + 0.2}])
    history.add([step(3, val_margin=1e-9)])
    rows = read(path)
    assert list(rows[0]) == [*COLUMNS, "margin", "val_margin"]
    assert [row["margin"] for row in rows] == ["", "", repr(0.1 + 0.2), ""]
    assert rows[3]["val_margin"] == "1e-09"


def test_a_resumed_run_reads_them_back(tmp_path):
    path = tmp_path / "history.csv"
    first = History(path)
    first.add([step(1, margin=0.25), step(2, margin=0.5)])
    with path.open("a") as file:
        file.write("step,1,3")  # the process was killed meanwhile
    resumed = History(path, until=1)
    assert resumed.rows == [step(1, margin=0.25)]
    resumed.add([step(2, margin=0.75)])
    assert [row["margin"] for row in read(path)] == ["0.25", "0.75"]

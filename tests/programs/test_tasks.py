"""Each page of docs/tasks begins with commands that run from an installed wheel, as they stand.

What a block needs beside one backend stands in front of it: "Needs `pip install
"kmodels[export]"`."
"""

import json
import os
import re
import subprocess
import tempfile
import tomllib
from pathlib import Path

import pytest

import installed_wheel

ROOT = Path(__file__).resolve().parents[2]
PAGES = {page.stem: page for page in sorted((ROOT / "docs" / "tasks").glob("*.md"))}
BACKENDS = {"jax", "torch", "tensorflow"}
# The last line of a run.
END = r"report: run/report\.html\n"
# A page, the number of its block, a backend to run it on, and what the output ends with. Each page
# runs once, and on JAX and TensorFlow one page each: there a training step takes long to compile.
RUNS = [
    (
        "fine_tune_vit",
        0,
        "torch",
        rf"{END}(images/\S+ +\w+ \d+\.\d%\n){{2}}160 images, .*\ntop-1 \d.*\n(.*\n)+"
        r"rings/000\.png shows (rings|stripes)\n",
    ),
    ("fine_tune_gemma", 0, "torch", rf" +after +(billing|shipping)\n(.*\n)*{END}"),
    ("prefer", 0, "torch", rf"  validation +accuracy (.*\n)+{END}"),
    ("reward", 0, "torch", rf"  validation +reward_before (.*\n)+{END}"),
    ("chat", 0, "torch", r"What would you like to know\?\nI am a Gemma of .* parameters\.\n"),
    # 1.4 was seen; with weights that are others each time 0.98 to 2.3, which once was too little.
    ("peft_adapters", 0, "torch", r"up to [1-3]\.\d+\n.* differ by 0\nadapter_config\.json\n.*\n"),
    ("resume", 0, "torch", rf"exit code 137\n(.*\n)*resumed from .* at step \d+\n(.*\n)*{END}"),
    ("many_gpus", 0, "jax", rf"{END}trained on cpu x8\n"),
    ("many_gpus", 1, "torch", rf"  test +accuracy .*\n{END}"),
    ("slow_op", 0, "torch", r"  attention +2 x override\n  dense +10 x override\n(  .*\n)*"),
    ("own_kernel", 0, "torch", r"your overrides +│ sdpa \(attention\)(.*\n)*\d+ calls of sdpa\n"),
    ("own_kernel", 1, "jax", r"\d+ of 52 calls ran on jax; values and gradients within .*\n"),
    ("own_kernel", 2, "tensorflow", r"\n2 of 6 calls ran on tensorflow; values and .*\n"),
    ("keras_model", 0, "tensorflow", r"held out: 0\.9\d\nstep_00000090\nstep_00000092\n"),
]
# These ask for more than one environment has but the full one.
ACROSS = [
    ("export", 0, "tensorflow", r"(vit\.onnx|vit\.tflite|gemma\.gguf|\n)+"),
    ("tune", 0, "torch", r"best: \{'learning_rate': 0\.\d+, 'weight_decay': 0\.0\d*\}\n"),
    ("tune", 1, "torch", r"best: 0\.003\n(.*\n)*2\n"),
    ("serve_on_ray", 0, "torch", r"of France is Paris\.\nThe capital of Italy is Rome\.\n(.*\n)*"),
    ("change_backend", 0, "jax", rf"at step 88\n(.*\n)* +4/4 .*\n(.*\n)*{END}"),
]
# These start a Ray cluster of their own.
CLUSTERS = [("tune", 1), ("serve_on_ray", 0)]
# The programs of these are in the tests of recipes and tools, too; a run takes up to 30 s.
NIGHTLY = [
    *(("fine_tune_gemma", 0), ("prefer", 0), ("reward", 0), ("chat", 0), ("many_gpus", 1)),
    *(("many_gpus", 0), ("own_kernel", 1), ("own_kernel", 2), ("export", 0)),
    *(("change_backend", 0), ("tune", 0), *CLUSTERS),
]
NEEDS = re.compile(r'Needs\s+`pip install "kmodels\[([\w,]+)\]"`')
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _block(page, number):
    """The commands of a block, and the extras that the text in front of it asks for."""
    text = PAGES[page].read_text()
    found = list(BLOCK.finditer(text))
    before = text[found[number - 1].end() if number else 0 : found[number].start()]
    return found[number][1], {name for names in NEEDS.findall(before) for name in names.split(",")}


def _cases():
    here = [run for run in RUNS if run[2] == os.environ["KERAS_BACKEND"]]
    marked = [(run, pytest.mark.each_backend) for run in here]
    marked += [(run, pytest.mark.across(run[2])) for run in ACROSS]
    return [
        pytest.param(
            *(page, number, ending),
            id=f"{page}-{number}",
            marks=[mark, *[pytest.mark.nightly] * ((page, number) in NIGHTLY)],
        )
        for (page, number, _, ending), mark in marked
    ]


def _run(programs, tmp_path, commands):
    """The output of commands in an empty folder, for a person whose home is empty."""
    folder, home = tmp_path / "folder", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    # The paths of Ray's sockets have to be short, and its logs stay when it ends.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as short:
        env = installed_wheel.variables(programs, home) | {"RAY_TMPDIR": short}
        env["PYTHON_EXEC"] = str(programs / "python")  # for the processes that torchrun starts
        done = subprocess.run(
            ["bash", "-e"],
            input=commands, cwd=folder, env=env, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert not [*home.glob("*ray*"), *home.glob(".ray*")]
    return done.stdout


@pytest.mark.parametrize(("page", "number", "ending"), _cases())
def test_the_commands_run(page, number, ending, forked_programs, tmp_path):
    shown = _run(forked_programs, tmp_path, _block(page, number)[0])
    assert re.search(f"{ending}$", shown), shown[-3000:]


def test_it_is_the_wheel_that_runs(programs, tmp_path):
    """The checkout is not on the path, nothing imported comes from it, and no variable is set."""
    told = """
import json, os, sys
variables = [name for name in os.environ if name.startswith(("KERAS_", "KMODELS_"))]
import kmodels, kmodels.runs.recipe
shipped = kmodels.runs.recipe.load("vit").__file__
home = os.listdir(os.environ["HOME"])
print(json.dumps([sys.path, kmodels.__file__, shipped, os.listdir(), home, variables]))
"""
    commands = f"python - <<'PY'\n{told}PY\nkmodels --version\n"
    shown = _run(programs, tmp_path, commands).splitlines()
    path, package, recipe, here, home, variables = json.loads(shown[-2])
    place = str(programs.parent)
    assert package.startswith(place) and recipe.startswith(place)
    holding = [folder for folder in path if (Path(folder) / "kmodels/__init__.py").is_file()]
    assert [folder.startswith(place) for folder in holding] == [True]
    assert not {str(ROOT), str(ROOT / "src"), str(ROOT / "tests")} & set(path)
    assert here == home == variables == []
    assert shown[-1].startswith("kmodels ")


def test_the_wheel_describes_itself_without_dead_links(programs):
    (metadata,) = programs.parent.glob("lib/python*/site-packages/kmodels-*.dist-info/METADATA")
    text = metadata.read_text()
    assert "Description-Content-Type: text/markdown\n" in text and "\n# kmodels\n" in text
    assert not re.search(r"\]\((?!https?:|#)", text)


def test_each_page_is_listed_runs_and_begins_with_its_commands():
    assert {run[0] for run in (*RUNS, *ACROSS)} == set(PAGES)
    for place in ("README.md", "docs/README.md", "mkdocs.yml"):
        listed = re.findall(r"tasks/(\w+)\.md", (ROOT / place).read_text())
        assert sorted(set(listed)) == list(PAGES), place
    for name, page in PAGES.items():
        title, sentence, fence = page.read_text().split("\n\n")[:3]
        assert re.fullmatch(r"# [^\n]+", title), name
        assert sentence.endswith(".") and fence.startswith("```sh\n"), name


def test_what_a_page_needs_is_said():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for page, number, backend, _ in (*RUNS, *ACROSS):
        commands, needs = _block(page, number)
        assert needs <= set(project["optional-dependencies"])
        # A block that names backends asks for these, and runs on the first it is listed with.
        named = set(re.findall(r"KERAS_BACKEND=(\w+)", commands))
        assert needs & BACKENDS == named
        across = (page, number) in {run[:2] for run in ACROSS}
        assert across == bool(needs - {backend})

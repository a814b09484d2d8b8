"""The `kmodels` command as a whole: what it shows by itself, and the recipes by name."""

import ast
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from command_line import run
from kmodels import __version__
from kmodels.runs import recipe
from kmodels.tools import cli

GROUP: Any = typer.main.get_command(cli.app)
COMMANDS = GROUP.commands

ROOT = Path(__file__).resolve().parents[3]


def test_alone_it_shows_an_example_of_each_command(capsys):
    assert run() == 0
    shown = capsys.readouterr().out
    commands = COMMANDS
    assert set(recipe.RECIPES) < set(commands)
    for command in commands:
        assert f"  kmodels {command} " in shown
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_the_version_also_as_a_module(capsys, monkeypatch):
    assert run("--version") == 0
    monkeypatch.setattr("sys.argv", ["kmodels", "--version"])
    with pytest.raises(SystemExit):
        runpy.run_module("kmodels", run_name="__main__")
    assert capsys.readouterr().out == f"kmodels {__version__}\n" * 2


@pytest.mark.parametrize("name", COMMANDS)
def test_without_a_backend_there_is_help_and_else_a_line(name, capsys, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "wrong")
    assert run(name, "--help") == 0
    shown = capsys.readouterr().out
    assert f"Usage: kmodels {name} " in shown
    if name in recipe.RECIPES:
        assert f"kmodels {name}" in shown.split("Usage:")[1].split("\n", 1)[1]
        assert "recipes/" not in shown and "--learning-rate" in shown
    command = COMMANDS[name]
    needed = []
    for parameter in command.params:
        if parameter.required:
            needed += [*[o for o in parameter.opts if o.startswith("--")][:1], "any"]
    assert run(name, *needed) == 2
    shown = capsys.readouterr().err
    assert ": KERAS_BACKEND is 'wrong'; choose one of jax, torch, tensorflow" in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("vitt",), "kmodels: No such command 'vitt'. Did you mean 'vit'?"),
        (("vit", "--stepps", "5"), "vit: error: unknown flag --stepps; did you mean --steps?"),
        (("vit", "--data", "folder:nowhere"), "nowhere"),
        (("doctor", "--jsn"), "kmodels: unknown flag --jsn"),
    ],
)
def test_wrong_uses_give_a_line(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    shown = capsys.readouterr()
    assert words in shown.err and not shown.out
    assert shown.err.count("\n") == 1


def test_text_of_users_is_not_read_as_markup():
    """rich takes "[torch]" for markup and ":cat:" for a picture unless a console is told not to."""
    consoles = [
        (file.name, {k.arg: ast.unparse(k.value) for k in call.keywords})
        for file in sorted(Path(cli.__file__).parents[1].rglob("*.py"))
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Console"
    ]
    assert len(consoles) > 1
    for name, given in consoles:
        assert given.get("markup") == given.get("emoji") == "False", name


REGISTERED = {
    one.name or getattr(one.callback, "__name__", "") for one in cli.app.registered_commands
}


@pytest.mark.parametrize("name", sorted(REGISTERED))
def test_help_has_a_short_flag_and_no_twins_of_switches_that_are_off(name, capsys):
    assert run(name, "-h") == 0
    shown = capsys.readouterr().out
    assert run(name, "--help") == 0
    assert capsys.readouterr().out == shown
    # On by default, or chosen from the data.
    switches = {"segment": {"--no-batch-norm", "--no-flip"}, "gemma": {"--no-pack"}}
    on = {**switches, "detect": {"--no-flip"}}.get(name, set())
    found = {word for word in shown.split() if word.startswith("--no-")}
    assert found <= {"--no-thinking", *on}, name


def test_the_wheel_holds_every_recipe():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    included = wheel["targets"]["wheel"]["force-include"]
    files = {f"recipes/{path.name}" for path in (ROOT / "recipes").glob("*.py")}
    assert included == {file: f"kmodels/{file}" for file in (*files, "recipes/settings")}
    assert {f"recipes/{name}.py" for name in recipe.RECIPES.values()} == files


def test_a_recipe_that_is_not_installed(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(recipe, "FOLDERS", (tmp_path,))
    assert run("vit") == 2
    assert "vit.py is not in" in capsys.readouterr().err

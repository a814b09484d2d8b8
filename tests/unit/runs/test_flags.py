"""Recipes' command lines: flags of a dataclass, what is given and what is not, errors, the help."""

import dataclasses
import json
import re

import pytest
import yaml

from command_line import run
from kmodels.runs.run_folder import OF_A_CALL, Folder
from kmodels.runs.settings import GROUPS, Common, flag, parse, shipped
from recipe_modules import RECIPES, load
from refusals import refused


@dataclasses.dataclass(frozen=True)
class Settings(Common):
    rate: float = flag(0.5, "a share of 100 %", small=0.25)
    name: str | None = flag(None, "a text")
    flip: bool = flag(True, "a switch that is on")
    kind: str = flag("a", "one of two", choices=("a", "b"))
    level: int = flag(1, "one of two numbers", choices=(1, 2))


def _fields(path):
    return dataclasses.fields(load(path.stem).Settings)


def test_values_have_the_types_of_their_fields():
    words = "--rate nan --name=x=y --no-flip --kind b --level 2 --steps 3 --seed -1 --batch-size=8"
    found = parse(Settings, words.split())
    assert found.rate != found.rate and isinstance(found.rate, float)
    assert (found.name, found.flip, found.kind, found.level) == ("x=y", False, "b", 2)
    assert (found.steps, found.seed, found.batch_size) == (3, -1, 8)
    assert type(found.level) is type(found.steps) is int
    assert found == dataclasses.replace(
        Settings(rate=found.rate), name="x=y", flip=False, kind="b", level=2, steps=3, seed=-1,
        batch_size=8,
    )  # fmt: skip
    assert parse(Settings, []) == Settings()
    assert parse(Settings, ["--resume", "--resume"]).resume
    refused("unknown flag --no-resume", parse, Settings, ["--no-resume"])


def test_small_defaults(monkeypatch):
    monkeypatch.setenv("KMODELS_SMALL", "1")
    assert parse(Settings, []).rate == 0.25
    assert parse(Settings, ["--rate", "0.5"]).rate == 0.5
    assert parse(Settings, []).kind == "a"


def test_what_is_not_given_is_that_of_the_run(tmp_path):
    former = {"recipe": "r", "rate": 0.1, "flip": False, "out": "elsewhere", "resume": True}
    (tmp_path / "config.json").write_text(json.dumps({**former, "gone": 1}))
    found = parse(Settings, ["--evaluate", "--out", str(tmp_path), "--rate", "0.5"])
    # A value that is given counts though it is the default.
    assert (found.rate, found.flip, found.evaluate) == (0.5, False, True)
    assert (found.out, found.resume) == (str(tmp_path), False)
    assert parse(Settings, ["--out", str(tmp_path)]).flip


LEVELS = [f" a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)]
BOMB = "name:\n a0: &a0 x\n" + "".join(LEVELS)


def written(folder, text, name="settings.yaml"):
    (folder / name).write_text(text)
    return ["--config", str(folder / name)]


def test_a_file_comes_before_defaults_and_after_flags(tmp_path):
    text = "recipe: r\nrate: 1e-3\nname: [a, 2]\nflip: false\nkind: b\nbatch-size: 8\nsteps: null\n"
    # In YAML `on` is true, and 010 is 8.
    words = written(tmp_path, f"{text}on: ray\nseed: 010\n")
    values = {"rate": 1e-3, "name": "a,2", "flip": False, "kind": "b", "batch_size": 8}
    values |= {"on": "ray", "seed": 10}
    assert parse(Settings, words, recipe="r") == Settings(**values, config=words[1])
    found = parse(Settings, [*words, "--rate", "0.5", "--flip"], recipe="r")
    assert (found.rate, found.flip, found.kind) == (0.5, True, "b")
    assert parse(Settings, written(tmp_path, "out: there\n")).out == "there"


def test_the_config_of_a_run_starts_another_one(tmp_path):
    run = Settings(rate=0.1, out="former", resume=True, mesh="data=2")
    text = json.dumps({"recipe": "r", **dataclasses.asdict(run)})
    words = written(tmp_path, text, "config.json")
    assert parse(Settings, words, recipe="r") == Settings(rate=0.1, mesh="data=2", config=words[1])
    other = "config.json has settings of the recipe r; this is other"
    refused(other, parse, Settings, words, recipe="other")


def test_a_file_comes_after_the_run_that_continues(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"rate": 0.1, "kind": "b"}))
    words = written(tmp_path, "rate: 0.2\n")
    found = parse(Settings, [*words, "--out", str(tmp_path), "--resume"])
    assert (found.rate, found.kind) == (0.2, "b")


def test_each_setting_that_a_resumed_run_changes_is_named(tmp_path, capsys):
    def begin(**values):
        folder = Folder("r", str(tmp_path), Settings(**values), resume=True)
        folder.write_config()
        folder.close()
        return " ".join(capsys.readouterr().out.split())

    assert begin(name="s3://a:b@c") == begin(name="s3://a:b@c", resume=True, out="there") == ""
    fixed = {*OF_A_CALL, "name"}
    for field in dataclasses.fields(Settings):
        if field.name not in fixed:
            flag = f"--{field.name.replace('_', '-')}"
            said = f"changed since the run began: {flag} was {field.default}, is other"
            assert begin(**{field.name: "other"}, name="s3://a:b@c", resume=True) == said
            begin(name="s3://a:b@c")


def test_an_edited_config_of_the_run_is_checked(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"rate": "0.1", "steps": 2.0}))
    words = ["--out", str(tmp_path), "--resume"]
    assert (parse(Settings, words).rate, parse(Settings, words).steps) == (0.1, 2)
    (tmp_path / "config.json").write_text(json.dumps({"rate": "much"}))
    refused("config.json: .*'--rate'.*'much'", parse, Settings, words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rat: 1", "yaml: the recipe r takes no rat; did you mean rate?"),
        ("xyzzy: 1", "the recipe r takes no xyzzy; it takes batch_size, "),
        ("versions: {}\nrate: 1", "the recipe r takes no versions"),
        ("recipe: q\nrate: 1", "has settings of the recipe q; this is r"),
        ("rate: much", "settings.yaml: .*'--rate'.* number|float.*'much'"),
        ("steps: 2.5", "settings.yaml: .*'--steps'.* integer.*'2.5'"),
        ("kind: c", "'--kind': 'c' is not one of 'a', 'b'"),
        ("kind: null", "kind is null; give a value, or leave it out"),
        ("name: yes", "name is True; give a text or a number, in quotes"),
        ("name: 2026-01-02", "name is datetime.date.*; give a text or a number"),
        ("name: {a: 1}", "name is .*; give a text or a number"),
        ("name: [[a]]", "name is a list; give a text or a number"),
        # Each level has the one before ten times.
        (BOMB, "name is a dict; give a text or a number"),
        ("flip: 1", "flip is '1'; give true or false"),
        ("rate: 1\nrate: 2", "has rate twice"),
        ("batch-size: 1\nbatch_size: 2", "has batch_size twice"),
        ("keep: 1:30", "'--keep'.*'1:30'"),
        ("config: other.yaml", "config is 'other.yaml'; give --config only as a flag"),
        ("? [a]\n: 1", "is not readable: while constructing"),
        ("- rate", "is not a mapping; write lines such as epochs: 10"),
        ("", "is not a mapping"),
        ("rate: [", "is not readable: while parsing"),
        ("name: !!python/object/apply:os.getcwd []", "is not readable: could not determine a con"),
        ("name: &a [*a]", "is not readable|name is .*; give a text"),
        ("name: 2026-99-99", "is not readable: month must be in"),
        ("[" * 9000, "is not readable: "),
        ("name: " + "x" * 1_000_001, "has more than 1,000,000 characters"),
        ("data: s3://b:***@x", "takes no data|passwords are not saved"),
    ],
)
def test_a_wrong_file_is_one_line(text, message, tmp_path):
    refused(message, parse, Settings, written(tmp_path, text), recipe="r")


def test_wrong_json_and_missing_files_are_one_line(tmp_path):
    for text, message in (('{"rate": 1, "rate": 2}', "has rate twice"), ("{", "is not readable")):
        refused(message, parse, Settings, written(tmp_path, text, "a.json"), recipe="r")
    refused("json is not a mapping", parse, Settings, written(tmp_path, "[]", "a.json"))
    wrong = "--config vit_finetune is neither a file nor a name .*; did you mean vit_fine_tune?"
    refused(wrong, parse, Settings, ["--config", "vit_finetune"])
    hidden = written(tmp_path, "name: s3://user:***@bucket/x\n")
    refused("passwords are not saved; give --name again", parse, Settings, hidden)
    assert parse(Settings, [*hidden, "--name", "x"]).name == "x"


@pytest.mark.parametrize("name", shipped())
def test_shipped_settings_are_those_of_their_recipe(name, capsys):
    text = shipped()[name].read_text()
    [recipe] = re.findall("^recipe: (\\w+)$", text, re.MULTILINE)
    module = load(recipe)
    for flag_of_name in ("--config", "--recipe"):
        assert parse(module.Settings, [flag_of_name, name], recipe=recipe).config == name
    assert re.search(f" --(config|recipe) {name} ", text.splitlines()[0])
    assert run("recipe", name) == 0 and capsys.readouterr().out == text
    assert run("recipe") == 0
    listed = rf"^{name} +[A-Z].*--(config|recipe) {name} "
    assert re.search(listed, capsys.readouterr().out, re.MULTILINE)
    origin = yaml.safe_load(text).get("origin")
    if origin is not None:
        assert list(origin) == ["result", "hardware", "hours", "paper", "code"]
        assert " at " in origin["code"] and origin["paper"].startswith("arXiv:")
        with pytest.raises(SystemExit) as stop:
            parse(module.Settings, ["--recipe", "list"], recipe=recipe)
        shown = capsys.readouterr().out
        assert stop.value.code == 0 and re.search(f"^{name} .*{origin['paper']}", shown, re.M)


def test_published_settings_give_way_to_flags(monkeypatch, tmp_path):
    settings, [name] = load("vit").Settings, ["vit_s16_i1k"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("epochs: 1")  # which --config would read
    found = parse(settings, ["--recipe", name, "--epochs", "3"], recipe="vit")
    assert (found.epochs, found.batch_size, found.positions) == (3, 1024, "sincos")
    for words, message in (
        (["--recipe", "vit_s17"], "--recipe vit_s17 is not a name of kmodels recipe; did you mean"),
        (["--recipe", name, "--config", name], "--recipe and --config are both given; choose one"),
        (["--recipe", "gemma_lora"], "has settings of the recipe gemma_lora; this is vit"),
    ):
        refused(message, parse, settings, words, recipe="vit")
    for text, message in (("origin: x", "origin is 'x'"), ("origin: {a: 1}", "origin takes no a")):
        refused(message, parse, Settings, written(tmp_path, text), recipe="r")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rat 1", "unknown flag --rat; did you mean --rate\\?"),
        ("--Rate=1", "unknown flag --Rate; did you mean --rate\\?"),
        ("--xyzzy", "unknown flag --xyzzy; --help lists the flags"),
        ("-q", "unknown flag -q; --help lists the flags"),
        ("--rate much", "'--rate'.* number|float.*'much'"),
        ("--steps 2.5", "'--steps'.* integer.*'2.5'"),
        ("--steps=two", "'--steps'.* integer.*'two'"),
        ("--kind c", "'--kind': 'c' is not one of 'a', 'b'"),
        ("--level 3", "'--level': .*3.* is not one of '?1'?, '?2'?"),
        ("--name", "'--name' requires an argument"),
        ("--flip=1", "'--flip' does not take a value"),
        ("stray", "unexpected extra argument.*stray"),
    ],
)
def test_wrong_words_are_one_line(words, message):
    refused(message, parse, Settings, words.split())


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help(word, capsys):
    description = "What it is.\n\n    python one.py --flag  \\\n        --other\n\nMore of\nit."
    with pytest.raises(SystemExit) as stop:
        parse(Settings, [word], description, "one")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "python one.py --flag  \\\n" in shown and "More of it." in shown
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert any(line.endswith("a share of 100 % (default: 0.5)") for line in lines), shown
    assert "--flip / --no-flip a switch that is on (default: True)" in lines
    assert any(line.startswith("--name") and line.endswith("a text") for line in lines)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.py")), ids=lambda path: path.stem)
def test_the_help_of_a_recipe_fits_80_columns(path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    module = load(path.stem)
    with pytest.raises(SystemExit):
        module.main(["--help"])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    sections = dict(re.findall(r"^(\w+):\n((?:  .*\n)+)", shown, re.MULTILINE))
    assert list(sections) == [name for name in (*GROUPS, "Options") if name in sections]
    assert {"Data", "Model", "Optimizer", "Memory", "Cluster", "Output"} < sections.keys()
    assert " ".join(sections["Options"].split()) == "-h, --help Show this message and exit."
    for field in dataclasses.fields(module.Settings):
        [group] = [group for group, names in GROUPS.items() if field.name in names.split()]
        assert f"--{field.name.replace('_', '-')} " in sections[group]
        assert field.metadata["help"].split()[0] in shown


def test_groups_of_flags_are_those_of_recipes():
    flags = {field.name for path in RECIPES.glob("*.py") for field in _fields(path)}
    grouped = [name for names in GROUPS.values() for name in names.split()]
    assert sorted(grouped) == sorted(flags)


def test_help_is_not_read_as_markup(capsys):
    with pytest.raises(SystemExit):
        parse(Settings, ["--help"], "Reads [red]names[/red] and [/nothing] :cat:.", "one")
    assert "Reads [red]names[/red] and [/nothing] :cat:." in capsys.readouterr().out


# Settings that choose the records of a step, what its loss counts, or which models there are, and
# those that have an effect at the start of a run alone.
OF_DATA = {
    *("data", "images", "held_out", "image_size", "sequence_length", "template", "pack"),
    *("batch_size", "accumulate", "loss_on", "loss_normalization", "rates", "seed"),
    *("positions", "kernel_std", "layer_scale", "head_std", "pooled_norm", "teacher_epochs"),
    "first_steps",
}


def test_a_resumed_run_has_the_data_of_the_former():
    for path in RECIPES.glob("*.py"):
        fields = {field.name for field in _fields(path)}
        assert (path.stem, fields & OF_DATA - {*load(path.stem).FIXED}) == (path.stem, set())


@pytest.mark.parametrize(
    ("recipe", "words", "reason"),
    [
        ("vit", "--resources GPU=1", "without --on"),
        ("vit", "--drop-path-constant", "without --drop-path"),
        ("vit", "--recipe vit_deit3_b --erasing-noise", "without --erasing"),
        ("vit_probe", "--epochs 20", "with --tune none"),
        ("vit_probe", "--tune grid --learning-rate 1", "with --tune grid"),
        ("gemma_lora", "--workers 2", "without --on"),
        ("gemma_lora", "--weights x --first-steps 9", "with --weights x"),
        ("gemma_lora", "--quantize nf4 --export", "with --quantize nf4"),
        ("prefer", "--method kto --margin 1", "with --method kto"),
        ("caption", "--alpha 8", "without --rank"),
        ("segment", "--queries 9", "with --head linear"),
        ("segment", "--head eomt --no-batch-norm", "with --head eomt"),
        ("detect", "--rank 2", "with --tune all"),
        ("dino", "--center-momentum 0.5", "with --centering sinkhorn_knopp"),
        ("dino", "--temperature-warmup 0.5", "without --first-temperature"),
        ("distill", "--teacher x --teacher-epochs 3", "with --teacher x"),
    ],
)
def test_a_flag_without_effect_is_refused(recipe, words, reason):
    flag = next(word for word in reversed(words.split()) if word.startswith("--"))
    message = f"{flag} has no effect {reason}; leave it out"
    refused(message, parse, load(recipe).Settings, words.split(), recipe=recipe)


def test_a_setting_of_a_file_that_a_flag_leaves_without_effect_is_named(capsys):
    words = ["--recipe", "vit_fine_tune_mae", "--erasing", "0"]
    assert parse(load("vit").Settings, words, recipe="vit").erasing == 0
    said = "erasing_noise of vit_fine_tune_mae has no effect without --erasing\n"
    assert capsys.readouterr().out == said
    for path in RECIPES.glob("*.py"):
        names = {field.name for field in _fields(path)}
        needed = {field.metadata["needs"][0] for field in _fields(path) if field.metadata["needs"]}
        assert needed <= names

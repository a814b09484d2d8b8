"""Passwords of addresses are neither printed nor kept, and the address itself still opens."""

import dataclasses
import json
import pickle
from pathlib import Path

import pytest

from kmodels.checkpoint.callback import Checkpoint
from kmodels.core.errors import InputError, shown
from kmodels.runs import console, trackers
from kmodels.runs import settings as flags
from kmodels.runs.run_folder import Folder
from refusals import refused

SECRET = "sEcr3t"
# address -> what is shown of it
SPELLINGS = {
    f"s3://key:{SECRET}@host/run": "s3://***@host/run",
    f"s3:/key:{SECRET}@host/run": "s3:/***@host/run",
    f"S3://:{SECRET}/with/slashes@host/run": "S3://***@host/run",
    f"https://me:at@{SECRET}@host": "https://***@host",
    f"https://{SECRET}@host/run": "https://***@host/run",
    f"https://host/run?X-Amz-Signature={SECRET}&x=1": "https://host/run?X-Amz-Signature=***&x=***",
    f"gs://bucket/run?token={SECRET}": "gs://bucket/run?token=***",
    f"az://box/run?sv=1&sig={SECRET}%2F": "az://box/run?sv=***&sig=***",
    f"https://host/run#access_token={SECRET}": "https://host/run#access_token=***",
    f"https://host/run;key={SECRET}": "https://host/run;key=***",
    f"abfs://box:{SECRET}@account/run": "abfs://***@account/run",
    f"simplecache::s3://key:{SECRET}@host/run": "simplecache::s3://***@host/run",
    f"zip://x.zip::https://host/run?token={SECRET}": "zip://x.zip::https://host/run?token=***",
    f"--data=https://me:{SECRET}@host/run": "--data=https://***@host/run",
    f"cannot read 'https://host?sig={SECRET}': stop": "cannot read 'https://host?sig=***': stop",
}
UNCHANGED = (
    "gs://bucket/run", "s3://bucket/a@b/day=3/x", "http://host:8080/a@b", "abfs://box@account/run",
    "ssh://me@host/run", "hf://datasets/me/data@main/x", "gs://bucket/?.tar", "runs/vit-1",
    "a:b@c", "see https://host/page; give x=3", None, 3, True,
)  # fmt: skip


@dataclasses.dataclass
class Settings:
    data: str = flags.flag("digits", "data")
    out: str | None = flags.flag(None, "folder of the run")
    resume: bool = flags.flag(False, "go on")


@pytest.mark.parametrize(("text", "wanted"), SPELLINGS.items())
def test_every_spelling_of_a_password_is_hidden(text, wanted):
    assert shown(text) == wanted
    assert shown(wanted) == wanted
    assert shown({"data": [text, 3]}) == {"data": [wanted, 3]}


@pytest.mark.parametrize("value", UNCHANGED)
def test_what_is_no_password_stays(value):
    assert shown(value) == value


def said(address, folder, capsys):
    console.say(f"reading {address}")
    console.say_facts(f"of {address}", {"data": address})


def raised(address, folder, capsys):
    error = pickle.loads(pickle.dumps(InputError(f"there is nothing at {address}")))
    print(error, repr(error))


def kept_by_the_run(address, folder, capsys):
    run = Folder("vit", str(folder), Settings(address))
    run.begin(f"kmodels vit --data {address}")
    run.write_config()
    run.write_json("result.json", {"preset": address})
    run.close()


def kept_by_a_tracker(address, folder, capsys):
    pytest.importorskip("tensorboardX")
    trackers.start("tensorboard", folder, {"data": address}, 0)
    trackers.give_up()


def kept_by_a_checkpoint(address, folder, capsys):
    checkpoint = Checkpoint(folder, settings={"data": address}, origin=address)
    print(vars(checkpoint))


@pytest.mark.parametrize("address", list(SPELLINGS)[:13])
@pytest.mark.parametrize(
    "place", [said, raised, kept_by_the_run, kept_by_a_tracker, kept_by_a_checkpoint]
)
def test_no_place_has_the_password(place, address, tmp_path, capsys):
    place(address, tmp_path, capsys)
    written = b"".join(x.read_bytes() for x in tmp_path.rglob("*") if x.is_file()).decode("latin1")
    texts = written + capsys.readouterr().out
    assert "***" in texts
    assert SECRET not in texts


def test_a_resumed_run_is_given_the_address_again(tmp_path):
    address = f"s3://key:{SECRET}@host/data"
    kept = {"recipe": "vit", "data": shown(address)}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    words = ["--resume", "--out", str(tmp_path)]
    refused(r"--data was s3://\*\*\*@host/data", flags.parse, Settings, words, recipe="vit")
    again = flags.parse(Settings, [*words, "--data", address], recipe="vit")
    assert again.data == address


def test_a_message_about_a_storage_has_no_password_and_opens_the_real_one():
    pytest.importorskip("fsspec")
    from kmodels.core import remote

    address = f"memory://key:{SECRET}@host/none"
    assert remote.open_address(address).address == address
    for function in (remote.fetch, remote.local_copy):
        with pytest.raises(InputError, match=r"memory://\*\*\*@host/none") as error:
            function(Path(address))
        assert SECRET not in str(error.value)

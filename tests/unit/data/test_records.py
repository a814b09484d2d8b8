"""Tar shards and TFRecord files: what is in them, and what happens where they are not whole."""

import gzip
import json
import os
import pickle
import tarfile
import zlib

import numpy as np
import pytest

from kmodels.core.errors import InputError
from kmodels.data import ImageLoader, TarShards, TFRecords, open_dataset
from kmodels.data.records import expand
from record_files import crc32c, encoded, write_shard, write_tfrecords
from refusals import refused

rng = np.random.default_rng(0)
PICTURES = rng.integers(0, 256, (24, 6, 5, 3), "uint8")
LABELS = rng.integers(0, 4, 24)


def samples_of_a_shard(numbers=range(24)):
    return {
        f"dir.d/{n:04d}": {"png": PICTURES[n], "cls": LABELS[n], "json": {"n": n}} for n in numbers
    }


def records():
    return [
        {"image/encoded": encoded(picture, "png"), "image/class/label": label}
        for picture, label in zip(PICTURES, LABELS, strict=True)
    ]


def test_a_shard(tmp_path):
    boxes = {"label": 2, "boxes": [1]}
    thing = {"one.txt": "ähm", "left.npy": np.arange(3), "JSON": boxes, "x": b"\0"}
    archive = write_shard(tmp_path / "a.tar", {"a": thing, "__meta__": {"txt": "no"}, "b": thing})
    shards = TarShards(str(archive))
    assert len(shards) == 2
    found = shards[-1]
    np.testing.assert_array_equal(found.pop("left.npy"), [0, 1, 2])
    assert found == {"one.txt": "ähm", "json": boxes, "x": b"\0"}
    assert shards.label(0) == 2 and shards.name(1) == f"{archive}: sample b"
    assert TarShards(str(archive), {"t": "one.txt"})[0] == {"t": "ähm"}
    without = TarShards(str(archive), {"image": "png"})
    refused("sample a has no png, only one.txt, left.npy, json, x", without.__getitem__, 0)
    with pytest.raises(IndexError):
        shards[2]


@pytest.mark.parametrize("kind", ["tar", "tfrecord"])
@pytest.mark.parametrize("workers", [0, 1])
def test_open_dataset(tmp_path, kind, workers):
    if kind == "tar":
        write_shard(tmp_path / "a-0008.tar", samples_of_a_shard(range(10)))
        write_shard(tmp_path / "a-0009.tar", samples_of_a_shard(range(10, 24)))
        spec = f"{tmp_path}/a-{{0008..0009}}.tar"
    else:
        write_tfrecords(tmp_path / "a.tfrecord-00000-of-00002", records()[:10])
        write_tfrecords(tmp_path / "a.tfrecord-00001-of-00002", records()[10:])
        spec = f"{tmp_path}/a.tfrecord-*"
    data = open_dataset(spec, validation_split=0.25)
    assert data.image_shape == (6, 5, 3)
    assert data.class_names == ["0", "1", "2", "3"]
    parts = [data.train, data.validation, data.test]
    assert [len(part) for part in parts] == [12, 6, 6]
    seen = []
    for part in parts:
        loader = ImageLoader(part, 5, workers=workers)
        for images, labels in (loader[n] for n in range(len(loader))):
            for image, label in zip(np.round(images * 255).astype("uint8"), labels, strict=True):
                number = int(np.flatnonzero((image == PICTURES).all((1, 2, 3)))[0])
                assert label == LABELS[number]
                seen.append(number)
        loader.close()
    assert sorted(seen) == list(range(24))


def test_pixels_in_a_record(tmp_path):
    given = [{"image_raw": PICTURES[0].tobytes(), "label": 3, "height": 6, "width": 5, "depth": 3}]
    found = TFRecords(str(write_tfrecords(tmp_path / "a.tfrecord", given)))
    np.testing.assert_array_equal(found.picture(0), PICTURES[0])


def test_numbers_of_a_record(tmp_path):
    assert crc32c(b"123456789") == 0xE3069283  # so that the files of these tests are right
    given = {"w": np.float32([1.5, -2, 3e38]), "n": [-1, 2**40], "one": 7, "text": b"ab", "no": []}
    path = write_tfrecords(tmp_path / "a.tfrecord", [given, given])
    found = pickle.loads(pickle.dumps(TFRecords(str(path))))[1]
    assert found["w"].dtype == "float32" and found["n"].dtype == "int64"
    np.testing.assert_array_equal(found["w"], given["w"])
    assert found["n"].tolist() == given["n"] and found["one"].shape == () and found["one"] == 7
    assert found["text"] == b"ab" and len(found["no"]) == 0


def read_all(make, path):
    found = make(str(path))
    return [found[number] for number in range(len(found))]


def test_every_byte_of_a_record_is_checked(tmp_path):
    path = tmp_path / "a.tfrecord"
    whole = write_tfrecords(path, [{"a": 1, "b": b"xyz"}, {"a": 2}]).read_bytes()
    first = 12 + int.from_bytes(whole[:8], "little") + 4
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        refused(f"a.tfrecord: record {int(place >= first)} is ", read_all, TFRecords, path)
        path.write_bytes(whole[:place])
        expected = {0: "holds no records"}.get(place, f"record {int(place > first)} is cut short")
        if place == first:
            assert len(read_all(TFRecords, path)) == 1  # a whole file of one record
        else:
            refused(expected, read_all, TFRecords, path)


def test_a_record_that_is_no_example(tmp_path, monkeypatch):
    monkeypatch.setattr("record_files.example", lambda sample: sample)
    path = write_tfrecords(tmp_path / "a.tfrecord", [b"\x0a\xff\xff", rng.bytes(40)])
    for number in range(2):
        read = TFRecords(str(path)).__getitem__
        refused(f"record {number} is not a tf.train.Example", read, number)


def test_a_shard_that_is_not_whole(tmp_path):
    path = write_shard(tmp_path / "a.tar", {str(n): {"txt": "x" * 600, "cls": 1} for n in range(3)})
    whole = path.read_bytes()
    good = read_all(TarShards, path)
    for size in range(0, len(whole), 512):
        path.write_bytes(whole[: size + 100])
        try:
            assert read_all(TarShards, path) == good  # what follows the last member
        except InputError as error:
            assert str(path) in str(error) and "\n" not in str(error)
    path.write_bytes(b"")
    refused("not a readable tar file|holds no samples", TarShards, str(path))


class Executes:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_is_unpickled(tmp_path):
    thing = Executes(tmp_path / "executed")
    content = encoded(np.array([thing], object), "npy")
    named = {"npy": content, "pyd": pickle.dumps(thing), "pickle": pickle.dumps(thing)}
    shards = TarShards(str(write_shard(tmp_path / "a.tar", {"a": named})), {"x": "npy"})
    refused(r"npy is damaged \(.*allow_pickle=False", shards.__getitem__, 0)
    held = {name: name for name in ("pyd", "pickle")}
    found = TarShards(str(tmp_path / "a.tar"), held)[0]
    assert found == {name: named[name] for name in held}
    assert not thing.path.exists()


def test_errors(tmp_path):
    shard = write_shard(tmp_path / "a.tar", {"a": {"png": PICTURES[0]}, "b": {"txt": "x"}})
    refused("a.tar: sample a has no label; give KEY.cls or KEY.json", open_dataset, str(shard))
    refused("sample b: no image in it, only txt", TarShards(str(shard)).picture, 1)
    no_number = write_shard(tmp_path / "b.tar", {"a": {"cls": "x"}})
    refused("cls is damaged", TarShards(str(no_number)).__getitem__, 0)
    twice = write_shard(tmp_path / "c.tar", {"a": {"txt": "x"}})
    twice.write_bytes(twice.read_bytes()[:1024] * 2 + bytes(1024))
    refused("has a.txt twice; give it once", TarShards, str(twice))
    (tmp_path / "d.tar").write_bytes(gzip.compress(shard.read_bytes()))
    refused("unpack it if it is compressed", TarShards, str(tmp_path / "d.tar"))
    record = write_tfrecords(tmp_path / "a.tfrecord", [{"a": 1}])
    refused("record 0 has no label; give a whole number as image/cl", open_dataset, str(record))
    without = TFRecords(str(record), {"b": "b"})
    refused("record 0 has no feature b, only a", without.__getitem__, 0)
    picture = TFRecords(str(record)).picture
    refused("no image under image/encoded, image, image_raw", picture, 0)
    packed = tmp_path / "b.tfrecord"
    packed.write_bytes(gzip.compress(record.read_bytes()))
    refused("b.tfrecord is compressed; unpack it, as by gunzip", TFRecords, str(packed))
    sizes = {f"{n}": {"png": np.zeros((4, 4 + n % 2, 3), "uint8"), "cls": 0} for n in range(20)}
    uneven = str(write_shard(tmp_path / "e.tar", sizes))
    refused(r"images differ in size \(4x4, 4x5, ...\); give image", open_dataset, uneven)
    assert open_dataset(uneven, image_size=(8, 8)).image_shape == (8, 8, 3)


def test_a_bad_picture_can_be_left_out(tmp_path):
    samples = samples_of_a_shard()
    samples["dir.d/0003"]["png"] = b"none"
    data = open_dataset(str(write_shard(tmp_path / "a.tar", samples)), skip_bad=True)
    assert len(data.skipped) == 1 and data.skipped[0][1] == "not an image that Pillow reads"
    assert len(data.train) + len(data.validation) + len(data.test) == 23


def test_names_of_several_files(tmp_path):
    for name in ("a-08", "a-09", "a-10", "b"):
        (tmp_path / name).touch()

    def names(pattern):
        return [path.name for path in expand(f"{tmp_path}/{pattern}")]

    assert names("a-{08..10}") == ["a-08", "a-09", "a-10"]
    assert names("{b,a-{08,10}}") == ["b", "a-08", "a-10"]
    assert names("a-?[89]") == ["a-08", "a-09"]
    refused("a-11 does not exist; .* names 2 files", names, "a-{10..11}")
    refused("no file fits", names, "c*")


def test_names_on_the_disk_are_no_patterns(tmp_path):
    paths = [tmp_path / name for name in ("a[1].tar", "{b,c}.tar", "deep/er/d.tar", "deep/d.tar")]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        assert expand(str(path)) == [path]
    assert expand(f"{tmp_path}/deep/**/d.tar") == sorted(paths[2:])
    assert expand(f"{tmp_path}/deep/{{d,[d],*}}.tar") == paths[3:]


def test_members_that_are_not_read(tmp_path):
    shard = write_shard(tmp_path / "a.tar", {"a": {"txt": "x"}})
    with tarfile.open(shard, "a") as archive:
        for name, kind in (("b.txt", tarfile.LNKTYPE), ("b.cls", tarfile.SYMTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "a.txt"
            archive.addfile(member)
    with pytest.warns(UserWarning, match=r"a\.tar: 2 members left out, .* sparse: b\.txt, b\.cls;"):
        assert len(TarShards(str(shard))) == 1
    joined = write_shard(tmp_path / "b.tar", {"a": {"txt": "x"}})
    joined.write_bytes(2 * joined.read_bytes())
    refused("b.tar continues after its end, as joined files do", TarShards, str(joined))


def npy(header):
    whole = encoded(np.zeros(3), "npy")
    start = whole.index(b"(3,)")
    return whole[:start] + header + whole[start + len(header) :]


@pytest.mark.parametrize(
    "header", [b"(3, ", b"(99999999999999,), }", b"(99999999999999999999,), }"]
)
def test_an_array_with_a_wrong_header(tmp_path, header):
    shard = write_shard(tmp_path / "a.tar", {"a": {"npy": npy(header)}})
    refused(r"sample a: npy is damaged \(", TarShards(str(shard)).__getitem__, 0)


PIXELS = {"label": 1, "height": 2, "width": 2, "depth": 3}
RAW = {
    "empty": {"image": b"", "label": 1},
    "a side of text": {"image_raw": bytes(12), **PIXELS, "height": b"two"},
    "negative sides": {"image_raw": bytes(12), **PIXELS, "height": -2, "width": -2},
    "no number": {"image_raw": bytes(12), **PIXELS, "height": np.float32(np.nan)},
    "two numbers": {"image_raw": bytes(12), **PIXELS, "height": [2, 2]},
}


@pytest.mark.parametrize("name", RAW)
def test_pixels_without_sides_are_no_image(tmp_path, name):
    path = write_tfrecords(tmp_path / "a.tfrecord", [RAW[name]])
    refused("record 0: not an image that Pillow reads", TFRecords(str(path)).picture, 0)


@pytest.mark.parametrize("kind", ["tar", "tfrecord"])
@pytest.mark.parametrize("label", [10**7, 2**40, 2**62])
def test_ids_are_no_classes(tmp_path, kind, label):
    path, image = tmp_path / f"a.{kind}", encoded(PICTURES[0], "png")
    if kind == "tar":
        write_shard(path, {"a": {"png": image, "cls": label}})
    else:
        write_tfrecords(path, [{"image": image, "label": label}])
    refused(f"label {label} is too large; number the classes from 0", open_dataset, str(path))


def test_the_first_length_may_look_compressed(tmp_path):
    other = len(write_tfrecords(tmp_path / "a", [{"b": bytes(35000)}]).read_bytes()) - 16 - 35000
    path = write_tfrecords(tmp_path / "a.tfrecord", [{"b": bytes(0x8B1F - other)}])
    assert path.read_bytes()[:2] == b"\x1f\x8b"
    assert len(TFRecords(str(path))[0]["b"]) == 0x8B1F - other
    path.write_bytes(zlib.compress(path.read_bytes()))
    refused("a.tfrecord is compressed; unpack it", TFRecords, str(path))


def test_a_sequence_example_is_no_example(tmp_path, monkeypatch):
    monkeypatch.setattr("record_files.example", lambda sample: sample)
    path = write_tfrecords(tmp_path / "a.tfrecord", [b"\x0a\x00\x12\x02\x0a\x00"])
    refused(r"\(it has feature_lists, as a SequenceEx", TFRecords(str(path)).__getitem__, 0)


@pytest.mark.across("tensorflow")
def test_a_file_that_tensorflow_wrote_and_reads(tmp_path):
    import tensorflow as tf

    path = str(tmp_path / "a.tfrecord")
    features = {
        "b": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"x", b"yz"])),
        "f": tf.train.Feature(float_list=tf.train.FloatList(value=[0.1, -2.5])),
        "i": tf.train.Feature(int64_list=tf.train.Int64List(value=[-(2**62), 5])),
    }
    example = tf.train.Example(features=tf.train.Features(feature=features))
    with tf.io.TFRecordWriter(path) as writer:
        for _ in range(3):
            writer.write(example.SerializeToString())
    found = TFRecords(path)
    assert len(found) == 3
    assert found[2]["b"] == [b"x", b"yz"] and found[2]["i"].tolist() == [-(2**62), 5]
    np.testing.assert_array_equal(found[2]["f"], np.float32([0.1, -2.5]))
    assert json.dumps(sorted(found[0])) == '["b", "f", "i"]'
    # And the writer of these tests writes what TensorFlow reads.
    given = {"f": np.float32([1, 2]), "i": [-3, 300], "b": b"abc"}
    raw = next(iter(tf.data.TFRecordDataset(str(write_tfrecords(tmp_path / "b", [given])))))
    again = tf.train.Example.FromString(raw.numpy()).features.feature
    assert list(again["i"].int64_list.value) == [-3, 300]
    assert list(again["f"].float_list.value) == [1, 2] and again["b"].bytes_list.value == [b"abc"]

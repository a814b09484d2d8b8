"""Hostile files, as bytes by what is wrong with them: zip, `.keras`, HDF5, npz, GGUF, pickles."""

import io
import os
import pickle
import stat
import struct
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign
import h5py
import numpy as np

CANARY = foreign.CANARY
MB = 2**20
COMMAND = f"touch {tempfile.gettempdir()}/{CANARY}"

PAYLOAD = pickle.dumps({"a": foreign.Payload()})


def entry(name: str, **changes: Any) -> zipfile.ZipInfo:
    """A member's description with changed fields."""
    found = zipfile.ZipInfo(name)
    for field, value in changes.items():
        setattr(found, field, value)
    return found


def archive(members: list[tuple[Any, bytes]], compression: int = zipfile.ZIP_STORED) -> bytes:
    """A zip of (name or description, content)."""
    stream = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(stream, "w", compression) as made:
        warnings.simplefilter("ignore")  # It warns of names that are there twice.
        for name, content in members:
            made.writestr(name, content)
    return stream.getvalue()


def patched(content: bytes, **fields: Any) -> bytes:
    """The archive with fields of its first member's directory entry changed."""
    places = {"flags": (8, "<H"), "method": (10, "<H"), "crc": (16, "<I"), "size": (24, "<I")}
    at = content.rindex(b"PK\x05\x06")
    start = struct.unpack_from("<I", content, at + 16)[0]
    changed = bytearray(content)
    for field, value in fields.items():
        place, kind = places[field]
        struct.pack_into(kind, changed, start + place, value)
    return bytes(changed)


def bombs(name: str, size: int) -> dict[str, bytes]:
    """A member of zeros, and many members that lie over each other."""
    plain = archive([(name, bytes(size))], zipfile.ZIP_DEFLATED)
    # One body, and a directory that names it again and again (Fifield 2019).
    end = plain.rindex(b"PK\x05\x06")
    start = struct.unpack_from("<I", plain, end + 16)[0]
    record, lists = plain[start:end], b""
    for number in range(200):
        other = f"{number:0{len(name)}d}".encode()
        lists += record.replace(name.encode(), other if number else name.encode())
    tail = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 200, 200, len(lists), start, 0)
    return {"a bomb": plain, "members over each other": plain[:start] + lists + tail}


def archives(name: str, good: bytes, size: int) -> dict[str, bytes]:
    """Yields what may be wrong with a zip that should hold `name`."""
    whole = archive([(name, good)])
    link = entry(name, create_system=3, external_attr=(stat.S_IFLNK | 0o777) << 16)
    return {
        "empty": b"",
        "a text": b"no zip",
        "no members": archive([]),
        "cut directory": whole[:-30],
        "cut in half": whole[: len(whole) // 2],
        "no end": whole[: whole.rindex(b"PK\x05\x06")],
        "twice, the last one other": archive([(name, good), (name, b"other")]),
        "above": archive([(f"../{name}", good)]),
        "absolute": archive([(f"/etc/{CANARY}", good), (f"/tmp/{name}", good)]),
        "a link": archive([(link, b"/etc/passwd")]),
        "a folder": archive([(f"{name}/", b"")]),
        "locked": patched(whole, flags=1),
        "method 99": patched(whole, method=99),
        "wrong checksum": patched(whole, crc=1),
        "says it is smaller": patched(whole, size=3),
        "says it is larger": patched(whole, size=2**31),
        **bombs(name, size),
    }


def dangerous_configs() -> dict[str, Any]:
    """config.json files that would run something if anybody made what they name."""
    command = COMMAND

    def named(module: str | None, name: str, config: Any, registered: str | None = None) -> dict:
        return {
            "module": module, "class_name": name, "config": config, "registered_name": registered
        }  # fmt: skip

    code = {"class_name": "__lambda__", "config": {"value": "4wAAAAAAAA==", "defaults": None}}
    layers = [
        named("keras.layers", "Lambda", {"name": "lambda", "function": code}),
        named("keras.layers", "Lambda", {"function": named("builtins", "eval", command)}),
        named("keras.layers", "TorchModuleWrapper", {"module": "gASVAA=="}),
        named("keras.layers", "TFSMLayer", {"filepath": f"/etc/{CANARY}"}),
    ]
    return {
        **{
            f"layer {number}": named("keras", "Sequential", {"layers": [layer]})
            for number, layer in enumerate(layers)
        },
        "os.system": named("os", "system", {"command": command}),
        "eval": named("builtins", "eval", {"source": f"__import__('os').system({command!r})"}),
        "subprocess": named("subprocess", "Popen", {"args": command, "shell": True}),
        "a module of its own": named(CANARY, "Layer", {}),
        "an optimizer": {
            **named("keras", "Sequential", {"layers": []}),
            "compile_config": {"optimizer": named("os", "system", {"command": command})},
        },
        "registered": named(None, "system", {"command": command}, "os>system"),
        "no JSON": "{{{",
    }


def repacked(members: dict[str, bytes], **changed: bytes | str) -> bytes:
    """The `.keras` file with other members."""
    return archive([(name, content) for name, content in {**members, **changed}.items()])


def changed_h5(weights: bytes, change: Callable[[h5py.File], object]) -> bytes:
    """The weights after a change."""
    stream = io.BytesIO(weights)
    with h5py.File(stream, "r+") as file:
        change(file)
    return stream.getvalue()


def _instead(name: str, make: Callable[[h5py.File], object]) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file[name]
        made = make(file)
        if made is not None:
            file[name] = made

    return change


def hostile_h5(weights: bytes, outside: Path) -> dict[str, bytes]:
    """Weights that point elsewhere, take all memory, or are no weights."""
    kernel, shape = "layers/dense/vars/0", (4, 5)
    raw = outside.with_suffix(".raw")
    source = h5py.VirtualSource(str(outside), "data", shape=shape)
    layout = h5py.VirtualLayout(shape=shape, dtype="float32")
    layout[:] = source
    huge = (2**28, 2**28)

    def external(file: h5py.File) -> None:
        file.create_dataset(kernel, shape, "float32", external=[(str(raw), 0, 80)])

    def virtual(file: h5py.File) -> None:
        file.create_virtual_dataset(kernel, layout)

    def unallocated(size: tuple[int, int]) -> Callable[[h5py.File], None]:
        def make(file: h5py.File) -> None:
            file.create_dataset(kernel, size, "float32", chunks=(1024, 1024))

        return make

    def packed(file: h5py.File) -> None:
        data = np.zeros(64 * MB // 4, "float32")
        file.create_dataset(kernel, data=data, compression="gzip", compression_opts=1)

    changes: dict[str, Callable[[h5py.File], object]] = {
        "external link": _instead(kernel, lambda f: h5py.ExternalLink(str(outside), "data")),
        "external link to a group": _instead(
            "layers/dense", lambda f: h5py.ExternalLink(str(outside), "/")
        ),
        "link to /etc/passwd": _instead(kernel, lambda f: h5py.ExternalLink("/etc/passwd", "/")),
        "soft link": _instead(kernel, lambda f: h5py.SoftLink("/layers/dense_1/vars/0")),
        "link to nothing": _instead(kernel, lambda f: h5py.SoftLink("/nowhere")),
        "raw data elsewhere": _instead(kernel, external),
        "virtual data": _instead(kernel, virtual),
        "a circle": lambda f: f.__setitem__("layers/dense/round", f["layers"]),
        "huge and not there": _instead(kernel, unallocated(huge)),
        "4 GB and not there": _instead(kernel, unallocated((2**15, 2**15))),
        "compressed": _instead(kernel, packed),
        "a group": _instead(kernel, lambda f: f.create_group(kernel) and None),
        "a text": _instead(kernel, lambda f: "weights"),
        "texts": _instead(kernel, lambda f: np.full(shape, b"x")),
        "fields": _instead(kernel, lambda f: np.zeros(shape, [("a", "f4"), ("b", "f4")])),
        "whole numbers": _instead(kernel, lambda f: np.zeros(shape, "int32")),
        "complex": _instead(kernel, lambda f: np.zeros(shape, "complex64")),
        "a type": _instead(kernel, lambda f: np.dtype("float32")),
        "a scalar": _instead(kernel, lambda f: np.float32(1)),
        "transposed": _instead(kernel, lambda f: np.zeros(shape[::-1], "float32")),
        "no shape": _instead(kernel, lambda f: h5py.Empty("float32")),
        "missing": _instead(kernel, lambda f: None),
        "too much": lambda f: f.__setitem__("layers/other/vars/0", np.zeros(3, "float32")),
        "another count": _instead("optimizer/vars/3", lambda f: None),
        "no optimizer": _instead("optimizer", lambda f: None),
        "ten thousand arrays": lambda f: [f.__setitem__(f"g/{n}", 0.0) for n in range(10_000)],
        "deep": lambda f: f.__setitem__("/".join("x" * 3000), 0.0),
    }
    found = {name: changed_h5(weights, change) for name, change in changes.items()}
    return found | {"no h5": b"no h5", "nothing": b"", "cut": weights[:-50], "a pickle": PAYLOAD}


def npy(array: np.ndarray, header: bytes | None = None) -> bytes:
    """A member of an npz; with `header` in the place of its own."""
    stream = io.BytesIO()
    np.save(stream, array)
    if header is None:
        return stream.getvalue()
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(header)) + header + array.tobytes()


def _header(shape: str, kind: str = "'<f4'") -> bytes:
    text = f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}}}"
    return text.encode()


def hostile_npz(size: int) -> dict[str, bytes]:
    """npz files that nobody should load."""
    x = np.arange(8, dtype="float32")
    call = "__import__('os').system('true')"
    members = {
        "objects": npy(np.array([1, 2])).replace(b"'<i8'", b"'|O' "),
        "a huge shape": npy(x, _header("(1099511627776,)")),
        "a shape below zero": npy(x, _header("(-8,)")),
        "code in the header": npy(x, _header(f"({call},)")),
        "code as type": npy(x, _header("(8,)", call)),
        "a long header": npy(x, _header("(8,)") + b" " * 200_000),
        "a deep header": npy(x, b"(" * 100_000),
        "no array": b"text",
        "a pickle": PAYLOAD,
    }
    found = {what: archive([("a.npy", content)]) for what, content in members.items()}
    return found | archives("a.npy", npy(x), size)


class Call:
    """Unpickles as a call.

    Args:
        function: what is called.
        *arguments: with these.
    """

    def __init__(self, function: Callable, *arguments: Any):
        self.call = function, arguments

    def __reduce__(self) -> tuple:
        return self.call


def gguf_file(
    fields: list[bytes], tensors: list[bytes] | None = None, claims: tuple[int, int] | None = None
) -> bytes:
    """A GGUF file of any settings; `claims` are the numbers of tensors and fields it speaks of."""
    tensors = tensors or []
    numbers = claims or (len(tensors), len(fields))
    content = struct.pack("<4sIQQ", b"GGUF", 3, *numbers) + b"".join(fields) + b"".join(tensors)
    return content + bytes(-len(content) % 32)


def _field(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def hostile_gguf() -> dict[str, bytes]:
    """GGUF files whose description leads nowhere."""

    def listed(kind: int, count: int, data: bytes = b"") -> bytes:
        return gguf_file([_field(b"a", 9, struct.pack("<IQ", kind, count) + data)])

    deep = b"".join(struct.pack("<IQ", 9, 1) for _ in range(5000))
    tensor = struct.pack("<Q", 1) + b"t" + struct.pack("<I", 1)
    named = _field(b"general.architecture", 8, struct.pack("<Q", 6) + b"gemma3")
    return {
        "empty": b"",
        "the magic alone": b"GGUF",
        "version 1": struct.pack("<4sIQQ", b"GGUF", 1, 0, 0),
        "other byte order": struct.pack(">4sIQQ", b"GGUF", 3, 0, 0),
        "nothing in it": gguf_file([]),
        "fields without end": gguf_file([], claims=(0, 2**63)),
        "tensors without end": gguf_file([], claims=(2**63, 0)),
        "numbers without end": listed(0, 2**62),
        "texts without end": listed(8, 2**62),
        "a million texts": listed(8, 2**20),
        "a list of lists": listed(9, 2**40),
        "deep": gguf_file([_field(b"a", 9, deep)]),
        "a kind unknown": gguf_file([_field(b"a", 77, b"")]),
        "a list of a kind unknown": listed(77, 3),
        "a text past the end": gguf_file([_field(b"a", 8, struct.pack("<Q", 2**62))]),
        "a name past the end": gguf_file([struct.pack("<Q", 2**60) + b"a"]),
        "twice": gguf_file([_field(b"a", 4, bytes(4))] * 2),
        "alignment 0": gguf_file([_field(b"general.alignment", 4, bytes(4))]),
        "alignment huge": gguf_file([_field(b"general.alignment", 4, struct.pack("<I", 2**31))]),
        "a huge tensor": gguf_file([named], [tensor + struct.pack("<QIQ", 2**60, 0, 0)]),
        "a tensor past the end": gguf_file([named], [tensor + struct.pack("<QIQ", 8, 0, 2**60)]),
        "a tensor of a kind unknown": gguf_file([named], [tensor + struct.pack("<QIQ", 8, 99, 0)]),
        "the name is no text": gguf_file([_field(b"general.architecture", 4, bytes(4))]),
    }  # fmt: skip


def hostile_pictures(pairs: list[tuple[Any, bytes]], size: int) -> dict[str, bytes]:
    """Zips of pictures, `pairs` among them, that are not what they seem."""
    picture = pairs[0][1]
    body = b"IHDR" + struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    large = picture[:12] + body + struct.pack(">I", zlib.crc32(body)) + picture[33:]
    return archives("a/0.png", picture, size) | {
        "a picture of 2.5 gigapixels": archive([*pairs, ("a/9.png", large)]),
        "a zip in a zip": archive([*pairs, ("a/9.png", archive(pairs))]),
        "a bomb among pictures": archive([*pairs, ("a/9.png", bytes(size))], zipfile.ZIP_DEFLATED),
    }


def hostile_pickles(size: int) -> dict[str, bytes]:
    """Yields what torch.load would make without `weights_only` and should not make with it."""
    import torch

    def saved(thing: Any) -> bytes:
        out = io.BytesIO()
        torch.save(thing, out)
        return out.getvalue()

    one = torch.ones(1)
    return archives("archive/data.pkl", PAYLOAD, size) | {
        "os.system": saved({"a": Call(os.system, COMMAND)}),
        "eval": saved({"a": Call(eval, "1")}),
        "getattr": saved({"a": Call(getattr, "a", "upper")}),
        "a module": saved(torch.nn.Linear(2, 2)),
        "a list": saved([one]),
        "one value as 4 TB": saved({"a": one.expand(2**20, 2**20)}),
        "a pickle": PAYLOAD,
        "a sparse one": saved({"a": one.to_sparse()}),
        "nested": saved({"a": {"b": one}}),
    }


def good_gguf(path: Path) -> bytes:
    """A small Gemma as llama.cpp's converter writes it."""
    import gguf

    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_sliding_window(4)
    writer.add_token_list([b"<pad>", b"<eos>", b"a"])
    writer.add_token_scores([0.0, 0.0, -1.0])
    writer.add_tensor("token_embd.weight", np.ones((3, 8), "float32"))
    writer.add_tensor("output_norm.weight", np.ones(8, "float16"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()

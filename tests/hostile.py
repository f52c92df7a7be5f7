"""Hostile checkpoints, made from a number: manifests, shards, documents and folders as no writer of ours leaves them."""

from __future__ import annotations

import copy
import gzip
import hashlib
import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from checkpoint import save_checkpoint
from checkpoint.layout import MANIFEST, is_document
from qeffect_lm.data.permutation import ALGORITHM
from qeffect_lm.state import LogicalTensor, Role
from tests.checkpoint_support import on_ranks
from tests.tiny import config, local_plan

STEP = "step_00000003"
TEXT_MOST = 1 << 20  # what a document may unpack to where these are read, so that a bomb is small
CURSOR = {
    **{"version": 2, "algorithm": ALGORITHM, "seed": 1, "seq_len": 16, "packing": "stream", "documents": "joined"},
    "blends": [{"first": 0, "sources": [{"sha256": "0", "weight": 1, "offset": 0}]}],
    "batches": [[0, 8]],
}

Files = dict[str, "bytes | Callable[[Path], object]"]  # name in the root → content, or what makes it there


# --- the sound ones -----------------------------------------------------------------------------------------


def grid(rank: int) -> list[LogicalTensor]:
    """What rank ``rank`` of two holds: a tensor in two columns, one of its own, histories, one without elements."""
    half = torch.arange(24, dtype=torch.float32).reshape(4, 6)[:, 3 * rank : 3 * rank + 3].contiguous()
    items = [
        LogicalTensor("master/w", half, Role.MASTER, (4, 6), (0, 3 * rank), (None, "tp"), replicated=("dp",)),
        LogicalTensor.whole(f"rng/{rank}", torch.arange(5, dtype=torch.uint8), Role.RNG, per_rank=True),
    ]
    if rank == 0:
        items += [
            LogicalTensor.whole("scale/w.input", torch.tensor(2.0), Role.SCALE),
            LogicalTensor.whole("amax_history/w.input", torch.ones(4), Role.AMAX_HISTORY),
            LogicalTensor.whole("none", torch.empty(0, 3, dtype=torch.int64), Role.COUNTER),
        ]
    return items


def run_meta() -> dict[str, Any]:
    """What a training run of the tiny model on two ranks would keep beside its tensors."""
    settings = config()
    names = ["layers.0.mlp.down.weight", "embedding.weight"]
    return {
        "qeffect_lm": "0.1.0",
        "step": 3,
        "tokens": 384,
        "config": settings.to_dict(),
        "data": {**CURSOR, "next_sample": 8},
        "dataset_sha256": "0" * 64,
        "layout": {"dp": 1, "pp": 2, "tp": 1},
        "schedule": "1f1b",
        "plan": local_plan(2, 2).to_json(),
        "plan_fingerprint": "0" * 64,
        "branch": None,
        "wandb": {"id": "x", "segment": 1},
        "contract": {
            "timeline": {"epochs": {"forward": 3, "backward": 3}, "commits": 3, "window": "step"},
            "weights": {kind: dict.fromkeys(names, 3) for kind in ("versions", "cache_version", "cache_epoch")},
        },
        "graph_fingerprints": ["1" * 64, "2" * 64],
        "save_id": "a",
        "list": [1, [2.5, {"a": None}]],
    }


def bases(folder: Path) -> list[Files]:
    """The golden checkpoints of both formats, and one with documents and a training run's meta data."""
    golden = Path(__file__).parent / "golden"
    meta = run_meta()

    def save(comm: Any) -> Path:
        documents = {"graphs": f"of {comm.rank}\n" * 40}
        return save_checkpoint(folder, 3, grid(comm.rank), meta, comm, {"tp": comm.rank}, documents=documents)

    for result in on_ranks(2, save):
        if isinstance(result, BaseException):
            raise result
    return [_read(root) for root in (golden / "format1", golden / "format2", folder)]


def _read(root: Path) -> Files:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


# --- manifests ----------------------------------------------------------------------------------------------

NUMBERS = [0, 1, -1, 2, 7, 8, 255, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, -(2**63)]
ODD_NUMBERS = [0.5, -0.0, 1.0, 8.0, 1e308, float("inf"), float("nan"), True, False, "1", "0x8"]
NAMES = [
    "", ".", "..", "../x", "/etc/passwd", "a/../../b", "a\0b", "a\nb", "\x1b[2J", "\ud800", "\u202eabc",
    "x" * 300, "y" * 100_000, "manifest.json", "latest", "rank00000.safetensors", "../rank00000.safetensors",
    "rank00000.safetensors\n", "rank00000.pt", "RANK00000.safetensors", "-.safetensors", "\uff3f.safetensors",
    "..safetensors", "a/b.safetensors", "layers." + "9" * 5000, "none", "master/w", "__metadata__", "rank00001.graphs.txt.gz",
    "os:system", "hostile:family", "hostile",
]  # fmt: skip
DTYPES = ["float32", "int64", "float64", "bool", "float8_e5m2", "load", "Tensor", "float32 ", "complex64", "quint8", "os"]


def nested(depth: int, square: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if square else {"a": value}
    return value


def value(draw: random.Random) -> Any:
    """Something that does not belong where it is put."""
    kind = draw.randrange(9)
    if kind <= 2:
        return draw.choice(NUMBERS)
    if kind == 3:
        return draw.choice(ODD_NUMBERS)
    if kind == 4:
        return draw.choice(NAMES)
    if kind == 5:
        return draw.choice([None, [], {}, [[]], [None] * 3, {"": None}])
    if kind == 6:
        return nested(draw.choice([3, 60, 70, 300]), draw.random() < 0.5)
    if kind == 7:
        return [draw.choice(NUMBERS)] * draw.choice([1, 2, 5, 33, 65, 1000])
    letters = [chr(code) for code in (0, 9, 34, 47, 92, 97, 0x7F, 0x85, 0x2028, 0xFFFF, 0xDC00)]
    return "".join(draw.choices(letters, k=draw.randrange(8)))


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything within."""
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    else:
        inner = []
    for key, item in inner:
        yield (*here, key)
        yield from places(item, (*here, key))


def at(body: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        body = body[key]
    return body


def change(draw: random.Random, body: dict[str, Any]) -> None:
    """One change of the tree somewhere."""
    path = draw.choice(list(places(body)))
    parent, key = at(body, path[:-1]), path[-1]
    kind = draw.randrange(10)
    old = parent[key]
    if kind <= 3:
        parent[key] = value(draw)
    elif kind == 4 and isinstance(old, int):
        parent[key] = draw.choice([old + 1, old - 1, old * 2, old + 8, -old, float(old), str(old)])
    elif kind == 5:
        del parent[key]
    elif kind == 6:
        parent[key] = copy.deepcopy(at(body, draw.choice(list(places(body)))))
    elif kind == 7 and isinstance(parent, dict):
        parent[draw.choice(NAMES)] = parent.pop(key) if draw.random() < 0.7 else old
    elif kind == 8 and isinstance(parent, list):
        parent[key : key + 1] = [old] * draw.choice([2, 3, 1000])
    elif isinstance(parent, dict):
        parent[draw.choice([*NAMES, "format", "digest", "hashed"])] = value(draw)


def alone(body: dict[str, Any], name: str, part: dict[str, Any], shape: list[int]) -> None:
    """Leave one tensor in one file, in one slice of another shape."""
    file = body["files"][part["file"]]
    part["shape"], part["start"], part["offset"] = list(shape), [0] * len(shape), file.get("hashed", part["offset"])
    body["tensors"] = {name: {**body["tensors"][name], "shape": shape, "axes": [None] * len(shape), "slices": [part]}}
    body["files"] = {part["file"]: file}


def aim(draw: random.Random, body: dict[str, Any]) -> None:
    """A change where it hurts: shapes, offsets, sizes, dtypes, slices. What can be kept consistent is, sometimes."""
    tensors = body["tensors"]
    name = draw.choice(sorted(tensors))
    tensor = tensors[name]
    part = draw.choice(tensor["slices"])
    file = body["files"][part["file"]]
    kind = draw.randrange(12)
    big = draw.choice([2**20, 2**31, 2**40, 2**61, 2**62])
    if kind == 0:  # a huge tensor that agrees with itself, and a file that claims to hold it
        alone(body, name, part, [big] * draw.choice([1, 1, 1, 2, 40]))
        file["size"] = part["offset"] + big * draw.choice([1, 2, 4, 8])
    elif kind == 1:  # no element, and strides that overflow
        shape = [0, *([big] * draw.choice([1, 2, 5]))]
        draw.shuffle(shape)
        alone(body, name, part, shape)
        file["size"] = part["offset"]
    elif kind == 2:
        tensor["dtype"] = draw.choice(DTYPES)
    elif kind == 3:
        part["offset"] = draw.choice([0, 1, part["offset"] + 8, part["offset"] - 1, big, file["size"]])
    elif kind == 4:
        file["size"] = draw.choice([0, file["size"] + 1, file["size"] - 1, big])
    elif kind == 5:
        file["hashed"] = draw.choice([0, 1, file["size"], file["size"] + 1, big, file.get("hashed", 8) - 8])
    elif kind == 6:  # very many slices of one row
        tensor["slices"] = [part] * draw.choice([2, 50, 2000])
    elif kind == 7:  # stairs of slices, of which each row crosses very many
        n = draw.choice([10, 300])
        alone(body, name, part, [2 * n, 2 * n])
        body["tensors"][name]["slices"] = [{**part, "start": [i, i], "shape": [n, 1]} for i in range(n)]
    elif kind == 8:
        body["format"] = draw.choice([0, 1, 2, 3, -1, 2**64, True, 2.0, "2"])
    elif kind == 9:  # bytes that two tensors share
        tensors[draw.choice(["again", "zz"])] = copy.deepcopy(tensor)
    elif kind == 10:
        part["file"] = draw.choice([*NAMES, *body["files"]])
    else:
        part["start"], part["shape"] = part["shape"], part["start"]


def sealed(text: str) -> bytes:
    """A manifest's bytes with a digest that fits."""
    rest = text.encode(errors="surrogatepass")
    rest = rest[1:].lstrip() + b"\n"
    return b'{"digest": "' + hashlib.sha256(rest).hexdigest().encode() + b'",\n' + rest


def dumped(draw: random.Random, body: dict[str, Any]) -> bytes:
    text = json.dumps(body, indent=1, ensure_ascii=draw.random() < 0.7)
    if draw.random() < 0.1:  # a name that is there twice
        lines = text.split("\n")
        chosen = draw.randrange(1, len(lines) - 1)
        lines.insert(chosen, lines[chosen].rstrip(",") + ",")
        text = "\n".join(lines)
    return sealed(text)


SNIPPETS = [b"\0", b"[" * 5000, b'{"a":' * 2000, b"9" * 5000, b'"', b",", b"\xff\xfe", b"NaN", b"1e999"]


def noise(draw: random.Random, raw: bytes) -> bytes:
    """A few bytes changed, put in, taken out, cut off or doubled."""
    data = bytearray(raw)
    for _ in range(draw.choice([1, 1, 2, 5])):
        place = draw.randrange(len(data) + 1)
        kind = draw.randrange(6)
        if kind == 0 and place < len(data):
            data[place] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[place:place] = draw.choice(SNIPPETS)
        elif kind == 2:
            del data[place : place + draw.choice([1, 8, 1000])]
        elif kind == 3:
            del data[place:]
        elif kind == 4:
            data[place:place] = data[place : place + draw.choice([1, 30, 3000])]
        else:
            data[place : place + 1] = bytes([draw.randrange(256)])
    return bytes(data)


def hostile_meta(draw: random.Random, raw: bytes) -> bytes:
    """A sound manifest around what no run has saved: a value of any kind somewhere in the meta data, or in the plan's JSON."""
    body = json.loads(raw)
    del body["digest"]
    if draw.random() < 0.3:
        plan = json.loads(body["meta"]["plan"])
        for _ in range(draw.choice([1, 1, 2])):
            change(draw, plan)
        body["meta"]["plan"] = json.dumps(plan)
        if draw.random() < 0.3:
            body["meta"]["plan"] = noise(draw, body["meta"]["plan"].encode()).decode(errors="replace")
    elif draw.random() < 0.5:  # in something that a resume looks at
        change(draw, body["meta"][draw.choice(["config", "data", "contract", "layout", "wandb"])])
    else:
        change(draw, body["meta"])
    return dumped(draw, body)


def hostile_manifest(draw: random.Random, raw: bytes) -> bytes:
    kind = draw.randrange(4)
    if kind == 0:
        changed = noise(draw, raw)
        if draw.random() < 0.3:
            return changed
        return sealed("{" + changed[changed.find(b"\n") + 1 :].decode(errors="replace"))
    body = json.loads(raw)
    del body["digest"]
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        try:
            (change if kind == 1 else aim)(draw, body)
        except (KeyError, TypeError, IndexError, ValueError, AttributeError):  # an earlier change took away what this one wants
            change(draw, body) if body else None
    return dumped(draw, body)


# --- files and folders --------------------------------------------------------------------------------------


def resealed(files: Files, name: str, content: bytes) -> None:
    """A document of other content that its manifest vouches for."""
    manifest = files[f"{STEP}/{MANIFEST}"]
    assert isinstance(manifest, bytes)
    body = json.loads(manifest)
    del body["digest"]
    entry = body["files"][name]
    entry["size"], entry["sha256"] = len(content), hashlib.sha256(content).hexdigest()
    if "hashed" in entry:
        entry["hashed"] = len(content)
    files[f"{STEP}/{name}"] = content
    files[f"{STEP}/{MANIFEST}"] = sealed(json.dumps(body, indent=1))


def bombs() -> list[bytes]:
    """What a document's file may hold instead of a text in one gzip member."""
    packed = gzip.compress(b"text" * 50, mtime=0)
    lengths = [64 << 20, TEXT_MOST, TEXT_MOST + 1]
    parts = [packed[:-3], packed[:12], packed + packed, packed + b"x", b"", b"plain", b"\x1f\x8b"]
    return [*parts, gzip.compress(b"\xff\xfe\0\xd8", mtime=0), *(gzip.compress(bytes(n), mtime=0) for n in lengths)]


def shard(draw: random.Random, raw: bytes) -> bytes:
    """A shard that is not what its manifest says."""
    length = struct.unpack("<Q", raw[:8])[0]
    kind = draw.randrange(6)
    if kind == 0:
        return struct.pack("<Q", draw.choice([0, 1, 2**31, 2**63, 2**64 - 1, length + 1, length - 1, len(raw)])) + raw[8:]
    if kind == 1:
        return raw[:8] + noise(draw, raw[8 : 8 + length]) + raw[8 + length :]
    if kind == 2:
        large = b'{"w":{"dtype":"F32","shape":[9223372036854775807],"data_offsets":[0,1]}}'
        text = draw.choice([b"{" * 3000, b"[]", b"not JSON", large])
        return struct.pack("<Q", len(text)) + text + raw[8 + length :]
    if kind == 3:
        return raw[: draw.randrange(len(raw))]
    return noise(draw, raw)


def _special(draw: random.Random, name: str, raw: bytes) -> Callable[[Path], object]:
    """Something that is not a regular file."""
    kind = draw.randrange(6)

    def make(path: Path) -> None:
        if kind == 0:
            os.mkfifo(path)
        elif kind == 1:
            path.mkdir()
        elif kind == 2:  # the right bytes, elsewhere
            outside = path.parents[1] / "outside"
            outside.write_bytes(raw)
            path.symlink_to(outside)
        elif kind == 3:
            path.symlink_to("/dev/zero")
        elif kind == 4:
            path.symlink_to(path.name)
        else:
            path.write_bytes(raw)
            os.truncate(path, len(raw) + (1 << 34))  # takes no room on the disk

    return make


LATEST = [
    b"", b"\n", b"step_00000003", b"step_99999999", b"../step_00000003", b"/etc", b"step_" + b"9" * 5000, b"\0", b"\xff" * 50,
    "step_０００００００３".encode(), b"step_00000003\nstep_00000004", b"x" * 3_000_000,
]  # fmt: skip


FOLDERS = ["step_00000009", "step_" + "9" * 200, "step_٠٠٠٠٠٠٠٣", ".tmp-step_00000008", "step_9999999999999999999"]


def hostile(number: int, sound: list[Files], documents: list[bytes]) -> tuple[str, Files]:
    """Input ``number``: what kind it is, and its files."""
    draw = random.Random(number)
    files = dict(draw.choice(sound))
    shards = [name for name in files if name.endswith(".safetensors")]
    kind = draw.choices(["manifest", "meta", "shard", "file", "document", "latest", "folder"], [12, 4, 3, 2, 1, 1, 1])[0]
    if kind == "manifest":
        raw = files[f"{STEP}/{MANIFEST}"]
        assert isinstance(raw, bytes)
        files[f"{STEP}/{MANIFEST}"] = hostile_manifest(draw, raw)
    elif kind == "meta":
        files = dict(sound[-1])
        raw = files[f"{STEP}/{MANIFEST}"]
        assert isinstance(raw, bytes)
        files[f"{STEP}/{MANIFEST}"] = hostile_meta(draw, raw)
    elif kind == "shard":
        name = draw.choice(shards)
        files[name] = shard(draw, files[name]) if draw.random() < 0.8 else files[draw.choice(shards)]  # type: ignore[arg-type]
    elif kind == "file":
        name = draw.choice(sorted(files))
        content = files.pop(name)
        assert isinstance(content, bytes)
        if draw.random() < 0.9:
            files[name] = _special(draw, name, content)
    elif kind == "document":
        files = dict(sound[-1])
        resealed(files, draw.choice([n.partition("/")[2] for n in files if is_document(n)]), draw.choice(documents))
    elif kind == "latest":
        files["latest"] = draw.choice(LATEST)
        if draw.random() < 0.5:
            files = {"latest": files["latest"]}
    else:
        name = draw.choice(FOLDERS)
        links = [lambda path: path.symlink_to("/"), lambda path: path.symlink_to(path.name)]
        files[name] = draw.choice([b"a file", Path.mkdir, *links])
    return kind, files


def lay_out(root: Path, files: Files) -> None:
    if root.exists():
        shutil.rmtree(root)
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            content(path)

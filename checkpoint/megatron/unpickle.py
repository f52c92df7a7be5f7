"""The one program that opens pickles. It runs in a process of its own, makes nothing of them but JSON, imports none of us.

    python -P unpickle.py torch FILE…       files of torch.save, one line of JSON for each
    python -P unpickle.py torch_dist DIR    a folder of torch.distributed.checkpoint, one line

Both kinds of pickle are read by restricted unpicklers: torch's own with ``weights_only=True``, and for ``.metadata`` and
Transformer Engine's extra states, which are no torch files, one of ours. A name that a pickle asks for is either harmless
by itself (tensors, containers), or on the short list below and then stands for an inert record of what it was called with,
or the file is refused. So nothing is imported and nothing is called that a pickle names.

Tensors are not read: torch loads under a fake mode, and the answer is where their bytes lie in the file. Whoever asked reads
those bytes, which are numbers and nothing else.

JSON has plain values as they are; ``{"dict": [[key, value], …]}``, ``{"list": […]}``, ``{"bytes": base64}``,
``{"float": "nan"}``; ``{"tensor": {file, offset, dtype, shape, stride}}`` for bytes in a file; ``{"values": {dtype, shape,
data}}`` for a small tensor; ``{"object": name, "args": […], "state": …}`` for a record.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import pickle
import re
import resource
import signal
import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

# What Megatron's checkpoints ask for besides tensors and containers: its own classes, arguments, random states. All become
# records.
RECORDS = re.compile(
    r"argparse\.Namespace|types\.SimpleNamespace|signal\.Signals|_?io\.BytesIO|pathlib(\._local)?\.(Pure)?(Posix)?Path"
    r"|numpy\.(ndarray|dtype|dtypes\.\w+|(_?core)\.multiarray\.(_reconstruct|scalar))|torch\._C\.Generator"
    r"|megatron\.[\w.]+|transformer_engine\.[\w.]+|transformer_engine_torch\.[\w.]+"
)
METADATA_RECORDS = re.compile(
    r"torch\.distributed\.(checkpoint|_shard)\.[\w.]+|torch\.serialization\._get_layout|torch\.(memory_format|layout)"
    r"|megatron\.core\.dist_checkpointing\.[\w.]+|pathlib(\._local)?\.(Pure)?(Posix)?Path"
)
EXTRA_STATE = "_extra_state"
SMALL = 1 << 24  # elements of a tensor that is given by value
PIECE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.distcp")


class Refused(Exception):
    """What is in a file is more than this program makes sense of; the message is for people."""


class Record:
    """What a pickle said about an object of a class that is not here: what it was made with, and its state."""

    name = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Record:
        self = object.__new__(cls)
        self.args, self.state = args, None
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        self.args = (*self.args, item)

    def extend(self, items: Any) -> None:
        self.args = (*self.args, *items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.args = (*self.args, (key, value))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return field(self, name)


def record(name: str) -> type[Record]:
    return type(name.rpartition(".")[2], (Record,), {"name": name})


def field(item: Any, name: str, default: Any = None) -> Any:
    """An attribute of a record, by its state."""
    state = item.state
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
        state = {**(state[0] or {}), **state[1]}
    return state.get(name, default) if isinstance(state, dict) else default


class Dtype(str):
    """A dtype by name."""


class Restricted(pickle.Unpickler):
    """For pickles that are no torch files."""

    def __init__(self, raw: bytes, allowed: re.Pattern[str]) -> None:
        super().__init__(io.BytesIO(raw))
        self.allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return Dtype(name)
        plain = {
            "collections.OrderedDict": dict,
            "torch.Size": tuple,
            "builtins.set": list,
            "builtins.frozenset": list,
            "torch._utils._rebuild_tensor_v2": rebuild,
            "torch.storage._load_from_bytes": storage,
            "megatron.core.safe_globals.safe_load_from_bytes": storage,
        }
        if full in plain:
            return plain[full]
        if self.allowed.fullmatch(full):
            return record(full)
        raise Refused(f"it asks for {full}, which no Megatron checkpoint needs")

    def persistent_load(self, pid: Any) -> Any:
        raise Refused("it refers to something outside itself")


def storage(raw: bytes) -> Any:
    """The storage of a tensor inside a plain pickle: a little torch file of its own."""
    return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)


def rebuild(data: Any, offset: int, size: Any, stride: Any, *_: Any) -> torch.Tensor:
    if not isinstance(data, torch.storage.TypedStorage):
        raise Refused("it has a tensor without a storage")
    return torch._utils._rebuild_tensor_v2(data, offset, tuple(size), tuple(stride), False, {})


class Window(io.RawIOBase):
    """Some bytes of a file, as a file."""

    def __init__(self, path: str, begin: int, length: int) -> None:
        self._file = open(path, "rb", buffering=0)
        size = os.fstat(self._file.fileno()).st_size
        if begin < 0 or length < 0 or begin + length > size:
            raise Refused(f"{os.path.basename(path)} ends before byte {begin + length}")
        self._begin, self._length, self._at = begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        got = os.preadv(self._file.fileno(), [view], self._begin + self._at)
        self._at += got
        return got

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        size = left if size is None or size < 0 else min(size, left)
        raw = b""
        while len(raw) < size:
            piece = os.pread(self._file.fileno(), size - len(raw), self._begin + self._at + len(raw))
            if not piece:
                break
            raw += piece
        self._at += len(raw)
        return raw

    def close(self) -> None:
        self._file.close()
        super().close()


def load_torch(file: Any) -> Any:
    """The content of a file of torch.save, with fake tensors that know where their bytes are."""
    unknown = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    file.seek(0)
    for name in unknown:
        if not RECORDS.fullmatch(name):
            raise Refused(f"it asks for {name}, which no Megatron checkpoint needs")
    with torch.serialization.safe_globals([(record(name), name) for name in unknown]), FakeTensorMode():
        return torch.load(file, map_location="cpu", weights_only=True)


class Encoder:
    """Objects of one file as plain data; ``base`` is where in the file the torch file begins."""

    def __init__(self, path: str, base: int = 0) -> None:
        self.path, self.base = path, base

    def encode(self, item: Any, key: str = "") -> Any:
        if item is None or isinstance(item, (bool, int, Dtype)):
            return item if not isinstance(item, Dtype) else {"dtype": str(item)}
        if isinstance(item, str):
            return item
        if isinstance(item, float):
            return item if math.isfinite(item) else {"float": repr(item)}
        if isinstance(item, torch.dtype):
            return {"dtype": str(item).removeprefix("torch.")}
        if isinstance(item, (bytes, bytearray)):
            return {"bytes": base64.b64encode(bytes(item)).decode()}
        if isinstance(item, dict):
            return {"dict": [[self.encode(k), self.encode(v, k if isinstance(k, str) else "")] for k, v in item.items()]}
        if isinstance(item, (list, tuple, set, frozenset)):
            return {"list": [self.encode(each, key) for each in item]}
        if isinstance(item, torch.Tensor):
            return self.tensor(item, key)
        if isinstance(item, Record):
            if item.name.endswith("BytesIO"):
                raw = item.state[0] if item.state else (item.args[0] if item.args else b"")
                return self.extra_state(bytes(raw)) if key.endswith(EXTRA_STATE) else self.encode(bytes(raw))
            args = [self.encode(each) for each in item.args]
            return {"object": item.name, "args": args, "state": self.encode(item.state)}
        return {"object": f"{type(item).__module__}.{type(item).__qualname__}", "args": [], "state": None}

    def tensor(self, item: torch.Tensor, key: str) -> Any:
        dtype = str(item.dtype).removeprefix("torch.")
        kept = item.untyped_storage()
        begin = getattr(kept, "_checkpoint_offset", None)
        if begin is None:  # a real tensor, out of a plain pickle
            if item.numel() > SMALL:
                raise Refused(f"{key or 'a tensor'} of a plain pickle has {item.numel()} elements")
            flat = item.detach().reshape(-1)
            values = flat.double().tolist() if item.is_floating_point() else flat.tolist()
            return {"values": {"dtype": dtype, "shape": list(item.shape), "data": [self.encode(each) for each in values]}}
        offset = self.base + begin + item.storage_offset() * item.element_size()
        if key.endswith(EXTRA_STATE) and item.dtype is torch.uint8:
            with open(self.path, "rb") as file:
                return self.extra_state(os.pread(file.fileno(), item.numel(), offset))
        found = {"offset": offset, "dtype": dtype, "shape": list(item.shape), "stride": list(item.stride())}
        return {"tensor": {"file": os.path.basename(self.path), **found}}

    def extra_state(self, raw: bytes) -> Any:
        """Transformer Engine's state of a layer: a plain pickle, or before its version 2 a torch file."""
        if not raw:
            return None
        if raw[:2] == b"PK":
            unknown = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(raw))
            for name in unknown:
                if not RECORDS.fullmatch(name):
                    raise Refused(f"an extra state asks for {name}, which none needs")
            with torch.serialization.safe_globals([(record(name), name) for name in unknown]):
                return self.encode(torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True))
        return self.encode(Restricted(raw, RECORDS).load())


def torch_file(path: str) -> Any:
    with Window(path, 0, os.path.getsize(path)) as file:
        return Encoder(path).encode(load_torch(file))


def torch_dist(folder: str) -> Any:
    """Where each chunk of each tensor lies, and the objects that are no tensors."""
    with open(os.path.join(folder, ".metadata"), "rb") as file:
        metadata = Restricted(file.read(), METADATA_RECORDS).load()
    if not isinstance(metadata, Record) or not metadata.name.endswith(".Metadata"):
        raise Refused(".metadata holds no metadata of torch.distributed.checkpoint")
    places: dict[tuple[str, Any], Any] = {}
    for index, info in field(metadata, "storage_data", {}).items():
        offset = field(index, "offset")
        places[field(index, "fqn"), None if offset is None else tuple(offset)] = info
    answer: dict[str, Any] = {"tensors": {}, "objects": {}}
    for key, kind in field(metadata, "state_dict_metadata", {}).items():
        if kind.name.endswith(".BytesStorageMetadata"):
            path, begin, length = _piece(folder, key, places.get((key, None)))
            with Window(path, begin, length) as file:
                answer["objects"][key] = Encoder(path, begin).encode(load_torch(file), key.partition("/")[0])
            continue
        if not kind.name.endswith(".TensorStorageMetadata"):
            raise Refused(f"{key} is a {kind.name}")
        dtype = field(kind, "properties").state
        dtype = str(dtype[0] if isinstance(dtype, tuple) else dtype["dtype"])
        chunks = []
        for chunk in field(kind, "chunks"):
            start, shape = list(field(chunk, "offsets")), list(field(chunk, "sizes"))
            info = places.get((key, tuple(start)))
            if info is None and all(each == 0 for each in start):
                info = places.get((key, None))
            path, begin, length = _piece(folder, f"{key} at {start}", info)
            with Window(path, begin, length) as file:
                held = load_torch(file)
            if not isinstance(held, torch.Tensor) or list(held.shape) != shape or str(held.dtype) != f"torch.{dtype}":
                raise Refused(f"{key} at {start} is not the {dtype} {shape} that .metadata says")
            chunks.append({"start": start, **Encoder(path, begin).tensor(held, "")["tensor"]})
        answer["tensors"][key] = {"dtype": dtype, "shape": list(field(kind, "size")), "chunks": chunks}
    return answer


def _piece(folder: str, what: str, info: Any) -> tuple[str, int, int]:
    if info is None:
        raise Refused(f".metadata does not say where {what} is")
    name, offset, length = field(info, "relative_path"), field(info, "offset"), field(info, "length")
    if not isinstance(name, str) or not PIECE_NAME.fullmatch(name):
        raise Refused(f"{what} is said to be in {name!r}, which is not the name of a .distcp file here")
    if field(info, "transform_descriptors"):
        raise Refused(f"{what} is compressed or otherwise transformed")
    return os.path.join(folder, name), int(offset), int(length)


def lock_down() -> None:
    """Nothing that runs from here on may write a file."""
    warm = io.BytesIO()
    torch.save(torch.zeros(1), warm)
    warm.seek(0)
    load_torch(warm)  # what torch imports for it may look for a folder to write to
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def answer(kind: str, path: str) -> str:
    """One line of JSON: the content, or why the file is refused."""
    try:
        return json.dumps({"content": torch_file(path) if kind == "torch" else torch_dist(path)})
    except Refused as error:
        return json.dumps({"refused": str(error)})
    except Exception as error:  # whatever a damaged or hostile file brings about
        first = next(iter(str(error).strip().splitlines()), "")
        return json.dumps({"refused": f"{type(error).__name__}: {first[:300]}"})


def main() -> int:
    lock_down()
    kind, *paths = sys.argv[1:]
    for path in paths:
        print(answer(kind, path), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

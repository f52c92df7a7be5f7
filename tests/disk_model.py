"""A model of a disk that loses power: what may be left of a recorded trace of operations.

Data of a file are safe once the file was fsynced, names of a directory once the directory was. Of everything since then any
part may be there and any part may be lost, in any order: each name by itself (a rename within one directory as a whole, which
is what every journaling file system gives), and of a file's bytes all, none, a part, or a file of the right length that holds
zeros. That is weaker than any file system in use, so that what survives here survives there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.crashing import Operation

Tree = dict[str, Any]  # name → bytes of a file, or the tree of a directory


@dataclass
class File:
    safe: bytes = b""
    now: bytes = b""

    def variants(self) -> list[bytes]:
        """What may be there after the crash; the first is that nothing was written, the second that all was."""
        if self.safe == self.now:
            return [self.now]
        return [self.safe, self.now, bytes(len(self.now)), self.now[: len(self.now) // 2], b""]


@dataclass
class Change:
    """One name in a directory set or removed, or (by a rename) one removed and one set."""

    removes: str | None = None
    sets: tuple[str, File | Directory] | None = None

    def apply(self, names: dict[str, File | Directory]) -> None:
        if self.removes is not None:
            names.pop(self.removes, None)
        if self.sets is not None:
            names[self.sets[0]] = self.sets[1]


@dataclass
class Directory:
    safe: dict[str, File | Directory] = field(default_factory=dict)
    now: dict[str, File | Directory] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)

    def change(self, change: Change) -> None:
        self.pending.append(change)
        change.apply(self.now)


class Disk:
    """The tree under ``top``, of which ``tree`` is safe already."""

    def __init__(self, top: Path, tree: Tree | None = None) -> None:
        self.top = top
        self.root = _directory(tree or {})

    def apply(self, operation: Operation) -> None:
        """Raises ValueError for operations that the model does not know: then it has to learn them."""
        name, path = operation.name, operation.path
        if name == "direct":  # says how the next bytes get there, not that they are safe
            return
        if name == "fsync_dir":
            if path == self.top or self.top in path.parents:  # those above are not part of the model
                found = self._at(path)
                assert isinstance(found, Directory)
                found.safe, found.pending = dict(found.now), []
            return
        parent = self._at(path.parent)
        assert isinstance(parent, Directory), path
        if name == "mkdir":
            parent.change(Change(sets=(path.name, Directory())))
        elif name == "create":
            if path.name in parent.now:
                self._file(path).now = b""
            else:
                parent.change(Change(sets=(path.name, File())))
        elif name == "write":
            self._file(path).now += operation.data
        elif name == "fsync":
            self._file(path).safe = self._file(path).now
        elif name in ("unlink", "rmdir"):
            assert path.name in parent.now, path
            parent.change(Change(removes=path.name))
        elif name == "rename":
            assert operation.target is not None and operation.target.parent == path.parent
            parent.change(Change(removes=path.name, sets=(operation.target.name, parent.now[path.name])))
        else:
            raise ValueError(f"the model of the disk does not know {name!r}: say in tests/disk_model.py what it leaves")

    def crashes(self, rng: random.Random, samples: int) -> Iterator[Tree]:
        """States that a crash may leave now: of what is unsafe nothing, all, all but one effect, one effect alone, for each;
        and ``samples`` at random."""
        choices = self._choices()
        nothing, everything = [0] * len(choices), [min(1, count - 1) for count in choices]
        yield self._tree(nothing)
        yield self._tree(everything)
        for i, count in enumerate(choices):
            for k in range(1, count):
                yield self._tree([*nothing[:i], k, *nothing[i + 1 :]])
            for k in range(count):
                yield self._tree([*everything[:i], k, *everything[i + 1 :]])
        for _ in range(samples):
            yield self._tree([rng.randrange(count) for count in choices])

    def _choices(self) -> list[int]:
        """How many ways each unsafe effect may go; changes of names first (lost or there), then contents of files."""
        directories, files = self._all()
        return [*(2 for one in directories for _ in one.pending), *(len(one.variants()) for one in files)]

    def _tree(self, chosen: Sequence[int]) -> Tree:
        directories, files = self._all()
        left = iter(chosen)
        names = {}
        for one in directories:
            survived = dict(one.safe)
            for change in one.pending:
                if next(left):
                    change.apply(survived)
            names[id(one)] = survived
        contents = {id(one): one.variants()[next(left)] for one in files}

        def build(one: Directory) -> Tree:
            return {
                name: contents[id(child)] if isinstance(child, File) else build(child)
                for name, child in names[id(one)].items()
            }

        return build(self.root)

    def _all(self) -> tuple[list[Directory], list[File]]:
        """Every directory and file that some name leads or may lead to, once, in a fixed order."""
        directories: list[Directory] = []
        files: list[File] = []
        seen: set[int] = set()

        def visit(one: File | Directory) -> None:
            if id(one) in seen:
                return
            seen.add(id(one))
            if isinstance(one, File):
                files.append(one)
                return
            directories.append(one)
            for child in [*one.safe.values(), *one.now.values(), *(c.sets[1] for c in one.pending if c.sets)]:
                visit(child)

        visit(self.root)
        return directories, files

    def _at(self, path: Path) -> File | Directory:
        found: File | Directory = self.root
        for name in path.relative_to(self.top).parts:
            assert isinstance(found, Directory)
            found = found.now[name]
        return found

    def _file(self, path: Path) -> File:
        found = self._at(path)
        assert isinstance(found, File), path
        return found


def _directory(tree: Tree) -> Directory:
    made: dict[str, File | Directory] = {
        name: _directory(child) if isinstance(child, dict) else File(child, child) for name, child in tree.items()
    }
    return Directory(dict(made), dict(made))


def read_tree(path: Path) -> Tree:
    """The files and directories under ``path``."""
    return {child.name: read_tree(child) if child.is_dir() else child.read_bytes() for child in path.iterdir()}


def write_tree(path: Path, tree: Tree) -> None:
    """Make them anew in ``path``, which is not there yet."""
    path.mkdir()
    for name, child in tree.items():
        if isinstance(child, dict):
            write_tree(path / name, child)
        else:
            (path / name).write_bytes(child)

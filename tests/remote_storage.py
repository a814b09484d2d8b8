"""Remote storage for tests: fsspec's in memory, and one whose n-th write or reads fail."""

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class FailingFileSystem(MemoryFileSystem):
    """A storage in memory of its own that loses the connection at a write.

    Attributes:
        fail_at: the write that fails, counted from 1; 0 for none.
        cut: whether the failing write leaves half of the file, as a connection lost within it.
        denied: whether reads are refused.
    """

    protocol = "failing"
    cachable = False
    store: dict = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    writes, fail_at, cut, denied = 0, 0, False, False

    @classmethod
    def _strip_protocol(cls, path):
        path = path.removeprefix("failing://").strip("/")
        return f"/{path}" if path else ""

    @classmethod
    def reset(cls, fail_at=0, cut=False, denied=False, empty=False):
        cls.writes, cls.fail_at, cls.cut, cls.denied = 0, fail_at, cut, denied
        if empty:
            cls.store.clear()
            cls.pseudo_dirs[:] = [""]

    def _count(self, path, content):
        type(self).writes += 1
        if self.writes == self.fail_at:
            if self.cut:
                super().pipe_file(path, content[: len(content) // 2])
            raise ConnectionResetError(104, "Connection reset by peer")

    def put_file(self, lpath, rpath, **kwargs):
        with open(lpath, "rb") as file:
            self.pipe_file(rpath, file.read())

    def pipe_file(self, path, value, **kwargs):
        self._count(path, value)
        super().pipe_file(path, value)

    def cat_file(self, path, **kwargs):
        if self.denied:
            raise PermissionError("403 Forbidden: no access\nto this bucket")
        return super().cat_file(path, **kwargs)


fsspec.register_implementation("failing", FailingFileSystem, clobber=True)


def empty_storage():
    """Leaves nothing in the storages in memory, fsspec's own and the one that fails."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    FailingFileSystem.reset(empty=True)


def files(address):
    """Paths in a storage, without its protocol."""
    system, path = fsspec.core.url_to_fs(address)
    system.invalidate_cache()
    return sorted(system.find(path))

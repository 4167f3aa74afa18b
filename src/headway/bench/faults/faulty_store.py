"""An object store that fails as real ones do, by a seeded plan: errors, timeouts, torn uploads, listings that lag."""

from __future__ import annotations

import io
import random
from typing import Any, ClassVar

from fsspec.implementations.memory import MemoryFileSystem


class FaultyStore(MemoryFileSystem):
    """`faulty://`: one store a process, kept in memory. `plan` sets how it fails from now on."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    cachable = False
    dice: ClassVar[random.Random] = random.Random(0)
    error_rate: ClassVar[float] = 0.0
    torn_rate: ClassVar[float] = 0.0
    listing_lag: ClassVar[int] = 0
    operations: ClassVar[int] = 0
    faults: ClassVar[int] = 0
    _unlisted: ClassVar[dict[str, int]] = {}

    @classmethod
    def plan(cls, seed: int, *, errors: float = 0.0, torn: float = 0.0, lag: int = 0, clear: bool = True) -> None:
        """`errors`: share of operations that raise; `torn`: of uploads that lose their end without a word; `lag`:
        listings that do not show a new object."""
        cls.dice, cls.error_rate, cls.torn_rate, cls.listing_lag = random.Random(seed), errors, torn, lag
        cls.operations = cls.faults = 0
        if clear:
            cls.store.clear()
            cls._unlisted.clear()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(str(path).replace("faulty://", "memory://"))

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._maybe_fail()
        options.pop("cache_type", None)
        if "w" not in mode:
            return io.BytesIO(super().cat_file(path))
        return _Upload(self, self._strip_protocol(path))

    def cat_file(self, path: str, *args: Any, **options: Any) -> bytes:
        self._maybe_fail()
        return super().cat_file(path, *args, **options)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self._maybe_fail()
        hidden = {name for name, left in self._unlisted.items() if left > 0}
        type(self)._unlisted = {name: left - 1 for name, left in self._unlisted.items() if left > 1}
        found = super().ls(path, detail=True, **options)
        seen = []
        for entry in found:
            inside = [name for name in self.store if name == entry["name"] or name.startswith(f"{entry['name']}/")]
            if any(name not in hidden for name in inside):
                seen.append(entry)
        return seen if detail else [entry["name"] for entry in seen]

    def rm_file(self, path: str) -> None:
        self._maybe_fail()
        self.store.pop(self._strip_protocol(path), None)

    def keep(self, path: str, content: bytes) -> None:
        cls = type(self)
        if self.dice.random() < self.torn_rate:
            cls.faults += 1
            content = content[: len(content) // 2]
        with super().open(path, "wb") as file:
            file.write(content)
        cls._unlisted[path] = self.listing_lag

    def _maybe_fail(self) -> None:
        cls = type(self)
        cls.operations += 1
        if self.dice.random() < self.error_rate:
            cls.faults += 1
            raise self.dice.choice((OSError("503 Slow Down"), TimeoutError("the read timed out")))


class _Upload(io.BytesIO):
    """Appears in the store when it is closed, as a whole or torn."""

    def __init__(self, store: FaultyStore, path: str) -> None:
        super().__init__()
        self._store, self._path = store, path

    def close(self) -> None:
        if not self.closed:
            content = self.getvalue()
            super().close()
            self._store.keep(self._path, content)

"""The process beside a training run: compresses a rank's trace; on rank 0, waits for all and diagnoses them.

`python -m headway.diagnose.background FOLDER RANK WORLD_SIZE`, started by `periodic`. Imports no torch.
"""

from __future__ import annotations

import gzip
import os
import shutil
import sys
import time
from pathlib import Path

# Other ranks write at the same step; one that is gone must not keep this process for ever.
_WAIT_S = 300.0


def main(folder: Path, rank: int, world_size: int) -> int:
    os.nice(19)
    compress(folder / f"rank-{rank:05d}.json")
    if rank != 0:
        return 0
    paths = wait_for_ranks(folder, world_size)
    from headway.diagnose.periodic_result import write_diagnosis

    write_diagnosis(folder, paths, world_size)
    return 0


def compress(plain: Path) -> Path:
    """Replaces FILE.json by FILE.json.gz; the compressed file appears whole or not at all."""
    target = plain.with_name(plain.name + ".gz")
    aside = target.with_name(f".{target.name}.tmp")
    with plain.open("rb") as source, gzip.open(aside, "wb", compresslevel=4) as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    aside.replace(target)
    plain.unlink()
    return target


def wait_for_ranks(folder: Path, world_size: int, wait_s: float = _WAIT_S) -> list[Path]:
    """The ranks' traces, all of them or those that came within `wait_s`."""
    until = time.monotonic() + wait_s
    while True:
        paths = sorted(folder.glob("rank-*.json.gz"))
        if len(paths) >= world_size or time.monotonic() > until:
            return paths
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))

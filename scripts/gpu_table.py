"""The last table of gpu_check.sh: tokens/s, MFU and the step's shares of each run, warm-up steps left out."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from headway.record.folder import RunFolder
from headway.record.sessions import read_history

WARM_UP = 3


def main() -> None:
    columns = [("tokens/s", 10), ("slots used", 11), ("MFU", 7), ("step ms", 9), ("fwd+bwd", 9), ("loss", 7)]
    columns += [("opt", 7), ("data", 7), ("GiB", 7)]
    print(f"{'run':<18}" + "".join(f"{name:>{width}}" for name, width in columns))
    for folder in sorted(Path(sys.argv[1]).iterdir()):
        if not (folder / "metrics.jsonl").is_file():
            continue
        lines = read_history(RunFolder(folder)).kept[WARM_UP:]
        if not lines:
            print(f"{folder.name:<18}no steps")
            continue
        wall = sum(line.wall_ns for line in lines)

        def share(*paths: str, lines: list = lines, wall: int = wall) -> str:
            return f"{100 * sum(line.account.get(path, 0) for line in lines for path in paths) / wall:.1f}%"

        tokens, slots = sum(line.tokens for line in lines), sum(line.slots for line in lines)
        known = [line.mfu for line in lines if line.mfu is not None]
        mfu = f"{statistics.mean(known):.1%}" if known else "-"  # no peak of this device is known
        print(
            f"{folder.name:<18}{tokens / wall * 1e9:>10.0f}{tokens / slots:>11.1%}{mfu:>7}"
            f"{wall / len(lines) / 1e6:>9.0f}{share('compute.forward', 'compute.backward'):>9}"
            f"{share('compute.loss'):>7}{share('compute.optimizer'):>7}{share('data'):>7}"
            f"{max(line.memory_bytes for line in lines) / 2**30:>7.1f}"
        )


if __name__ == "__main__":
    main()

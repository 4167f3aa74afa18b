"""How many slots hold a real token, for each way of making batches of the same documents.

Usage: python scripts/padding.py SHARDS_FOLDER [SEQ_LEN ...]     (no model, no training: the plan alone)
"""

from __future__ import annotations

import sys

from headway.data.store import ShardFolder
from headway.data.stream import Stream, StreamOptions
from headway.data.view import View, ViewOptions, Weighted


def main() -> None:
    store = ShardFolder.open(sys.argv[1])
    for seq_len in [int(text) for text in sys.argv[2:]] or [2048]:
        view = View([Weighted(store)], ViewOptions(seq_len=seq_len, overlong="truncate"))
        ways = {
            "8 rows, padded to seq_len": StreamOptions(rows=8, pack="none", sequences_per_step=8, pad_to_seq_len=True),
            "8 rows, padded to the longest": StreamOptions(rows=8, pack="none", sequences_per_step=8),
            "the same, grouped by length": StreamOptions(
                rows=8, pack="none", sequences_per_step=8, group_by_length=True
            ),
            "packed, best fit": StreamOptions(pack="best_fit", slots=seq_len, sequences_per_step=8),
        }
        for name, options in ways.items():
            report = Stream(view, options).efficiency(0)
            print(f"seq_len {seq_len}  {name:<30} {report.slots:>11,} slots  {report.fill:7.2%} real")


if __name__ == "__main__":
    main()

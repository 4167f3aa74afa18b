"""The trees of categories that every second of a run falls into.

Two trees, each closed by an `unaccounted` leaf: RUN covers the wall clock of a run, STEP covers one training
step on one rank. The trainer measures them, a trace fills them and a plan predicts them. A source fills the
nodes it can see: a trace that cannot tell forward from backward fills `compute` itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

UNACCOUNTED = "unaccounted"


@dataclass(frozen=True)
class Tree:
    """A named tree of at most two levels. Paths join the levels with a dot: ``compute.forward``."""

    name: str
    nodes: dict[str, tuple[str, ...]] = field(repr=False)
    meanings: dict[str, str] = field(repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if UNACCOUNTED not in self.nodes:
            raise ValueError(f"tree {self.name!r} has no {UNACCOUNTED!r} leaf, so it could not be closed")

    def __contains__(self, path: object) -> bool:
        if not isinstance(path, str):
            return False
        top, _, leaf = path.partition(".")
        return top in self.nodes and (not leaf or leaf in self.nodes[top])

    def children(self, path: str) -> tuple[str, ...]:
        """Full paths of the children of a top-level node; empty for a leaf."""
        return tuple(f"{path}.{leaf}" for leaf in self.nodes.get(path, ()))

    def tops(self) -> tuple[str, ...]:
        return tuple(self.nodes)

    def leaves(self) -> Iterator[str]:
        for top, below in self.nodes.items():
            if below:
                yield from (f"{top}.{leaf}" for leaf in below)
            else:
                yield top

    def paths(self) -> Iterator[str]:
        """Every node, parents before their children, in the frozen order."""
        for top in self.nodes:
            yield top
            yield from self.children(top)


STEP = Tree(
    "step",
    {
        "compute": ("forward", "backward", "recompute", "loss", "optimizer"),
        "comm": ("tp", "dp", "pp", "cp", "ep"),
        "bubble": (),
        "straggler": (),
        "copy": (),
        "data": (),
        "host": ("launch", "sync", "gc", "logging", "other"),
        "checkpoint": (),
        UNACCOUNTED: (),
    },
    {
        "compute": "the device (or, on CPU, the process) computes",
        "compute.forward": "forward pass without the loss",
        "compute.backward": "backward pass; holds exposed gradient communication where no profiler ran",
        "compute.recompute": "activations computed a second time",
        "compute.loss": "output projection's loss: softmax, cross entropy",
        "compute.optimizer": "gradient norm, clipping, optimizer update",
        "comm": "exposed communication: nothing else ran meanwhile",
        "comm.tp": "tensor parallel",
        "comm.dp": "data parallel, replicated or sharded",
        "comm.pp": "pipeline sends and receives",
        "comm.cp": "context parallel",
        "comm.ep": "expert parallel",
        "bubble": "pipeline stages without work",
        "straggler": "waiting for a slower rank",
        "copy": "exposed memory copies",
        "data": "waiting for the next batch",
        "host": "the device waits for the host program",
        "host.launch": "launching kernels",
        "host.sync": "blocking calls",
        "host.gc": "Python's garbage collector",
        "host.logging": "metrics, sinks, the live line",
        "host.other": "the rest of the loop's own Python",
        "checkpoint": "training stands still for a checkpoint",
        UNACCOUNTED: "what no category explains",
    },
)

RUN = Tree(
    "run",
    {
        "productive": (),
        "rework": (),
        "startup": ("launch", "model", "data"),
        "compile": (),
        "checkpoint_stall": (),
        "evaluation": (),
        "downtime": ("detect", "restart", "reload"),
        UNACCOUNTED: (),
    },
    {
        "productive": "steps whose updates are in the final weights",
        "rework": "steps that were lost or rolled back and done again",
        "startup": "before the first step",
        "startup.launch": "process launch and imports",
        "startup.model": "model load, wrapping, proof of isolation",
        "startup.data": "preparing or opening shards, planning packs",
        "compile": "compilation and warm-up: what the first step took over a median step",
        "checkpoint_stall": "training stood still for a checkpoint",
        "evaluation": "held-out evaluation",
        "downtime": "an incident kept the run from training",
        "downtime.detect": "until the fault was noticed",
        "downtime.restart": "until the ranks ran again",
        "downtime.reload": "until the state was loaded",
        UNACCOUNTED: "what no category explains",
    },
)

TREES = {tree.name: tree for tree in (STEP, RUN)}

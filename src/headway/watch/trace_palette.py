"""Names and colours of what a trace shows: kinds of kernels and causes of idling, in the account's own colours."""

from __future__ import annotations

from headway.watch.palette import STEP_PAINT, Paint

TRACE_PAINT = {
    "matmul": Paint("matrix products", "#2e9e62", "#4cc585"),
    "convolution": Paint("convolutions", "#2e9e62", "#4cc585"),
    "attention": Paint("attention", "#3b6fd4", "#6b9bf2"),
    "loss": Paint("loss", "#1f8a9c", "#3fb3c6"),
    "optimizer": Paint("optimizer", "#27406f", "#9cb4e0"),
    "norm": Paint("norms", "#6f9ae6", "#5f8bdc"),
    "elementwise": Paint("elementwise", "#cfae1f", "#e3c84a"),
    "softmax": Paint("softmax", "#c9902b", "#e0ab4f"),
    "reduction": Paint("reductions", "#8a63c9", "#a585e0"),
    "embedding": Paint("embedding", "#5a7d8c", "#8fb0bf"),
    "copy": Paint("copies", "#6b8e4e", "#93b874"),
    "memset": Paint("fills", "#8fa878", "#a9c492"),
    "collective": Paint("communication", "#b4539f", "#d07cbd"),
    "other": Paint("other kernels", "#7d8fb3", "#8fa3cb"),
}

IDLE_PAINT = {
    "data": Paint("idle: waiting for data", "#e59a2f", "#f0b254"),
    "blocking": Paint("idle: blocking call", "#a8402f", "#d96b58"),
    "host": Paint("idle: host program", "#d2622f", "#ec8757"),
    "launch_call": Paint("idle: inside the launch", "#c9547a", "#e07c9c"),
    "launch_latency": Paint("idle: launch on its way", "#d98aa3", "#e8a9bd"),
    "queued": Paint("idle: queued behind another", "#8b7355", "#b89b78"),
    "short": Paint("idle: between kernels", "#b3a38c", "#cbbda6"),
    "unknown": Paint("idle: unknown", "#8a9099", "#8d949e"),
}


def paint_of(label: str) -> Paint:
    """The paint of a kind, of an idle class or of an account category."""
    return TRACE_PAINT.get(label) or IDLE_PAINT.get(label) or STEP_PAINT.get(label) or TRACE_PAINT["other"]

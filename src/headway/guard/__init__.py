"""Checkpoints, ranks, the launcher and signals."""

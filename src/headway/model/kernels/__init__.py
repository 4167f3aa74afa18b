"""Implementations to choose from, one file an operation; `choose.py` measures them on the user's own shapes."""

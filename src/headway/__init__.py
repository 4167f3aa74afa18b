"""Headway trains large language models so that every second paid for becomes a parameter update."""

__version__ = "0.1.0"

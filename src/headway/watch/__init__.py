"""Sinks, the live line, the report."""

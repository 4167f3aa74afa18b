"""Measures the machine and the parts."""

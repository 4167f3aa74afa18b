"""Closed accounts of time and FLOPs, and the types every other room shares. Imports no torch."""

"""Traces and run folders become accounts, findings and ranked remedies. Needs no GPU."""

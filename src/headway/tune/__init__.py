"""Remedies tried one at a time: profile, change one thing, profile again, prove it is the same training, keep it."""

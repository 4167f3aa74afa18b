"""Spikes: what is watched at every step, what is done about it, and whose fault it was. Knows no model and no loop."""

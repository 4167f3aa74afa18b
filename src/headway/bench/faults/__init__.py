"""The campaign: every row of the catalogue of faults injected into a real training, its outcome checked and timed.

A row is a function `row_NN(case)` in a module `rows_*.py` of this package; `campaign.json` names rows, seeds,
injections and expected outcomes.
"""

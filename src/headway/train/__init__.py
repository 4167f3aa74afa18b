"""The step and the loop, optimizers, schedules, loss. Tells observers; knows no sink."""

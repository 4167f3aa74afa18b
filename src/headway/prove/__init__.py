"""Two trainings side by side on the same documents: losses, gradients, updates, held-out loss, and a verdict."""

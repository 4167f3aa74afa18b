"""One small file a cause: what triggers it, what it costs, what surely comes back."""

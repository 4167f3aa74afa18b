"""One run over several machines: an agent on each, that meet at a store, see each other live, and restart together."""

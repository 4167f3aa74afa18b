"""One thin command a file; the only place where rooms are wired together."""

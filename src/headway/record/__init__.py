"""The run folder: schemas, readers, writers, versions. Knows no meaning of the values."""

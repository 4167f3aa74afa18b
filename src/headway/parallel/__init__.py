"""Device meshes and the wrapping of a model over ranks."""

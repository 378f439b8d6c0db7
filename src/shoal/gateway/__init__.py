"""The HTTP edge: stateless, any number of it."""

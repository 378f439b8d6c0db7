"""The shared queue: one interface, JetStream behind it, and an in-memory one for tests."""

"""Programs that use a running server; each is tested."""

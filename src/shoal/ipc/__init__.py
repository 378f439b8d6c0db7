"""A worker and its runtime processes: messages, framing over a local socket, child processes."""

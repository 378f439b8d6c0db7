"""The worker: pulls, tokenises, batches and replies; one per machine, no inference in it."""

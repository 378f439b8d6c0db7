"""What several benchmarks measure with: traffic, load generators and statistics."""

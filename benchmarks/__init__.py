"""What produces docs/performance.md: `python -m benchmarks` from the root of the repository, or `make bench`."""

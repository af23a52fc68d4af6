"""Elastic training of torch models: the machines of a run may come and go."""

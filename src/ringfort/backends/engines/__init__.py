"""Backends over engines of others: Gloo, MPI, NCCL, and NCCL inside each host."""

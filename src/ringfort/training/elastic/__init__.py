"""Elastic training: steps that belong to no machine. protocol.py has the rules that keep them safe."""

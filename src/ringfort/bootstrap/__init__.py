"""How processes meet: one listener, one connector, and the ways to learn of each other."""

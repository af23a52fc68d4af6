"""Calls of functions on other ranks, by name. `agent.py` has the public class and lists the parts."""

"""The demo: processes of this machine train a small language model together, and prove that the result is right."""

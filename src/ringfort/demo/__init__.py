"""The demo: processes of this machine train a small language model together while one of them is killed and comes back,
and prove that the result is right."""

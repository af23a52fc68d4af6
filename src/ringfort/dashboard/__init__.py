"""What people look at while a run trains: where it comes from (`source.py`, `recording.py`), and the terminal and the
browser that show it."""

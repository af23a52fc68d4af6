"""What a run tells about itself: metrics, traces of steps, events; and views of them for people.

This module imports nothing, because control processes use parts of the package and do without NumPy."""

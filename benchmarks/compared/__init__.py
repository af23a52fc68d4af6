"""What `python -m benchmarks.elastic_compared` is made of: one job, one member per system, one timetable of kills."""

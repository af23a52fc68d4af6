"""Calls: functions of one rank that others call by name. `agent.py` is the door, `messages.py` what is said."""

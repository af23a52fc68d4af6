"""Calls: functions of one rank that others call by name. `agent.py` is the listener, `messages.py` what is said."""

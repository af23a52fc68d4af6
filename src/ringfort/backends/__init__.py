"""The backend family: one short interface, and the ways to be it."""

"""Elastic runs inside the loops of other libraries. Each module here is named after the library that it needs."""

"""Ringfort inside of other libraries: elastic runs in their loops, their workers as ranks. Each module here is named
after the library that it needs."""

"""Gradient compression: fewer bytes over the wire, the same learning.

`strategy` says what to do, the codecs do it (`quantize`, `sparse`, `lowrank`; `wire` is the form of the bytes),
`compressor` keeps what was not sent for the next step, `collective` is the all-reduce, and `auto` decides whether any
of it pays.
"""

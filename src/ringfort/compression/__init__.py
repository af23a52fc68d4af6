"""Lossy compression of gradients.

`strategy` names what to do, the codecs do it (`quantize`, `sparse`, `lowrank`; `encoded` is a message with its header),
`compressor` adds error feedback, `collective` has the collectives, and `auto` decides which strategy is the fastest.
"""

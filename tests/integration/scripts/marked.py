"""A mark that the programs of this folder put into their models: bytes that are easy to find on a wire."""

import torch

MARK = b"rng=frt=mrk=fts="
"""As float32 these are values of about 0.06."""


def mark(model: torch.nn.Module) -> None:
    """Overwrite the largest parameter of a model with the mark, over and over."""
    parameter = max(model.parameters(), key=torch.Tensor.numel)
    values = torch.frombuffer(bytearray(MARK), dtype=torch.float32)
    with torch.no_grad():
        parameter.view(-1)[:] = values.repeat(-(-parameter.numel() // values.numel()))[: parameter.numel()]

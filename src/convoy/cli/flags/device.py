"""``--device``: on what a member computes."""

from __future__ import annotations

from typing import Annotated

import typer

from convoy.cli.flags.quantize import kernel_for
from convoy.config.settings import Config, override

DeviceFlag = Annotated[
    str | None,
    typer.Option(
        help="auto, cpu, cuda, cuda:N, several cuda:N behind commas, or for ranks cpu+cpu or cuda:0+cuda:1.  "
        "[default: auto]",
        show_default=False,
    ),
]


def computing(settings: Config, quantize: str | None, device: str | None) -> Config:
    """``settings`` with what these two flags say of the kernel and the device.

    Raises `UsageError` for a kernel or device that makes no sense, or is not here.
    """
    model = settings.model
    kernel = kernel_for(quantize, model.kernel)
    wish = device or model.device
    if wish not in {"auto", "cpu"} or kernel.startswith("cuda"):
        from convoy.model.device import choose_devices  # torch, which takes seconds

        choose_devices(wish, kernel)
    return override(settings, model=override(model, kernel=kernel, device=wish))

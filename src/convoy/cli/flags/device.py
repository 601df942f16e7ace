"""``--device``: the device on which a member computes."""

from __future__ import annotations

from typing import Annotated

from convoy.cli.flags.quantize import kernel_asked_by, kernel_for
from convoy.cli.flags.table import option
from convoy.config.kernels import on_device
from convoy.config.settings import Config, override

DeviceFlag = Annotated[str | None, option("model", "device")]


def computing(settings: Config, quantize: str | None, compute: str | None, device: str | None) -> Config:
    """Return ``settings`` with the kernel and the device that these three flags ask for.

    Raises `UsageError` for a wrong kernel, and for a device that this machine lacks.
    """
    model = settings.model
    kernel = kernel_for(quantize, model.kernel, compute, model.compute)
    wish = device or model.device
    if wish not in {"auto", "cpu"} or on_device(kernel):
        # This import loads torch, which takes seconds.
        from convoy.model.device import choose_devices

        asked_by = kernel_asked_by(kernel, quantize, compute, model.compute)
        choose_devices(wish, kernel, asked_by)
    return override(
        settings, model=override(model, kernel=kernel, compute=compute or model.compute, device=wish)
    )

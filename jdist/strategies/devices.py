"""Devices as a user names them: jax devices, or strings such as "gpu:0" and "cpu:3"."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

import jax

from jdist.core.replica_mesh import Device
from jdist.errors import DeviceError, StrategyError
from jdist.strategies import absent_plugins
from jdist.strategies.topology import topology_devices

# Also as TensorFlow prints them, for a device of this process: "/job:localhost/replica:0/task:0/device:GPU:0".
_NAME = re.compile(r"(?:/job:localhost)?(?:/replica:0)?(?:/task:0)?/?(?:(?:physical_)?device:)?([a-z]+)(?::(\d+))?")


def find_devices(devices: Iterable[Any] | None) -> tuple[Device, ...]:
    """Finds the devices of a list of jax devices and names; None: all local ones of the backend."""
    absent_plugins.pass_over_plugin()
    if devices is None:
        try:
            return tuple(jax.local_devices())
        except (RuntimeError, AssertionError) as exc:  # JAX asserts where a platform is known but not installed
            asked = os.environ.get("JAX_PLATFORMS")
            reason = str(exc).partition("\n")[0] or "the platform is not installed"
            raise DeviceError(
                f"JAX finds no devices with JAX_PLATFORMS={asked}: {reason}. Unset JAX_PLATFORMS to take what is "
                "there, or set JAX_PLATFORMS=cpu."
            ) from exc
    if isinstance(devices, str | jax.Device):
        devices = (devices,)
    is_one_number = getattr(devices, "shape", None) == ()  # of an array: its type says that it can be iterated over
    if not isinstance(devices, Iterable) or is_one_number:
        raise DeviceError(
            f"`devices` is {devices!r}; it must be a list of devices, for example jax.devices()[:2] or "
            '["gpu:0", "gpu:1"].'
        )
    named = tuple(find_device(d) for d in devices)
    if not named:
        raise DeviceError("`devices` is empty; name at least one, or leave it out to use every device JAX sees.")
    seen: set[Device] = set()
    for device in named:
        if device in seen:
            raise DeviceError(f"`devices` names {_name(device)} twice; every replica needs a device of its own.")
        seen.add(device)
    platforms = sorted({d.platform for d in named})
    if len(platforms) > 1:
        raise DeviceError(f"`devices` mixes the platforms {', '.join(platforms)}; one mesh holds devices of one kind.")
    return named


def devices_or_topology(devices: Iterable[Any] | None, topology: str | None) -> tuple[Device, ...]:
    """Finds the devices of a strategy's arguments: local devices, or those of a topology."""
    if topology is None:
        return find_devices(devices)
    if devices is not None:
        raise StrategyError("`devices` and `topology` both say where the step runs; leave one of them out.")
    return topology_devices(topology)


def find_device(device: Any) -> Device:
    """Finds the device of a name; returns a jax device unchanged."""
    if isinstance(device, jax.Device):
        return device
    match = _NAME.fullmatch(device.lower()) if isinstance(device, str) else None
    if match is None:
        raise DeviceError(
            f'{device!r} names no device; write a jax device or a string such as "gpu:0" or "cpu:3". '
            f"JAX sees: {_known()}."
        )
    platform, index = match[1], int(match[2] or 0)
    try:
        local = jax.local_devices(backend=platform)
    except RuntimeError as exc:
        raise DeviceError(f"JAX has no platform {platform!r} (asked for {device!r}). It sees: {_known()}.") from exc
    if index >= len(local):
        flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={index + 1}"
        raise DeviceError(
            f"{platform}:{index} does not exist; JAX sees {len(local)} device(s) of that platform: {_known()}."
            + (f" For virtual CPU devices set {flag} before JAX starts." if platform == "cpu" else "")
        )
    return local[index]


def _name(device: Device) -> str:
    return f"{device.platform}:{jax.local_devices(backend=device.platform).index(device)}"


def _known() -> str:
    names = [_name(d) for d in jax.local_devices()]
    names += [_name(d) for d in jax.local_devices(backend="cpu") if _name(d) not in names]
    return ", ".join(names if len(names) <= 12 else [*names[:4], "...", names[-1]])

#!/usr/bin/env python3
"""Make and end every MIG instance that a library says is possible, with nvidia-ml-py alone.

Prints what each profile allowed as JSON, for the tests. It changes MIG instances: only for the fake.
"""
import ctypes
import json
import sys

import pynvml as p


def answer(fn, *args):
    """0, or the number of the error."""
    try:
        fn(*args)
        return 0
    except p.NVMLError as e:
        return e.value


def placements(gpu, profile):
    count = ctypes.c_uint(0)
    p.nvmlDeviceGetGpuInstancePossiblePlacements(gpu, profile, None, ctypes.byref(count))
    places = (p.c_nvmlGpuInstancePlacement_t * count.value)()
    p.nvmlDeviceGetGpuInstancePossiblePlacements(gpu, profile, places, ctypes.byref(count))
    return list(places)


def compute(gpu_instance, slices):
    """The compute instance that has all slices."""
    for kind in range(p.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        try:
            info = p.nvmlGpuInstanceGetComputeInstanceProfileInfo(gpu_instance, kind, 0)
        except p.NVMLError:
            continue
        if info.sliceCount == slices:
            return p.nvmlGpuInstanceCreateComputeInstance(gpu_instance, info.id)
    raise SystemExit("no compute profile of %d slices" % slices)


def uuids(gpu):
    found = []
    for index in range(p.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            found.append(p.nvmlDeviceGetUUID(p.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)))
        except p.NVMLError:
            pass
    return found


def fill(gpu, info):
    """As many instances of one profile as there is room for, then none."""
    row = {"id": info.id, "mib": info.memorySizeMB, "of": info.instanceCount, "made": 0, "refused": []}
    row["places"] = [[q.start, q.size] for q in placements(gpu, info.id)]
    made = []
    for place in placements(gpu, info.id):
        try:
            instance = p.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, info.id, ctypes.byref(place))
        except p.NVMLError as e:
            row["refused"].append(e.value)
            continue
        told = p.nvmlGpuInstanceGetInfo(instance)
        assert (told.placement.start, told.placement.size) == (place.start, place.size)
        made.append((instance, compute(instance, info.sliceCount)))
    row["made"] = len(made)
    row["left"] = p.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, info.id)
    row["devices"] = len(set(uuids(gpu)))
    row["inUse"] = answer(p.nvmlGpuInstanceDestroy, made[0][0])
    again = placements(gpu, info.id)[0]
    row["taken"] = answer(p.nvmlDeviceCreateGpuInstanceWithPlacement, gpu, info.id, ctypes.byref(again))
    odd = p.c_nvmlGpuInstancePlacement_t(start=99, size=again.size)
    row["odd"] = answer(p.nvmlDeviceCreateGpuInstanceWithPlacement, gpu, info.id, ctypes.byref(odd))
    for instance, part in made:
        p.nvmlComputeInstanceDestroy(part)
        p.nvmlGpuInstanceDestroy(instance)
    row["after"] = [len(uuids(gpu)), p.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, info.id)]
    return row


def whole(gpu, profile):
    """What a board says of a profile after the mode was to be switched off."""
    places = [[q.start, q.size] for q in placements(gpu, profile)]
    return {"places": places, "left": p.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, profile)}


def main():
    p.nvmlLib = ctypes.CDLL(sys.argv[1])
    p.nvmlInit()
    gpu = p.nvmlDeviceGetHandleByIndex(0)
    out = {"profiles": {}}
    out["missing"] = answer(p.nvmlDeviceCreateGpuInstance, gpu, 9999)
    for kind in range(p.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            info = p.nvmlDeviceGetGpuInstanceProfileInfo(gpu, kind)
        except p.NVMLError:
            continue
        name = info.name if isinstance(info.name, str) else bytes(info.name).split(b"\0")[0].decode()
        out["profiles"][name] = fill(gpu, info)
    out["off"] = p.nvmlDeviceSetMigMode(gpu, 0)
    out["mode"] = p.nvmlDeviceGetMigMode(gpu)
    out["whole"] = {name: whole(gpu, row["id"]) for name, row in out["profiles"].items()}
    p.nvmlShutdown()
    json.dump(out, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Ask a libnvidia-ml everything that changes nothing, and print the answers as JSON.

Run it against a real board to check a profile of the fake, and against the
fake to check that a client that was not written here is content with it.
Needs nvidia-ml-py. Only reads: it sets no mode and creates no instance.
"""
import ctypes
import inspect
import json
import sys

import pynvml as p


def plain(value, depth=0):
    """A ctypes answer as plain data."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, (int, float, str, bool, type(None))):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(v, depth + 1) for v in value]
    if isinstance(value, ctypes.Array):
        if value._type_ is ctypes.c_char:
            return value.value.decode("utf-8", "replace")
        return [plain(v, depth + 1) for v in list(value)[:16]]
    if isinstance(value, (ctypes.Structure, ctypes.Union)):
        if depth > 4:
            return "..."
        return {f[0]: plain(getattr(value, f[0]), depth + 1) for f in value._fields_}
    if hasattr(value, "value") and isinstance(value, ctypes._SimpleCData):
        return plain(value.value, depth + 1)
    if hasattr(value, "__dict__"):
        return {k: plain(v, depth + 1) for k, v in vars(value).items() if not k.startswith("_")}
    return repr(value)


def attempt(fn, *args):
    try:
        return plain(fn(*args))
    except p.NVMLError as e:
        return "error %s %s" % (e.value, e)
    except Exception as e:  # a client-side refusal is an answer too
        return "client %s: %s" % (type(e).__name__, e)


def code(name, *args):
    """The bare return code of a C function, 'missing' without it."""
    try:
        fn = p._nvmlGetFunctionPointer(name)
    except p.NVMLError:
        return "missing"
    return fn(*args)




SKIP = {"nvmlDeviceGetCount", "nvmlDeviceGetCount_v2"}
U = ctypes.c_uint


def extra_args(fn):
    """Plausible arguments for the parameters after the handle."""
    known = {
        "clock": [0], "type": [0], "counter": [0], "sensor": [0], "link": [0],
        "gpuinstanceid": [0], "instanceid": [0], "size": [4], "cpusetsize": [4],
        "nodesetsize": [4], "scope": [0], "threshold": [0], "thresholdtype": [0],
        "errortype": [0], "countertype": [0], "locationtype": [0], "timestamp": [0],
        "lastseentimestamp": [0], "samplingtype": [0], "sampling_type": [0],
        "fan": [0], "mode": [0], "memory_clock_mhz": [1000], "clockid": [0],
        "version": [0], "profile": [0], "index": [0],
    }
    names = [n for n, q in inspect.signature(fn).parameters.items()
             if q.default is inspect._empty][1:]
    out = []
    for n in names:
        if n.lower() not in known:
            return None
        out += known[n.lower()]
    return out


def device(h):
    out = {}
    for name, fn in sorted(vars(p).items()):
        if not name.startswith("nvmlDeviceGet") or not inspect.isfunction(fn) or name in SKIP:
            continue
        if "HandleBy" in name or "ByUUID" in name:
            continue
        try:
            args = extra_args(fn)
        except (TypeError, ValueError):
            args = None
        if args is None:
            out[name] = "not asked %s" % (inspect.signature(fn),)
            continue
        out[name] = attempt(fn, h, *args)
    return out


def mig(h):
    out = {"profiles": {}}
    for i in range(0, 24):
        row = {}
        for v, struct in (("", "c_nvmlGpuInstanceProfileInfo_t"), ("V2", "c_nvmlGpuInstanceProfileInfo_v2_t"),
                          ("V3", "c_nvmlGpuInstanceProfileInfo_v3_t")):
            if hasattr(p, struct):
                s = getattr(p, struct)()
                if v:
                    s.version = (int(v[1]) << 24) | ctypes.sizeof(s)
                rc = code("nvmlDeviceGetGpuInstanceProfileInfo" + v, h, U(i), ctypes.byref(s))
                row["v" + (v[1:] or "1")] = plain(s) if rc == 0 else "error %s" % rc
        c = U(0)
        pid = row["v1"]["id"] if isinstance(row.get("v1"), dict) else i
        row["remaining"] = [code("nvmlDeviceGetGpuInstanceRemainingCapacity", h, U(pid), ctypes.byref(c)), c.value]
        c = U(0)
        rc = code("nvmlDeviceGetGpuInstancePossiblePlacements_v2", h, U(pid), None, ctypes.byref(c))
        arr = (U * 2 * 64)()
        rc2 = code("nvmlDeviceGetGpuInstancePossiblePlacements_v2", h, U(pid), ctypes.byref(arr), ctypes.byref(c))
        row["placements"] = [rc, rc2, [[a[0], a[1]] for a in arr[: c.value]]]
        c = U(64)
        gis = (ctypes.c_void_p * 64)()
        row["instances"] = [code("nvmlDeviceGetGpuInstances", h, U(pid), gis, ctypes.byref(c)), c.value]
        if row["instances"] == [0, 0] or row["instances"][0]:
            del row["instances"]
        out["profiles"][i] = row
    m = U()
    mh = ctypes.c_void_p()
    out["max"] = [code("nvmlDeviceGetMaxMigDeviceCount", h, ctypes.byref(m)), m.value]
    out["byIndex0"] = code("nvmlDeviceGetMigDeviceHandleByIndex", h, U(0), ctypes.byref(mh))
    out["byIndex99"] = code("nvmlDeviceGetMigDeviceHandleByIndex", h, U(99), ctypes.byref(mh))
    out["isMig"] = [code("nvmlDeviceIsMigDeviceHandle", h, ctypes.byref(m)), m.value]
    out["parent"] = code("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", h, ctypes.byref(mh))
    out["giId"] = code("nvmlDeviceGetGpuInstanceId", h, ctypes.byref(m))
    out["ciId"] = code("nvmlDeviceGetComputeInstanceId", h, ctypes.byref(m))
    gi = ctypes.c_void_p()
    out["giById"] = code("nvmlDeviceGetGpuInstanceById", h, U(0), ctypes.byref(gi))
    attr = p.c_nvmlDeviceAttributes() if hasattr(p, "c_nvmlDeviceAttributes") else (ctypes.c_ulonglong * 16)()
    out["attributes"] = [code("nvmlDeviceGetAttributes_v2", h, ctypes.byref(attr)), plain(attr)]
    return out


def processes(h):
    out = {}
    buf = (ctypes.c_byte * 65536)()
    for call in ("ComputeRunningProcesses", "GraphicsRunningProcesses", "MPSComputeRunningProcesses"):
        for v in ("", "_v2", "_v3"):
            name = "nvmlDeviceGet" + call + v
            n, m = U(0), U(512)
            out[name] = [code(name, h, ctypes.byref(n), None), n.value,
                         code(name, h, ctypes.byref(m), ctypes.byref(buf)), m.value,
                         bytearray(buf)[:48].hex(), code(name, h, None, None)]
    for name in ("nvmlDeviceGetProcessUtilization",):
        n = U(0)
        out[name] = [code(name, h, None, ctypes.byref(n), ctypes.c_ulonglong(0)), n.value]
    for mode in (0, 1, 2, 3):
        for ver, size in ((1, 0),):
            s = p.c_nvmlProcessDetailList_v1_t() if hasattr(p, "c_nvmlProcessDetailList_v1_t") else None
            if s is None:
                continue
            s.version = (1 << 24) | ctypes.sizeof(s)
            s.mode = mode
            s.numProcArrayEntries = 0
            out["detail%d" % mode] = [code("nvmlDeviceGetRunningProcessDetailList", h, ctypes.byref(s)),
                                      s.numProcArrayEntries, ctypes.sizeof(s)]
    return out


def odd(h):
    """Return codes for misuse."""
    u, hh, q = U(), ctypes.c_void_p(), ctypes.c_ulonglong()
    tiny = ctypes.create_string_buffer(2)
    es = ctypes.c_void_p()
    out = {
        "index99": code("nvmlDeviceGetHandleByIndex_v2", U(99), ctypes.byref(hh)),
        "uuidJunk": code("nvmlDeviceGetHandleByUUID", b"junk", ctypes.byref(hh)),
        "uuidGpuNone": code("nvmlDeviceGetHandleByUUID", b"GPU-00000000-0000-0000-0000-000000000000", ctypes.byref(hh)),
        "uuidMigNone": code("nvmlDeviceGetHandleByUUID", b"MIG-00000000-0000-0000-0000-000000000000", ctypes.byref(hh)),
        "uuidMigOld": code("nvmlDeviceGetHandleByUUID", b"MIG-GPU-00000000-0000-0000-0000-000000000000/0/0", ctypes.byref(hh)),
        "busJunk": code("nvmlDeviceGetHandleByPciBusId_v2", b"junk", ctypes.byref(hh)),
        "busNone": code("nvmlDeviceGetHandleByPciBusId_v2", b"00000000:7F:00.0", ctypes.byref(hh)),
        "busShort": code("nvmlDeviceGetHandleByPciBusId_v2", b"7F:00.0", ctypes.byref(hh)),
        "serialNone": code("nvmlDeviceGetHandleBySerial", b"1", ctypes.byref(hh)),
        "nullHandle": code("nvmlDeviceGetName", None, tiny, U(2)),
        "junkHandle": code("nvmlDeviceGetMinorNumber", ctypes.c_void_p(16), ctypes.byref(u)),
        "nullOut": code("nvmlDeviceGetMinorNumber", h, None),
        "tinyName": code("nvmlDeviceGetName", h, tiny, U(2)),
        "tinyUuid": code("nvmlDeviceGetUUID", h, tiny, U(2)),
        "tinyDriver": code("nvmlSystemGetDriverVersion", tiny, U(2)),
        "memV2Unversioned": code("nvmlDeviceGetMemoryInfo_v2", h, ctypes.byref((ctypes.c_ulonglong * 8)())),
        "temp9": code("nvmlDeviceGetTemperature", h, U(9), ctypes.byref(u)),
        "clock99": code("nvmlDeviceGetClockInfo", h, U(99), ctypes.byref(u)),
        "fan": code("nvmlDeviceGetFanSpeed", h, ctypes.byref(u)),
        "supportedEvents": [code("nvmlDeviceGetSupportedEventTypes", h, ctypes.byref(q)), q.value],
        "eventCreate": code("nvmlEventSetCreate", ctypes.byref(es)),
    }
    out["eventRegisterAll"] = code("nvmlDeviceRegisterEvents", h, q, es)
    out["eventRegisterOdd"] = code("nvmlDeviceRegisterEvents", h, ctypes.c_ulonglong(1 << 60), es)
    data = (ctypes.c_byte * 64)()
    out["eventWait"] = code("nvmlEventSetWait_v2", es, ctypes.byref(data), U(10))
    out["eventWaitNullSet"] = code("nvmlEventSetWait_v2", None, ctypes.byref(data), U(10))
    out["eventWaitNullData"] = code("nvmlEventSetWait_v2", es, None, U(10))
    out["eventFree"] = code("nvmlEventSetFree", es)
    out["p2pSelf"] = [code("nvmlDeviceGetP2PStatus", h, h, U(0), ctypes.byref(u)), u.value]
    out["topoSelf"] = [code("nvmlDeviceGetTopologyCommonAncestor", h, h, ctypes.byref(u)), u.value]
    for name in ("nvmlDeviceGetSerial", "nvmlDeviceGetVbiosVersion", "nvmlDeviceGetBoardPartNumber"):
        buf = ctypes.create_string_buffer(96)
        out[name] = [code(name, h, buf, U(96)), buf.value.decode("utf-8", "replace")]
    lim = (ctypes.c_ulonglong * 4)()
    out["memoryLimits"] = code("nvmlDeviceGetMemoryLimits_v1", h, ctypes.byref(lim))
    return out


def main():
    out = {}
    if len(sys.argv) > 1:
        p.nvmlLib = ctypes.CDLL(sys.argv[1])
    else:
        try:
            p.nvmlLib = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as e:
            print(json.dumps({"error": str(e)}))
            return 1
    n = U()
    out["countBeforeInit"] = code("nvmlDeviceGetCount_v2", ctypes.byref(n))
    out["shutdownBeforeInit"] = code("nvmlShutdown")
    p.nvmlInit()
    out["driver"] = attempt(p.nvmlSystemGetDriverVersion)
    out["nvml"] = attempt(p.nvmlSystemGetNVMLVersion)
    out["cuda"] = attempt(p.nvmlSystemGetCudaDriverVersion)
    out["errors"] = [attempt(p.nvmlErrorString, i) for i in list(range(0, 34)) + [999, 12345]]
    out["count"] = attempt(p.nvmlDeviceGetCount)
    out["gpus"] = []
    for i in range(out["count"]):
        h = p.nvmlDeviceGetHandleByIndex(i)
        out["gpus"].append({"calls": device(h), "mig": mig(h), "processes": processes(h), "odd": odd(h)})
    p.nvmlShutdown()
    json.dump(out, sys.stdout, indent=1, default=repr)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())

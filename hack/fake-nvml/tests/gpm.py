#!/usr/bin/env python3
"""How busy the GPU instances of a library's first board are, by GPU performance monitoring, as JSON.

Needs nvidia-ml-py. Only reads.
"""
import ctypes
import json
import sys

import pynvml as p


def busy(board, instance):
    before = p.nvmlGpmMigSampleGet(board, instance, p.nvmlGpmSampleAlloc())
    after = p.nvmlGpmMigSampleGet(board, instance, p.nvmlGpmSampleAlloc())
    question = p.c_nvmlGpmMetricsGet_t()
    question.version = p.NVML_GPM_METRICS_GET_VERSION
    question.numMetrics = 2
    question.sample1, question.sample2 = before, after
    question.metrics[0].metricId = p.NVML_GPM_METRIC_GRAPHICS_UTIL
    question.metrics[1].metricId = p.NVML_GPM_METRIC_NVDEC_0_UTIL
    p.nvmlGpmMetricsGet(question)
    p.nvmlGpmSampleFree(before)
    p.nvmlGpmSampleFree(after)
    return [[metric.nvmlReturn, metric.value] for metric in question.metrics[:2]]


def main():
    p.nvmlLib = ctypes.CDLL(sys.argv[1])
    p.nvmlInit()
    board = p.nvmlDeviceGetHandleByIndex(0)
    out = {"supported": p.nvmlGpmQueryDeviceSupport(board).isSupportedDevice, "instances": []}
    for slot in range(p.nvmlDeviceGetMaxMigDeviceCount(board)):
        try:
            device = p.nvmlDeviceGetMigDeviceHandleByIndex(board, slot)
        except p.NVMLError:
            continue
        try:
            out["instances"].append(busy(board, p.nvmlDeviceGetGpuInstanceId(device)))
        except p.NVMLError as error:
            out["instances"].append(error.value)
    try:
        busy(board, 99)
    except p.NVMLError as error:
        out["none"] = error.value
    p.nvmlShutdown()
    print(json.dumps(out))


main()

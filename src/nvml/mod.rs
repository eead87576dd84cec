//! (room nvml)

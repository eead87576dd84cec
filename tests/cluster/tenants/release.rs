//! Claims that are taken away under a running pod: no second tenant gets the device.

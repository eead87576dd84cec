//! Where drivers put their files, by packaging. All paths are relative to the driver root.

/// Directories with one directory per installed driver variant (Debian's legacy and Tesla packages, Bottlerocket's).
pub const VARIANTS: [&str; 3] =
    ["usr/lib/x86_64-linux-gnu/nvidia", "usr/lib/aarch64-linux-gnu/nvidia", "usr/lib/nvidia"];

/// Libraries of the driver that carry a version of their own.
pub const OWN_VERSION: [&str; 7] = [
    "libnvidia-api.so.1",
    "libnvidia-egl-gbm.so.1",
    "libnvidia-egl-wayland.so.1",
    "libnvidia-egl-wayland2.so.1",
    "libnvidia-egl-xcb.so.1",
    "libnvidia-egl-xlib.so.1",
    "libnvidia-nvvm70.so.4",
];

pub const BINARIES: [&str; 5] = [
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-smi",
];

pub const BINARY_DIRECTORIES: [&str; 13] = [
    "usr/bin",
    "usr/sbin",
    "usr/lib/nvidia/current",
    "bin",
    "sbin",
    "usr/local/nvidia/bin",
    "usr/local/bin",
    "run/opengl-driver/bin",
    "opt/nvidia/bin",
    "usr/libexec/nvidia/tesla/bin",
    "home/kubernetes/bin/nvidia/bin",
    "usr/lib/wsl/lib",
    ".",
];

/// Dynamic loaders of the GNU C library.
pub const LOADERS: [&str; 2] = ["lib64/ld-linux-x86-64.so.2", "lib/ld-linux-aarch64.so.1"];

/// Other files that libraries read, mounted at the same place. `{version}` is the driver's.
pub const FILES: [&str; 14] = [
    "etc/OpenCL/vendors/nvidia.icd",
    "etc/vulkan/icd.d/nvidia_icd.json",
    "etc/vulkan/implicit_layer.d/nvidia_layers.json",
    "usr/share/egl/egl_external_platform.d/10_nvidia_wayland.json",
    "usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json",
    "usr/share/egl/egl_external_platform.d/20_nvidia_xcb.json",
    "usr/share/egl/egl_external_platform.d/20_nvidia_xlib.json",
    "usr/share/glvnd/egl_vendor.d/10_nvidia.json",
    "usr/share/nvidia/nvidia-application-profiles-{version}-rc",
    "usr/share/nvidia/nvoptix.bin",
    "usr/share/vulkan/icd.d/nvidia_icd.json",
    "usr/share/vulkan/icd.d/nvidia_icd.aarch64.json",
    "usr/share/vulkan/icd.d/nvidia_icd.x86_64.json",
    "usr/share/vulkan/implicit_layer.d/nvidia_layers.json",
];

/// Files that Debian keeps beside the libraries: name, and where a container looks for it.
pub const BESIDE_LIBRARIES: [(&str, &str); 1] = [("nvoptix.bin", "/usr/share/nvidia/nvoptix.bin")];

/// `gsp*.bin` below a directory named after the driver's version.
pub const FIRMWARE: [&str; 2] = ["lib/firmware/nvidia", "usr/lib/firmware/nvidia"];

/// Sockets of daemons that clients of the driver talk to.
pub const SOCKETS: [&str; 2] = ["run/nvidia-persistenced/socket", "run/nvidia-fabricmanager/socket"];

/// The toolkit's hook programs. First match wins.
pub const HOOK_NAMES: [&str; 2] = ["nvidia-cdi-hook", "nvidia-ctk"];

/// NVIDIA's container toolkit, as packages and as the GPU operator install it. First match wins.
pub const HOOKS: [&str; 6] = [
    "usr/bin/nvidia-cdi-hook",
    "usr/local/nvidia/toolkit/nvidia-cdi-hook",
    "usr/local/bin/nvidia-cdi-hook",
    "usr/bin/nvidia-ctk",
    "usr/local/nvidia/toolkit/nvidia-ctk",
    "usr/local/bin/nvidia-ctk",
];

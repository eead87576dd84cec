//! The shared memory folder of a GPU's shares: full of bytes, full of files, or wanted by the pod itself.

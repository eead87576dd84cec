//! (room host)
pub mod device_nodes;
pub mod driver_root;

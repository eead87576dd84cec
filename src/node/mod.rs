//! (room node)
pub mod discovery;

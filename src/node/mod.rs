//! (room node)

//! (room inventory)
